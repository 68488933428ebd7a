"""Look at checkpoints, check, convert and compare them: ``from leyden import checkpoints``.

Every path is a local one or a URL. Nothing here runs code from a file.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from . import content, locations, tensor_files
from .content import Checkpoint as Checkpoint
from .content import Summary as Summary
from .difference import Difference as Difference
from .difference import between
from .errors import ConfigError, unknown
from .saving import checkpointer_for, load, view
from .shards import is_stored
from .weights import HOLDERS, read_weights

Options = Mapping[str, Any] | None
"""What fsspec takes for the file system of a URL, such as ``{"anon": True}``."""
_TAKEN = {
    "leyden", "folder", "epoch", "global_step", "state", "hyper_parameters", "optimizer_states",
    "lr_schedulers", "callbacks", "trainer",
}  # fmt: skip
_FORMS = ("weights", "safetensors", "checkpoint")
_VERSIONS = ("format", "version", "git", "python", "torch", "numpy", "written_by")


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a folder."""

    path: str
    step: int | None
    epoch: int | None
    time: float
    """When it was saved, in seconds since 1970."""
    size: int
    """Bytes of the file."""
    kind: str | None
    """``"training"``, ``"weights"``, or None where the file does not say."""
    complete: bool
    """Whether all of it was written."""


def open(path: str | Path, storage_options: Options = None) -> Checkpoint:
    """Return the checkpoint at ``path``, one of leyden or of Lightning, or a file of weights.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    checkpointer = checkpointer_for(str(path), storage_options)
    found = load(checkpointer, str(path))
    manifest = {**found.get("leyden", {}), **checkpointer.manifest(str(path))}
    return Checkpoint(str(path), manifest, found)


def inspect(path: str | Path, storage_options: Options = None) -> Summary:
    """Return what the checkpoint at ``path`` holds and what it can be used for.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    files, name = _file_system(path, storage_options)
    return content.summary(open(path, storage_options), int(files.du(name)))


def list(folder: str | Path, storage_options: Options = None) -> Sequence[Entry]:
    """Return the checkpoints in ``folder`` and below it, the newest first.

    A file with several names, such as ``last.ckpt``, is there once. What was not written to its end
    is there as not complete.
    """
    checkpointer = checkpointer_for(str(folder), storage_options)
    complete = checkpointer.find(str(folder))
    entries = [_entry(path, storage_options, checkpointer.manifest(path)) for path in complete]
    files, root = _file_system(folder, storage_options)
    known = {_file_system(path, storage_options)[1] for path in complete}
    for name in files.find(root):
        path = locations.join(folder, name.removeprefix(root.rstrip("/")).lstrip("/"))
        is_other = name.endswith(checkpointer.extension) and name not in known
        if is_other and not checkpointer.exists(path):
            entries.append(_entry(path, storage_options, None))
    return sorted(entries, key=lambda entry: -entry.time)


def verify(path: str | Path, storage_options: Options = None) -> None:
    """Read all of the checkpoint at ``path`` and compare it with its checksum.

    Raises:
        CheckpointError: There is none, or it is not as it was written.
    """
    checkpointer_for(str(path), storage_options).verify(str(path))


def convert(
    path: str | Path,
    target: str | Path,
    to: str | None = None,
    storage_options: Options = None,
    max_shard_size: int | None = None,
) -> None:
    """Write the checkpoint at ``path``, or its weights alone, in another form at ``target``.

    One process does, whatever number of ranks has written ``path``. It holds one tensor at a time.

    Args:
        path: A checkpoint, or any file that `Module.load_weights` reads.
        target: The file to write.
        to: ``"weights"``, a state_dict that ``torch.load`` reads; ``"safetensors"``; or
            ``"checkpoint"``, all there is of a checkpoint in one file, or in a folder for a target
            that ends in ``.sharded``. By default weights, in the form that the target's name tells.
        storage_options: What fsspec takes for the file systems of URLs.
        max_shard_size: For safetensors: bytes that go into a file before another is begun. Several
            are called ``model-00001-of-00002.safetensors`` and so on for the target
            ``model.safetensors``, and ``model.safetensors.index.json`` says what is where.

    Raises:
        CheckpointError: The file cannot be read, or the other not be written.
        ConfigError: ``to`` is unknown, or ``max_shard_size`` is not for it.
    """
    source, place = str(path), str(target)
    to = to or ("safetensors" if place.endswith(tensor_files.ENDING) else "weights")
    if to not in _FORMS:
        raise unknown("format", to, _FORMS, "Pass one of them as to=….")
    if max_shard_size is not None and (to != "safetensors" or max_shard_size < 1):
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} must be bytes, for a target of safetensors files; "
            f"this one is {to!r}."
        )
    reader = checkpointer_for(source, storage_options)
    found = view(reader, source) if to == "checkpoint" else read_weights(reader, source)
    if to == "safetensors":
        tensor_files.write(found, place, storage_options, max_shard_size)
        return
    with TemporaryDirectory(prefix="leyden-") as folder:
        checkpointer_for(place, storage_options).save(_spilled(found, folder), place)


def _spilled(value: Any, folder: str, done: dict[int, Any] | None = None) -> Any:
    """Return nested ``value`` with each tensor that stays in a checkpoint in a file in ``folder``.

    torch saves tensors only together, so they must all be there, and need not be in memory. One
    that is there twice, as tied weights are, is one.
    """
    done = {} if done is None else done
    if isinstance(value, dict):
        return {key: _spilled(part, folder, done) for key, part in value.items()}
    if type(value) in (builtins.list, tuple):
        return type(value)(_spilled(part, folder, done) for part in value)
    if not is_stored(value):
        return value
    if id(value) not in done:
        done[id(value)] = _spilled_tensor(value, folder)
    return done[id(value)]


def _spilled_tensor(value: Any, folder: str) -> Tensor:
    file, size = NamedTemporaryFile(dir=folder, delete=False), value.numel()  # noqa: SIM115
    file.close()
    mapped = torch.from_file(file.name, shared=True, size=size, dtype=value.dtype)
    value.read_into(mapped.view(value.shape))
    return mapped.view(value.shape)


def diff(
    a: str | Path | Checkpoint, b: str | Path | Checkpoint, storage_options: Options = None
) -> Difference:
    """Return in what checkpoint ``b`` differs from ``a``; the result is false where in nothing.

    Raises:
        CheckpointError: One of them cannot be read.
    """
    first, second = (
        checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint, storage_options)
        for checkpoint in (a, b)
    )
    return between(_parts(first), _parts(second))


def _parts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all that a checkpoint holds by the parts of a `Difference`."""
    own, manifest = dict(checkpoint), checkpoint.manifest
    parts = {
        "weights": checkpoint.state_dict,
        "counters": {**own.get("state", {}), "epoch": checkpoint.epoch, "step": checkpoint.step},
        "hyper_parameters": checkpoint.hyper_parameters,
        "optimizers": checkpoint.optimizer_states,
        "schedules": checkpoint.lr_schedulers,
        "callbacks": checkpoint.callbacks,
        "trainer": own.get("trainer", {}),
        "versions": {name: manifest[name] for name in _VERSIONS if name in manifest},
    }
    is_weight = {*checkpoint.state_dict, *HOLDERS}
    parts["others"] = {n: v for n, v in own.items() if n not in _TAKEN and n not in is_weight}
    return parts


def _file_system(path: str | Path, storage_options: Options) -> tuple[Any, str]:
    """Return the file system that ``path`` is in, and its name there."""
    place, options = locations.absolute(path), storage_options or {}
    return import_module("fsspec").url_to_fs(place, **options)  # type: ignore[no-any-return]


def _entry(path: str, storage_options: Options, manifest: Mapping[str, Any] | None) -> Entry:
    files, name = _file_system(path, storage_options)
    told = manifest or {}
    return Entry(
        path=path,
        step=told.get("global_step"),
        epoch=told.get("epoch"),
        time=told["time"] if "time" in told else files.modified(name).timestamp(),
        size=int(files.du(name)),
        kind=told.get("kind"),
        complete=manifest is not None,
    )
