"""One logged name: its last value, and the reduction of its epoch so far."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, ModuleError

Reduction = Literal["mean", "sum", "min", "max"]
REDUCTIONS: dict[Any, Reduction] = {
    "mean": "mean", torch.mean: "mean",
    "sum": "sum", torch.sum: "sum", sum: "sum",
    "min": "min", torch.min: "min", min: "min",
    "max": "max", torch.max: "max", max: "max",
}  # fmt: skip


class Options(NamedTuple):
    """The options of one ``self.log`` call that must stay the same from call to call."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    sync_dist: bool
    add_dataloader_idx: bool
    rank_zero_only: bool


class Entry:
    """What is known of one name.

    Args:
        name: As logged.
        options: As logged.
        in_batch: Whether it is logged while there is a batch; elsewhere only epochs make sense.
        in_training: Whether a batch's value counts for its step, not for its epoch, by default.
        suffix: What its names end in, to tell loaders apart.

    Raises:
        ModuleError: It would be recorded nowhere, or in a place there is none of.
        ConfigError: The reduction is unknown.
    """

    __slots__ = (
        "epoch_name", "in_batch", "is_newest", "is_unsent", "metric", "name", "names", "on_epoch",
        "on_step", "options", "plain_name", "reduction", "step_name", "total", "value", "weight",
    )  # fmt: skip

    def __init__(
        self, name: str, options: Options, in_batch: bool, in_training: bool, suffix: str
    ) -> None:
        per_step = in_batch and in_training
        self.on_step = per_step if options.on_step is None else options.on_step
        self.on_epoch = not per_step if options.on_epoch is None else options.on_epoch
        if self.on_step and not in_batch:
            raise ModuleError(
                f"self.log({name!r}, on_step=True) in a hook that runs once an epoch. Leave "
                "on_step out, or log it in a step."
            )
        if not (self.on_step or self.on_epoch):
            raise ModuleError(
                f"self.log({name!r}, …) with neither on_step nor on_epoch records nothing. Set one "
                "of them to True, or leave both out."
            )
        if options.reduce_fx not in REDUCTIONS:
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={options.reduce_fx!r}) is not a reduction. Use "
                "'mean', 'sum', 'min' or 'max', or keep the values yourself and log what they "
                "come to in an on_…_epoch_end."
            )
        self.reduction = REDUCTIONS[options.reduce_fx]
        self.name, self.options, self.in_batch = name, options, in_batch
        both = self.on_step and self.on_epoch
        self.plain_name = name + suffix
        self.step_name = name + "_step" * both + suffix
        self.epoch_name = name + "_epoch" * both + suffix
        self.names = {self.step_name} if self.on_step else set()
        self.names |= {self.epoch_name} if self.on_epoch else set()
        self.value: Tensor | float | None = None
        """Of the last step."""
        self.is_unsent = self.is_newest = False
        """Whether ``value`` came after the last record of the loggers, and after the last epoch."""
        self.metric: Any = None
        """The object that reduces the epoch itself, where one was logged."""
        self.forget_epoch()

    def forget_epoch(self) -> None:
        """Begin a new reduction."""
        self.total: Tensor | float = 0.0
        self.weight = 0.0
        if self.metric is not None:
            self.metric.reset()
            self.metric = None

    def keep(self, value: Tensor | float) -> None:
        """Take ``value`` as the last step's."""
        # A clone, since an optimizer or `loss += …` may write to what was logged.
        self.value = value.clone() if isinstance(value, Tensor) else value
        self.is_unsent = self.is_newest = True

    def add(self, value: Tensor | float, weight: float) -> None:
        """Take ``value``, a number or a detached tensor of shape ``()``, into the epoch's."""
        if self.reduction in ("min", "max"):
            self._add_extreme(value)
        elif isinstance(value, Tensor):
            if not isinstance(self.total, Tensor):
                self.total = value.new_full((), self.total, dtype=_wide(value))
            self.total = torch.add(self.total, value, alpha=weight)
        else:
            self.total = self.total + value * weight
        self.weight += weight

    def _add_extreme(self, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            new = value.to(_wide(value))
        else:
            new = torch.tensor(value, dtype=torch.float64)
        if not isinstance(self.total, Tensor):
            self.total = new.clone()
        elif self.reduction == "min":
            self.total = torch.minimum(self.total, new)
        else:
            self.total = torch.maximum(self.total, new)

    def hold(self, metric: Any) -> None:
        """Let ``metric``, an object that reduces by itself, be the epoch's reduction.

        Raises:
            ModuleError: It is not the one that the name stands for, or has no value of this step.
        """
        if self.metric is not None and self.metric is not metric:
            raise ModuleError(
                f"self.log({self.name!r}, …) got two metric objects in one epoch: "
                f"{_kind(self.metric)} and {_kind(metric)}. Log each under a name of its own."
            )
        self.metric = metric
        if self.on_step:
            of_batch = getattr(metric, "_forward_cache", None)
            if of_batch is None:
                raise ModuleError(
                    f"self.log({self.name!r}, …) is to record {_kind(metric)} per step, and only "
                    "update() was called, which gives no value of the step. Call the object "
                    "itself, metric(preds, target), or pass on_step=False, on_epoch=True."
                )
            self.keep(number_of(self.name, of_batch))

    def epoch_value(self) -> Tensor | float | None:
        """Return the epoch's reduction so far, or None where there is none."""
        value: Tensor | float
        if self.metric is not None:
            value = number_of(self.name, self.metric.compute())
        elif not self.weight:
            return None
        else:
            value = self.total / self.weight if self.reduction == "mean" else self.total
        if isinstance(value, Tensor) and value.is_inference():
            # It could not take part in training later on.
            with torch.inference_mode(False):
                value = value.clone()
        return value


class Computed:
    """A metric object's value for one loader, kept after the object was reset for the next."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def compute(self) -> Any:
        """Return what the object came to."""
        return self.value

    def reset(self) -> None:
        """Nothing is left to reset."""


def is_metric(value: object) -> bool:
    """Say if ``value`` reduces by itself, as torchmetrics' objects do; a collection is several."""
    kind = type(value)
    methods = hasattr(kind, "update") and hasattr(kind, "compute") and hasattr(kind, "reset")
    return methods and not hasattr(kind, "items")


def number_of(name: str, value: Any) -> Tensor | float:
    """Return ``value`` as a number, or as a detached tensor of shape ``()``.

    Raises:
        ModuleError: It is not one number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ModuleError(
                f"self.log({name!r}, …) got a tensor of shape {tuple(value.shape)}. Log one "
                "number: reduce it first, for example with .mean()."
            )
        return value.detach().reshape(())
    if hasattr(value, "__float__") and getattr(value, "size", 1) == 1:
        return float(value.item() if hasattr(value, "item") else value)
    hint = " Log the values of a dict with self.log_dict." if hasattr(value, "items") else ""
    shown = repr(value).partition("\n")[0][:60]
    raise ModuleError(
        f"self.log({name!r}, …) got {_kind(value)} {shown}. Log a number, a tensor with one "
        f"element, or an object with update(), compute() and reset().{hint}"
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _wide(value: Tensor) -> torch.dtype:
    """Return the dtype that reductions of ``value`` are kept in; MPS has no float64."""
    return torch.float32 if value.device.type == "mps" else torch.float64
