"""The numbers a ModelCheckpoint ranks by and writes into names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from math import inf, isnan, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checkpoint_names import COUNTS
from .checkpoint_schedule import epoch_of
from .monitored import missing

if TYPE_CHECKING:
    from leyden.trainer import Trainer

    from .checkpoint_schedule import At

log = logging.getLogger(__name__)


class Numbers:
    """Reads numbers by name from what a run has logged.

    Args:
        monitor: The metric to rank by; None ranks by age.
        prefers_high: Whether the best has the highest score.
    """

    def __init__(self, monitor: str | None, prefers_high: bool) -> None:
        self._monitor, self._prefers_high = monitor, prefers_high
        self._has_said_missing = False

    def named(
        self,
        names: Iterable[str],
        template: str,
        metrics: Mapping[str, Tensor],
        trainer: Trainer,
        at: At,
    ) -> dict[str, float]:
        """Return the numbers called ``names``, which ``template`` shows."""
        asked_by = f"filename={template!r}"
        return {name: self._number(name, asked_by, trainer, at, metrics) for name in names}

    def score(
        self, metrics: Mapping[str, Tensor], trainer: Trainer, at: At, is_cut: bool
    ) -> Tensor:
        """Return what the state is ranked by, shape ``()``: never NaN, infinite if unknown.

        Args:
            metrics: What was logged.
            trainer: Whose run it is.
            at: The moment.
            is_cut: Whether the run was cut here, so that the state is not validated, or not wholly.
        """
        if self._monitor is None:
            return torch.tensor(trainer.state.total_batches)
        number = self._number(self._monitor, f"monitor={self._monitor!r}", trainer, at, metrics)
        if isnan(number) or is_cut:
            return torch.tensor(-inf if self._prefers_high else inf)
        return metrics[self._monitor].detach().cpu().clone()

    def _number(
        self, name: str, asked_by: str, trainer: Trainer, at: At, metrics: Mapping[str, Tensor]
    ) -> float:
        """Return the value called ``name``; NaN while it may still come.

        Raises:
            ConfigError: All that logs has had its turn, and nothing has logged it.
        """
        if name in COUNTS:
            return epoch_of(trainer.state) if name == "epoch" else trainer.global_step
        if name in metrics:
            return metrics[name].item()
        validates = sum(trainer.num_val_batches) > 0
        if at != "end" and (trainer.state.validations > 0 or (at == "epoch" and not validates)):
            raise missing(f"ModelCheckpoint({asked_by})", name, metrics)
        if not self._has_said_missing and trainer.is_global_zero:
            self._has_said_missing = True
            log.warning(
                "ModelCheckpoint saves at step %d, where %r is not known yet: it counts as worst.",
                trainer.global_step,
                name,
            )
        return nan
