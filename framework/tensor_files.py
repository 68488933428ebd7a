"""Weights in safetensors files: read by the package, which is imported on use.

Written here, since the package writes only what is in memory all at once. The format is a header in
JSON with the place of each tensor's bytes, and then the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch import Tensor

from . import locations
from .errors import CheckpointError
from .shards import is_stored

ENDING = ".safetensors"
INDEX = ".safetensors.index.json"
"""How the name of an index ends, which says what tensor is in which of several files."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What the format calls them."""


def read(path: str, storage_options: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the tensors at ``path``, a file or an index, by name, on the CPU.

    Those of a local file stay in it until they are used.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if path.endswith(INDEX):
        names = _files_of(path, storage_options)
        folder = locations.folder_of(path)
        parts = [read(locations.join(folder, name), storage_options) for name in names]
        return {name: tensor for part in parts for name, tensor in part.items()}
    safetensors = _safetensors(path)
    try:
        if not locations.is_remote(path):
            return dict(safetensors.load_file(locations.local(path)))
        with import_module("fsspec").open(path, "rb", **(storage_options or {})) as file:
            return dict(safetensors.load(file.read()))
    except Exception as error:  # each file system has errors of its own
        raise CheckpointError(
            f"{path!r} cannot be read as safetensors: {error}. Pass a file that is there and whole."
        ) from error


def _files_of(path: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the files that the index at ``path`` names, which lie beside it."""
    try:
        with _opened(path, "rb", storage_options) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        if any(PurePosixPath(name).name != name for name in names):
            raise ValueError("it names files outside of its folder")
    except Exception as error:  # each file system has errors of its own
        raise CheckpointError(
            f"{path!r} cannot be read as an index of safetensors files: {error}. Pass one that is "
            "there and whole."
        ) from error
    return names


def write(
    weights: Mapping[str, Any],
    path: str,
    storage_options: Mapping[str, Any] | None = None,
    max_shard_size: int | None = None,
) -> None:
    """Write ``weights`` at ``path``, whole or not at all, one tensor after the other.

    Of weights that are tied the first is written; under each other name the file's metadata has the
    name of the first, as ``safetensors.torch.save_model`` does it.

    Args:
        weights: Tensors by name; those that stay in a file are read one at a time.
        path: The file's name. With several it is that of none: ``model.safetensors`` becomes
            ``model-00001-of-00002.safetensors`` and so on, with an index beside them.
        storage_options: What fsspec takes for the file system of a URL.
        max_shard_size: Bytes of tensors that go into a file before another is begun.

    Raises:
        CheckpointError: Something in them is no tensor, or a file cannot be written.
    """
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name}: no tensor, and {path!r} can hold nothing else. Convert to 'weights' "
                "instead."
            )
        if value.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is of {value.dtype}, which {path!r} cannot hold. Convert to 'weights' "
                "instead."
            )
    kept, tied = _untied(weights)
    shards = _dealt(kept, max_shard_size)
    stem, places = path.removesuffix(ENDING), [path]
    if len(shards) > 1:
        places = [f"{stem}-{i:05}-of-{len(shards):05}{ENDING}" for i in range(1, len(shards) + 1)]
    try:
        for place, shard in zip(places, shards, strict=True):
            own = {name: first for name, first in tied.items() if first in shard}
            with _writing(place, storage_options) as file:
                _write(shard, own, file)
        if len(shards) > 1:
            with _writing(f"{stem}{INDEX}", storage_options) as file:
                file.write(_index(places, shards))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path!r} cannot be written: {error}. Make room, or pass a place that can be written."
        ) from error


def _dealt(weights: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    """Return the weights in parts of at most ``limit`` bytes; a larger tensor is one by itself."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        size += _bytes_of(tensor)
        if limit is not None and size > limit and shards[-1]:
            shards.append({})
            size = _bytes_of(tensor)
        shards[-1][name] = tensor
    return shards


def _index(places: Sequence[str], shards: Sequence[Mapping[str, Tensor]]) -> bytes:
    size = sum(_bytes_of(tensor) for shard in shards for tensor in shard.values())
    pairs = zip(places, shards, strict=True)
    files = {name: locations.name_of(place) for place, shard in pairs for name in shard}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=1).encode()


def _write(weights: Mapping[str, Tensor], tied: Mapping[str, str], file: IO[bytes]) -> None:
    """Write one file: the length of its header, the header, and the tensors' bytes."""
    # Wide dtypes first, so that each tensor begins where its dtype may.
    ordered = sorted(weights.items(), key=lambda pair: -pair[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    at = 0
    for name, tensor in ordered:
        end = at + _bytes_of(tensor)
        shape, dtype = [*tensor.shape], _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        plain = tensor.clone() if is_stored(tensor) else tensor.detach().cpu()
        file.write(plain.contiguous().view(-1).view(torch.uint8).numpy().data)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _safetensors(path: str) -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(
            f"{path!r} takes the package safetensors. Install it: pip install safetensors"
        ) from error


def _untied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights without second names, and these with the first names."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in weights.items():
        own = id(tensor) if is_stored(tensor) else tensor.data_ptr()
        place = (own, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    return kept, tied


def _opened(path: str, mode: str, storage_options: Mapping[str, Any] | None) -> Any:
    if locations.is_remote(path):
        return import_module("fsspec").open(path, mode, **(storage_options or {}))
    return locations.local(path).open(mode)


@contextmanager
def _writing(path: str, storage_options: Mapping[str, Any] | None) -> Iterator[IO[bytes]]:
    """Give a file to write, which takes its name when left, unless by an error."""
    if locations.is_remote(path):
        with _opened(path, "wb", storage_options) as file:
            yield file
        return
    target = locations.local(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
