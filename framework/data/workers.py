"""Loader workers: alive until the run ends them, and gone when it has."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import parent_process
from time import monotonic
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch._C import _remove_worker_pids

from .. import rng

_PR_SET_PDEATHSIG = 1
PATIENCE = 1.0  # seconds that workers have to end by themselves


def end_with_parent() -> None:
    """Let this worker end when the process that reads it does, by whatever means.

    torch's own watch takes the parent for the one it first sees, which is another where the parent
    was killed before that: the worker would be left for ever.
    """
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux" and parent.pid == os.getppid():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)


class WorkerInit:
    """Prepares a loader worker, then calls the user's own ``worker_init_fn``.

    An interrupt of the terminal, or a scheduler's signal, goes to every process of the run. The
    worker leaves it to its parent, which finishes its step with the batches it needs for it.

    Args:
        own: The user's function, or None.
        apart: Whether ranks are to draw apart, as ``seed_everything(workers=True)`` asks for.
    """

    def __init__(self, own: Callable[[int], None] | None, apart: bool) -> None:
        self.own, self.apart = own, apart

    def __call__(self, worker_id: int) -> None:
        end_with_parent()
        parent = os.getppid()

        def leave_it_to_parent(number: int, frame: FrameType | None) -> None:
            if os.getppid() != parent:
                os._exit(128 + number)

        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):  # Windows has fewer
                signal.signal(getattr(signal, name), leave_it_to_parent)
        if self.own is not None:
            self.own(worker_id)
        elif self.apart:
            rng.worker_init(worker_id)


def end(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, by force if need be; others have none."""
    workers = getattr(iterator, "_workers", None)
    if not workers or iterator._shutdown:
        return
    # Or torch's handler of SIGCHLD takes the end of one for an accident, and raises anywhere.
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    # What torch's own shutdown begins with; it would then wait five seconds for each of them.
    iterator._workers_done_event.set()
    for queue in iterator._index_queues:
        queue.put(None)
    deadline = monotonic() + PATIENCE
    for worker in workers:
        worker.join(timeout=max(0.0, deadline - monotonic()))
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    iterator._shutdown_workers()


_watched: WeakSet[Any] = WeakSet()


def watch(kind: Any) -> None:
    """See to it that the workers of ``kind.iterator`` have ended when this process does.

    multiprocessing ends them by a SIGTERM then, which they leave to their parent, and waits.
    """
    _watched.add(kind)


@atexit.register
def _end_all() -> None:
    for kind in list(_watched):
        end(kind.iterator)
