"""When validation happens: by batches, shares, steps, epochs and time, and at start and end."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import ModelCheckpoint
from leyden.testing import on_ranks, quiet_trainer

TEN = [torch.ones(1)] * 10


class Scalar(Module):
    """Keeps the step of each validation, and what it trains on and draws."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.validated, self.trained = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append((batch.tolist(), float(torch.rand(()))))
        return (self.w * batch).mean()

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean() - self.w)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def validated(interval, data=TEN, **choices):
    """Return the steps at which validation began."""
    module = Scalar()
    choices = {"max_epochs": None, "max_steps": 25, **choices}
    quiet_trainer(val_check_interval=interval, **choices).fit(module, data, TEN[:1])
    return module.validated


# Units, with ten batches an epoch and 25 steps


@pytest.mark.parametrize("window", [1, 2])
def test_steps_are_optimizer_steps_counted_across_epochs(window):
    """PL #12000."""
    every_four = [4, 8, 12, 16, 20, 24]
    choices = {"accumulate_grad_batches": window}
    assert validated("4 steps", **choices) == every_four
    assert validated("4 steps", validate_at="end", **choices) == [*every_four, 25]


@pytest.mark.parametrize("window", [1, 2])
def test_an_interval_longer_than_the_run_validates_at_the_end_if_asked_to(window):
    choices = {"accumulate_grad_batches": window}
    assert validated("40 steps", validate_at="end", **choices) == [25]
    assert validated("40 steps", **choices) == []


def test_the_end_is_not_validated_twice():
    assert validated("5 steps", validate_at="end") == [5, 10, 15, 20, 25]


def test_one_step_and_one_epoch_are_spelled_differently():
    assert validated("1 step") == list(range(1, 26))
    assert validated("1 epoch") == [10, 20]
    assert validated(1) == list(range(1, 26))
    assert validated(1.0) == [10, 20]


@pytest.mark.parametrize(
    ("interval", "choices", "expected"),
    [
        (4, {}, [4, 8, 14, 18, 24]),
        (4, {"check_val_every_n_epoch": 2}, [14, 18]),
        (4, {"check_val_every_n_epoch": None}, [4, 8, 12, 16, 20, 24]),
        (12, {"check_val_every_n_epoch": None}, [12, 24]),
        ("4 batches", {}, [4, 8, 14, 18, 24]),
        (0.5, {}, [5, 10, 15, 20, 25]),
        (0.33, {}, [3, 6, 9, 13, 16, 19, 23]),
        (0.5, {"check_val_every_n_epoch": 2}, [15, 20]),
        (None, {}, [10, 20]),
        (1.0, {"check_val_every_n_epoch": 2}, [20]),
        ("2 epochs", {}, [20]),
    ],
)
def test_batches_and_shares_count_within_epochs_unless_told_otherwise(interval, choices, expected):
    assert validated(interval, **choices) == expected


def test_batches_are_counted_and_not_steps_where_gradients_accumulate():
    assert validated(4, accumulate_grad_batches=2, max_steps=10) == [2, 4, 7, 9]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("4 steps", [4, 8]), (4, [4, 8]), (1.0, [10]), ("1 epoch", [10])],
)
def test_a_loader_without_a_length_is_validated_too(interval, expected):
    class Stream:
        def __iter__(self):
            return iter(TEN)

    assert validated(interval, Stream(), max_steps=-1, max_epochs=1) == expected


def test_time_counts_from_the_end_of_the_last_validation(monkeypatch):
    class Clock(Callback):
        """Lets each step take ten minutes and each validation an hour."""

        now = 0.0

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.now += 600

        def on_validation_start(self, trainer, module):
            self.now += 3600

    clock = Clock()
    for place in ("agreement", "wiring"):
        monkeypatch.setattr(f"leyden.{place}.perf_counter", lambda: clock.now)
    choices = {"callbacks": [clock], "num_sanity_val_steps": 0}
    assert validated("30 min", max_steps=10, **choices) == [3, 6, 9]


# Start and end


def fitted(tmp_path=None, **choices):
    """Return the trainer of two steps over shuffled data."""
    torch.manual_seed(5)
    module = Scalar()
    data = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    choices = {"max_epochs": None, "max_steps": 2, "log_every_n_steps": 1, **choices}
    trainer = quiet_trainer(**choices)
    trainer.fit(module, data, DataLoader(torch.arange(4.0)))
    return trainer


def test_a_validation_at_the_start_is_whole_and_logged_at_step_zero(tmp_path):
    """PL #20985."""
    choices = {"logger": "csv", "default_root_dir": tmp_path, "num_sanity_val_steps": 0}
    trainer = fitted(validate_at="start", **choices)
    assert trainer.module.validated == [0]
    header, row = (trainer.run_dir / "metrics.csv").read_text().split()
    assert dict(zip(header.split(","), row.split(","), strict=True)) == {
        "step": "0", "epoch": "0", "val": "1.5",
    }  # fmt: skip


def test_a_validation_at_the_start_leaves_training_as_it_is():
    without, with_start = fitted(limit_val_batches=0), fitted(validate_at="start")
    assert len(without.module.trained) == 2
    assert with_start.module.trained == without.module.trained
    assert with_start.module.w.item() == without.module.w.item()


def test_a_validation_at_the_start_can_make_the_best_checkpoint(tmp_path):
    class Worsens(Scalar):
        def validation_step(self, batch, batch_idx):
            self.log("val", float(self.global_step))

    saver = ModelCheckpoint(tmp_path, monitor="val", mode="min", filename="{step}-{val:.0f}")
    trainer = quiet_trainer(callbacks=[saver], validate_at=("start", "end"), max_epochs=2)
    trainer.fit(Worsens(), TEN, TEN)
    assert trainer.module.validated == [0, 10, 20]
    assert saver.best_model_path == str(tmp_path / "step=0-val=0.ckpt")


def begun_on_ranks(folder):
    """Return what two ranks validate, log, train on and draw, without and with a baseline."""
    logged = {"logger": "csv", "default_root_dir": folder, "num_sanity_val_steps": 0}
    choices = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}
    without = fitted(limit_val_batches=0, **choices)
    baseline = fitted(validate_at="start", **choices, **logged)
    rows = (baseline.run_dir / "metrics.csv").read_text().split()[:2]
    return [
        baseline.module.validated,
        dict(zip(*(row.split(",") for row in rows), strict=True)),
        [(run.module.trained, run.module.w.item()) for run in (without, baseline)],
    ]


def test_a_validation_at_the_start_is_one_for_all_ranks(tmp_path):
    for validated, row, (without, baseline) in on_ranks(2, begun_on_ranks, tmp_path):
        assert validated == [0, 2]  # at the start, and after the epoch's two steps
        # The mean of 0, 1, 2 and 3, of which each rank has two.
        assert row == {"step": "0", "epoch": "0", "val": "1.5"}
        assert len(without[0]) == 2
        assert baseline == without


def test_start_and_end_are_not_validated_without_validation_data():
    module = Scalar()
    quiet_trainer(validate_at=("start", "end")).fit(module, TEN)
    assert module.validated == []


def test_a_second_fit_that_trains_nothing_validates_nothing():
    module, trainer = Scalar(), quiet_trainer(validate_at=("start", "end"))
    for _ in range(2):
        trainer.fit(module, TEN, TEN)
    assert module.validated == [0, 10]


# What is refused


@pytest.mark.parametrize(
    "interval",
    ["often", "0 steps", "1.5 epochs", "500 ms", "3 parsecs", "", True, [4], 0, -1, 0.0, 1.5],
)
def test_what_is_no_interval_is_refused_when_the_trainer_is_made(interval):
    with pytest.raises(ConfigError, match=r"val_check_interval=.*'500 steps', '2 epochs'"):
        Trainer(val_check_interval=interval)


@pytest.mark.parametrize("interval", ["4 steps", "2 epochs", "30 min"])
def test_a_unit_and_epochs_left_out_exclude_each_other(interval):
    message = f"'{interval}' counts .* check_val_every_n_epoch=3 leaves epochs out"
    with pytest.raises(ConfigError, match=message):
        Trainer(val_check_interval=interval, check_val_every_n_epoch=3)


def test_a_share_of_an_epoch_cannot_count_across_epochs():
    message = "val_check_interval=0.5 is a share of an epoch.*=None counts across epochs"
    with pytest.raises(ConfigError, match=message):
        Trainer(val_check_interval=0.5, check_val_every_n_epoch=None)


def test_a_share_of_an_epoch_needs_a_length():
    message = "val_check_interval=0.5 is a share of an epoch, and this loader has no length"
    with pytest.raises(ConfigError, match=message):
        validated(0.5, iter(TEN))


def test_more_batches_than_an_epoch_has_are_refused():
    message = "val_check_interval=11 batches is more than the 10 of an epoch.*'11 steps'"
    with pytest.raises(ConfigError, match=message):
        validated(11)
