"""Which rank the others wait for in vain, and where it stands.

Ranks share a store. Each leaves its place there when it joins, and its error when it fails. One
that has waited in vain looks for those that leave no error, and has their stacks written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from leyden.failure import blame, is_consequence

PATIENCE = 5.0
"""Seconds that ranks whose waiting was in vain may be apart."""
USR2 = getattr(signal, "SIGUSR2", None)
SHOWN = 3
"""Ranks that are shown with their stacks."""


class RollCall:
    """Tells which ranks are missing.

    While it lasts SIGUSR2 has the stack of this process written into ``file``, also for loader
    workers forked from it, unless the user has a handler of his own.

    Args:
        store: What all ranks reach; they pass the same part of it.
        rank: Of this process.
        world_size: Ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.began = monotonic()
        self.file: Any = None
        if USR2 is not None and signal.getsignal(USR2) is signal.SIG_DFL:
            path = Path(tempfile.gettempdir(), f"leyden-stack-{os.getpid()}.txt")
            self.file = path.open("w")
            faulthandler.register(USR2, self.file, all_threads=False)
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        store.set(f"place/{rank}", json.dumps(place | {"file": self.file and self.file.name}))

    def close(self) -> None:
        """Give SIGUSR2 back, and delete what it had written."""
        if self.file is not None:
            faulthandler.unregister(USR2)  # type: ignore[arg-type]
            self.file.close()
            Path(self.file.name).unlink(missing_ok=True)
            self.file = None

    def report(self, error: Exception, is_told_to_end: Callable[[], bool]) -> None:
        """Leave ``error`` for the others, and note on it whose fault it is where it follows.

        Args:
            error: What this rank has raised.
            is_told_to_end: Says that there is no time to wait for others.
        """
        follows = is_consequence(error)
        told = {"error": f"{type(error).__name__}: {error}", "follows": follows}
        # The rank that holds the store may be gone.
        with contextlib.suppress(RuntimeError):
            self.store.set(f"error/{self.rank}", json.dumps(told))
            if follows:
                self._blame(error, is_told_to_end)

    def _blame(self, error: Exception, is_told_to_end: Callable[[], bool]) -> None:
        deadline, silent = monotonic() + PATIENCE, set(range(self.world_size)) - {self.rank}
        places = {rank: json.loads(self.store.get(f"place/{rank}")) for rank in silent}
        while silent and monotonic() < deadline and not is_told_to_end():
            for rank in sorted(silent):
                place = places[rank]
                if self.store.check([f"error/{rank}"]):
                    silent.remove(rank)
                    told = json.loads(self.store.get(f"error/{rank}"))
                    if not told["follows"]:
                        blame(error, f"Rank {rank} on {place['host']} failed: {told['error']}")
                        return
                elif _is_here(place) and not _is_alive(place["pid"]):
                    blame(error, f"Rank {rank} on {place['host']} has ended without a word.")
                    return
            sleep(0.05)
        if silent and not is_told_to_end():
            shown = [_stalled(rank, places[rank]) for rank in sorted(silent)[:SHOWN]]
            blame(error, "\n".join(shown), is_stalled=True)


def roll_call(store: Store, name: str, rank: int, world_size: int) -> RollCall:
    """Return the `RollCall` of the ranks that share ``store``, in a part of it called ``name``."""
    return RollCall(PrefixStore(f"leyden/{name}", store), rank, world_size)


def _is_here(place: dict[str, Any]) -> bool:
    return bool(place["host"] == socket.gethostname())


def _is_alive(pid: int) -> bool:
    """Return whether process ``pid`` runs; one that has ended may still be listed."""
    try:
        return _status(pid, "State").split()[0] not in ("Z", "X")
    except OSError:
        return not Path("/proc/self").exists()


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).partition(":")[2]


def _stalled(rank: int, place: dict[str, Any]) -> str:
    """Return what to show of a rank that is missing."""
    who = f"Rank {rank} on {place['host']} does not come"
    if not place["file"]:
        return f"{who}, and has a handler of its own for SIGUSR2, which would show where it stands."
    command = f"kill -USR2 {place['pid']}; cat {place['file']}"
    if not _is_here(place):
        return f"{who}. To see there where it stands: {command}"
    stacks = _stacks(place["pid"], Path(place["file"]))
    return f"{who}. It stands in\n{stacks or f'  nothing it could write. Try: {command}'}"


def _stacks(pid: int, file: Path) -> str:
    """Return where process ``pid`` stands, and the loader workers it may be waiting for."""
    found = [_stack(pid, file)]
    for worker in _children(pid):
        stack = _stack(worker, file)
        if stack and "multiprocessing/connection.py" not in stack:  # that one waits for work
            found.append(f"and a process that it has forked, {worker}, in\n{stack}")
    return "\n".join(found)


def _stack(pid: int, file: Path) -> str:
    """Have process ``pid`` write its stack, and return that; empty where it does not."""
    if USR2 is None:
        return ""
    before = file.stat().st_size
    os.kill(pid, USR2)
    deadline, size = monotonic() + 2, before
    while monotonic() < deadline:
        sleep(0.1)
        previous, size = size, file.stat().st_size
        if size == previous > before:
            break
    with file.open("rb") as written:
        written.seek(before)
        text = written.read().decode(errors="replace")
    # Several ranks may ask at once.
    return text.split("Stack (most recent call first):\n")[-1].rstrip()


def _children(pid: int) -> list[int]:
    """Return the processes forked from ``pid`` that still have its handler of SIGUSR2."""
    with contextlib.suppress(OSError, StopIteration):
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        mask = 1 << (int(USR2 or 1) - 1)
        return [int(one) for one in listed if int(_status(int(one), "SigCgt"), 16) & mask]
    return []
