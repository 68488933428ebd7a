"""What leyden costs per step, measured against a bare loop in the same process.

    python benchmarks/overhead.py            every row; about three minutes
    python benchmarks/overhead.py --rounds 3 --only "bare loop" "leyden, defaults"

Variants run in turn, round after round, each in a fresh order; a row's ratio is the median over
rounds of its time by the bare loop's of the same round. The time of a run is taken inside
``training_step``, from the 50th batch to the last, so that starting and ending do not count. The
rows with a progress bar run under a pseudo-terminal, and the bar must have redrawn and the event
file must hold every value that was due, or the benchmark fails: nothing is saved by doing nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import others
import torch
from screen import terminal
from torch import nn
from workload import STEPS, Clock, loader, network

from leyden import Callback, Module, Trainer

SHORT_EPOCH = 10


class Net(Module):
    """The model of every leyden row."""

    def __init__(self, values: int = 0, on_epoch: bool = False) -> None:
        super().__init__()
        self.net, self.loss, self.clock = network(), nn.CrossEntropyLoss(), Clock()
        self.names = [f"train/value_{i}" for i in range(values)]
        self.on_epoch = on_epoch

    def training_step(self, batch, batch_idx):
        self.clock.tick()
        x, y = batch
        loss = self.loss(self.net(x), y)
        for name in self.names:
            self.log(
                name, loss, prog_bar=name == self.names[0], on_step=True, on_epoch=self.on_epoch
            )
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Listener(Callback):
    """A callback that hears of every batch."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.count += 1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1


def bare(epochs: int, length: int, window: int = 1, clip: float | None = None) -> float:
    """The hand-written loop."""
    net, loss_of, clock = network(), nn.CrossEntropyLoss(), Clock()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader(length)):
            clock.tick()
            if index % window == 0:
                optimizer.zero_grad()
            loss = loss_of(net(x), y)
            (loss if window == 1 else loss / window).backward()
            if (index + 1) % window == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
    return clock.per_step()


def leyden(module: Net, epochs: int, length: int, **choices) -> float:
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=epochs,
            default_root_dir=folder,
            enable_model_summary=False,
            **{**off, **choices},
        )
        trainer.fit(module, loader(length))
    return module.clock.per_step()


def with_defaults(module: Net, epochs: int = 1, length: int = STEPS, **choices) -> float:
    """A fit as users run it, watched: bar on a terminal, events read back."""
    with tempfile.TemporaryDirectory() as folder, terminal() as screen:
        trainer = Trainer(
            max_epochs=epochs, default_root_dir=folder, enable_model_summary=False, **choices
        )
        trainer.fit(module, loader(length))
        events = trainer.logger.log_dir
        screen.close()
        check_events(events, module, epochs * length)
    if screen.redraws < 1:
        raise SystemExit(
            f"The bar redrew {screen.redraws} times; a run without a bar is no default."
        )
    return module.clock.per_step()


def check_events(folder: str, module: Net, steps: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    for name in module.names:
        tag = name + ("_step" if module.on_epoch else "")
        found = [event.step for event in events.Scalars(tag)]
        if found != list(range(50, steps + 1, 50)):
            raise SystemExit(
                f"{tag} was written at steps {found[:5]}…, not at every 50th to {steps}."
            )


def variants() -> dict[str, tuple[Callable[[], float], str]]:
    """Every row: what runs, and the row it is compared with."""
    short = STEPS // SHORT_EPOCH
    window = "bare loop, window 4, clipping"
    rows: dict[str, tuple[Callable[[], float], str]] = {
        "bare loop": (lambda: bare(1, STEPS), "bare loop"),
        "leyden, nothing attached": (lambda: leyden(Net(), 1, STEPS), "bare loop"),
        "leyden, defaults, 1 value": (lambda: with_defaults(Net(1)), "bare loop"),
        "leyden, defaults, 1 value, on_epoch": (lambda: with_defaults(Net(1, True)), "bare loop"),
        "leyden, defaults, 10 values": (lambda: with_defaults(Net(10)), "bare loop"),
        "leyden, 8 callbacks": (
            lambda: leyden(Net(), 1, STEPS, callbacks=[Listener() for _ in range(8)]), "bare loop",
        ),
        window: (lambda: bare(1, STEPS, 4, 1.0), window),
        "leyden, window 4, clipping": (
            lambda: leyden(Net(), 1, STEPS, accumulate_grad_batches=4, gradient_clip_val=1.0),
            window,
        ),
        "bare loop, epochs of 10": (lambda: bare(short, SHORT_EPOCH), "bare loop, epochs of 10"),
        "leyden, nothing attached, epochs of 10": (
            lambda: leyden(Net(), short, SHORT_EPOCH), "bare loop, epochs of 10",
        ),
        "leyden, defaults, epochs of 10": (
            lambda: with_defaults(Net(1), short, SHORT_EPOCH), "bare loop, epochs of 10",
        ),
    }  # fmt: skip
    rows |= {name: (run, "bare loop") for name, run in others.installed().items()}
    return rows


def measure(
    rows: dict[str, tuple[Callable[[], float], str]], rounds: int
) -> dict[str, list[float]]:
    """Return µs per step of every row in every round."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(rounds + 1):
        for name in random.sample(list(rows), len(rows)):
            took = rows[name][0]()
            if round_:  # the first round warms up
                times[name].append(took)
        print(f"round {round_} of {rounds}", file=sys.stderr)
    return times


def table(rows: dict[str, tuple[Callable[[], float], str]], times: dict[str, list[float]]) -> str:
    lines = [
        "| row | µs per step | ratio to its bare loop | spread of the ratio |",
        "|---|---|---|---|",
    ]
    for name, (_, base) in rows.items():
        ratios = sorted(mine / other for mine, other in zip(times[name], times[base], strict=True))
        lines.append(
            f"| {name} | {statistics.median(times[name]):.0f} | {statistics.median(ratios):.3f} | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    return "\n".join(lines)


IMPORTS = "from leyden import Module, Trainer, Callback, seed_everything"
FIRST_STEP = """
import time, sys, torch, tempfile
sys.path.insert(0, {here!r})
import overhead
started = time.perf_counter()
{run}
print(time.perf_counter() - started)
"""


def seconds(code: str) -> float:
    """Return the number that ``code`` prints last, the least of three fresh processes."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(done.stdout.strip().splitlines()[-1]) for done in found)


def start_up() -> str:
    """Return the rows about importing and the first step."""
    timed = "import time, torch\nt = time.perf_counter()\n{}\nprint(time.perf_counter() - t)"
    here = str(Path(__file__).parent)
    first = FIRST_STEP.format(here=here, run="overhead.bare(1, 51)")
    fit = FIRST_STEP.format(here=here, run="overhead.first_fit()")
    return (
        f"import over torch: {seconds(timed.format(IMPORTS)):.2f} s (budget 0.3 s); "
        f"default fit of 51 steps over the bare loop's: {seconds(fit) - seconds(first):.2f} s "
        "(budget 0.5 s)"
    )


def first_fit() -> None:
    """A default fit, short, with its folder, bar, summary, logger and checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        Trainer(max_epochs=1, default_root_dir=folder).fit(Net(1), loader(51))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="names of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("leyden").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = variants()
    if options.only:
        wanted = set(options.only) | {rows[name][1] for name in options.only}
        rows = {name: row for name, row in rows.items() if name in wanted}
    times = measure(rows, options.rounds)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, one thread\n"
    )
    print(table(rows, times))
    if not options.only:
        print("\n" + start_up())


if __name__ == "__main__":
    main()
