"""How many samples a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..errors import DataError

OWN_COUNTS = ("batch_size", "num_graphs")
"""Attributes by which a batch object says its own size: TensorDict's and PyG's."""


def count_samples(batch: Any, sizer: Callable[[Any], int | None] | None, name: str) -> int:
    """Return the number of samples in ``batch``.

    Asks, in this order: the Module's ``count_samples``, the batch itself, and the first dimension
    of its tensors where all have the same.

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
    for attribute in OWN_COUNTS:
        own = getattr(batch, attribute, None)
        if isinstance(own, int):
            return own
        if isinstance(own, tuple) and own and isinstance(own[0], int):
            return own[0]
    sizes = set(_first_dimensions(batch))
    if len(sizes) == 1:
        return sizes.pop()
    found = f"tensors of {sorted(sizes)} rows" if sizes else f"no tensors in a {_kind(batch)}"
    raise DataError(
        f"Cannot tell how many samples weigh the epoch mean of {name!r}: the batch holds {found}. "
        "Pass self.log(…, batch_size=n), or define count_samples(self, batch) once on the Module."
    )


def _kind(batch: Any) -> str:
    return type(batch).__name__


def _first_dimensions(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch.shape[0]
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _first_dimensions(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _first_dimensions(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _first_dimensions(getattr(batch, field.name))
    elif (shape := getattr(batch, "shape", None)) is not None and len(shape):
        yield int(shape[0])
