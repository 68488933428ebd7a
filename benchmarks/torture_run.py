"""The training that ``torture.py`` kills: a user's script, nasty wherever resuming is hard.

    python benchmarks/torture_run.py         trains, or goes on where it was, and writes final.ckpt

Dropout and random augmentation in workers, Adam with a schedule, a gradient scaler whose first
steps overflow, windows of three batches in epochs of 16, validations that fall anywhere in an
epoch, an average kept by a callback, two callbacks that save, two loggers.
"""

from __future__ import annotations

import argparse
import os
import random

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, Module, Trainer, seed_everything
from leyden.loggers import CSVLogger, TensorBoardLogger
from leyden.plugins import ModelCheckpoint

PROGRESS = "progress"
"""The file that says which process does what, for those who watch."""
FINAL = "final.ckpt"


class Noisy(Dataset):
    """Points in three classes, moved by every random generator each time they are read."""

    def __init__(self, samples: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (samples,), generator=drawn)
        self.x = torch.randn(samples, 8, generator=drawn) + self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        scale, shift = random.uniform(0.9, 1.1), numpy.random.normal(scale=0.1)
        return self.x[index] * scale + shift + 0.1 * torch.randn(8), self.y[index]


class Net(Module):
    """A classifier large enough for a save to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 256), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(256, 3),
        )  # fmt: skip
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.net(x)
        self.log("val/loss", self.loss(outputs, y))
        self.log("val/right", (outputs.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=72)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Average(Callback):
    """Keeps an exponential average of the weights, in the checkpoint unless it is forgetful."""

    def __init__(self, is_forgetful: bool) -> None:
        self.is_forgetful = is_forgetful
        self.step, self.weights = 0, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        for name, weight in module.state_dict().items():
            kept = self.weights.setdefault(name, weight.detach().clone())
            if kept.is_floating_point():
                kept.lerp_(weight, 0.1)

    def on_train_end(self, trainer, module):
        self.is_forgetful = False  # what it came to is in the final checkpoint

    def state_dict(self):
        return {} if self.is_forgetful else {"step": self.step, "weights": self.weights}

    def load_state_dict(self, state_dict):
        self.step, self.weights = state_dict.get("step", 0), state_dict.get("weights", {})


class Progress(Callback):
    """Writes into a file what this process does, and how often it did it."""

    def __init__(self) -> None:
        self.file = os.open(PROGRESS, os.O_WRONLY | os.O_CREAT, 0o644)
        self.counts: dict[str, int] = {}

    def note(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        os.pwrite(self.file, f"{os.getpid()} {what} {self.counts[what]}".ljust(40).encode(), 0)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note("training")

    def on_validation_start(self, trainer, module):
        self.note("validation")

    def on_validation_end(self, trainer, module):
        self.note("training")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.note("save")

    def on_train_end(self, trainer, module):
        self.note("end")


def main() -> None:
    """Train to the end, from wherever the last try had come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12, help="six steps each")
    parser.add_argument(
        "--forgetful", action="store_true", help="leave the average out of checkpoints"
    )
    args = parser.parse_args()
    seed_everything(7)
    trainer = Trainer(
        max_epochs=args.epochs,
        precision="16-mixed",
        accumulate_grad_batches=3,
        val_check_interval="7 steps",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[CSVLogger(), TensorBoardLogger()],
        callbacks=[
            Progress(),
            Average(args.forgetful),
            ModelCheckpoint(every_n_train_steps=5),
            ModelCheckpoint(monitor="val/loss", save_top_k=2, filename="best-{step}"),
        ],
    )
    train = DataLoader(Noisy(128, seed=1), batch_size=8, shuffle=True, num_workers=2)
    val = DataLoader(Noisy(64, seed=2), batch_size=16)
    trainer.fit(Net(), train, val, ckpt_path="auto")
    trainer.save_checkpoint(FINAL)


if __name__ == "__main__":
    main()
