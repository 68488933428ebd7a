"""Torch's elastic launcher, on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from leyden.errors import ConfigError, RankError
from leyden.failure import LAUNCHER


class Elastic:
    """Starts the script once more for each rank, or calls a function in forked processes.

    Rank 0 writes to the terminal, the others to files, whose folder is shown when one fails.

    Args:
        grace: Seconds that ranks have to end by themselves after one has failed or a signal came;
            a save on SIGTERM is to be done within them.
        log_dir: Where the files go; a temporary folder by default.
    """

    max_nodes = 1

    def __init__(self, grace: int = 30, log_dir: str | Path | None = None) -> None:
        if not (isinstance(grace, int) and grace >= 0):
            raise ConfigError(f"grace={grace!r} must be whole seconds, 0 or more.")
        self.grace, self.log_dir = grace, log_dir

    def joins(self) -> bool:
        return False

    def launch(self, call: Callable[[], Any] | None, count: int) -> Any:
        folder = str(self.log_dir or tempfile.mkdtemp(prefix="leyden-ranks-"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        quiet = {rank: Std.ALL for rank in range(1, count)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="fork",
            shutdown_timeout=self.grace,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=quiet),
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        os.environ[LAUNCHER] = str(os.getpid())
        with _handlers_kept():
            return self._launched(config, call, folder)

    def _launched(self, config: LaunchConfig, call: Callable[[], Any] | None, folder: str) -> Any:
        try:
            if call is None:
                elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
                return 0

            def on_rank() -> Any:
                return call()

            return elastic_launch(config, on_rank)()[0]
        except ChildFailedError as error:
            report, code = _report(error, folder)
            if call is not None:
                raise RankError(report) from None
            print(report, file=sys.stderr, flush=True)
            return code
        except SignalException as ended:
            if call is not None:
                raise KeyboardInterrupt from None
            return 128 + ended.sigval
        finally:
            del os.environ[LAUNCHER]


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put signal handlers back, which torch's launcher leaves its own in place of."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT] if is_main else []
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _report(error: ChildFailedError, folder: str) -> tuple[str, int]:
    """Return what to show of the ranks that failed, the cause first, and the exit code."""
    failures = sorted(
        error.failures.items(), key=lambda item: (_follows(item[1]), item[1].timestamp)
    )
    (rank, cause), *others = failures
    told = _told(cause)
    host = told.get("host", "this machine")
    lines = [f"Rank {rank} on {host} failed first, with exit code {_code(cause)}:"]
    text = told.get("py_callstack") or _tail(cause, rank, folder)
    lines += [text.rstrip() or _message(cause)]
    lines += [f"After it, rank {other}: {_message(failure)}" for other, failure in others]
    lines.append(f"The output of ranks 1 and up is in {folder}")
    return "\n".join(lines), _code(cause)


def _told(failure: ProcessFailure) -> dict[str, Any]:
    """Return what a rank left of its error; nothing where it had no time to."""
    data = failure.error_file_data or {}
    message = data.get("message")
    found = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return found if isinstance(found, dict) else {}


def _follows(failure: ProcessFailure) -> bool:
    return bool(_told(failure).get("is_consequence", False))


def _message(failure: ProcessFailure) -> str:
    """Return a rank's error in one line."""
    data = (failure.error_file_data or {}).get("message")
    text = data.get("message") if isinstance(data, dict) else failure.message
    lines = str(text or "").strip().splitlines()
    if not lines or lines[0].startswith("To enable traceback"):
        return f"ended with exit code {_code(failure)}"
    return lines[0]


def _code(failure: ProcessFailure) -> int:
    return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode


def _tail(failure: ProcessFailure, rank: int, folder: str, lines: int = 40) -> str:
    """Return the end of what a rank wrote to stderr; rank 0's is on the terminal."""
    found = sorted(Path(folder).glob(f"*/attempt_*/{rank}/stderr.log"))
    text = found[-1].read_text(errors="replace").splitlines()[-lines:] if found else []
    return "\n".join([_message(failure), *text])
