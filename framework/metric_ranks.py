"""Values logged on several ranks, brought together by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .entry import Entry, Options
from .errors import ModuleError

if TYPE_CHECKING:
    from .metrics import Logged
    from .protocols import Strategy

Part = tuple[float, float, dict[str, Any]]
"""A rank's reduction, its weight, and what makes an entry for it elsewhere."""


def share(logged: Logged, strategy: Strategy) -> None:
    """Give every entry of the open epoch the reduction over all ranks.

    Names are what brings values together, in whatever order ranks logged them; a name that some
    ranks did not log is reduced over those that did. Each rank knows every name after.

    Raises:
        ModuleError: An object that reduces by itself was logged on some ranks only.
    """
    entries = {e.epoch_name: e for e in logged.all() if e.on_epoch and e.agreed is None}
    objects = sorted(name for name, entry in entries.items() if entry.metric is not None)
    told = strategy.gather(
        (strategy.data_rank, objects, _parts(entries, set(entries) - {*objects}))
    )
    _adopt(logged, entries, [values for _, _, values in told])
    if any(names for _, names, _ in told):
        _refuse_missing([names for _, names, _ in told])
        # An object may gather by itself when it computes, so all ranks ask in one order.
        told += strategy.gather((strategy.data_rank, objects, _parts(entries, objects)))
    for name, entry in entries.items():
        # Each part of the data once, though several ranks may have it.
        found = {place: values[name] for place, _, values in reversed(told) if name in values}
        if found:
            entry.agreed = _reduced(entry, [found[place] for place in sorted(found)])


def _parts(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, Part]:
    parts = {name: entries[name].part() for name in names}
    return {name: (*part, _kind(entries[name])) for name, part in parts.items() if part is not None}


def _adopt(logged: Logged, entries: dict[str, Entry], told: Sequence[Mapping[str, Part]]) -> None:
    """Make an entry for each name that only other ranks have logged."""
    for values in told:
        for name, (_, _, kind) in values.items():
            if name not in entries:
                options = Options(**kind["options"])
                made = Entry(
                    kind["name"], options, kind["in_batch"], logged.in_training, kind["suffix"]
                )
                made.is_restored = True
                entries[name] = made
                logged.adopt(made)


def require_same_objects(logged: Logged, strategy: Strategy) -> None:
    """Refuse an object that reduces by itself and that some ranks did not log.

    Raises:
        ModuleError: There is one.
    """
    own = sorted(e.epoch_name for e in logged.all() if e.metric is not None)
    _refuse_missing(strategy.gather(own))


def _refuse_missing(told: Sequence[Sequence[str]]) -> None:
    """Raise on every rank if an object is missing on one: others would wait for it for ever."""
    for name in sorted({name for names in told for name in names}):
        lacking = [str(rank) for rank, names in enumerate(told) if name not in names]
        if lacking:
            raise ModuleError(
                f"self.log({name!r}, …) got a metric object on some ranks and not on rank "
                f"{', '.join(lacking)}. Log it on every rank in each epoch, whether it was "
                "updated there or not."
            )


def of_all_ranks(value: Tensor | float, entry: Entry, strategy: Strategy) -> Tensor:
    """Return a step's ``value`` reduced over ranks, all of which must log it in this step."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return strategy.reduce(tensor.to(strategy.device), entry.reduction)


def _kind(entry: Entry) -> dict[str, Any]:
    """Return as plain data what makes an entry like this one on another rank."""
    options = entry.options._asdict() | {"reduce_fx": entry.reduction}
    suffix = entry.plain_name[len(entry.name) :]
    return {
        "name": entry.name,
        "options": options,
        "in_batch": entry.in_batch,
        "suffix": suffix,
    }


def _reduced(entry: Entry, found: Sequence[Part]) -> float:
    if entry.options.rank_zero_only:
        return found[0][0] / (found[0][1] if entry.reduction == "mean" else 1.0)
    values, weights = [part[0] for part in found], [part[1] for part in found]
    if entry.metric is not None or entry.reduction == "mean":
        return sum(values) / sum(weights)
    if entry.reduction == "sum" or any(value != value for value in values):
        return sum(values)  # NaN where there is one
    return min(values) if entry.reduction == "min" else max(values)
