"""SIGINT and SIGTERM during a run: the first is noted, the second ends at once."""

from __future__ import annotations

import builtins
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

NOTED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Notes signals for ``run`` while the block lasts; the handlers from before come back after.

    The handler only sets a flag: the loop stops at its next boundary. Elsewhere than in the main
    thread Python allows no handlers, and signals do what they did.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NOTED}

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no handlers here: those of a stream closed elsewhere stay
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A stream closed in another thread has left this handler behind.
        if self._run.interrupted_by is not None or not self._run.trainer.is_running:
            self.__exit__()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self._run.interrupted_by = number
        self._run.state.stop = f"interrupted by {signal.Signals(number).name}"


def exit_code(number: int) -> int:
    """Return the code a shell expects of a process that signal ``number`` ended."""
    return 128 + number


def is_interactive() -> bool:
    """Return whether a person is at a prompt, to whom control should return."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")
