"""What ``self.log`` keeps: tensors that stay on the device and become numbers when read.

A `Metrics` belongs to a run and holds one `Logged` for training and one for each evaluation. In a
`Logged`, every name has an `Entry` with its last value and, where asked for, its epoch's reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .data.samples import count_samples
from .errors import ConfigError, ModuleError

Sizer = Callable[[Any], int | None]
Reduction = Literal["mean", "sum", "min", "max"]
REDUCTIONS: dict[Any, Reduction] = {
    **{name: name for name in ("mean", "sum", "min", "max")},  # type: ignore[dict-item]
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
}


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
    """One logged name: its last value, and the reduction of its epoch so far."""

    __slots__ = (
        "fresh", "in_batch", "metric", "on_epoch", "on_step", "options", "reduction", "suffix",
        "total", "value", "weight",
    )  # fmt: skip

    def __init__(self, options: Options, in_batch: bool, in_training: bool, suffix: str) -> None:
        self.options, self.in_batch, self.suffix = options, in_batch, suffix
        step_is_default = in_batch and in_training
        self.on_step = step_is_default if options.on_step is None else options.on_step
        self.on_epoch = not step_is_default if options.on_epoch is None else options.on_epoch
        if options.reduce_fx not in REDUCTIONS:
            raise ConfigError(
                f"self.log(reduce_fx={options.reduce_fx!r}) is not a reduction. Use 'mean', 'sum', "
                "'min' or 'max', or keep the values yourself and log what they come to."
            )
        self.reduction = REDUCTIONS[options.reduce_fx]
        self.metric: Any = None
        self.value: Tensor | float | None = None
        self.fresh = False
        self.forget_epoch()

    def forget_epoch(self) -> None:
        """Begin a new reduction."""
        self.total: Tensor | float | None = None
        self.weight = 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Take ``value``, a number or a tensor of shape ``()``, into the epoch's reduction."""
        if self.reduction == "mean":
            self.weight += weight
        else:
            weight = 1.0
        if self.reduction in ("min", "max"):
            self._add_extreme(value)
        elif isinstance(self.total, Tensor):
            if isinstance(value, Tensor):
                self.total.add_(value, alpha=weight)
            else:
                self.total.add_(value * weight)
        elif isinstance(value, Tensor):
            self.total = value.detach().to(_wide(value)) * weight + (self.total or 0.0)
        else:
            self.total = (self.total or 0.0) + value * weight

    def _add_extreme(self, value: Tensor | float) -> None:
        new = torch.as_tensor(value).detach()
        if self.total is None:
            self.total = new.clone()
        else:
            pick = torch.minimum if self.reduction == "min" else torch.maximum
            self.total = pick(torch.as_tensor(self.total), new)

    def step_values(self, name: str) -> dict[str, Any]:
        """Return the last step's value under its logged name."""
        if not self.on_step or self.value is None:
            return {}
        return {name + ("_step" if self.on_epoch else "") + self.suffix: self.value}

    def epoch_values(self, name: str) -> dict[str, Any]:
        """Return the epoch's reduction so far under its logged name."""
        if not self.on_epoch:
            return {}
        ending = ("_epoch" if self.on_step else "") + self.suffix
        if self.metric is not None:
            computed = self.metric.compute()
            if isinstance(computed, Mapping):
                return {f"{key}{ending}": value for key, value in computed.items()}
            return {name + ending: computed}
        if self.total is None:
            return {}
        divided = self.total / self.weight if self.reduction == "mean" else self.total
        return {name + ending: divided}


def _wide(value: Tensor) -> torch.dtype:
    """Return the dtype that sums of ``value`` are kept in; MPS has no float64."""
    return torch.float32 if value.device.type == "mps" else torch.float64


class Logged:
    """What was logged in one stage: training, or one evaluation."""

    def __init__(self, in_training: bool, sizer: Sizer | None) -> None:
        """Begin empty.

        Args:
            in_training: Whether a value logged in a step counts for that step by default.
            sizer: The Module's own ``count_samples``, or None.
        """
        self.in_training, self.sizer = in_training, sizer
        self.entries: dict[str, Entry] = {}
        self.of_loader: list[dict[str, Entry]] = [self.entries]
        self.suffix = ""
        self.in_batch = False
        self.batch: Any = None
        self.size: float | None = None

    def begin_batch(self, batch: Any) -> None:
        """Weigh what is logged from here on by the number of samples in ``batch``."""
        self.batch, self.size = batch, None

    def begin_loader(self, index: int, of: int) -> None:
        """Keep what is logged from here on apart from that of the loaders before."""
        if index:
            self.entries = {}
            self.of_loader.append(self.entries)
        self.suffix = f"/dataloader_idx_{index}" if of > 1 else ""

    def log(self, name: str, value: Any, batch_size: float | None, options: tuple[Any, ...]) -> None:
        """Keep ``value`` under ``name``; ``options`` are those of `Options`, in their order.

        Raises:
            ModuleError: The value is no number, or the name was logged otherwise before.
        """
        entry = self.entries.get(name)
        if entry is None or entry.options != options or entry.in_batch is not self.in_batch:
            entry = self._new(name, options)
        if isinstance(value, Tensor):
            if value.ndim:
                value = _scalar(name, value)
        elif not isinstance(value, (int, float)):
            value = self._taken(name, entry, value)
            if value is None:
                return
        if entry.on_epoch:
            weight = batch_size
            if weight is None:
                weight = self.size or self._count(name) if entry.reduction == "mean" else 1.0
            entry.add(value.detach() if isinstance(value, Tensor) else value, weight)
        if entry.on_step:
            if isinstance(value, Tensor):
                # A leaf or a view may be written to by the update that follows; a result is not.
                alias = value.grad_fn is None or value._is_view()
                value = value.detach().clone() if alias else value.detach()
            entry.value, entry.fresh = value, True

    def _new(self, name: str, options: Any) -> Entry:
        options = Options(*options)
        if name in self.entries:
            raise ModuleError(
                f"self.log({name!r}, …) was called again in another hook or with other options: "
                f"first {self.entries[name].options}, now {options}. Log it under two names."
            )
        if self.suffix and not options.add_dataloader_idx:
            for entries in self.of_loader:
                if name in entries:
                    self.entries[name] = entries[name]
                    return entries[name]
        suffix = self.suffix if options.add_dataloader_idx else ""
        if options.on_step and not self.in_batch:
            raise ModuleError(
                f"self.log({name!r}, on_step=True) in a hook that runs once an epoch. Leave "
                "on_step out, or log it in a step."
            )
        entry = Entry(options, self.in_batch, self.in_training, suffix)
        self.entries[name] = entry
        return entry

    def _taken(self, name: str, entry: Entry, value: Any) -> Any:
        """Return the number in ``value``, or None when ``value`` is an object that keeps its own."""
        if hasattr(value, "compute") and hasattr(value, "reset"):
            entry.metric = value
            forwarded = getattr(value, "_forward_cache", None)
            if entry.on_step and isinstance(forwarded, Tensor):
                entry.value, entry.fresh = _scalar(name, forwarded).detach(), True
            return None
        if hasattr(value, "__float__") and getattr(value, "size", 1) == 1:
            return float(value)
        raise ModuleError(
            f"self.log({name!r}, …) got {_shown(value)}. Log a number, a tensor with one element, "
            "or an object with update(), compute() and reset()."
        )

    def _count(self, name: str) -> float:
        """Return the weight of the current batch, counted once for each."""
        if not self.in_batch:
            return 1.0
        self.size = float(count_samples(self.batch, self.sizer, name))
        return self.size

    def fresh_values(self) -> dict[str, Any]:
        """Return what goes to the loggers of the values logged since this was last asked."""
        values: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if entry.fresh:
                entry.fresh = False
                if entry.options.logger is not False:
                    values |= entry.step_values(name)
        return values

    def step_readings(self) -> Readings:
        """Return the last value of everything logged per step."""
        readings = Readings({}, {}, {})
        for entries in self.of_loader:
            for name, entry in entries.items():
                if values := entry.step_values(name):
                    value = next(iter(values.values()))
                    # Between epochs the plain name stands for the epoch's value.
                    newest = self.in_batch or not entry.on_epoch
                    readings.add(entry, values, {name + entry.suffix: value} if newest else {})
        return readings

    def epoch_readings(self) -> Readings:
        """Return the reductions so far."""
        readings = Readings({}, {}, {})
        for entries in self.of_loader:
            for name, entry in entries.items():
                values = entry.epoch_values(name)
                plain = {key.replace("_epoch" + entry.suffix, entry.suffix): values[key] for key in values}
                readings.add(entry, values, plain if entry.on_step else {})
        return readings

    def end_loader(self) -> None:
        """Reset the metric objects of this loader, keeping what they came to.

        One object logged for several loaders must not carry the first one's samples along.
        """
        done = [entry for entry in self.entries.values() if entry.metric and entry.suffix]
        computed = [(entry.metric, entry.metric.compute()) for entry in done]
        for entry, (metric, value) in zip(done, computed, strict=True):
            metric.reset()
            entry.metric = _Computed(value)

    def forget_epoch(self) -> None:
        """Begin a new epoch."""
        for entries in self.of_loader:
            for entry in entries.values():
                entry.forget_epoch()
                if entry.metric is not None:
                    entry.metric.reset()


class _Computed:
    """A metric object's value for one loader, kept after the object was reset for the next."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def compute(self) -> Any:
        return self.value

    def reset(self) -> None:
        """Nothing is left to reset."""


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ModuleError(
            f"self.log({name!r}, …) got a tensor of shape {tuple(value.shape)}. Log one number: "
            "reduce it first, for example with .mean()."
        )
    return value.reshape(())


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"


class Metrics:
    """All that was logged in a run: training's, the latest evaluation's, and finished epochs'."""

    def __init__(self, sizer: Sizer | None) -> None:
        self.sizer = sizer
        self.train = Logged(True, sizer)
        self.evaluation: Logged | None = None
        self.finished = Readings({}, {}, {})

    def finish(self, logged: Logged) -> dict[str, Any]:
        """End the epoch of ``logged`` and return what of it goes to the loggers."""
        # A value made in inference mode could not take part in training later on.
        with torch.inference_mode(False):
            epoch = logged.epoch_readings()
        self.finished.update(epoch)
        logged.forget_epoch()
        return epoch.logger

    def read(self) -> Readings:
        """Return the latest values: of finished epochs, of the last steps, and of the open epoch."""
        readings = Readings({}, {}, {})
        readings.update(self.finished)
        for logged in (self.train, self.evaluation):
            if logged is not None:
                readings.update(logged.step_readings())
                if not logged.in_batch:
                    readings.update(logged.epoch_readings())
        return readings


class Readings(NamedTuple):
    """Values by logged name, for the three that read them."""

    callback: dict[str, Any]
    bar: dict[str, Any]
    logger: dict[str, Any]

    def update(self, newer: Readings) -> None:
        """Take over what ``newer`` holds."""
        for mine, other in zip(self, newer, strict=True):
            mine.update(other)

    def add(self, entry: Entry, values: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        """Add an entry's ``values``; callbacks find it under its ``plain`` name too."""
        self.callback.update({**values, **plain})
        if entry.options.prog_bar:
            self.bar.update(values)
        if entry.options.logger is not False:
            self.logger.update(values)


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return ``values`` as Python numbers, waiting for the device once."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if len(tensors) > 1 and tensors[0].device.type != "cpu":
        stacked = torch.stack([t.detach().to(_wide(t)).reshape(()) for t in tensors]).tolist()
        numbers = iter(stacked)
        return {k: next(numbers) if isinstance(v, Tensor) else float(v) for k, v in values.items()}
    return {name: float(value) for name, value in values.items()}
