"""Weights in safetensors files; the package is imported on use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from . import locations
from .errors import CheckpointError

ENDING = ".safetensors"


def read(path: str, storage_options: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the tensors at ``path`` by name, on the CPU.

    Raises:
        CheckpointError: The file cannot be read.
    """
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


def write(
    weights: Mapping[str, Any], path: str, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write ``weights`` at ``path``, whole or not at all.

    Of weights that are tied the first is written; under each other name the file's metadata has the
    name of the first, as ``safetensors.torch.save_model`` does it.

    Raises:
        CheckpointError: Something in them is no tensor, or the file cannot be written.
    """
    safetensors = _safetensors(path)
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{', '.join(others)}: no tensor, and {path!r} can hold nothing else. Convert to "
            "'weights' instead."
        )
    kept, tied = _untied(weights)
    try:
        _write(safetensors.save(kept, {"format": "pt", **tied}), path, storage_options)
    except Exception as error:
        raise CheckpointError(
            f"{path!r} cannot be written: {error}. Make room, or pass a place that can be written."
        ) from error


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
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            # A view of part of another weight, too: safetensors refuses memory that is shared.
            shares = tensor.untyped_storage().nbytes() != tensor.nbytes
            kept[name] = tensor.clone().contiguous() if shares else tensor.contiguous()
    return kept, tied


def _write(data: bytes, path: str, storage_options: Mapping[str, Any] | None) -> None:
    if locations.is_remote(path):
        with import_module("fsspec").open(path, "wb", **(storage_options or {})) as file:
            file.write(data)
        return
    target = locations.local(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
