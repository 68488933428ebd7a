"""trainer.explain(): who is called at each hook, in which order, and where they come from."""

import re

from leyden import Callback, hookimpl
from leyden.loggers import CSVLogger
from leyden.plugins import EarlyStopping, Timer
from leyden.testing import Regression, quiet_trainer


class Plugin:
    @hookimpl
    def on_train_batch_end(self, batch_idx):
        """Does nothing."""

    @hookimpl(wrapper=True)
    def on_train_epoch_end(self):
        yield


class Own(Regression):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Does nothing."""


def explained(text):
    """Return what ``text`` says: each hook with its ``(owner, where from)`` in order."""
    found, hook = {}, None
    for line in text.splitlines():
        name, number, owner, origin = re.fullmatch(r"(\w*) +(\d+)\. (\w+) \((.*)\)", line).groups()
        hook = name or hook
        found.setdefault(hook, []).append((owner, origin))
        assert len(found[hook]) == int(number)
    return found


def test_explain_prints_and_returns_who_is_called_in_order_and_where_from(capsys):
    trainer = quiet_trainer(plugins=[Plugin()], callbacks=[Timer(), EarlyStopping("val/loss")])
    text = trainer.explain(Own())
    assert capsys.readouterr().out == text + "\n"
    assert explained(text)["on_train_batch_end"] == [
        ("Own", "Module"),
        ("Plugin", "Trainer(plugins=[…])"),
        ("Timer", "leyden.plugins.timer"),
    ]
    assert explained(text)["on_validation_end"] == [
        ("Timer", "leyden.plugins.timer"),
        ("EarlyStopping", "leyden.plugins.early_stopping"),
    ]


def test_explain_marks_wrappers():
    text = quiet_trainer(plugins=[Plugin()], callbacks=[Timer()]).explain()
    assert explained(text)["on_train_epoch_end"] == [
        ("Plugin", "Trainer(plugins=[…]), wraps the others"),
        ("Timer", "leyden.plugins.timer"),
    ]


def test_explain_without_a_module_leaves_its_hooks_out():
    text = quiet_trainer(callbacks=[Timer()]).explain()
    assert "Module" not in text
    assert "on_train_batch_end          1. Timer (leyden.plugins.timer)" in text


def test_explain_names_the_callbacks_that_a_module_brings():
    class Brings(Regression):
        def configure_callbacks(self):
            return Timer()

    assert "Timer" in quiet_trainer().explain(Brings())
    assert quiet_trainer().explain() == "No hook is implemented."


def test_explain_names_a_part_that_hooks_into_the_run():
    class Counts(CSVLogger):
        @hookimpl
        def on_fit_start(self):
            """Does nothing."""

    text = quiet_trainer(logger=Counts()).explain()
    assert explained(text) == {"on_fit_start": [("Counts", Counts.__module__)]}


def test_a_callback_that_overrides_nothing_is_not_named():
    assert "Callback" not in quiet_trainer(callbacks=[Callback()]).explain()
