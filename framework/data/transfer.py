"""A batch's tensors, wherever they are in it: moved to a device, or changed in dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with everything that has a ``to(device)`` on ``device``.

    A copy from pinned memory does not wait for the device.
    """
    asynchronous = device.type == "cuda"

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=asynchronous)
        return value.to(device)

    return mapped(batch, moved, lambda value: hasattr(value, "to"))


def mapped(data: Any, change: Callable[[Any], Any], wanted: Callable[[Any], bool]) -> Any:
    """Return ``data`` with ``change`` applied to each of its parts that is ``wanted``.

    Looks into mappings, sequences, named tuples and dataclasses, whose types are kept. Anything
    else stays the same object.
    """
    if isinstance(data, Tensor) or wanted(data):
        return change(data) if wanted(data) else data
    if isinstance(data, Mapping):
        items = {key: mapped(value, change, wanted) for key, value in data.items()}
        return items if type(data) is dict else type(data)(items)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(value, change, wanted) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)([mapped(value, change, wanted) for value in data])
    if is_dataclass(data) and not isinstance(data, type):
        changes = {
            f.name: mapped(getattr(data, f.name), change, wanted) for f in fields(data) if f.init
        }
        return replace(data, **changes)
    return data
