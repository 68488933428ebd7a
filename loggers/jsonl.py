"""JSONLLogger: metrics as a JSON object per line, in ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from .folder import FolderLogger, number, plain, replacing, whole_lines


class JSONLLogger(FolderLogger):
    """Appends a line to ``metrics.jsonl`` at each call, and writes ``hparams.json``.

    A line holds ``step``, ``time`` (seconds since 1970) and the metrics. It is strict JSON: NaN and
    infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` and
    pandas read back. It is written at once, so a process that is killed loses none. Opened where a
    ``metrics.jsonl`` is, it goes on below the lines that are there.
    """

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        super().open(folder)
        path = folder / "metrics.jsonl"
        if not path.exists():
            return
        with self._reading(path), replacing(path) as file:
            for line in whole_lines(path):
                step = json.loads(line)["step"]
                if resumed_at is None or step <= resumed_at:
                    file.write(line)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: plain(number(value)) for name, value in metrics.items()}
        record = {"step": step, "time": time.time()} | values | {"step": step}
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
