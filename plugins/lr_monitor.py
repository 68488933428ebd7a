"""LearningRateMonitor: logs the rate that each step is taken with."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from leyden.callback import Callback
from leyden.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from leyden.module import Module
    from leyden.trainer import Trainer

INTERVALS = ("step", "epoch")


class LearningRateMonitor(Callback):
    """Logs learning rates, at a step the rate that this step is taken with.

    They are called ``lr-Adam``, ``lr-Adam-1`` where a second optimizer is of that class too, or as
    the scheduler's ``name`` says, and end in ``/pg1``, ``/pg2`` or a group's own ``name`` where an
    optimizer has several groups. ``lrs`` keeps what was logged, by name.

    Args:
        logging_interval: ``"step"`` logs every ``log_every_n_steps`` steps, ``"epoch"`` when an
            epoch begins, None each rate as often as its scheduler changes it.
        log_momentum: Log momentum, or the first of the betas, too.
        log_weight_decay: Log weight decay too.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, *INTERVALS):
            raise unknown("logging_interval", logging_interval, INTERVALS, "None takes both.")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._logged_step = -1

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if not trainer.loggers:
            raise ConfigError(
                "LearningRateMonitor has nowhere to log to. Pass a logger to the Trainer, for "
                "example logger='csv', or take the callback out."
            )
        self.lrs, self._logged_step = {}, -1

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        is_resumed = trainer.state.batch > 0
        if self.logging_interval != "step" and not is_resumed:
            self._log(trainer, "epoch")

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step + 1
        # Several batches may make one step.
        if step % trainer.log_every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            if self.logging_interval != "epoch":
                self._log(trainer, "step")

    def _log(self, trainer: Trainer, interval: str) -> None:
        # Once a step is counted its schedule has moved on, so the coming step is logged.
        step = trainer.global_step + 1
        rates: dict[str, float] = {}
        others: dict[str, float] = {}
        for optimizer, name, intervals in _named(trainer):
            if self.logging_interval is None and interval not in intervals:
                continue
            for group, label in zip(optimizer.param_groups, _groups(optimizer, name), strict=True):
                rates[label] = float(group["lr"])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                    others[f"{label}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    others[f"{label}-weight_decay"] = float(group.get("weight_decay", 0))
        for label, rate in rates.items():
            self.lrs.setdefault(label, []).append(rate)
        if rates and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**rates, **others}, step=step)


def _named(trainer: Trainer) -> list[tuple[Optimizer, str, set[str]]]:
    """Return each optimizer, the name of its rate, and the intervals at which that may change."""
    seen: Counter[str] = Counter()
    named = []
    for index, optimizer in enumerate(trainer.optimizers):
        configs = [c for c in trainer.lr_scheduler_configs if c.opt_idx == index]
        name = next((c.name for c in configs if c.name), f"lr-{type(optimizer).__name__}")
        number = f"-{seen[name]}" if seen[name] else ""
        seen[name] += 1
        # Whoever sets rates by hand may do so at any time.
        intervals = {str(c.interval) for c in configs} or set(INTERVALS)
        named.append((optimizer, name + number, intervals))
    return named


def _groups(optimizer: Optimizer, name: str) -> list[str]:
    """Return the name of each parameter group's rate."""
    groups = optimizer.param_groups
    own = [group.get("name") for group in groups]
    if len({*own} - {None}) < len(groups):
        own = [f"pg{i}" for i in range(1, len(groups) + 1)] if len(groups) > 1 else [None]
    return [f"{name}/{label}" if label else name for label in own]
