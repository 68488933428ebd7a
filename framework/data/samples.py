"""How many samples a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..errors import DataError

OWN_COUNTS = ("batch_size", "num_graphs")
"""Attributes by which a batch object says its own size: TensorDict's and PyG's."""


def count_samples(batch: Any, sizer: Callable[[Any], int | None] | None, name: str) -> int:
    """Return the number of samples in ``batch``.

    Asks, in this order: the Module's ``count_samples``, the batch itself, and the first dimension
    of its tensors where all have the same. A lone number, or None, is one sample.

    Args:
        batch: One batch, as the step gets it.
        sizer: The Module's own count, or None.
        name: What is logged, for the message.

    Raises:
        DataError: The count cannot be known.
    """
    if sizer is not None:
        count = sizer(batch)
        if count is not None:
            return int(count)
    known = known_count(batch)
    if known is not None:
        return known
    rows: set[int] = set()
    _add_rows(batch, rows)
    kind = type(batch).__name__
    found = f"tensors of {sorted(rows)} rows" if rows else f"no tensors in a {kind}"
    raise DataError(
        f"Cannot tell how many samples weigh the epoch mean of {name!r}: the batch holds {found}. "
        "Pass self.log(…, batch_size=n), or define count_samples(self, batch) once on the Module."
    )


def known_count(batch: Any) -> int | None:
    """Return the number of samples that ``batch`` says or its tensors show, or None."""
    own = None if type(batch) in (tuple, list) else own_count(batch)
    if own is not None:
        return own
    rows: set[int] = set()
    _add_rows(batch, rows)
    if len(rows) == 1:
        return rows.pop()
    is_one = batch is None or isinstance(batch, (int, float))
    return 1 if is_one or getattr(batch, "shape", None) == () else None


def own_count(batch: Any) -> int | None:
    """Return the number of samples that a batch object says it has, or None."""
    if isinstance(batch, Tensor) or type(batch) in (list, tuple, dict):
        return None
    for attribute in OWN_COUNTS:
        own = getattr(batch, attribute, None)
        if isinstance(own, int):
            return own
        if isinstance(own, tuple) and own and isinstance(own[0], int):
            return own[0]
    return None


def _add_rows(batch: Any, rows: set[int]) -> None:
    """Add the first dimension of everything in ``batch`` that has one."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            rows.add(batch.size(0))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _add_rows(value, rows)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            if type(value) is Tensor and value.ndim:
                rows.add(value.size(0))  # what most batches hold, without a call for each
            else:
                _add_rows(value, rows)
    elif is_dataclass(batch):
        for field in fields(batch):
            _add_rows(getattr(batch, field.name), rows)
    elif shape := getattr(batch, "shape", None):
        rows.add(int(shape[0]))
