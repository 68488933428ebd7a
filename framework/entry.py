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


BLOCK = 64
"""Values that are reduced together."""


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
        "agreed", "block", "epoch_name", "in_batch", "is_newest", "is_restored", "is_unsent",
        "metric", "name", "names", "number", "on_epoch", "on_step", "options", "plain_name",
        "reduction", "step_name", "total", "value", "weight", "weights",
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
        self.is_restored = False
        """Whether it came from a checkpoint, which knows a reduction by its name alone."""
        self.forget_epoch()

    def forget_epoch(self) -> None:
        """Begin a new reduction."""
        self.agreed: float | None = None
        """The reduction over all ranks, once they have told each other theirs."""
        self.total: Tensor | None = None
        self.number: float | None = None
        self.block: list[Tensor] = []
        self.weights: list[float] = []
        self.weight = 0.0
        if self.metric is not None:
            self.metric.reset()
            self.metric = None

    def add(self, value: Tensor | float, weight: float) -> None:
        """Take ``value``, a number or a tensor of shape ``()`` that nobody writes to.

        Tensors are reduced a block at a time, which costs a fraction of reducing each. Blocks end
        where they end, not where somebody reads, so that reading does not change the last digit.
        """
        self.weight += weight
        if not isinstance(value, Tensor):
            if self.reduction == "mean":
                self.number = (self.number or 0.0) + value * weight
            else:
                self._add_number(value)
            return
        self.block.append(value)
        self.weights.append(weight)
        if len(self.block) == BLOCK:
            self.total = self._with_block()
            self.block, self.weights = [], []

    def _add_number(self, value: float) -> None:
        so_far = self.number
        if self.reduction == "sum":
            self.number = (so_far or 0.0) + value
        elif so_far is None or value != value:
            self.number = value
        elif value < so_far if self.reduction == "min" else value > so_far:
            self.number = value  # never where NaN was seen, which is neither less nor more

    def _with_block(self) -> Tensor:
        """Return the total of all tensors, those of the open block included."""
        wide = _wide(self.block[0])
        values = torch.stack([value.to(wide) for value in self.block])
        if self.reduction in ("min", "max"):
            reduced = values.min() if self.reduction == "min" else values.max()
            pick = torch.minimum if self.reduction == "min" else torch.maximum
            return reduced if self.total is None else pick(self.total, reduced)
        if self.reduction == "mean":
            values = values * values.new_tensor(self.weights)
        return values.sum() if self.total is None else self.total + values.sum()

    def _reduced(self) -> Tensor | float:
        total = self._with_block() if self.block else self.total
        if total is None:
            return self.number or 0.0
        if self.number is None:
            return total
        if self.reduction in ("mean", "sum"):
            return total + self.number
        pick = torch.minimum if self.reduction == "min" else torch.maximum
        return pick(total, total.new_tensor(self.number))

    def is_logged_with(self, options: Options, in_batch: bool) -> bool:
        """Return whether this is how the name was logged before, and learn its exact options."""
        if self.is_restored and options.reduce_fx in REDUCTIONS:
            reduction = REDUCTIONS[options.reduce_fx]
            if self.options == options._replace(reduce_fx=reduction):
                self.options, self.is_restored = options, False
        return self.options == options and self.in_batch is in_batch

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
            value = number_of(self.name, of_batch)
            self.value = value.clone() if isinstance(value, Tensor) else value
            self.is_unsent = self.is_newest = True

    def part(self) -> tuple[float, float] | None:
        """Return this rank's reduction without dividing, and its weight; None where there is none.

        Waits for the device.
        """
        if self.metric is not None:
            return float(number_of(self.name, self.metric.compute())), 1.0
        return (float(self._reduced()), self.weight) if self.weight else None

    def epoch_value(self) -> Tensor | float | None:
        """Return the epoch's reduction so far, or None where there is none."""
        value: Tensor | float
        if self.agreed is not None:
            return self.agreed
        if self.metric is not None:
            value = number_of(self.name, self.metric.compute())
        elif not self.weight:
            return None
        else:
            value = self._reduced() / self.weight if self.reduction == "mean" else self._reduced()
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
        return scalar(name, value)
    if hasattr(value, "__float__") and getattr(value, "size", 1) == 1:
        return float(value.item() if hasattr(value, "item") else value)
    hint = " Log the values of a dict with self.log_dict." if hasattr(value, "items") else ""
    shown = repr(value).partition("\n")[0][:60]
    raise ModuleError(
        f"self.log({name!r}, …) got {_kind(value)} {shown}. Log a number, a tensor with one "
        f"element, or an object with update(), compute() and reset().{hint}"
    )


def scalar(name: str, value: Tensor) -> Tensor:
    """Return ``value`` detached and in shape ``()``.

    Raises:
        ModuleError: It has not one element.
    """
    if value.numel() != 1:
        raise ModuleError(
            f"self.log({name!r}, …) got a tensor of shape {tuple(value.shape)}. Log one number: "
            "reduce it first, for example with .mean()."
        )
    return value.detach().reshape(())


def _kind(value: object) -> str:
    return type(value).__name__


def _wide(value: Tensor) -> torch.dtype:
    """Return the dtype that reductions of ``value`` are kept in; MPS has no float64."""
    return torch.float32 if value.device.type == "mps" else torch.float64
