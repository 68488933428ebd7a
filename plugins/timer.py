"""Timer: ends a run when its time is up, and knows how long each stage took."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from leyden.callback import Callback
from leyden.errors import ConfigError, unknown

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.state import State
    from leyden.trainer import Trainer

STAGES = ("train", "validate", "test", "predict")
INTERVALS = ("step", "epoch")


class Timer(Callback):
    """Ends training once it has gone on for a given time, all resumed parts counted.

    Args:
        duration: ``"DD:HH:MM:SS"``, a timedelta, or its arguments as in ``{"hours": 12}``; None
            only measures.
        interval: Look at the clock after each ``"step"`` or each ``"epoch"``.
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
    ) -> None:
        if interval not in INTERVALS:
            raise unknown("interval of a Timer", interval, INTERVALS, "Pass one of these.")
        self.duration = None if duration is None else _timedelta(duration)
        self.interval = interval
        self._state: State | None = None
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def start_time(self, stage: str = "train") -> float | None:
        """Return when ``stage`` last began, on the monotonic clock; None if it never did."""
        return self._started.get(_checked_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when ``stage`` last ended, on the monotonic clock; None if it is going on."""
        return self._ended.get(_checked_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in ``stage``: all of training, the last of any other."""
        started, ended = self.start_time(stage), self.end_time(stage)
        if stage == "train":
            return 0.0 if self._state is None else self._state.elapsed
        return 0.0 if started is None else (ended or monotonic()) - started

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds until ``stage`` has taken the whole duration; None without one."""
        elapsed = self.time_elapsed(stage)
        return None if self.duration is None else self.duration.total_seconds() - elapsed

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._state = trainer.state
        self._begin("train")
        self._check(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self.interval == "epoch":
            self._check(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._ended["train"] = monotonic()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._ended["validate"] = monotonic()

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._ended["test"] = monotonic()

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._ended["predict"] = monotonic()

    def _begin(self, stage: str) -> None:
        self._started[stage] = monotonic()
        self._ended.pop(stage, None)

    def _check(self, trainer: Trainer) -> None:
        elapsed = trainer.state.elapsed
        if self.duration is not None and elapsed >= self.duration.total_seconds():
            trained = timedelta(seconds=round(elapsed))
            trainer.should_stop = (
                f"the time limit of {self.duration} is over: trained for {trained}"
            )


def is_out_of_time(callbacks: list[Callback]) -> bool:
    """Return whether one of ``callbacks`` is a Timer whose time is over, on this process."""
    remaining = [c.time_remaining() for c in callbacks if isinstance(c, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)


def _timedelta(duration: str | timedelta | Mapping[str, float]) -> timedelta:
    wanted = "Pass 'DD:HH:MM:SS', a timedelta, or its arguments as in {'hours': 12}."
    if isinstance(duration, str):
        parts = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if parts is None:
            raise ConfigError(f"duration={duration!r} is not a duration. {wanted}")
        units = ("days", "hours", "minutes", "seconds")
        duration = dict(zip(units, map(int, parts.groups()), strict=True))
    if not isinstance(duration, timedelta):
        try:
            duration = timedelta(**duration)
        except TypeError as error:
            raise ConfigError(
                f"duration={duration!r} is not a duration: {error}. {wanted}"
            ) from None
    if duration < timedelta(0):
        raise ConfigError(f"duration={duration!r} is negative. {wanted}")
    return duration


def _checked_stage(stage: str) -> str:
    if stage not in STAGES:
        raise unknown("stage", stage, STAGES, "Pass one of these.")
    return stage
