"""EarlyStopping: ends a run when a metric no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.callback import Callback
from leyden.errors import ConfigError

from .monitored import checked_mode, missing

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.trainer import Trainer

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Asks for the end of training when a metric has stopped improving, at every check anew.

    A request before ``min_epochs`` or ``min_steps`` is dropped, and training goes on for good if
    the metric recovers meanwhile. A run that it has ended and that is resumed with unchanged
    settings trains nothing. With several ranks all go by rank 0's value, where a metric differs.

    Args:
        monitor: Logged metric to watch.
        min_delta: Change that counts as an improvement: more than this.
        patience: Checks without improvement after which to stop.
        verbose: Say at each improvement how much it was.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher ones.
        strict: Raise if the metric is missing at a check; False warns once.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop as soon as the metric is better than this.
        divergence_threshold: Stop as soon as the metric is worse than this.
        check_on_train_epoch_end: Check at the end of epochs, or, if False, of validations. None
            means after validations if the run has any.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ConfigError(
                f"EarlyStopping(patience={patience}, min_delta={min_delta}): neither can be "
                "negative. For a metric to maximise pass mode='max'."
            )
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = checked_mode(mode)
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._has_warned = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(inf if self.mode == "min" else -inf)
        self._last: float | None = None

    @property
    def state_key(self) -> str:
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "last": self._last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]
        self._last = state_dict["last"]

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.state.total_batches == 0:
            self._begin_anew()

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._ask_to_stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._checks_epochs(trainer):
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        is_fit = trainer.stage == "fit" and not trainer.sanity_checking
        if is_fit and not self._checks_epochs(trainer):
            self._check(trainer)

    def _checks_epochs(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return sum(trainer.num_val_batches) == 0

    def _check(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        if trainer.fast_dev_run:
            return
        own = metrics.get(self.monitor)
        value: Tensor | None = trainer.broadcast(own if own is None else own.detach().cpu().clone())
        if value is None:
            self._refuse(trainer, metrics)
            return
        self._last, best = float(value), float(self.best_score)
        counts = isfinite(self._last) or not self.check_finite
        if counts and self._is_better(self._last, best, by=self.min_delta):
            self.best_score, self.wait_count = value, 0
            if self.verbose and trainer.is_global_zero:
                log.info("%s improved from %.5g to %.5g", self.monitor, best, self._last)
        else:
            self.wait_count += 1
        self._ask_to_stop(trainer)

    def _ask_to_stop(self, trainer: Trainer) -> None:
        reason = None if self._last is None else self._reason(self._last)
        if reason is not None:
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = f"{self.monitor} {reason}"

    def _reason(self, value: float) -> str | None:
        """Return why to stop after a check that saw ``value``, or None to go on."""
        if self.check_finite and not isfinite(value):
            return f"is {value} (best so far {float(self.best_score):.5g})"
        threshold, divergence = self.stopping_threshold, self.divergence_threshold
        if threshold is not None and self._is_better(value, threshold):
            return f"reached {value:.5g}: stopping_threshold={threshold}"
        if divergence is not None and self._is_better(divergence, value):
            return f"is at {value:.5g}: divergence_threshold={divergence}"
        if self.wait_count >= max(1, self.patience):
            return (
                f"has not improved on {float(self.best_score):.5g} for {self.wait_count} checks "
                f"(last {value:.5g}): patience={self.patience}"
            )
        return None

    def _is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        gain = than - value if self.mode == "min" else value - than
        return gain > by

    def _refuse(self, trainer: Trainer, known: Mapping[str, Tensor]) -> None:
        error = missing(f"EarlyStopping(monitor={self.monitor!r})", self.monitor, known)
        if self.strict:
            raise error
        if not self._has_warned and trainer.is_global_zero:
            self._has_warned = True
            log.warning("%s Until then it checks nothing.", error)
