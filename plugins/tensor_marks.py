"""A checkpoint's tensors by their places in it, and the rest with a mark for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from leyden.dtensors import is_split, local

_MARK = "__tensor__"


def tied_in(value: Any) -> dict[str, str]:
    """Return the places of tensors that are in the same memory as another, with that one's."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for path, tensor in _tensors(value, ""):
        own = local(tensor)
        if own.numel() and own.device.type != "meta":
            memory = own.data_ptr(), own.dtype, own.shape, own.stride(), tensor.shape
            if first.setdefault(memory, path) != path:
                tied[path] = first[memory]
    return tied


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in (dict, list, tuple):
        for key, part in value.items() if type(value) is dict else enumerate(value):
            yield from _tensors(part, f"{path}/{key}")


def without_tensors(
    value: Any,
    tied: Mapping[str, str],
    tensors: dict[str, Tensor],
    path: str = "",
    keeps_all: bool = True,
) -> Any:
    """Return nested ``value`` with a mark in place of each tensor, which goes into ``tensors``.

    Of tensors that are ``tied`` the first goes there, and of others only those in parts on several
    ranks unless it ``keeps_all``.
    """
    if isinstance(value, Tensor):
        first = tied.get(path, path)
        if first == path and (keeps_all or is_split(value)):
            tensors[path] = value.detach()
        return {_MARK: first}
    go = partial(without_tensors, tied=tied, tensors=tensors, keeps_all=keeps_all)
    if type(value) is dict:
        return {k: go(v, path=f"{path}/{k}") for k, v in value.items()}
    if type(value) in (list, tuple):
        parts = [go(v, path=f"{path}/{i}") for i, v in enumerate(value)]
        return parts if type(value) is list else tuple(parts)
    return value


def with_tensors(value: Any, tensors: Mapping[str, Tensor], device: Any) -> Any:
    """Return nested ``value`` with the tensors in place of their marks."""
    if type(value) is dict:
        if set(value) == {_MARK}:
            return tensors[value[_MARK]].to(device)
        return {k: with_tensors(v, tensors, device) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_tensors(v, tensors, device) for v in value)
    return value
