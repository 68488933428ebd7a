"""Schedules: when each is stepped, with which metric, and how many steps a training has."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from leyden import Callback, ConfigError, Module, Trainer


class Net(Module):
    """A scalar, a schedule made by ``make``, and the rate of each update."""

    def __init__(self, make, **settings):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.make, self.settings, self.rates = make, settings, []

    def training_step(self, batch, batch_idx):
        self.log("train/loss", loss := self.w * 1.0)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 1.0)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(round(optimizer.param_groups[0]["lr"], 6))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": self.make(self, optimizer), **self.settings}]


def halving(module, optimizer):
    return StepLR(optimizer, 1, 0.5)


def one_cycle(module, optimizer):
    module.total = module.trainer.estimated_stepping_batches
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=module.total)


def plateau(module, optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def batches(number):
    return [torch.ones(1) for _ in range(number)]


class Stream(IterableDataset):
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(batches(self.number))


def stream(number):
    return DataLoader(Stream(number), batch_size=None)


def fitted(module, data, val=None, ckpt_path=None, **options):
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data, val, ckpt_path=ckpt_path)
    return trainer


def final_rate(total):
    """Return the last rate of a one-cycle schedule over ``total`` steps."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=total)
    for _ in range(total - 1):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


def assert_ends_after(total, module, trainer):
    """Check that the schedule was made for ``total`` steps and was stepped as often."""
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert (module.total, schedule.last_epoch, trainer.global_step) == (total, total, total)


@pytest.mark.parametrize(
    ("data", "options", "total"),
    [
        (batches(10), {"max_epochs": 3}, 9),  # PL #1476
        (batches(10), {"max_epochs": None, "max_steps": 7}, 7),
        (batches(10), {"max_epochs": 2, "max_steps": 20}, 6),
        (batches(10), {"max_epochs": 3, "limit_train_batches": 5}, 6),
        (batches(10), {"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        (stream(10), {"max_epochs": None, "max_steps": 8}, 8),
        (stream(10), {"max_epochs": 3, "limit_train_batches": 5}, 6),
    ],
)
def test_the_estimate_of_steps_is_what_the_training_takes(data, options, total):
    module = Net(one_cycle, interval="step")
    trainer = fitted(module, data, accumulate_grad_batches=4, **options)
    assert_ends_after(total, module, trainer)
    assert module.rates[-1] == pytest.approx(final_rate(total), abs=1e-6)
    assert trainer.estimated_stepping_batches == total


def test_a_stream_without_a_limit_has_no_estimate():
    with pytest.raises(ConfigError, match=r"number of steps is not known.*Pass Trainer\(max_steps"):
        fitted(Net(one_cycle), stream(3), max_epochs=3)


def test_a_schedule_resumed_half_way_ends_where_an_unbroken_one_does(tmp_path):
    class Save(Callback):
        def on_save_point(self, trainer, module, at):
            if trainer.global_step == 4 and at == "step":
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    options = {"max_epochs": 3, "accumulate_grad_batches": 4}
    unbroken, resumed = (Net(one_cycle, interval="step") for _ in range(2))
    fitted(unbroken, batches(10), callbacks=Save(), **options)
    trainer = fitted(resumed, batches(10), ckpt_path=tmp_path / "half.ckpt", **options)
    assert_ends_after(9, resumed, trainer)
    assert resumed.rates == unbroken.rates[4:]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"interval": "epoch", "frequency": 2}, [1, 1, 1, 1, 0.5, 0.5]),
        ({"interval": "step"}, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        ({"interval": "step", "frequency": 3}, [1, 1, 1, 0.5, 0.5, 0.5]),
    ],
)
def test_interval_and_frequency_say_when(settings, rates):
    module = Net(halving, **settings)
    fitted(module, batches(2), max_epochs=3)
    assert module.rates == rates


def test_a_step_is_an_optimizer_step_not_a_batch():
    module = Net(halving, interval="step")
    fitted(module, batches(5), accumulate_grad_batches=2)
    assert module.rates == [1, 0.5, 0.25]


def test_the_epoch_schedule_steps_after_the_epochs_last_hook():
    rates = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_save_point(self, trainer, module, at):
            if at == "epoch":
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fitted(Net(halving), batches(1), callbacks=Watch(), max_epochs=2)
    assert rates == [1, 0.5, 0.5, 0.25]


def test_a_run_stopped_inside_an_epoch_has_not_stepped_its_epoch_schedule():
    module = Net(halving)
    trainer = fitted(module, batches(4), max_steps=6, max_epochs=None)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_a_plateau_steps_on_the_validation_of_its_epoch():
    module = Net(plateau, monitor="val/loss")
    fitted(module, batches(1), batches(1), max_epochs=3)
    assert module.rates == [1, 1, 0.5]  # the loss stays 1.0, and patience is 0


def test_a_plateau_may_watch_the_step():
    module = Net(plateau, monitor="train/loss", interval="step")
    fitted(module, batches(4))
    assert module.rates == [1, 1, 1, 1]  # w falls at each step, and the loss with it


def test_a_missing_metric_lists_those_there_are():
    module = Net(plateau, monitor="val/los")
    with pytest.raises(
        ConfigError, match=r"'val/los'. Did you mean 'val/loss'.*train/loss, val/lo"
    ):
        fitted(module, batches(1), batches(1))


def test_a_missing_metric_may_be_gone_without():
    module = Net(plateau, monitor="val/los", strict=False)
    fitted(module, batches(1), batches(1), max_epochs=2)
    assert module.rates == [1, 1]


def test_a_plateau_waits_for_the_first_validation():
    module = Net(plateau, monitor="val/loss")
    fitted(module, batches(1), batches(1), max_epochs=4, check_val_every_n_epoch=2)
    assert module.rates == [1, 1, 1, 0.5]  # compared after epochs 2 and 3


def test_a_monitor_means_nothing_to_a_schedule_that_takes_no_metric():
    module = Net(halving, monitor="nowhere")
    fitted(module, batches(1), max_epochs=2)
    assert module.rates == [1, 0.5]


def test_lr_scheduler_step_may_be_overridden():
    told = []

    class Own(Net):
        def lr_scheduler_step(self, scheduler, metric):
            told.append((type(scheduler), metric))
            scheduler.step(metric)

    fitted(Own(plateau, monitor="val/loss"), batches(1), batches(1))
    assert told == [(ReduceLROnPlateau, 1.0)]


def test_a_schedule_of_ones_own_is_given_the_metric_where_it_says_so():
    class Own:
        def __init__(self):
            self.given = []

        def step(self, metric=None):
            self.given.append(metric)

        def state_dict(self):
            return {}

    schedules = Own(), Own()
    for schedule, watches in zip(schedules, (True, False), strict=True):
        settings = {"monitor": "val/loss", "reduce_on_plateau": watches}
        module = Net(lambda module, optimizer, own=schedule: own, **settings)
        fitted(module, batches(1), batches(1))
    assert [schedule.given for schedule in schedules] == [[1.0], [None]]


def test_schedules_of_manual_optimization_are_left_alone():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.w * 1.0)
            self.optimizers().step()
            if batch_idx == 1:
                self.lr_schedulers().step()

    module = Manual(halving, interval="step")
    fitted(module, batches(3))
    assert module.rates == [1, 1, 0.5]


def test_a_plateau_of_manual_optimization_needs_no_monitor():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.w * 1.0)
            self.optimizers().step()
            self.lr_schedulers().step(1.0)

    module = Manual(plateau)
    fitted(module, batches(3))
    assert module.rates == [1, 1, 0.5]


def test_several_schedules_are_stepped_each_in_its_time():
    class Both(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            per_step = {"scheduler": StepLR(optimizer, 2, 0.1), "interval": "step"}
            return [optimizer], [per_step, LambdaLR(optimizer, lambda epoch: 1.0)]

    trainer = fitted(Both(None), batches(4), max_epochs=2)
    ends = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert ends == [8, 2]
