"""A signal, an error or a death on one rank: all end, soon, and nothing is lost or half written."""

import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, Module
from leyden.plugins import ModelCheckpoint
from leyden.testing import on_ranks, quiet_trainer


class Line(Module):
    def __init__(self, slow=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.slow = slow

    def training_step(self, batch, batch_idx):
        time.sleep(self.slow)
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(count):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2, shuffle=True)


def trainer_of(folder, *callbacks, **choices):
    return quiet_trainer(
        accelerator="cpu", strategy="ddp", devices=2, callbacks=list(callbacks),
        default_root_dir=folder, name="run", **choices,
    )  # fmt: skip


class Terminated(Callback):
    """Has this rank sent a signal after some time, and counts the saves."""

    def __init__(self, after):
        self.after, self.saves = after, 0

    def on_train_start(self, trainer, module):
        threading.Timer(self.after, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.saves += 1


TIMES = 20


def terminated_again_and_again(folder):
    """Train with a signal to one of the ranks each time, until there is none left."""
    draw, found = random.Random(0), []
    for _ in range(TIMES):
        after, rank = draw.uniform(0, 0.4), draw.randrange(2)
        told = Terminated(after if os.environ["RANK"] == str(rank) else 1e6)
        trainer = trainer_of(folder, told, ModelCheckpoint(save_last=True), max_epochs=1)
        with pytest.raises(SystemExit) as ended:
            trainer.fit(Line(slow=0.003), samples(20000), ckpt_path="auto")
        path = trainer.checkpoint_callback.last_model_path
        step = torch.load(path, weights_only=True)["global_step"]
        found.append((ended.value.code, told.saves, trainer.global_step, step))
    module = Line()
    last = trainer_of(folder, ModelCheckpoint(save_last=True), max_steps=3000)
    last.fit(module, samples(20000), ckpt_path="auto")
    return found, module.layer.weight.detach()


def unbroken():
    module = Line()
    quiet_trainer(accelerator="cpu", strategy="ddp", devices=2, max_steps=3000).fit(
        module, samples(20000)
    )
    return module.layer.weight.detach()


@pytest.mark.slow
def test_a_signal_to_one_rank_twenty_times_ends_both_at_one_step_with_one_save(tmp_path):
    (first, weight), (second, _) = on_ranks(2, terminated_again_and_again, tmp_path, timeout=110)
    assert first == second
    assert [code for code, *_ in first] == [143] * TIMES
    assert [saves for _, saves, *_ in first] == [1] * TIMES
    steps = [step for *_, step in first]
    assert [step for _, _, step, _ in first] == steps
    assert sorted(set(steps)) == steps  # each went on from the one before
    assert torch.equal(weight, on_ranks(2, unbroken)[0])


class Failing(Line):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("words of the culprit")
        return super().training_step(batch, batch_idx)


class Notes(Callback):
    """Writes down what a rank knows of its error, and when."""

    def __init__(self, folder):
        self.folder = folder

    def on_exception(self, trainer, module, exception):
        notes = [f"{type(exception).__name__}: {exception}", *getattr(exception, "__notes__", [])]
        (self.folder / f"{trainer.global_rank}.part").write_text("\n".join(notes))
        (self.folder / f"{trainer.global_rank}.part").rename(
            self.folder / f"{trainer.global_rank}.txt"
        )


def failing(folder, how):
    saver = ModelCheckpoint(every_n_train_steps=2, save_on_exception=True)
    trainer = trainer_of(folder, saver, Notes(folder), max_epochs=1)
    trainer.fit(Failing(how), samples(32))


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "failed: ValueError: words of the culprit"), ("dies", "has ended without a word")],
)
def test_a_rank_that_lost_another_says_which_and_what_is_known(tmp_path, how, says):
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1"):
        on_ranks(2, failing, tmp_path, how, timeout=30)
    assert time.monotonic() - began < 30
    assert f"Rank 1 on {socket.gethostname()} {says}" in (tmp_path / "0.txt").read_text()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    # The last that was due: step 3 was trained, and no rank saves it alone.
    assert [torch.load(path, weights_only=True)["global_step"] for path in files] == [2]


def folders(folder):
    trainer = trainer_of(folder, ModelCheckpoint(), max_epochs=1)
    trainer.fit(Line(), samples(8))
    return trainer.run_dir, trainer.checkpoint_callback.dirpath


def test_a_run_has_one_folder_whatever_the_number_of_ranks(tmp_path):
    first, second = on_ranks(2, folders, tmp_path)
    assert first == second
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]


class Raises(Callback):
    """Raises SIGUSR1 on the second rank alone."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            signal.raise_signal(signal.SIGUSR1)


def cut_by_slurm(folder):
    os.environ["SLURM_JOB_ID"] = "4711"
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    trainer = trainer_of(folder, Raises(), ModelCheckpoint(), max_epochs=1)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(Line(), samples(64))
    return ended.value.code, trainer.global_step


def test_slurm_is_asked_once_by_rank_0_whichever_rank_it_told(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$RANK: $@" >> {tmp_path}/asked.txt\n')
    scontrol.chmod(0o755)
    first, second = on_ranks(2, cut_by_slurm, tmp_path)
    assert first == second
    assert first[0] == 138
    assert (tmp_path / "asked.txt").read_text() == "0: requeue 4711\n"
    [path] = Path(tmp_path, "run/version_0/checkpoints").iterdir()
    assert torch.load(path, weights_only=True)["global_step"] == first[1]
