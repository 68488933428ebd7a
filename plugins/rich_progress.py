"""Progress as live bars in a terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from leyden.callback import Callback

from .progress_text import Meter, begin_epoch, evaluation_meter, metric_texts, update_training
from .terminal_region import TerminalRegion

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from leyden.module import Module
    from leyden.trainer import Trainer

REDRAW_SECONDS = 0.2
CHANGES_PER_SECOND = 5
"""How many beginnings and ends of loops are shown at once; those of short epochs can wait."""


class RichProgress(Callback):
    """Shows the running loops as bars: batches, rate, ETA, share of waiting for data, metrics.

    It is drawn at most some five times a second, and only then are metrics read. Training keeps one
    bar for the whole fit; those of its validations come and go. In a narrow terminal the bar gets
    shorter, then the less important numbers give way.
    """

    is_progress_bar = True

    def __init__(self) -> None:
        self._region: TerminalRegion | None = None
        self._fits = False
        self._due = math.inf
        self._began, self._changes = 0.0, 0
        self._train = self._evaluation = Meter()
        self._shown: list[Meter] = []

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Get ready to draw at the first occasion; ranks other than 0 never do."""
        self._region = TerminalRegion() if trainer.is_global_zero else None
        self._fits = stage == "fit"
        self._due = 0.0 if self._region else math.inf
        self._began, self._changes = monotonic(), -CHANGES_PER_SECOND
        self._shown = []

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._train = Meter()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._shown = [self._train]
        begin_epoch(self._train, trainer)
        self._draw_change(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._train.done += 1
        if monotonic() >= self._due:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._finish(trainer)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._train in self._shown:
            update_training(self._train, trainer)
        self._evaluation = evaluation_meter(trainer)
        self._shown.append(self._evaluation)
        self._draw_change(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self._evaluation.done += 1
        if monotonic() >= self._due:
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not self._fits:
            self._finish(trainer)
            return
        self._train.resume(trainer.data_wait)
        self._shown.remove(self._evaluation)
        self._draw_change(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Give the terminal back, whatever ended the run."""
        self._due = math.inf
        if self._region is not None:
            self._region.close()

    def _draw_change(self, trainer: Trainer) -> None:
        """Draw now that a loop began or ended, unless too many did."""
        if self._changes < CHANGES_PER_SECOND * (monotonic() - self._began):
            self._changes += 1
            self._draw(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._draw(trainer, finished=True)
        if self._region is not None:
            self._region.close()

    def _draw(self, trainer: Trainer, *, finished: bool = False) -> None:
        if self._region is None:
            return
        if self._evaluation in self._shown:
            self._evaluation.update()
        elif self._train in self._shown:
            update_training(self._train, trainer)
        metrics = metric_texts(trainer) if self._train in self._shown else []
        self._region.draw(_Bars(tuple(self._shown), metrics, finished))
        self._due = monotonic() + REDRAW_SECONDS


CELL_WIDTHS = (12, 0, 11, 11, 9)
"""What each cell takes at least, so that a number that gains a digit moves nothing."""
FORMS = "<>><<"
STYLES = ("", "", "dim", "", "dim")
DROPPED_FIRST = (4, 2, 3)
"""Cells that give way in a narrow terminal: the wait for data, the rate, the time."""
BAR_LEAST, BAR_MOST = 10, 40


@dataclass(frozen=True)
class _Bars:
    """A line for each meter, in columns, and the metrics below the first."""

    meters: tuple[Meter, ...]
    metrics: list[str]
    finished: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        if not self.meters:
            return
        rows = [meter.cells(finished=self.finished) for meter in self.meters]
        columns = zip(CELL_WIDTHS, zip(*rows, strict=True), strict=False)
        widths = [max(least, *map(len, cells)) if any(cells) else 0 for least, cells in columns]
        bar = _fit(widths, options.max_width)
        indent = widths[0] + 2 if bar else 0
        for meter, row in zip(self.meters, rows, strict=True):
            line = Text(row[0].ljust(widths[0]), no_wrap=True, overflow="ellipsis")
            if bar and not math.isinf(meter.total):
                line.append("  ").append_text(_bar(meter, bar, plain=options.ascii_only))
            for cell, width, form, style in list(zip(row, widths, FORMS, STYLES, strict=True))[1:]:
                if width:
                    line.append(f"  {cell:{form}{width}}", style)
            line.rstrip()
            yield line
            if self.metrics and meter is self.meters[0]:
                yield Padding.indent(Text("  ").join(map(_metric, self.metrics)), indent)


def _fit(widths: list[int], room: int) -> int:
    """Set to 0 the widths that give way, and return the width of the bar; 0 if none fits."""
    for dropped in (None, *DROPPED_FIRST):
        if dropped is not None:
            widths[dropped] = 0
        left = room - sum(width + 2 for width in widths if width)
        if left >= BAR_LEAST:
            return min(left, BAR_MOST)
    return 0


def _bar(meter: Meter, width: int, *, plain: bool) -> Text:
    from rich.text import Text

    share = min(1.0, meter.done / meter.total) if meter.total else 1.0
    filled = int(width * share)
    done, rest = ("#", "-") if plain else ("━", "─")
    return Text.assemble(
        (done * filled, "green" if share == 1 else "cyan"), (rest * (width - filled), "dim")
    )


def _metric(text: str) -> Text:
    """Return ``"name=value"`` with the value standing out."""
    from rich.text import Text

    name, _, value = text.rpartition("=")
    return Text.assemble((f"{name}=", "dim"), value)
