"""Lines at the foot of the terminal that are drawn over in place, while the rest scrolls above."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


class TerminalRegion:
    """Opens on the first `draw` and stays until `close`, which leaves what was drawn last.

    Meanwhile whatever is printed or logged, by whom ever, goes above the region, unchanged.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._content: RenderableType = ""
        self._streams: list[_Stream] = []

    def draw(self, content: RenderableType) -> None:
        """Show ``content`` in place of what was there."""
        self._content = content
        if self._live is None:
            self._open()
        self.refresh()

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # A console of its own, on today's stdout: nothing is left behind for the next run to meet.
        console = Console(file=sys.stdout)
        # Drawn by the caller alone: a thread could hold a lock just when a data worker is forked.
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        if console.is_terminal:
            self._streams = [_Stream(self, "stdout"), _Stream(self, "stderr")]

    def refresh(self, printed: str | None = None) -> None:
        """Draw what is there again, below the lines ``printed`` and any line that is not ended."""
        from rich.console import Group
        from rich.text import Text

        if self._live is None:
            return
        unended = [Text.from_ansi(stream.unended) for stream in self._streams if stream.unended]
        self._live.update(Group(*unended, self._content), refresh=printed is None)
        if printed is not None:
            self._live.console.out(printed, highlight=False)

    def close(self) -> None:
        """Give the terminal back; closing twice is closing once."""
        for stream in self._streams:
            stream.leave()
        self._streams = []
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Stream:
    """Stands in for ``sys.stdout`` or ``sys.stderr`` and writes above the region."""

    def __init__(self, region: TerminalRegion, name: str) -> None:
        self._region, self._name = region, name
        self._file: TextIO = getattr(sys, name)
        self.unended, self._left = "", False
        # A stream that goes elsewhere, to a file, does not disturb the terminal.
        if self._file.isatty():
            self._replace(self._file, cast("TextIO", self))

    def leave(self) -> None:
        """Put the real stream back, wherever this one still stands in for it."""
        if self.unended:
            self.write("\n")
        self._replace(cast("TextIO", self), self._file)
        self._left = True

    def write(self, text: str) -> int:
        if self._left:  # by somebody who took this stream for the real one
            return self._file.write(text)
        # Of a line that returned to its start, as other progress bars do, the last form counts.
        *lines, self.unended = map(_last_form, (self.unended + text).split("\n"))
        if lines:
            self._region.refresh("\n".join(lines))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self.unended:
            self._region.refresh()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _replace(self, old: TextIO, new: TextIO) -> None:
        if getattr(sys, self._name) is old:
            setattr(sys, self._name, new)
        for handler in _stream_handlers():
            if handler.stream is old:
                handler.setStream(new)


def _last_form(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers that keep the stream they were made with."""
    for logger in (logging.root, *logging.Logger.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
