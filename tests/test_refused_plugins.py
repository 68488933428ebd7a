"""Hooks that would not do what their author meant: each is an error that says what to do."""

import re
from unittest import mock

import pytest

from leyden import Callback, PluginError, hookimpl
from leyden.plugins import Timer
from leyden.testing import Regression, batches, quiet_trainer


def fit(*plugins, callbacks=(), module=None, **choices):
    """Return the Trainer after an epoch of two batches and a validation of one."""
    trainer = quiet_trainer(plugins=plugins, callbacks=callbacks, num_sanity_val_steps=0, **choices)
    trainer.fit(module or Regression(), batches(2), batches(1))
    return trainer


def plugin_with(name, function):
    return type("Plugin", (), {name: function})()


def callback_with(name, function):
    return type("Mine", (Callback,), {name: function})()


class Async:
    async def on_fit_start(self, trainer, module):
        """Nobody awaits it."""

    def on_train_start(self, trainer, module):
        yield

    @hookimpl(wrapper=True)
    def on_train_end(self, trainer, module):
        """It should yield."""

    @hookimpl(hookwrapper=True)
    def on_fit_end(self, trainer, module):
        yield


REFUSED = {
    "a misspelt name on a callback": (
        lambda: callback_with("on_train_bacth_end", lambda self: None),
        "Mine.on_train_bacth_end is not a hook and would never be called. "
        "Did you mean 'on_train_batch_end'? Rename it, with a leading underscore",
    ),
    "a name of Lightning's on a callback": (
        lambda: callback_with("on_epoch_end", lambda self, trainer, module: None),
        "Mine.on_epoch_end is not a hook and would never be called. "
        "It is a hook of Lightning's; here use on_train_epoch_end.",
    ),
    "another on_ name on a callback": (
        lambda: callback_with("on_moonrise", lambda self: None),
        "Mine.on_moonrise is not a hook and would never be called. Rename it",
    ),
    "too few arguments on a callback": (
        lambda: callback_with("on_train_start", lambda self, trainer: None),
        "Mine.on_train_start(trainer) cannot take what this hook passes by position: "
        "(trainer, module). Define it with these arguments, under any names.",
    ),
    "too many arguments on a callback": (
        lambda: callback_with("on_before_zero_grad", lambda self, t, m, optimizer, index: None),
        "Mine.on_before_zero_grad(t, m, optimizer, index) cannot take what this hook passes",
    ),
    "a keyword that nobody passes": (
        lambda: callback_with("on_fit_start", lambda self, t, m, *, verbose: None),
        "Mine.on_fit_start(t, m, *, verbose) cannot take what this hook passes",
    ),
    "names registered by a callback": (
        lambda: callback_with("register_loggers", hookimpl(lambda self: {})),
        "Mine.register_loggers would never be asked",
    ),
    "an async method": (
        lambda: callback_with("on_fit_start", Async.on_fit_start),
        "Mine.on_fit_start is async, and nobody awaits a hook. Define it with def.",
    ),
    "a method that yields": (
        lambda: callback_with("on_train_start", Async.on_train_start),
        "Mine.on_train_start yields, so calling it would run nothing. Mark it with "
        "@hookimpl(wrapper=True)",
    ),
    "a wrapper that does not yield": (
        lambda: callback_with("on_train_end", Async.on_train_end),
        "Mine.on_train_end is marked as a wrapper and does not yield",
    ),
    "an old-style wrapper": (
        lambda: callback_with("on_fit_end", Async.on_fit_end),
        "Mine.on_fit_end is an old-style wrapper. Use @hookimpl(wrapper=True)",
    ),
    "an object that is no callback": (
        lambda: plugin_with("on_fit_start", hookimpl(lambda self: None)),
        "in Trainer(callbacks=[…]) is no Callback. Derive it from leyden.Callback, or pass an "
        "object with @leyden.hookimpl methods as plugins=[…].",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_trainer_refuses_a_callback_that_breaks_the_contract(case):
    make, message = REFUSED[case]
    with pytest.raises(PluginError, match=re.escape(message)):
        quiet_trainer(callbacks=[make()])


REFUSED_PLUGINS = {
    "a hook without the mark": (
        lambda: plugin_with("on_train_start", lambda self, trainer: None),
        "Plugin.on_train_start is named like a hook but would never be called. Decorate it with "
        "@leyden.hookimpl, or rename it.",
    ),
    "an unmarked method of a class": (
        lambda: plugin_with("on_train_start", classmethod(lambda cls, trainer: None)),
        "Plugin.on_train_start is named like a hook but would never be called.",
    ),
    "names registered without the mark": (
        lambda: plugin_with("register_loggers", lambda self: {}),
        "Plugin.register_loggers is named like a hook but would never be called.",
    ),
    "a marked name that is no hook": (
        lambda: plugin_with("on_train_bacth_end", hookimpl(lambda self: None)),
        "Plugin.on_train_bacth_end is marked with @hookimpl, but leyden has no hook "
        "'on_train_bacth_end'. Did you mean 'on_train_batch_end'?",
    ),
    "a specname that is no hook": (
        lambda: plugin_with("begin", hookimpl(lambda self: None, specname="register_logger")),
        "Plugin.begin is marked with @hookimpl, but leyden has no hook 'register_logger'. "
        "Did you mean 'register_loggers'?",
    ),
    "an argument that the hook has not": (
        lambda: plugin_with("on_train_start", hookimpl(lambda self, modul: None)),
        "Plugin.on_train_start asks for 'modul', which this hook does not offer. "
        "Did you mean 'module'? It offers: trainer, module.",
    ),
    "a misspelt argument with a default": (
        lambda: plugin_with("on_train_start", hookimpl(lambda self, modul=None: None)),
        "Plugin.on_train_start asks for 'modul'",
    ),
    "arguments of a registration": (
        lambda: plugin_with("register_loggers", hookimpl(lambda self, trainer: {})),
        "Plugin.register_loggers asks for 'trainer', which this hook does not offer. "
        "It offers: nothing.",
    ),
    "a wrapper of a registration": (
        lambda: plugin_with("register_loggers", hookimpl(Async.on_train_start, wrapper=True)),
        "Plugin.register_loggers is a wrapper, and only hooks that a run tells can be wrapped.",
    ),
    "a class": (lambda: Async, "Async is a class. Pass an object: Async(…)."),
    "nothing at all": (lambda: None, "None from Trainer(plugins=[…]) hooks into nothing"),
    "an object with no hook": (lambda: mock.MagicMock(name="m"), "hooks into nothing"),
    "a part": (
        lambda: __import__("leyden.plugins").plugins.FileCheckpointer(),
        "A strategy, precision, logger or checkpointer is passed under its own argument",
    ),
}


@pytest.mark.parametrize("case", REFUSED_PLUGINS)
def test_a_trainer_refuses_a_plugin_that_breaks_the_contract(case):
    make, message = REFUSED_PLUGINS[case]
    with pytest.raises(PluginError, match=re.escape(message)):
        quiet_trainer(plugins=[make()])


def test_one_object_listed_twice_is_refused():
    plugin, timer = plugin_with("on_fit_start", hookimpl(lambda self: None)), Timer()
    with pytest.raises(PluginError, match="same Plugin is listed twice, once from Trainer"):
        quiet_trainer(plugins=[plugin, plugin])
    with pytest.raises(PluginError, match="same Timer is listed twice"):
        quiet_trainer(callbacks=[timer, timer])
    with pytest.raises(PluginError, match=r"once from .*plugins.* and once from .*callbacks"):
        quiet_trainer(callbacks=[timer], plugins=[timer])


def test_a_callback_of_the_trainer_and_of_the_module_is_refused_before_it_runs_twice():
    timer = Timer()

    class Own(Regression):
        def configure_callbacks(self):
            return timer

    with pytest.raises(PluginError, match="same Timer is listed twice"):
        fit(callbacks=[timer], module=Own())


@pytest.mark.parametrize("kind", ["callback", "plugin", "module"])
def test_a_returned_value_is_refused_with_what_to_do_instead(kind):
    class Mine(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1

    class Plugin:
        @hookimpl
        def on_train_batch_start(self):
            return -1

    class Own(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    choices = {
        "callback": {"callbacks": [Mine()]},
        "plugin": {"plugins": [Plugin()]},
        "module": {},
    }
    trainer = quiet_trainer(**choices[kind])
    message = r"on_train_batch_start returned -1; a hook that is told returns nothing\. To end the "
    with pytest.raises(PluginError, match=message + r"epoch early, call trainer\.skip_epoch\(\)"):
        trainer.fit(Own() if kind == "module" else Regression(), batches(2))


def test_a_hook_of_a_module_with_the_arguments_it_once_had_in_lightning_is_refused():
    module = type("Own", (Regression,), {"on_train_epoch_end": lambda self, outputs: None})()
    message = r"Own\.on_train_epoch_end\(outputs\) cannot take what .* by position: \(\)\. Define"
    with pytest.raises(PluginError, match=message):
        fit(module=module)


def test_a_module_with_a_misspelt_hook_is_refused():
    module = type("Own", (Regression,), {"on_train_epoch_ends": lambda self: None})()
    with pytest.raises(PluginError, match=r"Own.on_train_epoch_ends is not a hook .*'on_train_ep"):
        fit(module=module)


def test_a_module_with_a_hook_that_lightning_removed_is_told_the_replacement():
    module = type("Own", (Regression,), {"validation_epoch_end": lambda self, outputs: None})()
    message = "Lightning's; here use on_validation_epoch_end, keeping the outputs yourself"
    with pytest.raises(PluginError, match=message):
        fit(module=module)


def test_another_on_method_of_a_module_warns():
    module = type("Own", (Regression,), {"on_policy": lambda self, outputs: None})()
    with pytest.warns(UserWarning, match=r"Own\.on_policy is not a hook and would never be called"):
        fit(module=module)


def test_a_property_of_a_module_is_its_own_affair_whatever_its_name():
    module = type("Own", (Regression,), {"on_gpu": property(lambda self: 1 / 0)})()
    fit(module=module)


def test_a_part_with_an_unmarked_hook_is_refused():
    from leyden.strategies.single_device import SingleDevice

    class Strategy(SingleDevice):
        def on_train_start(self, trainer):
            """It has no mark."""

    with pytest.raises(PluginError, match=r"Strategy\.on_train_start is named like a hook"):
        fit(strategy=Strategy())
