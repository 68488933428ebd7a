"""How far a loop is, how fast it goes, and the words for it: shared by the progress displays."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from leyden.trainer import Trainer

HALF_LIFE = 10.0
"""Seconds after which a measured second counts half: fast enough to follow, slow enough to read."""


class Meter:
    """Counts the batches of one loop and knows their recent rate.

    A display adds to ``done`` at every batch, and calls `update` only when it is to show the rest.
    """

    def __init__(self, label: str = "", total: float = math.inf) -> None:
        self.label, self.total, self.done = label, total, 0
        self.began = monotonic()
        self.wait_share: float | None = None
        self._seconds = self._batches = self._waited = 0.0
        self.resume()

    def resume(self, data_wait: float = 0.0) -> None:
        """Leave the time since the last `update` out of the rate: it was not this loop's."""
        self._counted, self._at, self._wait = self.done, monotonic(), data_wait

    def update(self, data_wait: float | None = None) -> None:
        """Bring the rate up to now.

        Args:
            data_wait: Seconds waited for data so far, on the same clock at every call; None where
                nobody measures them.
        """
        seconds = monotonic() - self._at
        keep = 0.5 ** (seconds / HALF_LIFE)
        self._seconds = self._seconds * keep + seconds
        self._batches = self._batches * keep + self.done - self._counted
        if data_wait is not None and self._seconds:
            self._waited = self._waited * keep + data_wait - self._wait
            self.wait_share = min(1.0, self._waited / self._seconds)
        self.resume(data_wait or 0.0)

    @property
    def rate(self) -> float | None:
        """Batches per second of late; None before the first."""
        return self._batches / self._seconds if self._batches and self._seconds else None

    def cells(self, *, finished: bool = False) -> list[str]:
        """Return what a line of progress says: name, count, rate, time, share of waiting."""
        if finished:
            time = f"took {duration_text(monotonic() - self.began)}"
        elif math.isinf(self.total):
            time = ""
        else:
            left = max(0, self.total - self.done) / self.rate if self.rate else None
            time = f"ETA {duration_text(left)}"
        data = "" if self.wait_share is None else f"data {self.wait_share:.0%}"
        return [self.label, count_text(self.done, self.total), rate_text(self.rate), time, data]


def begin_epoch(meter: Meter, trainer: Trainer) -> None:
    """Set ``meter`` to where the epoch begins, or resumes; its rate stays as it was."""
    last = f"/{trainer.max_epochs}" if trainer.max_epochs else ""
    meter.label = f"Epoch {trainer.current_epoch + 1}{last}"
    meter.done = trainer.state.batch
    meter.resume(trainer.data_wait)


def update_training(meter: Meter, trainer: Trainer) -> None:
    """Bring ``meter`` up to now: its rate, and how many batches the epoch will have run."""
    meter.update(trainer.data_wait)
    meter.total = trainer.num_training_batches
    # Who optimizes by hand decides how many batches a step takes.
    if trainer.max_steps is not None and trainer.module.automatic_optimization:
        left, window = trainer.max_steps - trainer.global_step, trainer.accumulate_grad_batches
        limit = meter.done + left * window - meter.done % window if left > 0 else meter.done
        meter.total = min(meter.total, limit)


def evaluation_meter(trainer: Trainer) -> Meter:
    """Return the meter of the evaluation that begins, over the batches of all its loaders."""
    if trainer.sanity_checking:
        label, counts = "Sanity check", trainer.num_sanity_val_batches
    elif trainer.testing:
        label, counts = "Testing", trainer.num_test_batches
    elif trainer.predicting:
        label, counts = "Predicting", trainer.num_predict_batches
    else:
        label, counts = "Validating", trainer.num_val_batches
    return Meter(label, sum(counts))


def count_text(done: int, total: float) -> str:
    """Return ``" 20/500"``, as wide at the start as at the end, or ``"20"`` without a total."""
    if math.isinf(total):
        return str(done)
    return f"{done:>{len(str(int(total)))}}/{int(total)}"


def rate_text(rate: float | None) -> str:
    """Return ``"353.2 it/s"``, or ``"2.50 s/it"`` for what takes longer than a second."""
    if rate is None:
        return "- it/s"
    if rate < 1:
        return f"{1 / rate:.2f} s/it"
    return f"{rate:.{0 if rate >= 1000 else 1}f} it/s"


def duration_text(seconds: float | None) -> str:
    """Return ``"0:01:12"``."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def number_text(value: SupportsFloat) -> str:
    """Return ``value`` in four digits, so that a changing number keeps its width."""
    number = float(value)
    if number.is_integer() and abs(number) < 1e6:
        return str(int(number))
    return f"{number:#.4g}".rstrip(".")


def metric_texts(trainer: Trainer) -> list[str]:
    """Return ``"train/loss=0.5320"`` for each metric meant for the progress bar.

    Reading them waits for the device, so this is for a few times a second.
    """
    metrics = trainer.progress_bar_metrics
    return [f"{name}={number_text(value)}" for name, value in metrics.items()]
