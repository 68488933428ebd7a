"""In what two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ABSENT = object()
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs; one that only one of the two has is `ABSENT` in the other."""

    before: Any
    after: Any
    max_abs: float | None = None
    """The largest difference, where both are tensors of one shape and dtype."""

    def __str__(self) -> str:
        if self.max_abs is not None:
            return f"differs by up to {self.max_abs:.3g}"
        if self.before is ABSENT:
            return f"added: {_shown(self.after)}"
        if self.after is ABSENT:
            return f"removed: {_shown(self.before)}"
        return f"{_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """In what a checkpoint differs from another, by dotted names; false where in nothing.

    Print it for the first of each part.
    """

    weights: dict[str, Change]
    counters: dict[str, Change]
    hyper_parameters: dict[str, Change]
    optimizers: dict[str, Change]
    """Options and states: ``0.param_groups.0.lr`` is the first optimizer's rate."""
    schedules: dict[str, Change]
    callbacks: dict[str, Change]
    trainer: dict[str, Change]
    """The Trainer's choices that change what training comes to."""
    versions: dict[str, Change]
    others: dict[str, Change]
    """Random generators, the place in the data, what ``on_save_checkpoint`` added, and the like."""

    def __bool__(self) -> bool:
        return any(changes for _, changes in self._parts())

    def __str__(self) -> str:
        lines = []
        for name, changes in self._parts():
            lines += [f"{name}: {len(changes)}"] if changes else []
            lines += [f"  {entry}: {change}" for entry, change in [*changes.items()][:_SHOWN]]
            lines += [f"  and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        return "\n".join(lines) or "no difference"

    def _parts(self) -> Iterator[tuple[str, dict[str, Change]]]:
        for name in self.__slots__:
            yield name, getattr(self, name)


def between(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """Return in what the parts ``b``, by the names that a `Difference` gives them, differ."""
    return Difference(**{name: _changes(_flat(a[name]), _flat(b[name])) for name in a})


def _changes(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Change]:
    names = [*a, *(name for name in b if name not in a)]
    pairs = {name: (a.get(name, ABSENT), b.get(name, ABSENT)) for name in names}
    return {
        name: Change(before, after, _distance(before, after))
        for name, (before, after) in pairs.items()
        if not _same(before, after)
    }


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts, lists and tuples by their dotted names."""
    if isinstance(value, Mapping):
        items = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), part) for index, part in enumerate(value)]
    else:
        return {name: value}
    if name and not items:
        return {name: value}
    below = f"{name}." if name else ""
    return {k: leaf for key, part in items for k, leaf in _flat(part, f"{below}{key}").items()}


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _distance(a, b) == 0.0
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal) or (a != a and b != b)


def _distance(a: Any, b: Any) -> float | None:
    """Return the largest difference of two tensors of a kind; equal NaN differ in nothing."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    distance[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return float(distance.max()) if distance.numel() else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    return f"{value!r:.100}"
