"""Train and eval mode: evaluations set it and put every part back, whatever happens."""

import warnings

import pytest
import torch
from torch import nn

from leyden import Callback, Module
from leyden.testing import quiet_trainer

DATA = [torch.ones(4, 2)] * 2


class Frozen(Module):
    """Has a batch norm that its author put in eval mode for good."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.norm.eval()
        self.modes = []

    def look(self):
        self.modes.append((self.training, self.norm.training, self.layer.training))

    def training_step(self, batch, batch_idx):
        self.look()
        return self.layer(self.norm(batch)).mean()

    def validation_step(self, batch, batch_idx):
        self.look()
        return self.layer(self.norm(batch))

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:No optimizer holds")
def test_a_frozen_part_stays_in_eval_mode_through_training_and_validation():
    """PL #18930."""
    module = Frozen()
    quiet_trainer(max_epochs=2, num_sanity_val_steps=1).fit(module, DATA, DATA)
    training, evaluating = (True, False, True), (False, False, False)
    epoch = [training] * 2 + [evaluating] * 2
    assert module.modes == [evaluating, *epoch, *epoch]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_evaluation_puts_every_part_back_in_the_mode_it_had(method):
    module = Frozen()
    getattr(quiet_trainer(), method)(module, DATA)
    assert module.modes == [(False, False, False)] * 2
    assert (module.training, module.norm.training, module.layer.training) == (True, False, True)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("place", ["step", "on_{}_start", "on_{}_epoch_end", "on_{}_model_eval"])
def test_an_evaluation_that_fails_does_so_too(method, place):
    name = {"validate": "validation"}.get(method, method)

    def fail(self, *args):
        raise RuntimeError("mine")

    hook = f"{name}_step" if place == "step" else place.format(name)
    module = type("Fails", (Frozen,), {hook: fail})()
    with pytest.raises(RuntimeError, match="mine"):
        getattr(quiet_trainer(), method)(module, DATA)
    assert (module.training, module.norm.training, module.layer.training) == (True, False, True)


def test_the_model_eval_and_model_train_hooks_stand_around_the_change():
    modes = []

    class Looks(Callback):
        def on_validation_start(self, trainer, module):
            modes.append(module.layer.training)

        on_validation_model_eval = on_validation_end = on_validation_model_train = (
            on_validation_start
        )

    quiet_trainer(callbacks=[Looks()]).validate(Frozen(), DATA, verbose=False)
    assert modes == [True, False, False, True]


@pytest.mark.filterwarnings("ignore:No optimizer holds")
def test_a_module_handed_over_in_eval_mode_stays_in_it_and_one_warning_says_so():
    module = Frozen().eval()
    with pytest.warns(UserWarning, match=r"Frozen is in eval mode and.*model\.train\(\)") as said:
        quiet_trainer(max_epochs=2).fit(module, DATA, DATA)
    assert sum("eval mode" in str(warning.message) for warning in said) == 1
    assert set(module.modes) == {(False, False, False)}
    assert not module.training


@pytest.mark.filterwarnings("ignore:No optimizer holds")
def test_a_module_in_train_mode_is_not_warned_of():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet_trainer().fit(Frozen(), DATA)
    assert not any("eval mode" in str(warning.message) for warning in said)


def test_a_module_in_eval_mode_is_evaluated_without_a_word():
    module = Frozen().eval()
    quiet_trainer().test(module, DATA, verbose=False)
    assert not module.training
