"""Who is called at a hook."""

import functools
import re
import threading
import types
from unittest import mock

import pytest
import torch

from leyden import Callback, DataModule, Module, hookimpl
from leyden.testing import Regression, batches, quiet_trainer


def fit(*plugins, callbacks=(), module=None, **choices):
    """Return the Trainer after an epoch of two batches and a validation of one."""
    trainer = quiet_trainer(plugins=plugins, callbacks=callbacks, num_sanity_val_steps=0, **choices)
    trainer.fit(module or Regression(), batches(2), batches(1))
    return trainer


def test_any_callable_that_stands_for_a_callbacks_method_is_called():
    seen = []

    def note(what, trainer, module):
        seen.append(what)

    class Odd(Callback):
        @staticmethod
        def on_fit_start(trainer, module):
            seen.append("static")

        @classmethod
        def on_train_start(cls, trainer, module):
            seen.append(cls.__name__)

        on_train_epoch_start = functools.partialmethod(lambda self, *given: note(*given), "method")

    odd = Odd()
    odd.on_train_epoch_end = functools.partial(note, "partial")
    odd.on_train_end = lambda trainer, module: seen.append("attribute")
    fit(callbacks=[odd])
    assert seen == ["static", "Odd", "method", "partial", "attribute"]


def test_a_callback_may_call_what_it_overrides_however_deep():
    seen = []

    class Middle(Callback):
        def on_fit_start(self, trainer, module):
            super().on_fit_start(trainer, module)
            seen.append("middle")

    class Last(Middle):
        def on_fit_start(self, trainer, module):
            super().on_fit_start(trainer, module)
            seen.append("last")

    fit(callbacks=[Last()])
    assert seen == ["middle", "last"]


def test_the_mark_is_found_wherever_python_lets_it_stand():
    seen = []

    class Plugin:
        __slots__ = ("on_train_end",)

        @hookimpl
        @staticmethod
        def on_fit_start(trainer):
            seen.append("above static")

        @staticmethod
        @hookimpl
        def on_train_start(trainer):
            seen.append("below static")

        @hookimpl
        @classmethod
        def on_train_epoch_start(cls):
            seen.append("class")

        @hookimpl(specname="on_train_epoch_end")
        def under_another_name(self):
            seen.append("named")

    plugin = Plugin()
    plugin.on_train_end = hookimpl(functools.partial(seen.append, "partial in a slot"))
    fit(plugin)
    assert seen == ["above static", "below static", "class", "named", "partial in a slot"]


def test_a_module_of_python_can_be_a_plugin():
    seen = []
    plugin = types.ModuleType("handwritten")
    plugin.on_fit_start = hookimpl(lambda trainer: seen.append(trainer))
    plugin.setup = lambda: seen.append("not marked, so not a hook")
    trainer = fit(plugin)
    assert seen == [trainer]
    assert "handwritten" in trainer.explain()


def test_only_what_an_object_holds_is_looked_at():
    class Magic:
        is_ready = False

        @property
        def explosive(self):
            raise AssertionError("a property was read")

        @functools.cached_property
        def on_train_start(self):
            raise AssertionError("a property was read")

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

        def __eq__(self, other):
            raise AssertionError("plugins were compared")

        __hash__ = None

        @hookimpl
        def on_fit_start(self):
            Magic.is_ready = True

    fit(Magic(), Magic())
    assert Magic.is_ready


def test_an_object_that_answers_to_any_name_is_no_saver_for_that():
    seen = []
    magic = mock.MagicMock()
    magic.on_train_start = hookimpl(lambda: seen.append("magic"))
    fit(magic, Log("after", seen))
    assert seen == ["magic", "after"]


def test_equal_plugins_are_two_plugins():
    class Counter(Callback):
        count = 0

        def __eq__(self, other):
            return isinstance(other, Counter)

        __hash__ = None

        def on_train_start(self, trainer, module):
            self.count += 1

    one, other, third = Counter(), Counter(), Counter()
    fit(third, callbacks=[one, other])
    assert [one.count, other.count, third.count] == [1, 1, 1]


def test_an_optional_hook_that_does_not_exist_is_let_pass():
    seen = []

    class Plugin:
        @hookimpl(optionalhook=True)
        def on_hook_of_a_later_version(self, anything):
            seen.append("later")

        @hookimpl
        def on_fit_start(self):
            seen.append("now")

    fit(Plugin())
    assert seen == ["now"]


def test_a_datamodule_is_told_of_setup_errors_and_teardown():
    seen = []

    class Data(DataModule):
        def setup(self, stage):
            seen.append(stage)

        def train_dataloader(self):
            return 1 / 0

        def on_exception(self, exception):
            seen.append(type(exception))

        def teardown(self, stage):
            seen.append("over")

    with pytest.raises(ZeroDivisionError):
        quiet_trainer().fit(Regression(), datamodule=Data())
    assert seen == ["fit", ZeroDivisionError, "over"]


def test_a_module_may_mark_its_methods():
    seen = []

    class Own(Regression):
        @hookimpl(wrapper=True)
        def on_train_start(self):
            seen.append("before")
            yield
            seen.append("after")

        @hookimpl(specname="on_train_start")
        def begin(self):
            seen.append("inside")

    fit(module=Own())
    assert seen == ["before", "inside", "after"]


def test_a_part_may_hook_into_the_run_it_serves():
    from leyden.strategies.single_device import SingleDevice

    seen = []

    class Strategy(SingleDevice):
        @hookimpl
        def on_train_start(self, module):
            seen.append(module)

    module = Regression()
    fit(module=module, strategy=Strategy())
    assert seen == [module]


class Log(Callback):
    """Notes into a list shared with others."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def on_train_start(self, trainer, module):
        self.seen.append(self.name)


class Around:
    """Wraps one hook of a run."""

    def __init__(self, seen):
        self.seen = seen

    @hookimpl(wrapper=True)
    def on_train_start(self, trainer):
        self.seen.append("before")
        try:
            result = yield
        except ZeroDivisionError as error:
            self.seen.append(f"saw {error}")
            raise
        finally:
            self.seen.append("after")
        assert result is None
        return result


def test_two_trainers_side_by_side_share_nothing():
    seen = []

    class Pauses(Callback):
        def __init__(self, name):
            self.name, self.stage = name, None

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            barrier.wait(timeout=30)
            seen.append((self.name, trainer.global_step, trainer.callbacks == [self]))

    barrier = threading.Barrier(2)
    trainers = [
        quiet_trainer(callbacks=[Pauses("a")], max_steps=2),
        quiet_trainer(callbacks=[Pauses("b")], max_steps=2),
    ]
    threads = [
        threading.Thread(target=trainer.fit, args=(Regression(), batches(2)))
        for trainer in trainers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(seen) == [("a", 1, True), ("a", 2, True), ("b", 1, True), ("b", 2, True)]
    assert trainers[0].registry is not trainers[1].registry
    assert trainers[0].state is not trainers[1].state


def test_a_trainer_made_inside_a_hook_of_another_leaves_it_alone():
    class Inner(Callback):
        def on_train_start(self, trainer, module):
            other = quiet_trainer(max_steps=1)
            other.fit(Regression(), batches(1))
            assert (other.global_step, trainer.global_step) == (1, 0)
            assert module.trainer is trainer

    assert fit(callbacks=[Inner()]).global_step == 2


def test_trace_prints_each_call_of_a_hook_to_stderr(monkeypatch, capsys):
    monkeypatch.setenv("LEYDEN_TRACE", "1")

    class Own(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            """Called twice."""

    fit(Around([]), callbacks=[Log("a", [])], module=Own())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("leyden: ")]
    calls = [tuple(line.split()[1:3]) for line in lines]
    assert calls == [
        ("on_train_start", "Log"),
        ("on_train_start", "Around"),
        ("on_train_batch_end", "Own"),
        ("on_train_batch_end", "Own"),
    ]
    assert all(re.search(r" \d+\.\d+ ms$", line) for line in lines)


def test_without_the_trace_nothing_is_printed(monkeypatch, capsys):
    monkeypatch.delenv("LEYDEN_TRACE", raising=False)
    fit(callbacks=[Log("a", [])])
    assert "on_train_start" not in capsys.readouterr().err


def test_a_hook_may_make_a_module_that_learns_nothing_of_the_run():
    """A callback deep-copies the Module it is told of, as weight averaging does."""
    import copy

    class Copies(Callback):
        def on_train_end(self, trainer, module):
            self.copy = copy.deepcopy(module)

    callback = Copies()
    module = Regression()
    fit(callbacks=[callback], module=module)
    assert torch.equal(callback.copy.layer.weight, module.layer.weight)
    assert isinstance(callback.copy, Module)
