"""Kill a training again and again, start it again, and see if it ends as if nothing had happened.

    python benchmarks/torture.py                      100 kills
    python benchmarks/torture.py --kills 20 --seed 5  other instants
    python benchmarks/torture.py --spawn              a new interpreter for every start: slower

``torture_run.py`` is trained once unbroken. Then it is started in an empty folder, killed with
SIGKILL at a random instant and started again by the same command, until it reaches its end; then
in the next empty folder, until there were that many kills. Weights, optimizer, schedule, scaler,
random generators, place in the data, the callback's average, the table of metrics and TensorBoard's
curves must be those of the unbroken run, to the last bit, and no process may be left. The exit code
is 1 if anything differs.

Where to kill is drawn too: at any instant of training, while it starts, after a save or a
validation has begun. Without ``--spawn`` each start is a fork of one process that has imported
torch.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import leyden.loggers  # noqa: F401  forks have it

SCRIPT = Path(__file__).with_name("torture_run.py")
AIMS = {"training": 5, "save": 3, "validation": 2, "start": 1}
"""What is aimed at, and how often."""
PARTS = (
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "precision",
    "state",
    "ranks",
    "average",
)
CLOCKS = ("elapsed", "validated_at")
"""What two runs never have in common."""


@dataclass
class Training:
    """Starts of one training in one folder."""

    folder: Path
    arguments: list[str]
    is_spawned: bool
    groups: list[int] = field(default_factory=list)
    """Of every process that was started."""

    def start(self) -> int:
        """Start the script in a session of its own, and return its process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        process = os.fork()
        if not process:
            self._become_the_run()
        self.groups.append(process)
        return process

    def _become_the_run(self) -> None:
        code = 1
        try:
            os.setsid()
            os.chdir(self.folder)
            log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = [str(SCRIPT), *self.arguments]
            if self.is_spawned:
                os.execv(sys.executable, [sys.executable, *sys.argv])
            runpy.run_path(str(SCRIPT), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def doing(self, process: int) -> tuple[str, int]:
        """Return what ``process`` does, and for which time; ``"start"`` before its first batch."""
        try:
            owner, what, count = (self.folder / "progress").read_text().split()
        except (FileNotFoundError, ValueError):
            return "start", 0
        return (what, int(count)) if int(owner) == process else ("start", 0)

    def checkpoints(self) -> set[tuple[str, int]]:
        """Return what a restart may find: names and times of complete checkpoints."""
        found = self.folder.glob("runs/*/*/checkpoints/[!.]*")
        return {(str(path), path.stat().st_mtime_ns) for path in found if path.exists()}

    def half_written(self) -> set[Path]:
        """Return the hidden files that saves are written to before they get their name."""
        return set(self.folder.glob("runs/*/*/checkpoints/.*"))

    def finish(self) -> float:
        """Run to the end, and return how long it took.

        Raises:
            SystemExit: It failed.
        """
        began = time.perf_counter()
        _, status = os.waitpid(self.start(), 0)
        self.check(status)
        return time.perf_counter() - began

    def check(self, status: int) -> None:
        """Refuse an end of the script that is none."""
        if code := os.waitstatus_to_exitcode(status):
            print((self.folder / "log.txt").read_text()[-4000:])
            raise SystemExit(f"FAILED: the script ended with {code}, see {self.folder}/log.txt")


@dataclass
class Killer:
    """Kills trainings at instants that ``seed`` draws."""

    seed: int
    span: float
    """Seconds of training within which most kills come."""
    landed: Counter[str] = field(default_factory=Counter)
    wasted: int = 0
    """Kills before there was anything new to go on from."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self, training: Training) -> bool:
        """Start ``training`` and kill it, and return whether it was quicker."""
        aim = self.draw.choices(list(AIMS), list(AIMS.values()))[0]
        number = self.draw.randint(1, 4) if aim in ("save", "validation") else 1
        delay = self.draw.uniform(0, {"save": 0.012, "validation": 0.008}.get(aim, self.span))
        before, pieces = training.checkpoints(), training.half_written()
        process = training.start()
        if aim != "start":
            wait_for(training, process, aim, number)
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):
            training.check(status)
            return True
        where = training.doing(process)[0]
        if training.half_written() - pieces:
            where = "save, file half written"
        self.landed[where] += 1
        self.wasted += training.checkpoints() == before
        return False


def wait_for(training: Training, process: int, aim: str, number: int) -> None:
    """Return once ``process`` does ``aim`` for the ``number``-th time, or is over."""
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        what, count = training.doing(process)
        if (what == aim and count >= number) or what == "end":
            return
        time.sleep(0.0005)


def result(folder: Path) -> dict[str, Any]:
    """Return all that the training in ``folder`` came to."""
    final = torch.load(folder / "final.ckpt", weights_only=True)
    final["state"] = {k: v for k, v in final["state"].items() if k not in CLOCKS}
    final["average"] = final["callbacks"]["Average"]
    with (Path(final["folder"]) / "metrics.csv").open(newline="") as file:
        table = list(csv.reader(file))
    return {part: final[part] for part in PARTS} | {
        "metrics.csv": table,
        "TensorBoard": curves(Path(final["folder"])),
    }


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of the run in ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each restart
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield where two results are not the same to the last bit."""
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{where}: the tensors differ"
    elif isinstance(one, dict):
        for name in sorted({*one, *other}, key=str):
            if name in one and name in other:
                yield from differences(one[name], other[name], f"{where}[{name!r}]")
            else:
                yield f"{where}[{name!r}]: only in one of them"
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{where}[{index}]")
    elif one != other and not (one != one and other != other):
        yield f"{where}: {one!r} and {other!r}"


def left_over(groups: list[int], patience: float = 15.0) -> list[int]:
    """Return the processes of ``groups`` that are there after all had time to see that it is over.

    A worker looks every five seconds whether its parent lives.
    """
    deadline = time.monotonic() + patience
    while (left := list(living(set(groups)))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def living(groups: set[int]) -> Iterator[int]:
    """Yield the processes in ``groups``, but for those that only wait to be forgotten."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) in groups and state != "Z":
            yield int(path.parent.name)


def torture(root: Path, kills: int, seed: int, make: Callable[[str], Training]) -> list[str]:
    """Kill and restart trainings in folders of ``root``, and return what differed."""
    unbroken = make("unbroken")
    took = unbroken.finish()
    wanted = result(unbroken.folder)
    steps = wanted["state"]["step"]
    print(f"unbroken: {steps} steps in {took:.1f} s", flush=True)
    killer = Killer(seed, span=took / 4)
    found, groups, rounds, done = [], list(unbroken.groups), 0, 0
    while done < kills:
        rounds += 1
        training = make(f"round_{rounds}")
        while done < kills and not killer.run(training):
            done += 1
        if not (training.folder / "final.ckpt").exists():
            training.finish()
        groups += training.groups
        differ = list(differences(wanted, result(training.folder)))
        found += [f"round {rounds}{where}" for where in differ]
        starts = len(training.groups)
        verdict = f"{len(differ)} differences" if differ else "the same"
        print(f"round {rounds}: {starts - 1} kills, {verdict}", flush=True)
    found += [f"process {process} is left" for process in left_over(groups)]
    print(f"{done} kills and restarts in {rounds} trainings; {killer.wasted} before a new save")
    print("they landed in:", ", ".join(f"{w} {n}" for w, n in killer.landed.most_common()))
    return found


def main() -> None:
    """Torture, report, and exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawn", action="store_true", help="a new interpreter for every start")
    parser.add_argument("--folder", type=Path, help="keep what was trained there")
    args, others = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).absolute()
        found = torture(
            root, args.kills, args.seed, lambda name: Training(root / name, others, args.spawn)
        )
    for line in found[:20]:
        print("DIFFERENT:", line)
    print("FAILED" if found else "PASSED: nobody can tell them from the unbroken run")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
