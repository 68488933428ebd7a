"""Optimizers and schedules: what ``configure_optimizers`` may return, and how both are stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .errors import ModuleError, did_you_mean

if TYPE_CHECKING:
    from .protocols import Precision

SHAPES = (
    "an optimizer; a list of optimizers; (optimizer, scheduler); two lists, of optimizers and of "
    "schedulers; {'optimizer': …, 'lr_scheduler': …}; a list of such dicts; or None"
)
SCHEDULER_KEYS = (
    "scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau",
)  # fmt: skip


@dataclass(slots=True)
class SchedulerConfig:
    """A schedule and when it is stepped."""

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    opt_idx: int = 0
    """Index of the optimizer whose rates it sets."""


def configured(
    returned: Any, owner: str, by_hand: bool = False
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedules in what ``configure_optimizers`` returned.

    Args:
        returned: What it returned.
        owner: The Module's class, for messages.
        by_hand: Whether the Module steps its schedules itself.

    Raises:
        ModuleError: It is none of the shapes allowed, or a schedule's settings are wrong.
    """
    optimizers, schedulers = _split(returned, owner)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise _wrong_shape(returned, owner)
    configs = [_config(scheduler, index, owner) for index, scheduler in schedulers]
    for config in configs:
        kind = type(config.scheduler).__name__
        if config.reduce_on_plateau and config.monitor is None and not by_hand:
            raise ModuleError(
                f"{kind} needs to know what to watch. Return {{'optimizer': …, 'lr_scheduler': "
                "{'scheduler': …, 'monitor': 'val/loss'}}, with the name of a logged metric."
            )
        own = getattr(config.scheduler, "optimizer", None)
        if own is not None:
            found = [index for index, optimizer in enumerate(optimizers) if optimizer is own]
            if not found:
                raise ModuleError(
                    f"{kind} sets the rates of an optimizer that {owner}.configure_optimizers() "
                    "does not return. Return both."
                )
            config.opt_idx = found[0]
    return optimizers, configs


def _split(returned: Any, owner: str) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Return the optimizers, and the schedules with the index of the dict they came in."""
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _split([returned], owner)
    if not isinstance(returned, (list, tuple)):
        raise _wrong_shape(returned, owner)
    parts = list(returned)
    if parts and all(isinstance(part, Mapping) for part in parts):
        return _from_dicts(parts, owner)
    if len(parts) == 2 and isinstance(parts[0], (list, tuple)):
        schedulers = parts[1] if isinstance(parts[1], (list, tuple)) else [parts[1]]
        return list(parts[0]), [(0, s) for s in schedulers]
    if len(parts) == 2 and isinstance(parts[0], Optimizer) and _is_schedule(parts[1]):
        return [parts[0]], [(0, parts[1])]
    return parts, []


def _is_schedule(part: Any) -> bool:
    if isinstance(part, Mapping):
        return "scheduler" in part
    return hasattr(part, "step") and not isinstance(part, Optimizer)


def _from_dicts(dicts: list[Any], owner: str) -> tuple[list[Any], list[tuple[int, Any]]]:
    schedulers: list[tuple[int, Any]] = []
    for index, part in enumerate(dicts):
        _refuse_keys(part, ("optimizer", "lr_scheduler", "monitor"), owner)
        if "optimizer" not in part:
            raise _wrong_shape(part, owner)
        schedule = part.get("lr_scheduler")
        if schedule is not None and not isinstance(schedule, (list, tuple)):
            schedule = [schedule]
        for one in schedule or []:
            settings = one if isinstance(one, Mapping) else {"scheduler": one}
            schedulers.append((index, {"monitor": part.get("monitor"), **settings}))
    return [part["optimizer"] for part in dicts], schedulers


def _config(schedule: Any, index: int, owner: str) -> SchedulerConfig:
    settings = dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}
    _refuse_keys(settings, SCHEDULER_KEYS, owner)
    scheduler = settings.get("scheduler")
    if not hasattr(scheduler, "step"):
        raise ModuleError(
            f"{owner}.configure_optimizers() returned {scheduler!r:.80} as a scheduler. Return an "
            "object with step(), such as those of torch.optim.lr_scheduler."
        )
    settings.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    config = SchedulerConfig(**settings, opt_idx=index)
    if config.interval not in ("step", "epoch"):
        raise ModuleError(
            f"interval={config.interval!r} of a scheduler is neither 'step' nor 'epoch'. Use "
            "'step' to step it after each optimizer step, 'epoch' after each epoch."
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ModuleError(
            f"frequency={config.frequency!r} of a scheduler must be a whole number, at least 1: "
            "the optimizer steps or epochs from one of its steps to the next."
        )
    return config


def _refuse_keys(settings: Mapping[str, Any], allowed: Sequence[str], owner: str) -> None:
    for key in settings:
        if key not in allowed:
            raise ModuleError(
                f"{owner}.configure_optimizers() returned a dict with the key {key!r}."
                f"{did_you_mean(str(key), allowed)} Allowed: {', '.join(allowed)}."
            )


def _wrong_shape(returned: Any, owner: str) -> ModuleError:
    if isinstance(returned, type):
        return ModuleError(
            f"{owner}.configure_optimizers() returned the class {returned.__name__}. Make one of "
            f"it: {returned.__name__}(self.parameters(), …)."
        )
    return ModuleError(
        f"{owner}.configure_optimizers() returned {type(returned).__name__} {returned!r:.80}. "
        f"Return {SHAPES}."
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` cannot do without a closure, as LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is parameter.empty


class LoopOptimizer:
    """An optimizer as a Module meets it: its ``step`` goes through the precision and is counted.

    Everything else is the optimizer's own, ``isinstance`` included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precision: Precision,
        before_step: Callable[[Optimizer], None],
        toggle: Callable[[LoopOptimizer, bool], AbstractContextManager[None]],
    ) -> None:
        self.optimizer = optimizer
        self.updates = self.skips = 0
        self._precision, self._before_step, self._toggle = precision, before_step, toggle
        self._needs_closure = needs_closure(optimizer)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The optimizer's class, so that ``isinstance`` and schedulers accept this as one."""
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A schedule made over this object replaces its step, and must not reach the inner one.
        if name in ("optimizer", "updates", "skips", "step") or name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients.

        Args:
            closure: Computes the gradients and returns the loss, if they are not there yet.

        Returns:
            What the closure returned the first time, or None.
        """
        losses: list[Any] = []

        def evaluated() -> Any:
            if closure is not None:
                with torch.enable_grad():
                    losses.append(closure())
            self._before_step(self.optimizer)
            return losses[-1] if losses else None

        if self._needs_closure and closure is not None:
            updated = self._precision.step(self.optimizer, evaluated)
        else:
            evaluated()
            updated = self._precision.step(self.optimizer)
        self.updates += updated
        self.skips += not updated
        return losses[0] if losses else None

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Let only this optimizer's parameters require gradients inside the block.

        Args:
            sync_grad: Whether backward inside averages gradients over ranks.
        """
        return self._toggle(self, sync_grad)
