"""What an asynchronous save holds training up for, and the memory it takes.

Rows of ``checkpoints.py``. Both kinds of save are due after the same steps of one training: the
blocking one writes before the other begins to, and the next are due when all is written.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch

from leyden import Callback, Module
from leyden.plugins import ModelCheckpoint
from leyden.testing import quiet_trainer


class Holder(Module):
    """Keeps a state and trains one number, so that steps take no time."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        frozen = {name: torch.nn.Parameter(t, requires_grad=False) for name, t in state.items()}
        self.state = torch.nn.ParameterDict(frozen)
        self.number = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.number * batch.mean()

    def configure_optimizers(self):
        return torch.optim.SGD([self.number], lr=0.1)


class Timed(ModelCheckpoint):
    """Saves every second step, the newest state, and notes how long training waits for it."""

    def __init__(self, folder: Path, asynchronous: bool) -> None:
        mode = "max" if asynchronous else "min"  # tells the two apart
        super().__init__(folder, every_n_train_steps=2, mode=mode, asynchronous=asynchronous)
        self.waits: list[float] = []

    def on_save_point(self, trainer, module, at):
        began = perf_counter()
        super().on_save_point(trainer, module, at)
        if at == "step" and trainer.global_step % 2 == 0:
            self.waits.append(perf_counter() - began)


class Pace(Callback):
    """Lets a step begin when all that was to be saved is written."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for thread in threading.enumerate():
            if thread.name == "leyden-save":
                thread.join()


def stalling(state: dict, folder: Path, repeats: int) -> Iterator[tuple[float, float]]:
    """Yield seconds that training waits for an asynchronous save and for a blocking one."""
    blocking, ours = (Timed(folder / str(kind), asynchronous=kind) for kind in (False, True))
    train(state, [Pace(), blocking, ours], 2 * repeats)
    yield from zip(ours.waits, blocking.waits, strict=True)


def train(state: dict, callbacks: list[Callback], steps: int) -> None:
    """Train ``steps`` steps of a Module with that state."""
    trainer = quiet_trainer(callbacks=callbacks)
    trainer.fit(Holder(state), [torch.ones(1)] * steps)


def peak(megabytes: int, folder: Path) -> float:
    """Return the most memory that asynchronous saves take, as a share of the state."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, {here!r}); "
        "from checkpoints import state_of; from stall import Pace, Timed, train; "
        "train(state_of({megabytes}), [Pace(), *[Timed(Path({folder!r}), True)][:{savers}]], 6); "
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    held = []
    for savers in (0, 1):
        given = {"here": str(Path(__file__).parent), "folder": str(folder / "peak")}
        script = code.format(megabytes=megabytes, savers=savers, **given)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        held.append(int(done.stdout.split()[-1]) * 1024 / 1_000_000)
    return (held[1] - held[0]) / megabytes
