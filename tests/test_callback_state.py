"""The state of callbacks in a checkpoint: each gets its own back, or an error says why not."""

import pytest

from leyden import Callback, PluginError
from leyden.testing import Regression, batches, quiet_trainer


class Counter(Callback):
    """Counts the batches of one name; what it says of them is no part of its identity."""

    def __init__(self, name, verbose=False):
        self.name, self.verbose = name, verbose
        self.count = 0

    @property
    def state_key(self):
        return f"Counter({self.name})"

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1 if self.name == "ones" else 10

    def state_dict(self):
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


@pytest.fixture
def saved(tmp_path):
    """Return the checkpoint of a run in which one Counter came to 2 and another to 20."""
    ones, tens = Counter("ones"), Counter("tens")
    trainer = quiet_trainer(callbacks=[ones, tens])
    trainer.fit(Regression(), batches(2))
    assert (ones.count, tens.count) == (2, 20)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def resumed(saved, *callbacks, module=None, **choices):
    """Go on from ``saved``, where nothing is left to train."""
    trainer = quiet_trainer(callbacks=callbacks, **choices)
    trainer.fit(module or Regression(), batches(2), ckpt_path=saved)


def test_two_callbacks_of_one_class_get_each_its_own_state_back(saved):
    """PL #6467."""
    ones, tens = Counter("ones"), Counter("tens")
    resumed(saved, ones, tens)
    assert (ones.count, tens.count) == (2, 20)


def test_their_order_and_settings_outside_of_the_key_do_not_matter(saved):
    ones, tens = Counter("ones", verbose=True), Counter("tens")
    resumed(saved, tens, ones)
    assert (ones.count, tens.count) == (2, 20)


def test_a_callback_of_the_module_is_told_apart_by_its_key_too(saved):
    ones, tens = Counter("ones"), Counter("tens")

    class Own(Regression):
        def configure_callbacks(self):
            return tens

    resumed(saved, ones, module=Own())
    assert (ones.count, tens.count) == (2, 20)


def test_a_callback_passed_as_a_plugin_keeps_its_state_too(saved):
    ones, tens = Counter("ones"), Counter("tens")
    resumed(saved, ones, plugins=[tens])
    assert (ones.count, tens.count) == (2, 20)


def test_two_callbacks_with_one_key_are_refused_before_anything_runs():
    class Alike(Counter):
        state_key = "alike"

        def setup(self, trainer, module, stage):
            raise AssertionError("something ran")

    message = (
        "Two callbacks would save their state under one key, 'alike'. Give Alike a state_key "
        "property that includes the settings that tell the two apart."
    )
    with pytest.raises(PluginError, match=message):
        quiet_trainer(callbacks=[Alike("ones"), Alike("tens")]).fit(Regression(), batches(1))

    class Own(Regression):
        def configure_callbacks(self):
            return [Alike("tens")]

    with pytest.raises(PluginError, match=message):
        quiet_trainer(callbacks=[Alike("ones")]).fit(Own(), batches(1))


def test_two_callbacks_of_one_class_without_state_need_no_key():
    class Stateless(Callback):
        pass

    trainer = quiet_trainer(callbacks=[Stateless(), Stateless()])
    assert trainer.fit(Regression(), batches(1)).steps == 1


def test_state_that_nobody_takes_over_is_named(saved):
    with pytest.warns(UserWarning, match=r"callbacks this run does not have: Counter\(tens\)\. It"):
        resumed(saved, Counter("ones"))
