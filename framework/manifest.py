"""What a checkpoint says of itself: where, when and by what it was saved."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

FORMAT = 2
"""Version of what a checkpoint holds. Newer code reads every older one."""


def manifest(run: Run, weights_only: bool) -> dict[str, Any]:
    """Return the manifest of a checkpoint of ``run`` as it stands, in plain values."""
    state = run.state
    return {
        "format": FORMAT,
        "kind": "weights" if weights_only else "training",
        "epoch": state.epoch,
        "global_step": state.step,
        "total_batches": state.total_batches,
        "exact": not run.is_in_step,
        "module": type(run.module).__name__,
        "world_size": run.strategy.world_size,
        "time": time.time(),
        "host": socket.gethostname(),
        "git": git_revision(str(Path.cwd())),
        **versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what makes the numbers."""
    found = {"version": metadata.version("leyden"), "python": platform.python_version()}
    for name in ("torch", "numpy"):
        if (package := sys.modules.get(name)) is not None:
            found[name] = str(package.__version__)
    return found


@cache
def git_revision(folder: str) -> str | None:
    """Return the commit checked out in ``folder``, or None where there is none."""
    try:
        asked = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
