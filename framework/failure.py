"""What a rank says when it fails, so that the launcher shows the rank that failed first."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

LAUNCHER = "LEYDEN_LAUNCHER_PID"
"""Variable that names the launching process to those it starts, which end with it."""
_PR_SET_PDEATHSIG = 1
LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|socket|"
    r"NCCL.*(abort|remote)|recvValue failed",
)
"""What collectives say when another rank is gone or does not come."""
PATIENCE = 5.0
"""Seconds that a rank which only lost another leaves to the launcher to find that one."""


def end_with_launcher() -> None:
    """Let this rank end when the process that started it is killed."""
    if sys.platform == "linux" and os.environ.get(LAUNCHER) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_consequence(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank is gone or did not come."""
    seen: BaseException | None = error
    while seen is not None:
        name = type(seen).__name__
        if name in ("DistBackendError", "DistNetworkError", "DistStoreError"):
            return True
        if isinstance(seen, RuntimeError) and LOST.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def tell(error: BaseException) -> None:
    """Leave ``error`` where an elastic launcher looks for it; nothing where there is none.

    A rank that lost another waits a little before it ends, so that the other is found first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    follows = is_consequence(error)
    if file and not Path(file).exists():
        report = {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "host": socket.gethostname(),
                "is_consequence": follows,
                # The launcher takes the earliest for the cause.
                "timestamp": str(int(time.time()) + (3600 if follows else 0)),
            },
        }
        Path(file).write_text(json.dumps({"message": report}))
    if follows:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(PATIENCE)
