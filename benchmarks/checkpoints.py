"""What saving and loading a checkpoint cost beside torch.save and torch.load alone.

Each repeat measures both, in turn; a row is the median of the ratios of their throughputs. Plain
saves are flushed to the disk too, since a file that is not may be lost. The last row sets what
training waits for an asynchronous save beside a blocking one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from stall import peak, stalling

from leyden.plugins import FileCheckpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    state = state_of(options.megabytes)
    print("| row | MB/s | plain | ratio | least | most |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, row in ROWS.items():
            pairs = list(row(state, Path(folder), options.repeats))
            ratios = sorted(plain / ours for ours, plain in pairs)
            speeds = [
                options.megabytes / statistics.median(times) for times in zip(*pairs, strict=True)
            ]
            middle = statistics.median(ratios)
            print(
                f"| {name} | {speeds[0]:.0f} | {speeds[1]:.0f} | {middle:.2f} | {ratios[0]:.2f} "
                f"| {ratios[-1]:.2f} |",
                flush=True,
            )
        share = peak(options.megabytes, Path(folder))
        print(f"\nAn asynchronous save takes memory of {share:.2f} times the state.")


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Return a state of that size in forty tensors, as of a network and its optimizer."""
    return {f"layer{i}": torch.randn(megabytes * 1_000_000 // 4 // 40) for i in range(40)}


def saving(state: dict, folder: Path, repeats: int) -> Iterator[tuple[float, float]]:
    """Yield seconds of a save of ours and of a plain one."""
    checkpointer = FileCheckpointer()

    def plain() -> None:
        with (folder / "plain.ckpt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    for _ in range(repeats):
        ours = seconds(lambda: checkpointer.save(state, str(folder / "ours.ckpt")))
        yield ours, seconds(plain)


def loading(state: dict, folder: Path, repeats: int) -> Iterator[tuple[float, float]]:
    """Yield seconds of a load of ours, which verifies the file first, and of a plain one.

    Each is the first of a process, as in a resumed run: later ones find memory made ready.
    """
    path = folder / "ours.ckpt"
    FileCheckpointer().save(state, str(path))
    for _ in range(repeats):
        ours = first_load(f"FileCheckpointer().load({str(path)!r})")
        yield ours, first_load(f"torch.load({str(path)!r}, weights_only=True)")


def first_load(expression: str) -> float:
    """Return how many seconds ``expression`` takes in a process of its own."""
    code = (
        "import time, torch; from leyden.plugins import FileCheckpointer; FileCheckpointer(); "
        f"t = time.perf_counter(); {expression}; print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def seconds(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


ROWS = {"save": saving, "load": loading, "asynchronous stall": stalling}
"""Each yields, for every repeat, the seconds of ours and of the plain way."""

if __name__ == "__main__":
    main()
