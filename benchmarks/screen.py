"""A terminal to run under, whose far end counts what is drawn."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Screen:
    """The far end of a pseudo-terminal: reads what is drawn and counts redraws."""

    def __init__(self, master: int, stream) -> None:
        self.redraws, self._master, self._stream = 0, master, stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                drawn = os.read(self._master, 65536)
            except OSError:
                return
            self.redraws += b"it/s" in drawn

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.close()
            self._thread.join(5)
            os.close(self._master)


@contextmanager
def terminal() -> Iterator[Screen]:
    """Make standard output a terminal inside the block."""
    master, slave = pty.openpty()
    stream, before = os.fdopen(slave, "w"), sys.stdout
    screen = Screen(master, stream)
    sys.stdout = stream
    os.environ.update(COLUMNS="120", TERM="xterm-256color")
    try:
        yield screen
    finally:
        sys.stdout = before
        screen.close()
