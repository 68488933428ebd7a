"""LearningRateMonitor: which rates it logs, under which names, at which steps."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from leyden import ConfigError, Module, Trainer
from leyden.plugins import LearningRateMonitor, ModelCheckpoint


class Scheduled(Module):
    """Two scalars, optimized as the function it is given says."""

    def __init__(self, configure, automatic=True):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.configure, self.automatic_optimization = configure, automatic
        self.used = []

    def training_step(self, batch, batch_idx):
        return ((self.a + self.b) * batch).mean()

    def on_before_optimizer_step(self, optimizer):
        self.used.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        return self.configure(self)


def halving(module, interval, **config):
    optimizer = SGD(module.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda count: 0.5**count)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": interval, **config},
    }


def logged(tmp_path, configure, *callbacks, automatic=True, ckpt_path=None, **options):
    """Return what was logged as a list of (step, {name: rate}), and the module."""
    trainer = Trainer(
        logger="csv",
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "log_every_n_steps": 1, **options},
    )
    module = Scheduled(configure, automatic)
    trainer.fit(module, DataLoader(torch.ones(4)), ckpt_path=ckpt_path)
    path = Path(trainer.log_dir) / "metrics.csv"
    if not path.exists():
        return [], module
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row.pop("step")) for row in rows]
    rates = [{name: float(rate) for name, rate in row.items() if rate} for row in rows]
    return list(zip(steps, rates, strict=True)), module


def test_rate_at_a_step_is_the_one_that_step_was_taken_with(tmp_path):
    monitor = LearningRateMonitor()
    rows, module = logged(tmp_path, lambda m: halving(m, "step"), monitor)
    assert [step for step, _ in rows] == list(range(1, 9))
    assert [rates["lr-SGD"] for _, rates in rows] == module.used == [0.5**k for k in range(8)]
    assert monitor.lrs == {"lr-SGD": module.used}


def test_only_steps_that_are_logged_log_rates(tmp_path):
    rows, module = logged(
        tmp_path, lambda m: halving(m, "step"), LearningRateMonitor(), log_every_n_steps=3
    )
    assert rows == [(3, {"lr-SGD": module.used[2]}), (6, {"lr-SGD": module.used[5]})]


def test_step_of_several_batches_logs_once(tmp_path):
    rows, module = logged(
        tmp_path, lambda m: halving(m, "step"), LearningRateMonitor(), accumulate_grad_batches=2
    )
    assert rows == [(k + 1, {"lr-SGD": rate}) for k, rate in enumerate(module.used)]
    assert len(rows) == 4


def test_rate_that_changes_by_epoch_is_logged_with_the_first_step_of_each(tmp_path):
    rows, module = logged(tmp_path, lambda m: halving(m, "epoch"), LearningRateMonitor())
    assert rows == [(1, {"lr-SGD": 1.0}), (5, {"lr-SGD": 0.5})]
    assert (module.used[0], module.used[4]) == (1.0, 0.5)


@pytest.mark.parametrize(("interval", "steps"), [("epoch", [1, 5]), ("step", list(range(1, 9)))])
def test_logging_interval_overrules_that_of_the_schedule(tmp_path, interval, steps):
    other = {"epoch": "step", "step": "epoch"}[interval]
    rows, _ = logged(tmp_path, lambda m: halving(m, other), LearningRateMonitor(interval))
    assert [step for step, _ in rows] == steps


def test_rate_without_a_schedule_is_logged_by_step_and_by_epoch(tmp_path):
    monitor = LearningRateMonitor()
    rows, _ = logged(tmp_path, lambda m: SGD(m.parameters(), lr=0.5), monitor, log_every_n_steps=2)
    assert [step for step, _ in rows] == [1, 2, 4, 5, 6, 8]
    assert monitor.lrs == {"lr-SGD": [0.5] * 6}
    logged(tmp_path, lambda m: Adam(m.parameters(), lr=0.2), monitor, log_every_n_steps=9)
    assert monitor.lrs == {"lr-Adam": [0.2, 0.2]}


def test_epoch_that_is_resumed_in_its_middle_does_not_log_again(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c")
    configure = partial(halving, interval="epoch")
    logged(tmp_path, configure, LearningRateMonitor(), saver, max_steps=2)
    monitor = LearningRateMonitor()
    logged(tmp_path, configure, monitor, saver, ckpt_path=saver.best_model_path)
    assert monitor.lrs == {"lr-SGD": [0.5]}


def names(tmp_path, configure, automatic=True, **options):
    rows, _ = logged(
        tmp_path,
        configure,
        LearningRateMonitor("epoch", **options),
        automatic=automatic,
        max_epochs=1,
    )
    return rows[0][1]


def test_groups_are_numbered(tmp_path):
    groups = names(tmp_path, lambda m: Adam([{"params": [m.a], "lr": 0.1}, {"params": [m.b]}]))
    assert groups == {"lr-Adam/pg1": 0.1, "lr-Adam/pg2": 0.001}


def test_groups_with_names_are_called_by_them(tmp_path):
    def configure(m):
        return Adam([{"params": [m.a], "name": "a"}, {"params": [m.b], "lr": 0.2, "name": "b"}])

    assert names(tmp_path, configure) == {"lr-Adam/a": 0.001, "lr-Adam/b": 0.2}


def test_optimizers_of_one_class_are_numbered_from_the_second(tmp_path):
    def configure(m):
        return [Adam([m.a], 0.1), Adam([m.b], 0.2), SGD([m.b], 0.3)]

    rates = names(tmp_path, configure, automatic=False)
    assert rates == {"lr-Adam": 0.1, "lr-Adam-1": 0.2, "lr-SGD": 0.3}


def test_schedule_with_a_name_gives_it_to_the_rate(tmp_path):
    assert names(tmp_path, lambda m: halving(m, "epoch", name="pace")) == {"pace": 1.0}


def test_momentum_and_weight_decay_are_logged_on_request(tmp_path):
    def configure(m):
        return [SGD([m.a], 1.0, momentum=0.9), Adam([m.b], betas=(0.8, 0.99), weight_decay=0.1)]

    rates = names(tmp_path, configure, automatic=False, log_momentum=True, log_weight_decay=True)
    assert rates == {
        "lr-SGD": 1.0,
        "lr-SGD-momentum": 0.9,
        "lr-SGD-weight_decay": 0.0,
        "lr-Adam": 0.001,
        "lr-Adam-momentum": 0.8,
        "lr-Adam-weight_decay": 0.1,
    }


def test_run_without_a_logger_is_refused(tmp_path):
    trainer = Trainer(
        logger=False,
        callbacks=[LearningRateMonitor()],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    with pytest.raises(ConfigError, match="nowhere to log to"):
        trainer.fit(Scheduled(lambda m: halving(m, "step")), DataLoader(torch.ones(4)))


def test_unknown_interval_is_refused():
    with pytest.raises(ConfigError, match=r"'steps'\. Did you mean 'step'"):
        LearningRateMonitor("steps")
