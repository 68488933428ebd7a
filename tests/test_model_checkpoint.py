"""ModelCheckpoint: when it saves, what it keeps, and what its names stand for."""

import logging
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from leyden import Callback, CheckpointError, ConfigError, Module, Trainer
from leyden.plugins import EarlyStopping, FileCheckpointer, ModelCheckpoint, Timer


class Scored(Module):
    """A scalar whose validation loss is the next of ``scores``, or 100 - global step."""

    def __init__(self, scores=()):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.scores = list(scores)

    def training_step(self, batch, batch_idx):
        loss = (self.w * batch).mean()
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("val/loss", self.scores.pop(0) if self.scores else 100.0 - self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class WithoutValidation(Scored):
    validation_step = None


def loader(batches):
    return DataLoader(torch.arange(float(batches)))


def trained(tmp_path, *callbacks, module=None, batches=2, val=True, ckpt_path=None, **options):
    """Return the Trainer after a fit that saves in ``tmp_path``."""
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path / "runs",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    train = loader(batches) if isinstance(batches, int) else batches
    trainer.fit(module or Scored(), train, loader(int(val)) if val else None, ckpt_path=ckpt_path)
    return trainer


def names(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def loaded(path):
    return FileCheckpointer().load(str(path))


# When


def test_validation_comes_before_a_save_at_the_same_step(tmp_path):
    """PL #20919: the file of step 2 holds the score of step 2, and the best is step 6."""
    callback = ModelCheckpoint(
        tmp_path, "{step}-{val/loss:.0f}", "val/loss", save_top_k=-1, every_n_train_steps=2
    )
    trained(tmp_path / "x", callback, batches=6, val_check_interval=2)
    assert names(tmp_path) == [
        "step=2-val_loss=98.ckpt",
        "step=4-val_loss=96.ckpt",
        "step=6-val_loss=94.ckpt",
    ]
    assert Path(callback.best_model_path).name == "step=6-val_loss=94.ckpt"
    assert callback.best_model_score == 94


def test_without_interval_it_saves_after_each_validation(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=-1)
    trained(tmp_path / "x", callback, batches=4, max_epochs=2, val_check_interval=0.5)
    assert names(tmp_path) == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
        "epoch=1-step=6.ckpt",
        "epoch=1-step=8.ckpt",
    ]


def test_without_validation_it_saves_at_the_end_of_each_epoch(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=-1)
    trained(tmp_path / "x", callback, val=False, max_epochs=2)
    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]


def test_save_after_the_validation_of_an_epoch_counts_the_epoch_as_done(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="train/loss_epoch")
    trained(tmp_path / "x", callback)
    state = loaded(callback.best_model_path)["state"]
    assert (state["epoch"], state["batch"], state["step"]) == (1, 0, 2)


def test_every_n_epochs_saves_at_the_end_of_every_nth(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=2, save_top_k=-1)
    trained(tmp_path / "x", callback, max_epochs=5, check_val_every_n_epoch=3)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt"]


def test_every_n_epochs_can_save_after_the_validations_of_every_nth(tmp_path):
    callback = ModelCheckpoint(
        tmp_path, "{step}", every_n_epochs=2, save_on_train_epoch_end=False, save_top_k=-1
    )
    trained(tmp_path / "x", callback, batches=4, max_epochs=3, val_check_interval=2)
    assert names(tmp_path) == ["step=6.ckpt", "step=8.ckpt"]


def test_every_n_train_steps_counts_optimizer_steps_over_epochs(tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trained(tmp_path / "x", callback, batches=6, val=False, max_epochs=2, accumulate_grad_batches=2)
    assert names(tmp_path) == [
        "epoch=0-step=2.ckpt",
        "epoch=1-step=4.ckpt",
        "epoch=1-step=6.ckpt",
    ]


def test_every_n_train_steps_saves_no_step_twice(tmp_path):
    class EveryOtherBatch(WithoutValidation):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward((self.w * batch).mean())
            if batch_idx % 2:
                self.optimizers().step()

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trained(tmp_path / "x", callback, module=EveryOtherBatch(), batches=5, val=False)
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt"]


class TenSecondsAStep(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer._run.began = time.perf_counter() - 10.0 * trainer.global_step


def test_train_time_interval_saves_each_time_it_has_passed(tmp_path):
    callback = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, train_time_interval=timedelta(seconds=25)
    )
    trained(tmp_path / "x", callback, TenSecondsAStep(), batches=8)
    assert names(tmp_path) == ["step=3.ckpt", "step=6.ckpt"]


def test_save_on_train_epoch_end_overrules_validation(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trained(tmp_path / "x", callback, max_epochs=2, check_val_every_n_epoch=2)
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_epoch_cut_by_max_steps_is_saved(tmp_path):
    callback = ModelCheckpoint(tmp_path)
    trained(tmp_path / "x", callback, batches=5, max_steps=3)
    assert names(tmp_path) == ["epoch=0-step=3.ckpt"]


def test_last_is_saved_at_the_end_whatever_the_interval(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last=True)
    trained(tmp_path / "x", callback, batches=5, max_steps=3)
    assert loaded(tmp_path / "last.ckpt")["state"]["step"] == 3


class Counting(Callback):
    count = 0

    def on_save_point(self, trainer, module, at):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}


def test_it_saves_what_all_others_leave(tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trained(tmp_path / "x", callback, Counting())
    assert loaded(callback.best_model_path)["callbacks"]["Counting"] == {"count": 2}


def test_run_that_trains_nothing_more_saves_nothing(tmp_path):
    first = ModelCheckpoint(tmp_path, save_last=True)
    trained(tmp_path / "x", first)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = ModelCheckpoint(tmp_path, save_last=True)
    trained(tmp_path / "x", again, ckpt_path=first.best_model_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert again.best_model_path == first.best_model_path


def test_fast_dev_run_saves_nothing(tmp_path):
    trained(tmp_path / "x", ModelCheckpoint(tmp_path / "c", save_last=True), fast_dev_run=True)
    assert not (tmp_path / "c").exists()


class Interrupt(Callback):
    """Sends this process a signal after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["epoch=0-step=3.ckpt"]),
        ({"monitor": "val/loss"}, ["epoch=0-step=2.ckpt", "last.ckpt"]),
        ({"every_n_train_steps": 10}, ["epoch=0-step=3.ckpt"]),
        ({"every_n_train_steps": 10, "monitor": "comes/later"}, ["epoch=0-step=3.ckpt"]),
    ],
)
def test_interrupted_run_saves_where_it_stopped(tmp_path, options, expected):
    callback = ModelCheckpoint(tmp_path, **options)
    with pytest.raises(SystemExit):
        trained(tmp_path / "x", callback, Interrupt(3), batches=6, val_check_interval=2)
    assert names(tmp_path) == expected
    assert loaded(tmp_path / expected[-1])["state"]["step"] == 3


class InterruptInValidation(Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx):
        if (trainer.global_step, batch_idx) == (4, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("batch", "expected"), [(0, ["last.ckpt", "step=2.ckpt"]), (1, ["step=4.ckpt"])]
)
def test_only_the_score_of_a_complete_validation_makes_a_best(tmp_path, batch, expected):
    callback, signal = ModelCheckpoint(tmp_path, "{step}", "val/loss"), InterruptInValidation(batch)
    with pytest.raises(SystemExit):
        trained(tmp_path / "x", callback, signal, batches=6, val=2, val_check_interval=2)
    assert names(tmp_path) == expected
    assert callback.best_model_path == str(tmp_path / expected[-1])


def test_save_that_a_cut_validation_has_kept_from_its_score_comes_on_resume(tmp_path):
    def callback(folder):
        return ModelCheckpoint(
            tmp_path / folder, "{step}", "val/loss", save_top_k=-1, every_n_train_steps=2
        )

    options = {"batches": 6, "val": 2, "val_check_interval": 2}
    trained(tmp_path / "x", whole := callback("whole"), **options)
    with pytest.raises(SystemExit):
        trained(tmp_path / "x", callback("c"), InterruptInValidation(0), **options)
    resumed, resume = callback("c"), tmp_path / "c" / "step=4.ckpt"
    trained(tmp_path / "x", resumed, **options, ckpt_path=resume)
    scores = [float(score) for score in resumed.best_k_models.values()]
    assert scores == [float(score) for score in whole.best_k_models.values()] + [float("inf")]


def test_regular_save_of_the_step_a_signal_came_in_is_scored_as_ever(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", "val/loss", save_top_k=2, every_n_train_steps=2)
    with pytest.raises(SystemExit):
        trained(tmp_path / "x", callback, Interrupt(4), batches=6, val_check_interval=3)
    assert [float(score) for score in callback.best_k_models.values()] == [97, float("inf")]


def test_last_of_an_interrupted_run_goes_once_the_resumed_one_has_saved(tmp_path):
    def callback():
        return ModelCheckpoint(tmp_path, "{step}", "val/loss")

    with pytest.raises(SystemExit):
        trained(tmp_path / "x", callback(), Interrupt(3), batches=6, val_check_interval=2)
    resume = str(tmp_path / "last.ckpt")
    trained(tmp_path / "x", callback(), batches=6, val_check_interval=2, ckpt_path=resume)
    assert names(tmp_path) == ["step=6.ckpt"]


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(3.0))


def test_data_without_a_length_is_saved_once_an_epoch(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=-1)
    trained(tmp_path / "x", callback, batches=DataLoader(Unsized()), max_epochs=2)
    assert names(tmp_path) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


def test_run_out_of_time_saves_where_it_stopped(tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=10)
    trained(tmp_path / "x", callback, Timer(timedelta(microseconds=1)), batches=6, min_steps=3)
    assert names(tmp_path) == ["epoch=0-step=3.ckpt"]


def test_early_stop_leaves_no_file_beyond_the_best(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val/loss")
    stop = EarlyStopping("val/loss", patience=2)
    trained(tmp_path / "x", callback, stop, module=Scored([1, 2, 3, 0]), max_epochs=9)
    assert names(tmp_path) == ["epoch=0-step=2.ckpt"]


# What


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_is_the_newest_saved_state(tmp_path, save_last):
    """PL #19189: the metric peaks in epoch 0, and "last" goes on to epoch 2."""
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=save_last)
    trained(tmp_path / "x", callback, module=Scored([1, 2, 3]), max_epochs=3)
    assert names(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert loaded(callback.last_model_path)["state"]["step"] == 6
    assert loaded(callback.best_model_path)["state"]["step"] == 2


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_takes_no_copy_when_that_state_is_a_best_file_too(tmp_path, save_last):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=save_last)
    trained(tmp_path / "x", callback, module=Scored([3, 2, 1]), max_epochs=3)
    assert names(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]
    assert (tmp_path / "epoch=2.ckpt").samefile(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")


def test_last_is_made_as_the_checkpointer_makes_copies(tmp_path):
    class Foldered(FileCheckpointer):
        """Keeps each checkpoint in a folder, which cannot be linked."""

        def save(self, checkpoint, path):
            super().save(checkpoint, f"{path}/data")

        def exists(self, path):
            return super().exists(f"{path}/data")

        def copy(self, existing, path, symbolic=False):
            shutil.copytree(existing, path, dirs_exist_ok=True)

        def remove(self, path):
            shutil.rmtree(path)

    callback = ModelCheckpoint(tmp_path / "c", "{epoch}", "val/loss", save_last=True)
    trained(tmp_path / "x", callback, checkpointer=Foldered(), max_epochs=3)
    assert names(tmp_path / "c") == ["data", "data"]
    last, best = (tmp_path / "c" / name / "data" for name in ("last.ckpt", "epoch=2.ckpt"))
    assert loaded(last)["state"] == loaded(best)["state"]


def test_last_follows_its_template(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_last=True)
    callback.CHECKPOINT_NAME_LAST = "newest-{epoch}"
    trained(tmp_path / "x", callback, max_epochs=3)
    assert names(tmp_path) == ["epoch=2.ckpt", "newest-epoch=2.ckpt"]


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("min", ["epoch=1.ckpt", "epoch=3.ckpt"]), ("max", ["epoch=0.ckpt", "epoch=2.ckpt"])],
)
def test_best_k_are_kept(tmp_path, mode, kept):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_top_k=2, mode=mode)
    trained(tmp_path / "x", callback, module=Scored([7, 3, 8, 2]), max_epochs=4)
    assert names(tmp_path) == kept
    best, worst = ("epoch=3", "epoch=1") if mode == "min" else ("epoch=2", "epoch=0")
    assert Path(callback.best_model_path).stem == best
    assert Path(callback.kth_best_model_path).stem == worst
    assert [float(score) for score in callback.best_k_models.values()] == (
        [2, 3] if mode == "min" else [8, 7]
    )


def test_nan_ranks_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", mode="max")
    trained(tmp_path / "x", callback, module=Scored([float("nan"), -5, float("nan")]), max_epochs=3)
    assert names(tmp_path) == ["epoch=1.ckpt"]
    assert callback.best_model_score == -5


def test_of_equal_scores_the_earlier_is_kept(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss")
    trained(tmp_path / "x", callback, module=Scored([1, 1]), max_epochs=2)
    assert names(tmp_path) == ["epoch=0.ckpt"]


def test_without_monitor_the_newest_is_kept_and_is_the_best(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}")
    trained(tmp_path / "x", callback, max_epochs=3)
    assert names(tmp_path) == ["epoch=2.ckpt"]
    assert callback.best_model_path == str(tmp_path / "epoch=2.ckpt")
    assert callback.best_model_score is None


def test_top_k_of_none_keeps_only_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    trained(tmp_path / "x", callback, max_epochs=2)
    assert names(tmp_path) == ["last.ckpt"]
    assert callback.best_model_path == ""


def test_weights_only_leaves_the_optimizer_out(tmp_path):
    small, whole = (
        ModelCheckpoint(tmp_path / "s", save_weights_only=True),
        ModelCheckpoint(tmp_path / "w"),
    )
    trained(tmp_path / "x", small, whole)
    assert "w" in loaded(small.best_model_path)["state_dict"]
    assert set(loaded(small.best_model_path)) < set(loaded(whole.best_model_path))


class FailingOnce(FileCheckpointer):
    """Fails half-way through its second save."""

    saves = 0

    def save(self, checkpoint, path):
        self.saves += 1
        super().save({**checkpoint, "bad": lambda: 0} if self.saves == 2 else checkpoint, path)


def test_failed_save_leaves_files_and_names_as_they_were(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        trained(
            tmp_path / "x",
            callback,
            module=Scored([3, 2, 1]),
            max_epochs=3,
            checkpointer=FailingOnce(),
        )
    assert names(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert callback.best_model_path == str(tmp_path / "epoch=0.ckpt")
    assert callback.last_model_path == str(tmp_path / "last.ckpt")
    assert callback.best_model_score == 3


class Watching(FileCheckpointer):
    """Notes which complete files there are when one is deleted."""

    def __init__(self):
        self.there = []

    def remove(self, path):
        self.there.append((Path(path).name, names(Path(path).parent)))
        super().remove(path)


def test_file_is_deleted_only_after_the_one_that_replaces_it_is_complete(tmp_path):
    watching = Watching()
    callback = ModelCheckpoint(tmp_path, "{epoch}")
    trained(tmp_path / "x", callback, max_epochs=2, checkpointer=watching)
    assert watching.there == [("epoch=0.ckpt", ["epoch=0.ckpt", "epoch=1.ckpt"])]


# Names


def test_files_of_others_are_left_alone(tmp_path):
    FileCheckpointer().save({"mine": 1}, str(tmp_path / "epoch=0.ckpt"))
    FileCheckpointer().save({"mine": 1}, str(tmp_path / "last.ckpt"))
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_last=True)
    trained(tmp_path / "x", callback, max_epochs=2)
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "last-v1.ckpt", "last.ckpt"]
    assert loaded(tmp_path / "epoch=0.ckpt") == loaded(tmp_path / "last.ckpt") == {"mine": 1}


def test_version_counter_can_be_turned_off(tmp_path):
    FileCheckpointer().save({"mine": 1}, str(tmp_path / "epoch=0.ckpt"))
    trained(tmp_path / "x", ModelCheckpoint(tmp_path, "{epoch}", enable_version_counter=False))
    assert names(tmp_path) == ["epoch=0.ckpt"]
    assert "mine" not in loaded(tmp_path / "epoch=0.ckpt")


def test_constant_name_is_replaced_while_it_is_the_only_one_kept(tmp_path):
    callback = ModelCheckpoint(tmp_path, "model", "val/loss")
    trained(tmp_path / "x", callback, module=Scored([3, 2]), max_epochs=2)
    assert names(tmp_path) == ["model.ckpt"]
    assert loaded(callback.best_model_path)["state"]["step"] == 4


def test_files_end_as_the_checkpointer_says_unless_told_otherwise(tmp_path):
    class Short(FileCheckpointer):
        extension = ".pt"

    plain, told = (
        ModelCheckpoint(tmp_path / "a", "a"),
        ModelCheckpoint(tmp_path / "b", "b", mode="max"),
    )
    told.FILE_EXTENSION = ".tar"
    trained(tmp_path / "x", plain, told, checkpointer=Short())
    assert names(tmp_path / "a") + names(tmp_path / "b") == ["a.pt", "b.tar"]


def test_default_folder_is_the_runs_own(tmp_path):
    callback = ModelCheckpoint()
    trainer = trained(tmp_path, callback)
    assert Path(callback.best_model_path).parent.name == "checkpoints"
    assert tmp_path / "runs" in Path(callback.best_model_path).parents
    assert trainer.checkpoint_callback is callback


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=3-step=40"),
        (None, False, "3-40"),
        ("{epoch:02d}-{val/loss:.2f}", True, "epoch=03-val_loss=0.12"),
        ("e{epoch}/loss{val/loss:.2f}", False, "e3/loss0.12"),
        ("best", True, "best"),
    ],
)
def test_names_are_made_from_the_template(template, insert, name):
    callback = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    metrics = {"epoch": 3, "step": 40, "val/loss": torch.tensor(0.1234)}
    assert callback.format_checkpoint_name(metrics) == f"{name}.ckpt"
    assert callback.format_checkpoint_name(metrics, ver=2) == f"{name}-v2.ckpt"


def test_slash_in_a_template_makes_a_folder(tmp_path):
    callback = ModelCheckpoint(tmp_path, "a/{epoch}")
    trained(tmp_path / "x", callback)
    assert callback.best_model_path == str(tmp_path / "a" / "epoch=0.ckpt")
    assert Path(callback.best_model_path).is_file()


# Going on


def test_resumed_run_goes_on_ranking_and_deletes_what_it_resumed_from_once_replaced(tmp_path):
    first = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=True)
    trained(tmp_path / "x", first, module=Scored([5]))
    second = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=True)
    trained(
        tmp_path / "x",
        second,
        module=Scored([6, 4]),
        max_epochs=3,
        ckpt_path=first.best_model_path,
        checkpointer=(watching := Watching()),
    )
    assert names(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]
    assert watching.there == [("epoch=0.ckpt", ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"])]
    assert second.best_model_score == 4


def test_resumed_run_that_gets_no_better_keeps_the_file_it_resumed_from(tmp_path):
    first = ModelCheckpoint(tmp_path, "{epoch}", "val/loss")
    trained(tmp_path / "x", first, module=Scored([5]))
    second = ModelCheckpoint(tmp_path, "{epoch}", "val/loss")
    resume = first.best_model_path
    trained(tmp_path / "x", second, module=Scored([6, 7]), max_epochs=3, ckpt_path=resume)
    assert second.best_model_path == resume
    assert names(tmp_path) == ["epoch=0.ckpt"]


def test_resumed_run_forgets_files_that_are_gone_and_says_so(tmp_path, caplog):
    first = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_top_k=2)
    trained(tmp_path / "x", first, module=Scored([1, 5]), max_epochs=2)
    (tmp_path / "epoch=0.ckpt").unlink()
    second = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_top_k=2)
    resume = str(tmp_path / "epoch=1.ckpt")
    trained(tmp_path / "x", second, module=Scored([6]), max_epochs=3, ckpt_path=resume)
    assert [Path(path).name for path in second.best_k_models] == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert "no longer tracks" in caplog.text
    assert "epoch=0.ckpt" in caplog.text


def test_resumed_run_in_another_folder_deletes_nothing_in_the_old_one(tmp_path, caplog):
    first = ModelCheckpoint(tmp_path / "a", "{epoch}", "val/loss")
    trained(tmp_path / "x", first, module=Scored([5]))
    second = ModelCheckpoint(tmp_path / "b", "{epoch}", "val/loss")
    resume = first.best_model_path
    trained(tmp_path / "x", second, module=Scored([4]), max_epochs=2, ckpt_path=resume)
    assert names(tmp_path / "a") == ["epoch=0.ckpt"]
    assert names(tmp_path / "b") == ["epoch=1.ckpt"]
    assert "no longer tracks" in caplog.text


def test_checkpoint_names_itself_as_best_and_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", save_last=True)
    trained(tmp_path / "x", callback, module=Scored([5]))
    state = loaded(callback.best_model_path)["callbacks"][callback.state_key]
    assert state["best_model_path"] == str(tmp_path / "epoch=0.ckpt")
    assert state["last_model_path"] == str(tmp_path / "last.ckpt")
    assert state["best_model_score"] == state["current_score"] == 5
    assert state["dirpath"] == str(tmp_path)
    assert (state["monitor"], state["kth_best_model_path"]) == (
        "val/loss",
        state["best_model_path"],
    )


def test_two_of_one_class_get_their_own_state_back_in_any_order(tmp_path):
    """PL #6467."""

    def pair(**options):
        return [
            ModelCheckpoint(tmp_path / "v", "{epoch}", "val/loss", **options),
            ModelCheckpoint(tmp_path / "t", "{epoch}", "train/loss_epoch", **options),
        ]

    first = pair()
    trained(tmp_path / "x", *first, module=Scored([5]))
    swapped = pair(verbose=True)[::-1]
    resume = first[1].best_model_path
    trained(tmp_path / "x", *swapped, ckpt_path=resume)
    assert [c.best_model_path for c in swapped] == [c.best_model_path for c in first][::-1]


def test_new_training_with_a_used_callback_starts_afresh(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss")
    trained(tmp_path / "x", callback, module=Scored([1]))
    trained(tmp_path / "x", callback, module=Scored([5]))
    assert callback.best_model_score == 5
    assert names(tmp_path) == ["epoch=0-v1.ckpt", "epoch=0.ckpt"]


# What is wrong


def test_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    module = Scored()
    with pytest.raises(ConfigError, match=r"cannot be saved in '.*/file/c'.*Pass another folder"):
        trained(tmp_path / "x", ModelCheckpoint(tmp_path / "file" / "c"), module=module)
    assert module.w == 0


def test_misspelt_monitor_is_refused_with_the_metrics_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"'val/los' has been logged. Did you mean 'val/loss'\?"):
        trained(tmp_path, ModelCheckpoint(monitor="val/los"))


def test_misspelt_name_in_a_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"filename='\{vall/loss\}'.*Did you mean 'val/loss'"):
        trained(tmp_path, ModelCheckpoint(filename="{vall/loss}"))


def test_monitor_missing_in_a_run_without_validation_is_refused_at_the_end_of_an_epoch(tmp_path):
    with pytest.raises(ConfigError, match="no metric 'val/loss' has been logged"):
        trained(tmp_path, ModelCheckpoint(monitor="val/loss"), val=False)


def test_save_before_the_first_validation_ranks_last_and_says_so_once(tmp_path, caplog):
    callback = ModelCheckpoint(
        tmp_path, "{step}-{val/loss:.0f}", "val/loss", save_top_k=3, every_n_train_steps=1
    )
    trained(tmp_path / "x", callback, batches=3, val_check_interval=3)
    assert Path(callback.best_model_path).name == "step=3-val_loss=97.ckpt"
    assert names(tmp_path)[0] == "step=1-val_loss=nan.ckpt"
    assert caplog.text.count("is not known yet: it counts as worst") == 1


def test_verbose_says_what_is_saved_and_what_is_not(tmp_path, caplog):
    caplog.set_level(logging.INFO, "leyden")
    callback = ModelCheckpoint(tmp_path, "{epoch}", "val/loss", verbose=True)
    trained(tmp_path / "x", callback, module=Scored([1, 2]), max_epochs=2)
    assert f"Step 2, val/loss = 1: saved as {tmp_path}/epoch=0.ckpt." in caplog.text
    assert "Step 4, val/loss = 2: not among the best 1." in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mim"}, "No mode is called 'mim'. Did you mean 'min'?"),
        ({"save_top_k": -2}, "save_top_k=-2 must be a whole number, at least -1. -1 keeps all"),
        ({"save_top_k": "3"}, "save_top_k='3' must be a whole number"),
        ({"save_top_k": True}, "save_top_k=True must be a whole number"),
        ({"save_top_k": 3}, "save_top_k=3 needs a metric to rank by. Pass monitor="),
        ({"save_last": "copy"}, "save_last='copy' is not a choice. Pass one of None, True, False"),
        ({"save_last": 1}, "save_last=1 is not a choice"),
        ({"every_n_epochs": 0}, "every_n_epochs=0 must be a whole number, at least 1"),
        ({"every_n_train_steps": -5}, "every_n_train_steps=-5 must be a whole number, at least 1"),
        ({"every_n_train_steps": 2.5}, "every_n_train_steps=2.5 must be a whole number"),
        (
            {"train_time_interval": timedelta(0)},
            "train_time_interval=datetime.timedelta(0) must be positive",
        ),
        (
            {"train_time_interval": 5},
            "train_time_interval=5 is of the wrong type. Pass a timedelta",
        ),
        ({"keep_for": 7}, "keep_for=7 is of the wrong type. Pass a timedelta"),
        ({"keep_for": timedelta(-1)}, "keep_for=datetime.timedelta(days=-1) must be positive"),
        ({"keep_newest": -1}, "keep_newest=-1 must be a whole number, at least 0"),
        ({"keep_newest": None}, "keep_newest=None must be a whole number"),
        ({"keep_every_n_train_steps": 0}, "keep_every_n_train_steps=0 must be a whole number"),
        ({"monitor": 3}, "monitor=3 is of the wrong type. Pass the name of a logged metric"),
        ({"dirpath": 3}, "dirpath=3 is of the wrong type. Pass a path, a URL or None"),
        ({"asynchronous": "yes"}, "asynchronous='yes' is of the wrong type. Pass True or False"),
        ({"when_busy": "skip"}, "when_busy='skip' is for saves in the background"),
        ({"when_failed": "warning"}, "when_failed='warning' is not a choice. Did you mean 'warn'?"),
        ({"max_share": 0}, "max_share=0 must be a number above 0"),
        (
            {"every_n_epochs": 1, "every_n_train_steps": 5},
            "one interval, not every_n_train_steps and every_n_epochs",
        ),
        ({"filename": "{epoch"}, "filename='{epoch' is not a template"),
        ({"filename": "{val/loss:d}"}, "metrics are decimal numbers"),
    ],
)
def test_impossible_choice_is_refused_at_once(options, message):
    with pytest.raises(ConfigError) as refused:
        ModelCheckpoint(**options)
    assert message in str(refused.value)


def test_unknown_name_in_a_call_of_format_checkpoint_name_is_refused():
    with pytest.raises(ConfigError, match="no metric 'step' has been logged"):
        ModelCheckpoint().format_checkpoint_name({"epoch": 1})


# Weights that are swapped for a validation


class Averaging(Callback):
    """Validates and ends with the average of the weights; says which set the module holds."""

    def __init__(self, begin_at=1):
        self.begin_at, self.average, self.live, self.seen = begin_at, None, None, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step >= self.begin_at:
            w = module.w.detach()
            self.average = w.clone() if self.average is None else self.average.lerp(w, 0.5)

    def on_validation_start(self, trainer, module):
        if self.average is not None:
            self.live = module.w.detach().clone()
            module.w.data.copy_(self.average)
        self.seen.append(module.w.item())

    def on_validation_model_train(self, trainer, module):  # told even where a signal cuts it
        if self.live is not None:
            module.w.data.copy_(self.live)
            self.live = None

    def on_exception(self, trainer, module, exception):
        self.on_validation_model_train(trainer, module)

    def state_dict(self):
        return {"average": self.average, "module_holds_average": self.live is not None}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]


def averaged(tmp_path, folder, *others, **options):
    saver, average = ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1), Averaging()
    trained(tmp_path, saver, average, *others, batches=6, val=2, val_check_interval=2, **options)
    return average


def both_sets(path):
    checkpoint = loaded(path)
    average = checkpoint["callbacks"]["Averaging"]
    assert average["module_holds_average"] is False
    return float(checkpoint["state_dict"]["w"]), float(average["average"])


def test_checkpoint_holds_the_live_weights_and_the_average_by_name(tmp_path):
    """PL #21724: step n subtracts n - 1, so w is -1 after two steps; the average halves."""
    average = averaged(tmp_path, "c")
    assert average.seen[1:] == [-0.5, -3.875, -10.96875]
    assert both_sets(tmp_path / "c" / "step=2.ckpt") == (-1.0, -0.5)
    assert both_sets(tmp_path / "c" / "step=4.ckpt") == (-6.0, -3.875)


@pytest.mark.parametrize("end", [Interrupt, InterruptInValidation])
def test_weights_swapped_for_a_validation_that_is_cut_are_saved_as_they_were(tmp_path, end):
    unbroken = averaged(tmp_path, "whole")
    with pytest.raises(SystemExit):
        averaged(
            tmp_path, "c", InterruptInValidation(0) if end is InterruptInValidation else end(4)
        )
    assert both_sets(tmp_path / "c" / "step=4.ckpt") == (-6.0, -3.875)
    resumed = averaged(tmp_path, "c", ckpt_path=tmp_path / "c" / "step=4.ckpt")
    assert resumed.seen[-1] == unbroken.seen[-1]
    assert both_sets(tmp_path / "c" / "step=6.ckpt") == both_sets(
        tmp_path / "whole" / "step=6.ckpt"
    )


class FailInValidation(Callback):
    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx):
        if trainer.global_step == 4:
            raise ValueError("in the validation")


def test_weights_swapped_for_a_validation_that_fails_are_saved_as_they_were(tmp_path):
    with pytest.raises(ValueError, match="in the validation"):
        averaged(tmp_path, "c", FailInValidation())
    assert both_sets(tmp_path / "c" / "step=4.ckpt") == (-6.0, -3.875)
