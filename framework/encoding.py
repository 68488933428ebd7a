"""Values as plain data that ``torch.load(weights_only=True)`` reads, and back again.

None, bool, int, float, str, list, dict and tensors stand for themselves. Anything else is a dict
with the key ``__leyden__``, which says what it was, and ``value``, what makes it again. Reading
runs no code that the data names: tags are looked up in the tables below, classes among those that
the caller hands over.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from importlib import import_module
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from .errors import did_you_mean

_ALLOWED = (
    "numbers, text, paths, dates, tensors, NumPy values, dtypes, devices, enums, dataclasses, "
    "and lists, tuples, sets, dicts and namespaces of these"
)
TAG = "__leyden__"
_MAX_DEPTH = 100
_MAX_BITS = 2000  # of an int; the safe loader reads up to 2039
_TORCH_READS = (torch.dtype, torch.device, torch.Size, complex, bytes, bytearray)
_NUMPY_KINDS = "biufcSUMm"  # numbers, text and dates; others hold objects


class NotData(Exception):
    """A value cannot be encoded or decoded: which one, and why, in words that follow its name."""

    def __init__(self, path: tuple[Any, ...], reason: str) -> None:
        super().__init__(f"{'.'.join(map(str, path))} {reason}")
        self.path = path
        self.reason = reason


def encode(value: Any) -> Any:
    """Return ``value`` as plain data.

    Raises:
        NotData: It is not, or something in it is not, of an allowed type.
    """
    return _encode(value, (), ())


def _encode(value: Any, path: tuple[Any, ...], above: tuple[int, ...]) -> Any:
    if _is_plain(value):
        return value
    if id(value) in above:
        raise NotData(path, "contains itself.")
    if len(above) == _MAX_DEPTH:
        raise NotData(path[:3], f"is nested more than {_MAX_DEPTH} deep.")
    above = (*above, id(value))
    kind = type(value)
    if kind is list:
        return [_encode(part, (*path, index), above) for index, part in enumerate(value)]
    if kind is dict:
        parts = {key: _encode(part, (*path, key), above) for key, part in value.items()}
        if all(type(key) is str for key in parts) and TAG not in parts:
            return parts
        pairs = [[_encode(key, (*path, key), above), part] for key, part in parts.items()]
        return {TAG: "dict", "value": pairs}
    if is_omegaconf(value):
        return _encode(_resolved(value, path), path, above)
    tagged = _dump(value)
    if tagged is None:
        raise NotData(
            path,
            f"is of type {kind.__name__}, which a checkpoint cannot hold. Allowed: {_ALLOWED}.",
        )
    return {**tagged, "value": _encode(tagged["value"], path, above)}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() < _MAX_BITS)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return bool(value.is_leaf)  # others belong to a graph
    return kind in (type(None), bool, float, str)


def readable(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return ``value`` as the safe loader reads it: NumPy's numbers become Python's.

    Unlike `encode` it keeps the types that torch allows, for readers other than leyden.

    Raises:
        NotData: Something in it is of a type that the safe loader refuses.
    """
    kind = type(value)
    if _is_plain(value) or isinstance(value, torch.Tensor) or kind in _TORCH_READS:
        return value
    if kind in (dict, OrderedDict, Counter, defaultdict):
        made: type[Any] = dict if kind is defaultdict else kind
        return made({readable(k, path): readable(v, (*path, k)) for k, v in value.items()})
    if kind in (list, tuple, set):
        return kind(readable(part, (*path, index)) for index, part in enumerate(value))
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic) and _is_plain(value.item()):
        return value.item()
    raise NotData(path, f"is of type {kind.__name__}, which the safe loader does not read.")


def _dump(value: Any) -> dict[str, Any] | None:
    """Return the tag of ``value`` and what makes it again, or None if it is not data."""
    kind = type(value)
    if kind in _DUMP:
        tag, dump = _DUMP[kind]
        return {TAG: tag, "value": dump(value)}
    if isinstance(value, Enum):
        member = value.value if isinstance(value, Flag) else value.name
        return {TAG: "enum", "class": _class_name(kind), "value": member}
    if dataclasses.is_dataclass(kind) and not isinstance(value, torch.nn.Module):
        names = [field.name for field in dataclasses.fields(kind)]
        state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        state |= getattr(value, "__dict__", {})  # what __post_init__ added
        return {TAG: "dataclass", "class": _class_name(kind), "value": state}
    numpy = sys.modules.get("numpy")
    if numpy and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return _dump_numpy(value, None if isinstance(value, numpy.generic) else list(value.shape))
    return None


def decode(data: Any, classes: Iterable[type] = ()) -> Any:
    """Return what `encode` made ``data`` of.

    Args:
        data: As a file holds it.
        classes: The dataclasses and enums that may be made again; no others are.

    Raises:
        NotData: Something is of a class that is not among ``classes``, or is damaged.
    """
    try:
        return _decode(data, (), {_class_name(cls): cls for cls in classes})
    except RecursionError:
        raise NotData((), "is nested too deep.") from None


def _decode(data: Any, path: tuple[Any, ...], known: dict[str, type]) -> Any:
    if isinstance(data, list):
        return [_decode(part, (*path, index), known) for index, part in enumerate(data)]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {key: _decode(part, (*path, key), known) for key, part in data.items()}
    try:
        value = _decode(data["value"], path, known)
        if "class" in data:
            return _of_class(_find(data["class"], known, path), value)
        return _LOAD[data[TAG]](value)
    except (NotData, RecursionError):
        raise
    except Exception as error:
        raise NotData(
            path,
            f"cannot be read as {data[TAG]!r} ({type(error).__name__}: {error}): "
            "it is damaged, or was written by a newer leyden.",
        ) from error


def _find(name: str, known: dict[str, type], path: tuple[Any, ...]) -> type:
    if name in known:
        return known[name]
    module, _, qualname = name.partition(":")
    for cls in known.values():  # a class of the script itself is in __main__, then or now
        if cls.__qualname__ == qualname and "__main__" in (module, cls.__module__):
            return cls
    short = qualname.rpartition(".")[2]
    raise NotData(
        path,
        f"is a {name.replace(':', '.')}. No class is imported because a file names it: pass "
        f"types=[{short}], or annotate the argument with it.{did_you_mean(name, known)}",
    )


def _of_class(cls: type, value: Any) -> Any:
    if issubclass(cls, Enum):
        return cls(value) if issubclass(cls, Flag) else cls[value]
    made = cls.__new__(cls)  # without __init__, as unpickling does: the values are checked already
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in value:
            continue
        if field.default_factory is not dataclasses.MISSING:
            value[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            value[field.name] = field.default
        else:
            raise ValueError(f"{cls.__name__} now has a field {field.name!r} without a default")
    for name, part in value.items():
        object.__setattr__(made, name, part)  # frozen ones too
    return made


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def is_omegaconf(value: object) -> bool:
    """Return whether ``value`` is a container of OmegaConf's."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and bool(omegaconf.OmegaConf.is_config(value))


def to_container(value: Any) -> Any:
    """Return the dict or list that an OmegaConf container is once its interpolations are filled."""
    return sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=True)


def _resolved(value: Any, path: tuple[Any, ...]) -> Any:
    try:
        return to_container(value)
    except Exception as error:
        raise NotData(path, f"cannot be resolved: {error}.") from error


def _dump_numpy(value: Any, shape: list[int] | None) -> dict[str, Any] | None:
    if value.dtype.kind not in _NUMPY_KINDS:
        return None
    data = {"dtype": value.dtype.str, "shape": shape, "data": value.tobytes()}
    return {TAG: "numpy", "value": data}


def _numpy(data: dict[str, Any]) -> Any:
    numpy = import_module("numpy")
    dtype, shape = numpy.dtype(data["dtype"]), tuple(data["shape"] or ())
    if dtype.kind not in _NUMPY_KINDS or math.prod(shape) * dtype.itemsize != len(data["data"]):
        raise ValueError(f"{len(data['data'])} bytes are no {dtype} of shape {shape}")
    array = numpy.zeros(shape, dtype)
    if data["data"]:
        array[...] = numpy.ndarray(shape, dtype, data["data"])
    return array if data["shape"] is not None else array[()]


def _namespace(entries: dict[str, Any]) -> Namespace:
    namespace = Namespace()
    vars(namespace).update(entries)  # an entry may be called self
    return namespace


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def add(
    tag: str, kind: type, dump: Callable[[Any], Any], load: Callable[[Any], Any] | None = None
) -> None:
    """Let values of exactly ``kind`` be encoded: ``dump`` simplifies one, ``load`` undoes that."""
    _DUMP[kind] = (tag, dump)
    _LOAD[tag] = load or kind


_DUMP: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_LOAD: dict[str, Callable[[Any], Any]] = {"dict": dict, "numpy": _numpy}

add("tuple", tuple, list)
add("set", set, list)
add("frozenset", frozenset, list)
add("OrderedDict", OrderedDict, dict)
add("Namespace", Namespace, vars, _namespace)
add("SimpleNamespace", types.SimpleNamespace, vars, lambda v: types.SimpleNamespace(**v))
add("int", int, hex, lambda v: int(v, 16))
# torch.load(weights_only=True) of torch 2.13 fails on b"".
add("bytes", bytes, lambda v: v.decode("latin-1"), lambda v: v.encode("latin-1"))
add("complex", complex, lambda v: [v.real, v.imag], lambda v: complex(*v))
add("range", range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v))
add("Path", type(Path()), PurePath.as_posix, Path)
add("PurePosixPath", PurePosixPath, str)
add("PureWindowsPath", PureWindowsPath, str)
add("date", date, date.isoformat, date.fromisoformat)
add(
    "datetime",
    datetime,
    lambda v: {"at": v.replace(tzinfo=None).isoformat(), "fold": v.fold, "tz": v.tzinfo},
    lambda v: datetime.fromisoformat(v["at"]).replace(fold=v["fold"], tzinfo=v["tz"]),
)
add("timezone", timezone, lambda v: v.utcoffset(None))
add("timedelta", timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v))
add("Decimal", Decimal, str)
add("torch.dtype", torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype)
add("torch.device", torch.device, str)
add("torch.Size", torch.Size, list)
