"""A batch's tensors, wherever they are in it: moved to a device, or changed in dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
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

    Looks into mappings, lists, tuples and dataclasses, which are copied and keep their types.
    Anything else stays the same object.
    """
    if wanted(data):
        return change(data)
    if isinstance(data, Mapping):
        return _with_items(data, {key: mapped(data[key], change, wanted) for key in data})
    if isinstance(data, (list, tuple)):
        return _with_parts(data, [mapped(value, change, wanted) for value in data])
    if is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in fields(data):
            # A frozen one is filled too, and none is made again from arguments it no longer has.
            value = mapped(getattr(data, field.name), change, wanted)
            object.__setattr__(changed, field.name, value)
        return changed
    return data


def _with_items(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return items
    if not isinstance(data, MutableMapping):
        return type(data)(items)  # type: ignore[call-arg]
    changed = copy.copy(data)
    changed.update(items)
    return changed


def _with_parts(data: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    if type(data) is list:
        return parts
    if hasattr(data, "_fields"):
        return type(data)(*parts)
    if isinstance(data, tuple):
        return type(data)(parts)
    changed = copy.copy(data)
    changed[:] = parts
    return changed
