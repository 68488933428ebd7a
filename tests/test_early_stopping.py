"""EarlyStopping: when training ends, and when it goes on."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import ConfigError, Module, Trainer
from leyden.plugins import EarlyStopping, ModelCheckpoint

NAN, INF = float("nan"), float("inf")


class Scored(Module):
    """A scalar whose validation loss, or training metric without validation, is next of scores."""

    def __init__(self, scores):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.scores = list(scores)

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("val/loss", float(self.scores.pop(0)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(tmp_path, scores, *callbacks, val=True, ckpt_path=None, **options):
    """Return the Trainer, and what fit returned, after at most 10 epochs of one batch."""
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 10, **options},
    )
    data = DataLoader(torch.ones(1))
    module = scores if isinstance(scores, Module) else Scored(scores)
    return trainer, trainer.fit(module, data, data if val else None, ckpt_path=ckpt_path)


def test_request_before_the_minimum_is_dropped_and_the_metric_may_recover(tmp_path):
    """PL #19966."""
    stopping = EarlyStopping("val/loss", patience=2)
    scores = [5, 6, 7, 4, 3, 2, 1, 0, -1, -2]
    _, result = trained(tmp_path, scores, stopping, min_epochs=5)
    assert result.epochs == 10
    assert "max_epochs" in result.reason


def test_infinite_value_is_not_taken_for_the_best(tmp_path):
    stopping = EarlyStopping("val/loss", patience=2)
    _, result = trained(tmp_path, [3, -INF, 2, 1], stopping, min_epochs=3, max_epochs=4)
    assert result.epochs == 4
    assert stopping.best_score == 1


def test_request_that_still_holds_at_the_minimum_ends_the_run_there(tmp_path):
    stopping = EarlyStopping("val/loss", patience=2)
    _, result = trained(tmp_path, range(10), stopping, min_epochs=5)
    assert result.epochs == 5


def test_resumed_run_that_had_stopped_trains_nothing_and_says_why(tmp_path):
    """PL #19966."""
    saver = ModelCheckpoint(tmp_path, save_last=True)
    _, first = trained(tmp_path, [1, 2, 3], EarlyStopping("val/loss", patience=2), saver)
    assert first.epochs == 3
    again = EarlyStopping("val/loss", patience=2)
    trainer, result = trained(tmp_path, [], again, saver, ckpt_path=saver.last_model_path)
    assert trainer.global_step == 3
    assert "val/loss has not improved on 1 for 2 checks" in result.reason


def test_resumed_run_goes_on_if_patience_is_raised(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trained(tmp_path, [1, 2, 3], EarlyStopping("val/loss", patience=2), saver)
    patient = EarlyStopping("val/loss", patience=4)
    _, result = trained(tmp_path, range(4, 14), patient, saver, ckpt_path=saver.last_model_path)
    assert result.epochs == 5
    assert patient.wait_count == 4


def test_resumed_run_that_had_reached_its_threshold_trains_nothing(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trained(tmp_path, [3, 1], EarlyStopping("val/loss", stopping_threshold=2), saver)
    again = EarlyStopping("val/loss", stopping_threshold=2)
    trainer, _ = trained(tmp_path, [], again, saver, ckpt_path=saver.last_model_path)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("options", "scores", "epochs"),
    [
        ({"patience": 1}, [3, 2, 1, 1], 4),
        ({"patience": 3}, [3, 4, 4, 4], 4),
        ({"patience": 0}, [3, 2, 2], 3),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 3], 4),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.0], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.5], 2),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 1.5], 2),
        ({"stopping_threshold": 2}, [3, 2, 1.9], 3),
        ({"stopping_threshold": 2, "mode": "max"}, [1, 2, 2.1], 3),
        ({"divergence_threshold": 5}, [3, 5, 6], 3),
        ({"divergence_threshold": 1, "mode": "max"}, [3, 1, 0], 3),
        ({}, [3, NAN], 2),
        ({}, [-INF], 1),
        ({"check_finite": False, "patience": 2}, [3, NAN, NAN], 3),
    ],
)
def test_run_ends_after_the_check_that_meets_the_condition(tmp_path, options, scores, epochs):
    stopping = EarlyStopping("val/loss", **options)
    _, result = trained(tmp_path, [*scores, *[0.0] * 9], stopping)
    assert result.epochs == epochs
    assert stopping.stopped_epoch == epochs - 1


@pytest.mark.parametrize(
    ("options", "scores", "reason"),
    [
        (
            {"patience": 2},
            [1, 2, 3],
            "val/loss has not improved on 1 for 2 checks (last 3): patience=2",
        ),
        ({"stopping_threshold": 2}, [1], "val/loss reached 1: stopping_threshold=2"),
        ({"divergence_threshold": 5}, [9], "val/loss is at 9: divergence_threshold=5"),
        ({}, [3, NAN], "val/loss is nan (best so far 3)"),
    ],
)
def test_reason_of_the_end_gives_the_numbers(tmp_path, options, scores, reason):
    _, result = trained(tmp_path, scores, EarlyStopping("val/loss", **options))
    assert result.reason == reason


def test_every_validation_is_a_check(tmp_path):
    stopping = EarlyStopping("val/loss", patience=2)
    _, result = trained(tmp_path, range(9), stopping, check_val_every_n_epoch=2)
    assert result.epochs == 6


class OnlyTraining(Scored):
    validation_step = None

    def on_validation_epoch_end(self):
        raise AssertionError("there is no validation")

    def on_train_epoch_end(self):
        self.log("train/score", float(self.scores.pop(0)))


def test_without_validation_the_end_of_an_epoch_is_a_check(tmp_path):
    stopping = EarlyStopping("train/score", patience=2)
    _, result = trained(tmp_path, OnlyTraining([1, 2, 3, 4]), stopping, val=False)
    assert result.epochs == 3


def test_check_on_train_epoch_end_sees_metrics_of_the_training_epoch(tmp_path):
    class Both(Scored):
        def on_train_epoch_end(self):
            self.log("train/score", float(self.current_epoch))

    stopping = EarlyStopping("train/score", patience=2, check_on_train_epoch_end=True)
    _, result = trained(tmp_path, Both(range(9)), stopping, check_val_every_n_epoch=9)
    assert result.epochs == 3


def test_sanity_check_and_validation_outside_fit_are_no_checks(tmp_path):
    stopping = EarlyStopping("val/loss")
    trainer, _ = trained(tmp_path, [1], stopping, max_epochs=1, num_sanity_val_steps=1)
    assert (float(stopping.best_score), stopping.wait_count) == (1, 0)
    trainer.validate(Scored([7]), DataLoader(torch.ones(1)), verbose=False)
    assert (float(stopping.best_score), stopping.wait_count) == (1, 0)


def test_new_training_with_a_used_callback_starts_afresh(tmp_path):
    stopping = EarlyStopping("val/loss", patience=2)
    trained(tmp_path, [1, 2, 3], stopping)
    _, result = trained(tmp_path, [5, 4, 3, 2], stopping, max_epochs=4)
    assert result.epochs == 4
    assert float(stopping.best_score) == 2


def test_misspelt_monitor_is_refused_with_the_metrics_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"'val/los'\).*Did you mean 'val/loss'\? Logged so far:"):
        trained(tmp_path, [1], EarlyStopping("val/los"))


def test_missing_monitor_is_told_once_if_not_strict(tmp_path, caplog):
    stopping = EarlyStopping("val/los", strict=False)
    _, result = trained(tmp_path, [1, 2, 3], stopping, max_epochs=3)
    assert result.epochs == 3
    assert caplog.text.count("no metric 'val/los' has been logged") == 1


def test_fast_dev_run_is_not_checked(tmp_path):
    trained(tmp_path, [1], EarlyStopping("nothing"), fast_dev_run=True)


def test_verbose_tells_improvements(tmp_path, caplog):
    caplog.set_level(logging.INFO, "leyden")
    trained(tmp_path, [3, 1], EarlyStopping("val/loss", verbose=True), max_epochs=2)
    assert "val/loss improved from 3 to 1" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mix"}, "No mode is called 'mix'. Did you mean 'min'?"),
        ({"patience": -1}, "patience=-1"),
        ({"min_delta": -0.1}, "min_delta=-0.1): neither can be negative"),
    ],
)
def test_impossible_choice_is_refused_at_once(options, message):
    with pytest.raises(ConfigError) as refused:
        EarlyStopping("val/loss", **options)
    assert message in str(refused.value)
