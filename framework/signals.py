"""Signals during a run: the first is noted and the run ends well, a second ends it at once."""

from __future__ import annotations

import builtins
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

USR1 = getattr(signal, "SIGUSR1", -1)
"""What Slurm sends ahead of its time limit; -1 where the platform has none."""
NOTED = [number for number in (signal.SIGINT, signal.SIGTERM, USR1) if number > 0]


class Signals:
    """Notes signals for ``run`` while the block lasts; the handlers from before come back after.

    The handler only sets a flag: the loop stops at its next boundary. A signal that is ignored
    stays so, and SIGUSR1 stays with a handler that is there already. Elsewhere than in the main
    thread Python allows no handlers, and signals do what they did.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in NOTED:
                if _is_free(number):
                    self._before[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no handlers here: those of a stream closed elsewhere stay
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        run, before = self._run, self._run.agreement.signal
        # A stream closed in another thread has left this handler behind.
        if run.trainer.is_running and run.agreement.note(number):
            return
        # Slurm's SIGTERM at the limit asks for nothing new, and the save may be under way.
        if (before, number) != (USR1, signal.SIGTERM):
            self.__exit__()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(exit_code(number))


def _is_free(number: int) -> bool:
    handler = signal.getsignal(number)
    if number == USR1:
        return handler is signal.SIG_DFL
    return handler is not signal.SIG_IGN


def reason(number: int) -> str:
    """Return why training stopped, where signal ``number`` cut it."""
    return f"interrupted by {signal.Signals(number).name}"


def exit_code(number: int) -> int:
    """Return the code a shell expects of a process that signal ``number`` ended."""
    return 128 + number


def is_interactive() -> bool:
    """Return whether a person is at a prompt, to whom control should return."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")
