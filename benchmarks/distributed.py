"""What leyden costs over two ranks, against loops written by hand with the same parts of torch.

    python benchmarks/distributed.py                  everything; about ten minutes
    python benchmarks/distributed.py --only ddp start

Both ways run in turn in the same two processes, on CPU over gloo, one thread each, round after
round and each in a fresh order; a ratio is the median over rounds of leyden's number by the other's
of the same round. Collectives are counted by the process groups themselves. Memory is by how much
resident memory grew, each time in new processes. Results are written to ``results/``.
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
    found = on_two_ranks(kind, options.rounds, options.width, steps)
    both = list(zip(*found["rounds"].values(), strict=True))

    def pairs(key: str) -> list[tuple[float, float]]:
        return [(ours[key], other[key]) for ours, other in both]

    name = kind.upper()
    ours, other = found["longer"]["leyden"], found["longer"]["by hand"]
    counts = {one["collectives"] for pair in both for one in pair}
    counts |= {ours["collectives"], other["collectives"]}
    if len(counts) != 1:
        raise SystemExit(f"{name}: collectives a step differ: {sorted(counts)}")
    return [
        row(f"{name} step", "µs", pairs("step_us"), "1.03"),
        row(f"{name} step, CPU time of a rank", "µs", pairs("cpu_us")),
        f"| {name} collectives a step on training groups | {ours['collectives']:g} | "
        f"{other['collectives']:g} | **1** | | | {len(both) + 1} | 1 |",
        f"| {name} exchanges a second on the control group | {ours['exchanges_per_s']:.2f} | "
        f"{other['exchanges_per_s']:.2f} | | | | 1 | 1 a second |",
    ]


def ddp(options: argparse.Namespace) -> list[str]:
    return steps_of("ddp", options, 60)


def fsdp(options: argparse.Namespace) -> list[str]:
    return steps_of("fsdp", options, 30)


def memory(options: argparse.Namespace) -> list[str]:
    """Return the line about the growth of memory under FSDP."""
    pairs = []
    for _ in range(options.repeats):
        grown = {}
        for name in random.sample(["leyden", "by hand"], 2):
            grown[name] = on_two_ranks("memory", "fsdp", name, options.large, 12)["growth_mb"]
        pairs.append((grown["leyden"], grown["by hand"]))
    return [row("FSDP growth of resident memory", "MB", pairs, "1.02")]


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
    found = on_two_ranks("shards", options.repeats, options.large, 0)
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
    parser.add_argument("--rounds", type=int, default=40, help="of steps")
    parser.add_argument("--repeats", type=int, default=5, help="of memory, start and shards")
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
