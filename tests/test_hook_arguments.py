"""What a method is passed at a hook."""

import inspect

import pluggy
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden import Callback, Module, hookimpl
from leyden.hook_names import HOOK_NAMES
from leyden.hookspecs import RunHooks
from leyden.implementations import implementations, in_order
from leyden.manager import Hooks
from leyden.testing import Regression, batches, quiet_trainer


def fit(*plugins, callbacks=(), module=None, **choices):
    """Return the Trainer after an epoch of two batches and a validation of one."""
    trainer = quiet_trainer(plugins=plugins, callbacks=callbacks, num_sanity_val_steps=0, **choices)
    trainer.fit(module or Regression(), batches(2), batches(1))
    return trainer


def test_a_callback_written_for_lightning_works_as_it_is():
    seen = {}

    class Lightning(Callback):
        def on_train_start(self, *args):
            seen["args"] = args

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, unused=7):
            seen["batch_end"] = pl_module, batch_idx, unused

        def on_validation_batch_end(self, trainer, pl_module, outputs, b, i):
            seen["without_dataloader_idx"] = i

        def on_validation_batch_start(self, trainer, pl_module, b, i, dataloader_idx=5):
            seen["with_dataloader_idx"] = dataloader_idx

        def on_train_end(self, trainer, pl_module, **kwargs):
            seen["kwargs"] = kwargs

    module = Regression()
    trainer = fit(callbacks=[Lightning()], module=module)
    assert seen == {
        "args": (trainer, module),
        "batch_end": (module, 1, 7),
        "without_dataloader_idx": 0,
        "with_dataloader_idx": 0,
        "kwargs": {},
    }


def test_a_marked_method_takes_what_it_names_in_any_way_python_has():
    seen = {}

    class Plugin:
        @hookimpl
        def on_fit_start(self):
            seen["nothing"] = ()

        @hookimpl
        def on_train_start(self, module, trainer, /):
            seen["by position"] = module, trainer

        @hookimpl
        def on_train_batch_start(self, batch_idx, *, module=None):
            seen["by keyword"] = batch_idx, module

        @hookimpl
        def on_train_epoch_end(self, trainer=None, since=3):
            seen["defaults"] = trainer, since

        @hookimpl
        def on_train_batch_end(self, batch_idx, **rest):
            seen["the rest"] = batch_idx, sorted(rest)

    module = Regression()
    trainer = fit(Plugin(), module=module)
    assert seen == {
        "nothing": (),
        "by position": (module, trainer),
        "by keyword": (1, module),
        "defaults": (trainer, 3),
        "the rest": (1, ["batch", "module", "outputs", "trainer"]),
    }


def plugin_with(name, function):
    return type("Plugin", (), {name: function})()


@st.composite
def signatures(draw):
    """Return a hook and the source of a parameter list that it can be asked with."""
    hook = draw(st.sampled_from(sorted(HOOK_NAMES)))
    names = draw(st.permutations([*HOOK_NAMES[hook], "zeta"]))
    parts = {"positional": [], "plain": [], "default": [], "keyword": []}
    for name in names:
        kinds = ["absent", *parts] if name != "zeta" else ["absent", "default", "keyword"]
        kind = draw(st.sampled_from(kinds))
        default = f"{name}='default'" if kind == "default" or name == "zeta" else name
        if kind != "absent":
            parts[kind].append(default)
    if draw(st.booleans()):
        parts["keyword"] = [f"{name.split('=')[0]}='default'" for name in parts["keyword"]]
    source = [*parts["positional"], *(["/"] if parts["positional"] else [])]
    source += [*parts["plain"], *parts["default"]]
    keywords = [*(["*"] if parts["keyword"] else []), *parts["keyword"]]
    return hook, ", ".join(["self", *source, *keywords]), parts["keyword"]


def recorder(hook, parameters, seen):
    """Return an object whose ``hook`` has ``parameters`` and appends what they are to ``seen``."""
    namespace = {"seen": seen}
    body = "seen.append({k: v for k, v in locals().items() if k not in ('self', 'seen')})"
    exec(f"def {hook}({parameters}): {body}", namespace)
    return type("Recorder", (), {hook: hookimpl(namespace[hook])})()


@given(signatures())
@settings(deadline=None, max_examples=300)
def test_a_method_is_passed_the_same_through_a_tuple_a_wrapper_and_pluggy_itself(signature):
    hook, parameters, keywords = signature
    seen = []
    plugin = recorder(hook, parameters, seen)
    wrapper = plugin_with(hook, hookimpl(lambda self: (yield), wrapper=True))
    values = [f"value of {name}" for name in HOOK_NAMES[hook]]
    for plugins in ([plugin], [plugin, wrapper]):
        found = [impl for one in plugins for impl in implementations(one, "here")]
        (function, *_) = getattr(Hooks(in_order(found)), hook)
        function(*values)
    assert seen[0] == seen[1]
    if not keywords:  # pluggy passes none by keyword alone
        manager = pluggy.PluginManager("leyden")
        manager.add_hookspecs(RunHooks)
        manager.register(plugin)
        getattr(manager.hook, hook)(**dict(zip(HOOK_NAMES[hook], values, strict=True)))
        assert seen[2] == seen[0]


def test_a_module_declares_every_hook_with_the_arguments_it_is_passed():
    for hook, arguments in HOOK_NAMES.items():
        declared = inspect.signature(getattr(Module, hook)).parameters
        assert tuple(declared)[1:] == arguments[2:], hook
