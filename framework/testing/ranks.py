"""Functions run on several ranks, each in a process of its own, for tests."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from leyden import failure

_PRELOADED = [
    "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_loader", "torchmetrics", "leyden.testing", "pytest",
]  # fmt: skip
"""What takes a rank seconds to import; those that are not installed are left out."""
_PR_SET_PDEATHSIG = 1


def on_ranks(
    count: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run ``function(*args)`` on ``count`` ranks of this machine, and return what each returned.

    Each is a new process that has torch loaded, with the environment that torchrun would give it.

    Args:
        count: Ranks.
        function: Defined at the top level of a file.
        *args: What it is called with; they and its result travel by pickle.
        timeout: Seconds for all of it.

    Raises:
        AssertionError: A rank raised, died, or was not done in time; its traceback is shown.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        call = _file_of(function), function.__qualname__, pickle.dumps(args)
        ranks = [
            context.Process(target=_rank, args=(rank, count, folder, call), daemon=False)
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        return _collected(ranks, folder, monotonic() + timeout)


def _file_of(function: Callable[..., Any]) -> tuple[str, str]:
    module = sys.modules[function.__module__]
    return function.__module__, str(module.__file__)


def _collected(ranks: list[Any], folder: str, deadline: float) -> list[Any]:
    try:
        while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
            if monotonic() > deadline:
                break
            wait([p.sentinel for p in ranks if p.is_alive()], 0.5)
        results, problems = [], []
        if any(p.exitcode for p in ranks):
            for process in ranks:  # those that have lost one notice it at once
                process.join(timeout=10)
        for rank, process in enumerate(ranks):
            found = Path(folder, f"{rank}.pt")
            if process.is_alive():
                problems.append(f"rank {rank} did not end in time")
            elif not found.exists():
                problems.append(f"rank {rank} died with code {process.exitcode}")
            else:
                result, error = torch.load(found, weights_only=False)
                results.append(result)
                if error:
                    problems.append(f"rank {rank} raised\n{error}")
        assert not problems, "\n".join(problems)
        return results
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(rank: int, count: int, folder: str, call: tuple[tuple[str, str], str, bytes]) -> None:
    if sys.platform == "linux":  # the server they are forked from ends with the test process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    failure.PATIENCE = 0.0  # no launcher looks for the rank that failed first
    result, error = None, ""
    try:
        _meet(rank, count, folder)
        (name, file), path, pickled = call
        found: Any = _loaded(name, file)
        for part in path.split("."):
            found = getattr(found, part)
        result = found(*pickle.loads(pickled))
    except BaseException:
        error = traceback.format_exc()
    written = Path(folder, f"{rank}.part")
    torch.save((result, error), written)
    written.rename(Path(folder, f"{rank}.pt"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


def _meet(rank: int, count: int, folder: str) -> None:
    """Agree on a free port: rank 0 takes one and leaves it in a file."""
    file = FileStore(str(Path(folder, "store")), count)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.set("port", str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = file.get("port").decode()


def _loaded(name: str, file: str) -> Any:
    """Return the module of a test file, which need not be where imports look."""
    if name in sys.modules:
        return sys.modules[name]
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
