"""JSONLLogger: metrics as a JSON object per line, in ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .folder import FolderLogger, plain, replacing, whole_lines

if TYPE_CHECKING:
    from .folder import Values


class JSONLLogger(FolderLogger):
    """Appends a line to ``metrics.jsonl`` at each call, and writes ``hparams.json``.

    A line holds ``step``, ``time`` (seconds since 1970) and the metrics. It is strict JSON: NaN and
    infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` and
    pandas read back. It is written at once, so a process that is killed loses none. Opened where a
    ``metrics.jsonl`` is, it goes on below the lines that are there.
    """

    FILES = "metrics.jsonl"

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        super().open(folder)
        path = folder / self.FILES
        if not path.exists():
            return
        last_step, again = self._take_up(resumed_at)
        with self._reading(path), replacing(path) as file:
            for line in whole_lines(path):
                if last_step is None or json.loads(line)["step"] <= last_step:
                    file.write(line)
        for values, step in again:
            self._record(values, step)

    def _record(self, values: Values, step: int) -> None:
        numbers = {name: plain(value) for name, value in values.items()}
        record = {"step": step, "time": time.time()} | numbers | {"step": step}
        with (self.folder / self.FILES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
