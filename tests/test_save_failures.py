"""Saves that fail, and the save of a run that fails."""

import logging
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from leyden import Callback, CheckpointError, ConfigError, Module, Trainer
from leyden.plugins import FileCheckpointer, ModelCheckpoint


class Net(Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 100.0 - self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Acts(Callback):
    """Calls ``action`` after a batch."""

    def __init__(self, after, action):
        self.after, self.action = after, action

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.total_batches == self.after:
            self.action()


def fails():
    raise ValueError("the user's own")


def trained(tmp_path, *callbacks, batches=6, val=False, ckpt_path=None, **options):
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path / "runs",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 1, **options},
    )
    data = list(torch.arange(1.0, batches + 1))
    trainer.fit(Net(), data, data[:1] if val else None, ckpt_path=ckpt_path)
    return trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_of(path):
    return FileCheckpointer().load(str(path))["state"]["step"]


class Failing(FileCheckpointer):
    """Fails half-way through the saves that ``fails`` numbers, or all from there on."""

    def __init__(self, *fails, error=None):
        super().__init__()
        self.saves, self.fails, self.error = 0, fails, error

    def save(self, checkpoint, path):
        self.saves += 1
        if self.saves in self.fails:
            if self.error is not None:
                raise self.error
            checkpoint = {**checkpoint, "bad": lambda: 0}
        super().save(checkpoint, path)


def saver(tmp_path, **options):
    return ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=2, **options)


# A save that fails


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_ends_training_and_leaves_files_and_names_as_they_were(tmp_path, asynchronous):
    callback = saver(tmp_path, save_last=True, asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="cannot be written"):
        trained(tmp_path, callback, checkpointer=Failing(2))
    assert names(tmp_path / "c") == ["last.ckpt", "step=2.ckpt"]
    assert callback.best_model_path == str(tmp_path / "c" / "step=2.ckpt")
    assert step_of(callback.last_model_path) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_can_be_a_warning_and_the_next_due_save_tries_again(tmp_path, asynchronous):
    callback = saver(tmp_path, save_last=True, asynchronous=asynchronous, when_failed="warn")
    with pytest.warns(UserWarning) as warned:
        trained(tmp_path, callback, batches=8, checkpointer=Failing(2, 3))
    assert [str(one.message).count("cannot be written") for one in warned] == [1, 1]
    assert "step=4.ckpt" in str(warned[0].message)
    assert "Training goes on from step 4, and the next due save tries again." in str(
        warned[0].message
    )
    assert names(tmp_path / "c") == ["last.ckpt", "step=8.ckpt"]
    assert step_of(callback.last_model_path) == 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_last_save_that_fails_is_tried_again_at_the_end(tmp_path, asynchronous):
    callback = saver(tmp_path, save_last=True, asynchronous=asynchronous, when_failed="warn")
    with pytest.warns(UserWarning, match="cannot be written"):
        trained(tmp_path, callback, checkpointer=Failing(3))
    assert step_of(callback.last_model_path) == 6
    assert names(tmp_path / "c") == ["last.ckpt", "step=6.ckpt"]


def test_time_interval_does_not_try_again_with_every_step(tmp_path):
    class Hourly(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer._run.began = time.perf_counter() - 3601.0 * trainer.global_step

    checkpointer = Failing(1, error=CheckpointError("The network is gone."))
    callback = ModelCheckpoint(
        tmp_path / "c", "{step}", train_time_interval=timedelta(hours=3), when_failed="warn"
    )
    with pytest.warns(UserWarning, match="The network is gone"):
        trained(tmp_path, callback, Hourly(), checkpointer=checkpointer)
    assert checkpointer.saves == 2
    assert names(tmp_path / "c") == ["step=6.ckpt"]


def test_error_of_a_checkpointer_that_is_no_error_of_leyden_is_one_too(tmp_path):
    checkpointer = Failing(1, error=OSError(28, "No space left on device"))
    with pytest.warns(UserWarning, match="No space left on device"):
        trained(tmp_path, saver(tmp_path, when_failed="warn"), checkpointer=checkpointer)
    assert names(tmp_path / "c") == ["step=6.ckpt"]


@contextmanager
def full_disk():
    """Give a switch: no file may grow from there on and to the end, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        for thread in threading.enumerate():
            if thread.name == "leyden-save":
                thread.join(30.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    try:
        yield fill
    finally:  # before anything is reported, which may go into a file too
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_leaves_the_older_file_and_says_what_to_do(tmp_path, asynchronous):
    callback = saver(tmp_path, when_failed="warn", asynchronous=asynchronous)
    with pytest.warns(UserWarning, match="Make room there"), full_disk() as fill:
        trained(tmp_path, callback, Acts(3, fill))
    assert names(tmp_path / "c") == ["step=2.ckpt"]
    assert step_of(callback.best_model_path) == 2


class NoCopies(FileCheckpointer):
    def copy(self, existing, path, symbolic=False):
        if self.exists(path):
            raise CheckpointError(f"{existing!r} cannot be kept as {path!r} too.")
        super().copy(existing, path, symbolic)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_last_that_cannot_be_moved_stays_and_the_new_file_counts(tmp_path, asynchronous):
    callback = saver(tmp_path, save_last=True, asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match=r"cannot be kept as '.*last.ckpt' too"):
        trained(tmp_path, callback, checkpointer=NoCopies())
    assert names(tmp_path / "c") == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert callback.best_model_path == str(tmp_path / "c" / "step=4.ckpt")
    assert step_of(callback.last_model_path) == 2


class Unreachable(FileCheckpointer):
    asked = 0

    def exists(self, path):
        self.asked += 1
        if self.asked == 2:
            raise CheckpointError(f"{path!r} cannot be read: the network is gone.")
        return super().exists(path)


def test_network_that_is_gone_when_a_name_is_sought_is_a_failed_save(tmp_path):
    callback = saver(tmp_path, when_failed="warn")
    with pytest.warns(UserWarning, match="the network is gone"):
        trained(tmp_path, callback, checkpointer=Unreachable())
    assert names(tmp_path / "c") == ["step=6.ckpt"]


@pytest.mark.parametrize("when_failed", ["raise", "warn"])
def test_mistake_in_what_is_saved_is_an_error_in_any_case(tmp_path, when_failed):
    class Wrong(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["mine"] = lambda: 0

    with pytest.raises(CheckpointError, match="What on_save_checkpoint added"):
        trained(tmp_path, saver(tmp_path, when_failed=when_failed), Wrong())


# A run that fails


@pytest.mark.parametrize("asynchronous", [False, True])
def test_its_state_is_saved_as_the_last_one(tmp_path, asynchronous):
    callback = ModelCheckpoint(tmp_path / "c", "{step}", "val/loss", asynchronous=asynchronous)
    with pytest.raises(ValueError, match="the user's own") as raised:
        trained(tmp_path, callback, Acts(3, fails), val=True, val_check_interval=2)
    assert raised.traceback[-1].name == "fails"
    assert names(tmp_path / "c") == ["last.ckpt", "step=2.ckpt"]
    assert step_of(callback.last_model_path) == 3
    assert callback.best_model_path == str(tmp_path / "c" / "step=2.ckpt")


def test_its_state_needs_no_other_name_where_it_is_kept_anyway(tmp_path):
    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, saver(tmp_path), Acts(3, fails))
    assert names(tmp_path / "c") == ["step=3.ckpt"]


def test_it_can_be_resumed_and_the_file_goes_once_the_next_is_saved(tmp_path):
    def callback():
        return ModelCheckpoint(tmp_path / "c", "{step}", "val/loss")

    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, callback(), Acts(3, fails), val=True, val_check_interval=2)
    trainer = trained(tmp_path, callback(), val=True, val_check_interval=2, ckpt_path="auto")
    assert trainer.module.w == -sum(range(1, 7))
    assert names(tmp_path / "c") == ["step=6.ckpt"]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("of the device")])
def test_memory_that_is_out_is_an_error_like_others(tmp_path, error):
    def action():
        raise error

    with pytest.raises(type(error)):
        trained(tmp_path, saver(tmp_path), Acts(3, action))
    assert names(tmp_path / "c") == ["step=3.ckpt"]


@pytest.mark.parametrize("after", [0, 2])
def test_what_is_saved_already_is_not_saved_again(tmp_path, after):
    class AtSavePoint(Callback):
        def on_train_epoch_start(self, trainer, module):
            if after == 0:
                fails()

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == after:
                fails()

    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, saver(tmp_path, save_last=True), AtSavePoint())
    assert names(tmp_path / "c") == (["last.ckpt", "step=2.ckpt"] if after else [])


def test_resumed_run_that_fails_before_it_trains_saves_nothing(tmp_path):
    first = saver(tmp_path)
    trained(tmp_path, first, max_steps=2)
    before = (tmp_path / "c" / "step=2.ckpt").stat().st_mtime_ns

    class AtStart(Callback):
        def on_train_start(self, trainer, module):
            raise ConfigError("too early")

    with pytest.raises(ConfigError, match="too early"):
        trained(tmp_path, saver(tmp_path), AtStart(), ckpt_path=first.best_model_path)
    assert names(tmp_path / "c") == ["step=2.ckpt"]
    assert (tmp_path / "c" / "step=2.ckpt").stat().st_mtime_ns == before


def test_error_of_that_save_is_logged_and_hides_nothing(tmp_path, caplog):
    with pytest.raises(ValueError, match="the user's own") as raised:
        trained(tmp_path, saver(tmp_path), Acts(3, fails), checkpointer=Failing(2))
    assert not hasattr(raised.value, "__notes__")
    assert "could not save the run as it ended: The checkpoint" in caplog.text
    assert names(tmp_path / "c") == ["step=2.ckpt"]


def test_it_can_be_left_out(tmp_path):
    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, saver(tmp_path, save_on_exception=False), Acts(3, fails))
    assert names(tmp_path / "c") == ["step=2.ckpt"]


def test_save_that_has_failed_is_not_tried_again_on_the_way_out(tmp_path):
    checkpointer = Failing(2)
    with pytest.raises(CheckpointError, match="cannot be written"):
        trained(tmp_path, saver(tmp_path), checkpointer=checkpointer)
    assert checkpointer.saves == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_saves_nothing(tmp_path, number):
    def twice():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trained(tmp_path, saver(tmp_path), Acts(3, twice))
    assert names(tmp_path / "c") == ["step=2.ckpt"]


def test_saver_hears_of_the_error_after_all_others(tmp_path):
    """A callback that has swapped the weights can put them back before they are saved."""

    class Swaps(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.kept = module.w.detach().clone()
                module.w.data.fill_(99.0)
                fails()

        def on_exception(self, trainer, module, exception):
            module.w.data.copy_(self.kept)

    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, saver(tmp_path), Swaps())
    assert FileCheckpointer().load(str(tmp_path / "c" / "step=3.ckpt"))["state_dict"]["w"] == -6


def test_two_savers_both_save_the_failed_run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    often = saver(tmp_path, verbose=True)
    seldom = ModelCheckpoint(tmp_path / "d", "{step}", every_n_train_steps=5)
    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, often, seldom, Acts(3, fails))
    assert names(tmp_path / "c") == names(tmp_path / "d") == ["step=3.ckpt"]
    assert f"Step 3: saved as {tmp_path}/c/step=3.ckpt." in caplog.text
