"""What ``self.log`` keeps: tensors that stay on the device and become numbers when read.

A `Metrics` belongs to a run and holds one `Logged` for training and one for each evaluation. In a
`Logged`, every name has an `Entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .data.samples import count_samples
from .entry import Computed, Entry, Options, is_metric, number_of, scalar
from .errors import ModuleError
from .metric_ranks import of_all_ranks, require_same_objects, share

if TYPE_CHECKING:
    from .protocols import Strategy

Sizer = Callable[[Any], int | None]


class Logged:
    """What was logged in one stage: training, or one evaluation."""

    def __init__(self, in_training: bool, sizer: Sizer | None) -> None:
        """Begin empty.

        Args:
            in_training: Whether a value logged in a step counts for that step by default.
            sizer: The Module's own ``count_samples``, or None.
        """
        self.in_training, self.sizer = in_training, sizer
        self.shared: dict[str, Entry] = {}
        """Entries by name, but for those of one loader among several."""
        self.of_loader: list[dict[str, Entry]] = []
        self.entries = self.shared
        """Entries by name, as they are looked up now."""
        self.suffix = ""
        self.in_batch = False
        self.batch: Any = None
        """Whose samples epoch means are weighed by."""
        self.size: float | None = None
        """How many those are, once counted."""
        self.strategy: Strategy | None = None
        """What reduces the values of steps that are logged with ``sync_dist``; None for nothing."""

    def begin_loader(self, index: int, of: int) -> None:
        """Keep what is logged from here on apart from that of the other loaders."""
        if of > 1:
            self.entries, self.suffix = {}, f"/dataloader_idx_{index}"
            self.of_loader.append(self.entries)

    def end_loader(self) -> None:
        """Reset the metric objects of this loader, keeping what they came to.

        One object logged for several loaders must not carry the first one's samples along.

        Raises:
            ModuleError: One is to span the loaders too.
        """
        joint = [entry.metric for entry in self.shared.values() if entry.metric is not None]
        own = [e for _, e in sorted(self.entries.items())]
        own = [e for e in own if e.metric is not None and not self._is_shared(e)]
        computed = [(entry, entry.metric, entry.metric.compute()) for entry in own]
        for entry, metric, value in computed:
            if any(metric is other for other in joint):
                raise ModuleError(
                    f"The object logged as {entry.name!r} for each loader is also logged with "
                    "add_dataloader_idx=False, for all of them. Use two objects: one is reset "
                    "after each loader, the other after the last."
                )
            metric.reset()
            entry.metric = Computed(value)
        self.entries, self.suffix, self.batch = self.shared, "", None

    def _is_shared(self, entry: Entry) -> bool:
        return self.shared.get(entry.name) is entry

    def log(
        self, name: str, value: Any, batch_size: float | None, options: tuple[Any, ...]
    ) -> None:
        """Keep ``value`` under ``name``; ``options`` are those of `Options`, in their order.

        Raises:
            ModuleError: The value is no number, or the name was logged otherwise before.
        """
        entry = self.entries.get(name)
        if entry is None or entry.options != options or entry.in_batch is not self.in_batch:
            entry = self._entry(name, Options(*options))
        if isinstance(value, Tensor):
            if value.ndim:
                value = scalar(name, value)
            # The CPU has its value at once. Elsewhere a clone is kept, since an optimizer or
            # `loss += …` may write to what was logged.
            value = value.item() if value.is_cpu else value.detach().clone()
        elif not isinstance(value, (int, float)):
            if is_metric(value):
                entry.hold(value)
                return
            value = number_of(name, value)
        if entry.on_epoch:
            weight: float | None = 1.0
            if entry.reduction == "mean":
                weight = batch_size if batch_size is not None else self.size
            entry.add(value, self._count(name) if weight is None else weight)
        if entry.on_step:
            if options[5] and self.strategy is not None:  # sync_dist
                value = of_all_ranks(value, entry, self.strategy)
            entry.value = value
            entry.is_unsent = entry.is_newest = True

    def _entry(self, name: str, options: Options) -> Entry:
        """Return the entry of a name that is new, or new for this loader."""
        entry = self.entries.get(name)
        if entry is None and not options.add_dataloader_idx:
            entry = self.shared.get(name)
        if entry is None:
            if not isinstance(name, str):
                raise ModuleError(f"self.log({name!r}, …): the name must be a string.")
            suffix = self.suffix if options.add_dataloader_idx else ""
            entry = Entry(name, options, self.in_batch, self.in_training, suffix)
            for other in self.all():
                if other.names & entry.names:
                    raise ModuleError(
                        f"self.log({name!r}, …) and self.log({other.name!r}, …) both record "
                        f"{', '.join(sorted(other.names & entry.names))}. Rename one of them."
                    )
            if not suffix:
                self.shared[name] = entry
        elif not entry.is_logged_with(options, self.in_batch):
            raise ModuleError(
                f"self.log({name!r}, …) was called again {_difference(entry, options)}. Log it the "
                "same way each time, or under two names."
            )
        self.entries[name] = entry
        return entry

    def _count(self, name: str) -> float:
        """Return the weight of the current batch, counted once for each."""
        if not self.in_batch:
            return 1.0
        self.size = float(count_samples(self.batch, self.sizer, name))
        return self.size

    def all(self) -> Iterator[Entry]:
        """Yield every entry."""
        for entries in (*self.of_loader, self.shared):
            yield from entries.values()

    def unsent_values(self) -> dict[str, Any]:
        """Return what goes to the loggers of the step values logged since this was last asked."""
        values: dict[str, Any] = {}
        for entry in self.all():
            if entry.is_unsent:
                entry.is_unsent = False
                if entry.options.logger is not False:
                    values[entry.step_name] = entry.value
        return values

    def step_readings(self, newest: bool = False) -> Readings:
        """Return the last value of all that is logged per step, or of the ``newest`` alone."""
        readings = Readings({}, {}, {})
        for entry in self.all():
            if entry.value is not None and (entry.is_newest or not newest):
                readings.add(entry, entry.step_name, entry.value)
        return readings

    def epoch_readings(self) -> Readings:
        """Return the reductions so far."""
        readings = Readings({}, {}, {})
        for entry in self.all():
            if entry.on_epoch and (value := entry.epoch_value()) is not None:
                readings.add(entry, entry.epoch_name, value)
        return readings

    def adopt(self, entry: Entry) -> None:
        """Keep an entry that another rank made."""
        where = self.shared
        if entry.plain_name != entry.name:
            suffix = entry.plain_name[len(entry.name) :]
            where = self.of_loader[int(suffix.rpartition("_")[2])]
        where[entry.name] = entry

    def forget_epoch(self) -> None:
        """Begin a new epoch."""
        self.batch = None
        for entry in self.all():
            entry.forget_epoch()


def _difference(entry: Entry, options: Options) -> str:
    """Say in what a call is unlike the one that made ``entry``."""
    for option, now, first in zip(Options._fields, options, entry.options, strict=True):
        if now != first:
            return f"with {option}={now!r} after {option}={first!r}"
    places = "a step", "a hook that runs once an epoch"
    return "in {1}, after {0}".format(*(places if entry.in_batch else reversed(places)))


class Metrics:
    """All that was logged in a run: training's, the latest evaluation's, and finished epochs'."""

    def __init__(self, sizer: Sizer | None) -> None:
        self.sizer = sizer
        self.train = Logged(True, sizer)
        self.evaluation: Logged | None = None
        self.finished = Readings({}, {}, {})
        self.strategy: Strategy | None = None
        """What other ranks are asked through; None for one process."""

    def join(self, strategy: Strategy) -> None:
        """Reduce over the ranks of ``strategy`` from now on."""
        self.strategy = strategy
        self.train.strategy = strategy

    def begin_evaluation(self) -> Logged:
        """Return where a new evaluation logs to."""
        self.evaluation = Logged(False, self.sizer)
        self.evaluation.strategy = self.strategy
        return self.evaluation

    def share(self, logged: Logged) -> None:
        """Let what was logged in the open epoch's batches be that of all ranks, from here on."""
        if self.strategy is not None:
            share(logged, self.strategy)

    def end_loader(self, logged: Logged) -> None:
        """Reset the metric objects of the loader that ends; every rank must have the same."""
        if self.strategy is not None and logged.suffix:
            require_same_objects(logged, self.strategy)
        logged.end_loader()

    def so_far(self, logged: Logged) -> dict[str, Any]:
        """Take the open epoch of ``logged`` for finished, and return what goes to the loggers."""
        self.share(logged)
        epoch = logged.epoch_readings()
        self.finished.update(epoch)
        return epoch.logger

    def finish(self, logged: Logged) -> dict[str, Any]:
        """End the epoch of ``logged`` and return what of it goes to the loggers."""
        values = self.so_far(logged)
        logged.forget_epoch()
        for entry in self.train.shared.values():
            entry.is_newest = False
        return values

    def read(self) -> Readings:
        """Return the latest values: of finished epochs, of the last steps, and of the open epoch.

        Where a step's value and an epoch's have one name, the later is returned.
        """
        readings = self.train.step_readings()
        readings.update(self.finished)
        for logged in (self.train, self.evaluation):
            if logged is not None:
                readings.update(logged.step_readings(newest=True))
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

    def add(self, entry: Entry, name: str, value: Any) -> None:
        """Add an entry's ``value``; callbacks find it under its plain name too."""
        self.callback[name] = self.callback[entry.plain_name] = value
        if entry.options.prog_bar:
            self.bar[name] = value
        if entry.options.logger is not False:
            self.logger[name] = value


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return ``values`` as Python numbers, waiting for the device once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), None)
    if device is None:
        return {name: float(value) for name, value in values.items()}
    dtype = torch.float32 if device.type == "mps" else torch.float64
    stacked = torch.stack([tensor.to(device, dtype) for tensor in tensors.values()]).tolist()
    read = dict(zip(tensors, stacked, strict=True))
    return {name: read[name] if name in read else float(values[name]) for name in values}
