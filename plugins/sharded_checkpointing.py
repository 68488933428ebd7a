"""ShardedCheckpointer: a checkpoint in a folder, its tensors as torch.distributed.checkpoint's.

::

    last.sharded/
        manifest.json     written last: what the checkpoint says of itself, and every file's sum
        1f0c9a3e/         the data of this save; those of others are no part of the checkpoint
            rest.pt       all that is no tensor, as a FileCheckpointer writes it
            .metadata     the index of the tensors
            __0_0.distcp  the tensors
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leyden import locations
from leyden.errors import CheckpointError

from . import archive
from .checkpointing import FileCheckpointer, advice, preference
from .sharded_metadata import read_index

MANIFEST, REST = "manifest.json", "rest.pt"
_TENSOR = "__tensor__"
_CHUNK = 1 << 24


class ShardedCheckpointer(FileCheckpointer):
    """Keeps a checkpoint in a folder that is complete once its manifest is.

    Each save writes into a subfolder of its own, then replaces the manifest, which names it, at
    once. It is read without running any code from it, though torch's own reader would.

    Args:
        storage_options: What fsspec needs to know for URLs, such as an endpoint or a key.
        retries: How often to try again after an error of the network.
    """

    extension = ".sharded"

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write ``checkpoint`` at ``path``, replacing what was there only when complete.

        Raises:
            CheckpointError: It cannot be written; what was at ``path`` before is unchanged.
        """
        name = secrets.token_hex(4)
        data, files = locations.join(path, name), self._files(path)
        tensors: dict[str, Tensor] = {}
        rest = _without_tensors(checkpoint, "", tensors)
        try:
            with files.writing(locations.join(data, REST)) as file:
                archive.write(rest, file)
            with _quiet():
                save(tensors, storage_writer=self._writer(data), no_dist=True)
            entries = {**checkpoint.get("leyden", {}), "data": name, "files": self._sums(data)}
            entries["size"] = sum(size for size, _ in entries["files"].values())
            entries["checksum"] = _sum_of(entries["files"])
            with files.writing(locations.join(path, MANIFEST)) as file:
                file.write(json.dumps(entries, indent=1).encode())
        except BaseException as error:
            with suppress(Exception):
                self._delete(data)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written, and what was there before is kept: "
                + advice(error)
            ) from error
        self._delete_others(path, name)

    def load(self, path: str, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at ``path`` without running any code from it.

        Raises:
            CheckpointError: There is none, or it was cut short or altered, or holds code.
        """
        data = self._verified(path)
        rest = super().load(locations.join(data, REST), map_location)
        with self._files(path).reading(locations.join(data, ".metadata")) as file:
            index = read_index(file)
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with _quiet():
            load(tensors, storage_reader=self._reader(data, index), no_dist=True)
        return _with_tensors(rest, tensors, map_location)  # type: ignore[no-any-return]

    def manifest(self, path: str) -> dict[str, Any]:
        """Return what the checkpoint says of itself, without reading the rest of it.

        Raises:
            CheckpointError: There is none.
        """
        return {k: v for k, v in self._all_of(path).items() if k not in ("data", "files")}

    def _all_of(self, path: str) -> dict[str, Any]:
        """Return the manifest with the names and sums of its files."""
        try:
            with self._files(path).reading(locations.join(path, MANIFEST)) as file:
                entries = json.load(file)
            known = entries["data"], entries["files"]
            is_sound = entries["checksum"] == _sum_of(entries["files"])
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing(path) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path!r} is no whole sharded checkpoint: its {MANIFEST} cannot be read ({error})."
                " Take another one."
            ) from error
        if not is_sound:
            raise CheckpointError(f"{path!r} was altered: its {MANIFEST} does not fit itself.")
        if any(PurePosixPath(name).name != name for name in (known[0], *known[1])):
            raise CheckpointError(f"{path!r} names files outside of its folder. Do not use it.")
        return entries  # type: ignore[no-any-return]

    def verify(self, path: str) -> None:
        """Read all of the checkpoint at ``path``.

        Raises:
            CheckpointError: There is none, or it is not as it was written.
        """
        self._verified(path)

    def exists(self, path: str) -> bool:
        """Return whether a complete checkpoint is at ``path``; looks at its manifest only."""
        with suppress(CheckpointError):
            return bool(self.manifest(path))
        return False

    def find(self, folder: str) -> list[str]:
        """Return the complete checkpoints in ``folder`` and below it, the newest first."""
        sights = self._files(folder).search(folder, MANIFEST, 1)
        places = [replace(sight, path=locations.folder_of(sight.path)) for sight in sights]
        found: dict[Any, tuple[tuple[float, int], str]] = {}
        for place in sorted(places, key=preference, reverse=True):
            name = locations.name_of(place.path)
            if name.endswith(self.extension) and not name.startswith("."):
                with suppress(CheckpointError):
                    entries = self.manifest(place.path)
                    age = (entries.get("time", 0.0), entries.get("total_batches", 0))
                    same = locations.folder_of(place.path), *age, entries["checksum"]
                    found[same] = (age, place.path)
        return [path for _, path in sorted(found.values(), key=lambda f: f[0], reverse=True)]

    def copy(self, existing: str, path: str, symbolic: bool = False) -> None:
        """Make ``path`` stand for ``existing``, file by file: links where those are known.

        Raises:
            CheckpointError: It cannot be made; what was at ``path`` before is unchanged.
        """
        entries = self._all_of(existing)
        name = secrets.token_hex(4)
        for file in entries["files"]:
            source = locations.join(existing, entries["data"], file)
            super().copy(source, locations.join(path, name, file), symbolic=False)
        with self._files(path).writing(locations.join(path, MANIFEST)) as stream:
            stream.write(json.dumps(entries | {"data": name}, indent=1).encode())
        self._delete_others(path, name)

    def remove(self, path: str) -> None:
        """Delete the checkpoint at ``path``, its manifest first."""
        super().remove(locations.join(path, MANIFEST))
        self._delete(path)

    def _verified(self, path: str) -> str:
        """Return the folder of the data at ``path``, all of which is as it was written."""
        entries = self._all_of(path)
        data = locations.join(path, entries["data"])
        found = self._sums(data)
        for name, sums in entries["files"].items():
            if list(found.get(name, ())) != list(sums):
                raise CheckpointError(
                    f"{path!r} was cut short or altered: its file {name!r} is not as it was "
                    "written. Copy it again, or resume from an older one."
                )
        return data

    def _sums(self, data: str) -> dict[str, tuple[int, str]]:
        """Return size and checksum of each file in ``data``."""
        files, sums = self._files(data), {}
        for name in files.names(data) or ():
            size = total = 0
            with files.reading(locations.join(data, name)) as file:
                while chunk := file.read(_CHUNK):
                    size, total = size + len(chunk), crc32(chunk, total)
            sums[name] = size, f"crc32:{total:08x}"
        return sums

    def _delete_others(self, path: str, kept: str) -> None:
        for name in self._files(path).names(path) or ():
            if name not in (kept, MANIFEST):
                with suppress(Exception):
                    self._delete(locations.join(path, name))

    def _delete(self, place: str) -> None:
        import fsspec

        system, inner = fsspec.url_to_fs(place, **self._options_for(place))
        if system.exists(inner):
            system.rm(inner, recursive=True)

    def _options_for(self, place: str) -> dict[str, Any]:
        return self.storage_options if locations.is_remote(place) else {}

    def _writer(self, data: str) -> Any:
        if not locations.is_remote(data):
            return FileSystemWriter(locations.local(data))
        return _of_fsspec("Writer")(data, **self.storage_options)

    def _reader(self, data: str, index: Any) -> Any:
        if not locations.is_remote(data):
            reader: Any = FileSystemReader(locations.local(data))
        else:
            reader = _of_fsspec("Reader")(data, **self.storage_options)
        reader.read_metadata = lambda *_, **__: index  # its own would unpickle anything
        return reader


def _sum_of(files: dict[str, Any]) -> str:
    return f"crc32:{crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def _of_fsspec(kind: str) -> Any:
    name = f"Fsspec{kind}"
    if hasattr(dcp, name):  # public from torch 2.15 on
        return getattr(dcp, name)
    from torch.distributed.checkpoint import _fsspec_filesystem

    return getattr(_fsspec_filesystem, name)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` with a mark in place of each tensor, which goes into ``tensors``."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if type(value) is dict:
        return {k: _without_tensors(v, f"{path}/{k}", tensors) for k, v in value.items()}
    if type(value) in (list, tuple):
        parts = [_without_tensors(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return parts if type(value) is list else tuple(parts)
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor], device: Any) -> Any:
    if type(value) is dict:
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]].to(device)
        return {k: _with_tensors(v, tensors, device) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v, tensors, device) for v in value)
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from saying that one process saves alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
