"""Wrappers around told hooks, and hooks that tell everyone whatever is raised."""

import contextlib

import pytest

from leyden import Callback, PluginError, hookimpl
from leyden.testing import Regression, batches, quiet_trainer


def fit(*plugins, callbacks=(), module=None, **choices):
    """Return the Trainer after an epoch of two batches and a validation of one."""
    trainer = quiet_trainer(plugins=plugins, callbacks=callbacks, num_sanity_val_steps=0, **choices)
    trainer.fit(module or Regression(), batches(2), batches(1))
    return trainer


def plugin_with(name, function):
    return type("Plugin", (), {name: function})()


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


def test_a_wrapper_surrounds_a_hook_and_the_order_inside_stays():
    seen = []

    class Own(Regression):
        def on_train_start(self):
            seen.append("module")

    fit(Log("a", seen), Around(seen), callbacks=[Log("b", seen), Log("c", seen)], module=Own())
    assert seen == ["before", "a", "b", "c", "module", "after"]


def test_the_wrapper_listed_first_is_outermost():
    seen = []

    def wrapper(name):
        def on_train_start(self):
            seen.append(f"{name} before")
            yield
            seen.append(f"{name} after")

        return plugin_with("on_train_start", hookimpl(on_train_start, wrapper=True))

    fit(wrapper("a"), Log("in", seen), wrapper("b"))
    assert seen == ["a before", "b before", "in", "b after", "a after"]


def test_a_wrapper_sees_an_error_and_can_clean_up():
    seen = []

    class Own(Regression):
        def on_train_start(self):
            raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError, match="oh"):
        fit(Around(seen), module=Own())
    assert seen == ["before", "saw oh", "after"]


def test_a_wrapper_may_settle_an_error_itself():
    class Settle:
        @hookimpl(wrapper=True)
        def on_train_start(self):
            with contextlib.suppress(ZeroDivisionError):
                yield

    class Own(Regression):
        def on_train_start(self):
            raise ZeroDivisionError("oh")

    assert fit(Settle(), module=Own()).global_step == 2


def test_a_wrapper_that_returns_a_value_is_refused():
    def on_train_start(self):
        yield
        return 3

    wrapper = plugin_with("on_train_start", hookimpl(on_train_start, wrapper=True))
    with pytest.raises(PluginError, match=r"Plugin.on_train_start returned 3; a hook that is told"):
        fit(wrapper)


class Fails(Callback):
    """Raises at its end and notes what it was told."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def teardown(self, trainer, module, stage):
        self.seen.append(f"teardown {self.name}")
        raise RuntimeError(f"teardown of {self.name}")

    def on_exception(self, trainer, module, exception):
        self.seen.append(f"on_exception {self.name}")
        raise RuntimeError(f"on_exception of {self.name}")


def test_teardown_tells_everyone_and_raises_the_first_error_last():
    seen = []
    with pytest.raises(RuntimeError, match="teardown of b") as error:
        fit(callbacks=[Fails("a", seen), Fails("b", seen)])
    assert seen == ["teardown b", "teardown a"]
    assert any("teardown of a" in note for note in error.value.__notes__)


def test_on_exception_tells_everyone_and_the_first_error_stays_the_one_raised():
    seen = []

    class Own(Regression):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("the first")

    with pytest.raises(ZeroDivisionError, match="the first") as error:
        fit(callbacks=[Fails("a", seen), Fails("b", seen)], module=Own())
    assert seen == ["on_exception a", "on_exception b", "teardown b", "teardown a"]
    for text in ("on_exception of a", "on_exception of b", "teardown of b", "teardown of a"):
        assert any(text in note for note in error.value.__notes__), text


@pytest.mark.parametrize("fails_before_its_yield", [False, True])
def test_a_wrapper_keeps_nobody_from_being_told_of_the_end(fails_before_its_yield):
    seen = []

    class Wrapper:
        @hookimpl(wrapper=True)
        def teardown(self):
            if fails_before_its_yield:
                raise ZeroDivisionError("in the wrapper")
            try:
                yield
            except RuntimeError as error:
                seen.append(f"saw {error}")
                raise

    wanted = ZeroDivisionError if fails_before_its_yield else RuntimeError
    with pytest.raises(wanted):
        fit(Wrapper(), callbacks=[Fails("a", seen), Fails("b", seen)])
    assert seen[:2] == ["teardown b", "teardown a"]
    assert seen[2:] == ([] if fails_before_its_yield else ["saw teardown of b"])
