"""What a fit takes from a checkpoint: all of it, or the parts it names."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from leyden import Callback, CheckpointError, ConfigError, Module
from leyden.testing import quiet_trainer

DATA = [torch.tensor([float(n)]) for n in range(1, 5)]
ALL_BUT_SCHEDULE = ("weights", "optimizer", "counters", "callbacks", "data", "random")


class Scalar(Module):
    """One weight, which each step moves by rate times the mean of its batch."""

    def __init__(self, make=None):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.moves = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return self.make([self.w])

    def on_train_batch_end(self, *_):
        self.moves.append(round(self.w.item(), 5))


class Counts(Callback):
    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, *_):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def fitted(module, path=None, restore=None, max_epochs=1, **options):
    trainer = quiet_trainer(max_epochs=max_epochs, **options)
    trainer.fit(module, DATA, ckpt_path=path, restore=restore)
    return trainer


def saved(tmp_path, make=None, **options):
    module = Scalar(make)
    fitted(module, **options).save_checkpoint(tmp_path / "one.ckpt")
    return str(tmp_path / "one.ckpt")


def momentum(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def test_a_new_rate_gives_way_to_the_saved_one_and_both_are_named(tmp_path):  # PL #12118
    path = saved(tmp_path)
    module = Scalar(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    with pytest.warns(UserWarning, match=r"checkpoint's lr=0\.1 rather than 0\.5.*'schedule' out"):
        trainer = fitted(module, path, max_epochs=2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert module.moves == [-1.1, -1.3, -1.6, -2.0]


def test_without_the_schedule_the_new_rate_holds_and_moments_are_kept(tmp_path):
    path = saved(tmp_path, momentum(0.1))
    unbroken, resumed = Scalar(momentum(0.1)), Scalar(momentum(0.5))
    fitted(unbroken, max_epochs=2)
    trainer = fitted(resumed, path, ALL_BUT_SCHEDULE, max_epochs=2)
    assert trainer.global_step == 8
    before, after = unbroken.moves[3:5]
    # The first step after: the same momentum buffer, five times the rate.
    assert resumed.moves[0] == pytest.approx(before + 5 * (after - before), abs=1e-4)


def test_weights_and_counters_go_on_with_another_optimizer(tmp_path):
    path = saved(tmp_path)
    module = Scalar(lambda parameters: torch.optim.Adam(parameters, lr=0.25))
    trainer = fitted(module, path, ("weights", "counters"), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert module.moves[0] == pytest.approx(-1.25, abs=1e-4)  # Adam's first step is its rate


def test_another_optimizer_is_refused_where_the_saved_state_is_asked_for(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"differ in kind: SGD was saved, and Adam is there"):
        fitted(Scalar(lambda p: torch.optim.Adam(p)), path, max_epochs=2)


def decaying(factor):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: 1 - step * factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return make


def test_a_longer_schedule_goes_on_at_the_step_that_was_reached(tmp_path):
    path = saved(tmp_path, decaying(0.1))
    module = Scalar(decaying(0.05))
    trainer = fitted(module, path, ALL_BUT_SCHEDULE, max_epochs=2)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 - 8 * 0.05)
    reached = -(1.0 * 1 + 0.9 * 2 + 0.8 * 3 + 0.7 * 4)  # by the first schedule
    assert module.moves[0] == pytest.approx(reached - (1 - 4 * 0.05) * 1)


def test_a_restored_schedule_sets_the_rate_of_a_new_optimizer(tmp_path):
    path = saved(tmp_path, decaying(0.1))
    module = Scalar(decaying(0.1))
    fitted(module, path, ("weights", "schedule", "counters"), max_epochs=2)
    reached = -(1.0 * 1 + 0.9 * 2 + 0.8 * 3 + 0.7 * 4)
    assert module.moves[0] == pytest.approx(reached - 0.6)


def per_epoch(parameters):
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    return [optimizer], [StepLR(optimizer, 1, 0.5)]


def test_a_new_schedule_per_epoch_goes_on_at_the_epoch_that_was_reached(tmp_path):
    path = saved(tmp_path, per_epoch, max_epochs=2)
    trainer = fitted(Scalar(per_epoch), path, ("weights", "counters"), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125


def test_weights_alone_begin_a_training_of_their_own(tmp_path):
    trainer = fitted(Scalar())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    module = Scalar()
    trainer = fitted(module, tmp_path / "weights.ckpt", "weights")
    assert trainer.global_step == 4
    assert module.moves == [-1.1, -1.3, -1.6, -2.0]


def test_callbacks_are_restored_only_where_asked_for(tmp_path):
    path = saved(tmp_path, callbacks=Counts())
    for restore, seen in ((("weights", "callbacks"), 8), (("weights",), 4)):
        counts = Counts()
        fitted(Scalar(), path, restore, callbacks=counts)
        assert counts.seen == seen


class SaveAt(Callback):
    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_save_point(self, trainer, module, at):
        if at == "step" and trainer.state.batch == self.batch and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_counters_without_data_begin_their_epoch_again(tmp_path):
    path = tmp_path / "half.ckpt"
    fitted(Scalar(), callbacks=SaveAt(path, 2))
    module = Scalar()
    trainer = fitted(module, path, ("weights", "optimizer", "schedule", "counters"))
    assert (trainer.global_step, trainer.current_epoch) == (6, 1)
    assert module.moves == [-0.4, -0.6, -0.9, -1.3]


def test_an_unknown_part_is_named_with_the_one_that_was_meant(tmp_path):
    with pytest.raises(ConfigError, match=r"no part 'optimizers'\. Did you mean 'optimizer'"):
        fitted(Scalar(), saved(tmp_path), ("weights", "optimizers"))


def test_a_place_in_the_data_without_its_epoch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the place in the data and not for the epoch it is in"):
        fitted(Scalar(), saved(tmp_path), ("weights", "data"))


def test_choices_that_differ_from_the_saved_run_are_named_with_both_values(tmp_path):
    path = saved(tmp_path, accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=1 \(2 until then\).*will not"):
        fitted(Scalar(), path, max_epochs=2)
