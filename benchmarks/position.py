"""What a place in the data costs: to go on from its middle, and to seed its samples.

    python benchmarks/position.py [--samples 10000000]

The first number is the time from a position to the batch that follows it. The others are µs per
batch of reading alone, over a bare loop's, for data that draws nothing and for data that does.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from leyden.data.feed import train_source
from leyden.data.source import Source, Wait

BATCHES = 3000
CHOICES = ("batch", "sample", False)


class Samples(Dataset):
    """Four numbers a sample, noise on them where asked for."""

    def __init__(self, draws: bool) -> None:
        self.draws, self.rows = draws, torch.zeros(BATCHES * 4, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        if self.draws:
            row = row + random.random() + numpy.random.rand() + torch.rand(4)
        return row


def source(loader: object, seed_samples: object = "batch") -> Source:
    return train_source(loader, 1.0, False, None, Wait(), seed_samples)


def skip(samples: int) -> float:
    """Return the seconds from a position in the middle of an epoch to its next batch."""
    middle = samples // 200
    first = source(DataLoader(range(samples), batch_size=100, shuffle=True))
    first.start = middle
    batches = first.batches(0)
    next(batches)
    position = first.position()
    second = source(DataLoader(range(samples), batch_size=100, shuffle=True))
    began = perf_counter()
    second.restore(position)
    following = next(second.batches(0))[0]
    seconds = perf_counter() - began
    assert torch.equal(following, next(batches)[0])
    return seconds


def per_batch(read: object, passes: int = 3) -> float:
    """Return the µs per batch of the fastest of a few passes."""
    read()
    fastest = float("inf")
    for _ in range(passes):
        began = perf_counter()
        read()
        fastest = min(fastest, perf_counter() - began)
    return fastest / BATCHES * 1e6


def compare(loader: object, choice: object) -> tuple[float, float]:
    """Return the µs per batch of a bare loop and of a source."""
    reading = source(loader, choice)

    def bare() -> None:
        for _ in loader:
            pass

    def ours() -> None:
        for _ in reading.batches(0):
            pass

    try:
        return per_batch(bare), per_batch(ours)
    finally:
        reading.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    samples = parser.parse_args().samples
    print(f"to the middle of {samples:,} samples: {skip(samples):.2f} s\n")
    print("| data | workers | seed_samples | bare loop, µs | ours, µs | more |")
    print("|---|---|---|---|---|---|")
    cases = [("list of batches", 0, "batch", list(torch.zeros(BATCHES, 4, 4)))]
    for draws in (False, True):
        name = "with random draws" if draws else "without draws"
        for workers in (0, 2):
            for choice in CHOICES:
                options = {"batch_size": 4, "shuffle": True, "num_workers": workers}
                cases.append((name, workers, choice, DataLoader(Samples(draws), **options)))
    for name, workers, choice, loader in cases:
        bare, ours = compare(loader, choice)
        print(f"| {name} | {workers} | {choice} | {bare:.1f} | {ours:.1f} | {ours - bare:+.1f} |")


if __name__ == "__main__":
    main()
