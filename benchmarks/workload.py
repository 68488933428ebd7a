"""What every row of the benchmark trains, and how its time is taken."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, WARM_UP = 2000, 100
WIDTH, BATCH = 184, 64


class Batches(Dataset):
    """The same few batches over and over: data costs next to nothing."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(BATCH, 64, generator=generator),
                torch.randint(10, (BATCH,), generator=generator),
            )
            for _ in range(10)
        ]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return self.batches[index % 10]


def loader(length: int) -> DataLoader:
    return DataLoader(Batches(length), batch_size=None)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


class Clock:
    """Notes when the step was entered after the warm-up and for the last time."""

    def __init__(self) -> None:
        self.count, self.first, self.last = 0, 0.0, 0.0

    def tick(self) -> None:
        self.count += 1
        self.last = time.perf_counter()
        if self.count == WARM_UP:
            self.first = self.last

    def per_step(self) -> float:
        return (self.last - self.first) / (self.count - WARM_UP) * 1e6
