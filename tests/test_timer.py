"""Timer: ends a run when its time is up, and measures stages."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import ModelCheckpoint, Timer

INSTANT, AGES = timedelta(microseconds=1), timedelta(days=1)


class Scalar(Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.w.detach())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.w.detach())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


DATA = DataLoader(torch.ones(4))


def trained(tmp_path, *callbacks, ckpt_path=None, **options):
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )
    return trainer, trainer.fit(Scalar(), DATA, DATA, ckpt_path=ckpt_path)


def test_run_whose_time_is_up_at_the_start_trains_nothing_and_says_why(tmp_path):
    _, result = trained(tmp_path, Timer(timedelta(0)))
    assert result.steps == 0
    assert result.reason == "the time limit of 0:00:00 is over: trained for 0:00:00"


def test_run_ends_after_the_step_in_which_its_time_is_up(tmp_path):
    _, result = trained(tmp_path, Timer(INSTANT))
    assert result.steps == 1
    assert "time limit of 0:00:00.000001 is over" in result.reason


def test_run_ends_after_the_epoch_in_which_its_time_is_up(tmp_path):
    _, result = trained(tmp_path, Timer(INSTANT, interval="epoch"))
    assert (result.steps, result.epochs) == (4, 1)


def test_run_within_its_time_is_not_disturbed(tmp_path):
    timer = Timer(AGES)
    _, result = trained(tmp_path, timer)
    assert result.epochs == 3
    assert 0 < timer.time_elapsed() < AGES.total_seconds()
    assert timer.time_remaining() == AGES.total_seconds() - timer.time_elapsed()


def test_time_of_the_resumed_parts_is_counted(tmp_path):
    saver, first = ModelCheckpoint(tmp_path), Timer(AGES)
    trained(tmp_path, first, saver, max_epochs=1)
    used = timedelta(seconds=first.time_elapsed())
    _, result = trained(tmp_path, Timer(used / 2), saver, ckpt_path=saver.best_model_path)
    assert (result.steps, result.epochs) == (4, 1)
    assert "time limit" in result.reason


def test_max_time_of_the_trainer_ends_the_run(tmp_path):
    _, result = trained(tmp_path, max_time=timedelta(microseconds=1))
    assert result.steps == 1
    assert "time limit" in result.reason


def test_stages_are_measured_apart(tmp_path):
    timer = Timer()
    trainer, _ = trained(tmp_path, timer)
    assert timer.end_time("train") > timer.end_time("validate") > timer.start_time("train")
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")
    assert timer.time_elapsed("validate") == timer.time_elapsed("validate")
    assert timer.time_elapsed("test") == 0
    assert timer.start_time("test") is timer.end_time("test") is timer.time_remaining() is None
    trainer.test(Scalar(), DATA, verbose=False)
    assert timer.time_elapsed("test") > 0


def test_stage_that_is_going_on_has_no_end_yet(tmp_path):
    timer, seen = Timer(), []

    class Look(Callback):
        def on_validation_batch_end(self, trainer, module, *rest):
            seen.append(timer.end_time("validate"))

    trained(tmp_path, timer, Look())
    assert seen == [None] * 14  # two of them in the sanity check


@pytest.mark.parametrize(
    "duration",
    ["01:12:30:05", timedelta(hours=36.5, seconds=5), {"days": 1, "hours": 12.5, "seconds": 5}],
)
def test_duration_is_text_timedelta_or_its_arguments(duration):
    assert Timer(duration).time_remaining() == 131405


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duration": "12:30"}, "duration='12:30' is not a duration. Pass 'DD:HH:MM:SS'"),
        ({"duration": {"hour": 1}}, "'hour' is an invalid keyword"),
        ({"duration": timedelta(-1)}, "is negative"),
        ({"interval": "steps"}, "'steps'. Did you mean 'step'?"),
    ],
)
def test_impossible_choice_is_refused_at_once(options, message):
    with pytest.raises(ConfigError) as refused:
        Timer(**options)
    assert message in str(refused.value)


def test_unknown_stage_is_refused():
    with pytest.raises(ConfigError, match=r"'training'\. Did you mean 'train'"):
        Timer().time_elapsed("training")
