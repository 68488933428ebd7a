"""What leyden costs over two ranks, against loops written by hand with the same parts of torch.

    python benchmarks/distributed.py                  everything; about five minutes
    python benchmarks/distributed.py --only ddp start

Both ways train in the same two processes, on CPU over gloo, one thread each: after each step of
leyden's the loop by hand does one. Steps are compared in parts of 25, a part's time being that of
its median step and its CPU time that of all; a ratio is the median over the parts. Collectives are
counted by the process groups themselves, memory by torch's profiler. Results are written to
``results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "distributed.md"
PART = 25
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LEYDEN_SCRIPT = """
import sys, time, torch
from leyden import Trainer
from leyden.testing import Regression, batches

class Told(Regression):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            print(time.time())

off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
Trainer(strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, enable_model_summary=False,
    **off).fit(Told(), batches(1))
"""
PLAIN_SCRIPT = """
import time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 1)).square().mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    print(time.time())
dist.destroy_process_group()
"""


def on_two_ranks(what: str, *numbers: object) -> Any:
    """Return what two ranks of ``distributed_ranks.py`` found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        script = [str(HERE / "distributed_ranks.py"), what, str(file), *map(str, numbers)]
        run([*TORCHRUN, *script])
        return json.loads(file.read_text())


def run(command: Sequence[str]) -> str:
    """Return what a command prints; show its errors where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} left with {done.returncode}:\n{done.stderr}")
    return done.stdout


def row(name: str, unit: str, pairs: Sequence[tuple[float, float]], most: str = "") -> str:
    """Return a line of the table: both medians, and the median and spread of the pairs' ratio."""
    ratios = sorted(ours / other for ours, other in pairs)
    quarter = len(ratios) // 4
    ours, other = (statistics.median(numbers) for numbers in zip(*pairs, strict=True))
    return (
        f"| {name}, {unit} | {ours:.4g} | {other:.4g} | **{statistics.median(ratios):.3f}** | "
        f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f} | "
        f"{ratios[0]:.3f} to {ratios[-1]:.3f} | {len(ratios)} | {most} |"
    )


def steps_of(kind: str, options: argparse.Namespace, steps: int) -> list[str]:
    """Return the lines about steps and collectives of ``kind``."""
    found = on_two_ranks(kind, options.width, steps)
    ours, other = (list(zip(*found[name], strict=True)) for name in ("leyden", "by hand"))
    name = kind.upper()
    (collectives,), (expected,) = set(ours[2]), set(other[2])
    if collectives != expected:
        raise SystemExit(f"{name}: {collectives} collectives a step, and {expected} by hand")
    wall = [
        (sorted(a)[PART // 2] * 1e6, sorted(b)[PART // 2] * 1e6)
        for a, b in parts(ours[0], other[0])
    ]
    cpu = [(sum(a) / PART * 1e6, sum(b) / PART * 1e6) for a, b in parts(ours[1], other[1])]
    a_second = sum(ours[3]) / (sum(ours[0]) + sum(other[0]))
    return [
        row(f"{name} step", "µs", wall, "1.03"),
        row(f"{name} step, CPU time of a rank", "µs", cpu),
        f"| {name} collectives a step on training groups, each step alike | {collectives:g} | "
        f"{expected:g} | **1** | | | {len(ours[2])} | 1 |",
        f"| {name} exchanges a second on the control group | {a_second:.2f} | {sum(other[3]):g} | "
        "| | | | 1 a second |",
    ]


def parts(ours: Sequence[float], other: Sequence[float]) -> list[tuple[Any, Any]]:
    """Return both lists' parts of `PART` steps, side by side."""
    starts = range(0, len(ours) - PART + 1, PART)
    return [(ours[at : at + PART], other[at : at + PART]) for at in starts]


def ddp(options: argparse.Namespace) -> list[str]:
    return steps_of("ddp", options, options.steps)


def fsdp(options: argparse.Namespace) -> list[str]:
    return steps_of("fsdp", options, options.steps // 2)


def memory(options: argparse.Namespace) -> list[str]:
    """Return the line about memory under FSDP."""
    found = [on_two_ranks("memory", options.large, 16) for _ in range(3)]
    pairs = [(one["leyden"], one["by hand"]) for one in found]
    return [row("FSDP, most memory of tensors at once", "MB", pairs, "1.02")]


def start(options: argparse.Namespace) -> list[str]:
    """Return the line about the time from the command to the first step's end on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder, "ours.py"), Path(folder, "plain.py")
        ours.write_text(LEYDEN_SCRIPT)
        plain.write_text(PLAIN_SCRIPT)
        commands = {"leyden": [sys.executable, str(ours)], "plain": [*TORCHRUN, str(plain)]}
        pairs = []
        for _ in range(options.repeats + 2):
            took = {}
            for name in random.sample(list(commands), 2):
                began = time.time()
                took[name] = float(run(commands[name]).split()[-1]) - began
            pairs.append((took["leyden"], took["plain"]))
    return [row("Start of 2 ranks to the first step's end", "s", pairs)]


def shards(options: argparse.Namespace) -> list[str]:
    """Return the lines about saving and loading a sharded state."""
    found = on_two_ranks("shards", options.repeats, options.large)
    gigabytes, took = found["gb"], found["seconds"]
    lines = []
    for name in ("save", "load"):
        # A ratio of times turns round into one of throughputs.
        speeds = [
            (gigabytes / ours, gigabytes / other)
            for ours, other in zip(took[name], took[f"dcp {name}"], strict=True)
        ]
        lines.append(row(f"Sharded {name} of {gigabytes:.2f} GB, against DCP", "GB/s", speeds))
    return lines


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "ddp": ddp, "fsdp": fsdp, "memory": memory, "start": start, "shards": shards,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="of DDP; half as many of FSDP")
    parser.add_argument("--repeats", type=int, default=5, help="of start and shards")
    parser.add_argument("--width", type=int, default=128, help="of the network that is timed")
    parser.add_argument("--large", type=int, default=1024, help="of the one saved and weighed")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load of others "
        f"{os.getloadavg()[0]:.1f} at the beginning, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo, one thread a rank\n",
        "| | leyden | by hand | ratio | middle half | least to most | pairs | budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in options.only:
        found = PARTS[name](options)
        lines += found
        print("\n".join(found), flush=True)
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text("\n".join(["# Two ranks\n", *lines, ""]))


if __name__ == "__main__":
    main()
