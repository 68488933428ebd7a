"""CSVLogger: metrics as a table, in ``metrics.csv``."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from leyden.errors import ConfigError

from .folder import FolderLogger, replacing, whole_lines

if TYPE_CHECKING:
    from .folder import Values


class CSVLogger(FolderLogger):
    """Appends a row to ``metrics.csv`` at each call, and writes ``hparams.json``.

    Columns are ``step``, ``epoch`` where it is logged, then the metrics as they first came. A
    metric that first comes later gets a column, empty in the rows above it: the file is then
    written anew beside the old one and put in its place. As that happens once per column, n rows
    cost O(n). Opened where a ``metrics.csv`` is, it goes on below the rows that are there.

    Args:
        save_dir: The folder for its runs; None for the folder of the Trainer's run.
        name: A folder in ``save_dir`` for runs that belong together; None for none.
        version: The run's folder in there: a number N means ``version_N``, None the next free one.
        flush_logs_every_n_steps: Steps whose rows are held back and written together. With 1, a
            process that is killed loses no row.
    """

    FILES = "metrics.csv"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version)
        if flush_logs_every_n_steps < 1:
            raise ConfigError(
                f"flush_logs_every_n_steps={flush_logs_every_n_steps} is not possible: it counts "
                "steps, from 1 (each row is written at once)."
            )
        self.flush_logs_every_n_steps = flush_logs_every_n_steps
        self._columns: dict[str, None] = {}
        self._held: list[Values] = []

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        super().open(folder)
        self._columns = {}
        if (folder / self.FILES).exists():
            last_step, again = self._take_up(resumed_at)
            self._rewrite((), math.inf if last_step is None else last_step)
            for values, step in again:
                self._record(values, step)

    def _record(self, values: Values, step: int) -> None:
        self._held.append(values | {"step": step})
        if step - self._held[0]["step"] >= self.flush_logs_every_n_steps - 1:
            self.flush()

    def flush(self) -> None:
        super().flush()
        if not self._held:
            return
        path = self.folder / self.FILES
        if not all(row.keys() <= self._columns.keys() for row in self._held):
            self._rewrite(name for row in self._held for name in row)
        with path.open("a", newline="", encoding="utf-8") as file:
            self._table(file).writerows(self._held)
        self._held.clear()

    def _rewrite(self, names: Iterable[str], last_step: float = math.inf) -> None:
        """Give the file columns for ``names`` too, and only its rows up to ``last_step``."""
        path = self.folder / self.FILES
        with self._reading(path), replacing(path) as file:
            old = csv.DictReader(whole_lines(path) if path.exists() else ())
            columns = dict.fromkeys([*(old.fieldnames or ()), *names])
            ordered = sorted(columns, key=lambda name: (name != "step", name != "epoch"))
            self._columns = dict.fromkeys(ordered)
            table = self._table(file)
            table.writeheader()
            table.writerows(row for row in old if int(row["step"]) <= last_step)

    def _table(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
