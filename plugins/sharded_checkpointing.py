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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leyden import locations
from leyden.errors import CheckpointError
from leyden.hookspecs import hookimpl

from . import archive
from .checkpointing import FileCheckpointer, advice, preference
from .ranks import Ranks
from .sharded_metadata import read_index
from .stored_tensors import StoredTensor
from .tensor_marks import tied_in, with_tensors, without_tensors

MANIFEST, REST = "manifest.json", "rest.pt"
_CHUNK = 1 << 24
_LARGE = ("/state_dict/", "/optimizer_states/", "/window/")
"""Where tensors of a Trainer's checkpoint lie that may stay in the files.

Those elsewhere are read by code of all kinds. In a file of weights alone all may."""
_SMALL = 4096
"""Bytes up to which a tensor is read at once: to ask for each would take longer."""


class ShardedCheckpointer(FileCheckpointer):
    """Keeps a checkpoint in a folder that is complete once its manifest is.

    Each save writes into a subfolder of its own, then replaces the manifest, which names it, at
    once. It is read without running any code from it, though torch's own reader would.

    Args:
        storage_options: What fsspec needs to know for URLs, such as an endpoint or a key.
        retries: How often to try again after an error of the network.
    """

    extension = ".sharded"
    is_sharded = True
    """Every rank calls `save`, and writes its parts of the tensors that lie on several ranks."""

    def __init__(self, storage_options: dict[str, Any] | None = None, retries: int = 3) -> None:
        super().__init__(storage_options, retries)
        self._ranks = Ranks()

    def join(self) -> None:
        """Find the other ranks; each calls it before saves that are made in the background."""
        self._ranks.join()

    @hookimpl
    def teardown(self) -> None:
        """Leave the other ranks."""
        self._ranks.leave()

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write ``checkpoint`` at ``path``, replacing what was there only when complete.

        Of several ranks each writes the parts it has of split tensors, rank 0 all else.

        Raises:
            CheckpointError: It cannot be written; what was at ``path`` before is unchanged. It is
                raised on every rank.
        """
        ranks, name = self._ranks, ""
        ranks.join()
        try:
            name, tied = ranks.do(lambda: (secrets.token_hex(4), tied_in(checkpoint)))[0]
            data = locations.join(path, name)
            tensors: dict[str, Tensor] = {}
            rest = without_tensors(checkpoint, tied, tensors, keeps_all=ranks.rank == 0)
            ranks.do(lambda: self._write_rest(rest, data) if ranks.rank == 0 else None)
            with _quiet():
                save(
                    tensors, storage_writer=self._writer(data),
                    process_group=ranks.group, no_dist=ranks.group is None,
                )  # fmt: skip
            sums = ranks.do(lambda: self._sums(data, partial(_is_of, ranks.rank)))
            files = {file: sum for own in sums for file, sum in own.items()}
            manifest = {**checkpoint.get("leyden", {}), "data": name, "files": files}
            ranks.do(lambda: self._write_manifest(manifest, path) if ranks.rank == 0 else None)
        except BaseException as error:
            if name and ranks.rank == 0:
                with suppress(Exception):
                    self._delete(locations.join(path, name))
                    if not self._files(path).names(path):  # nothing was there before
                        self._delete(path)
            # torch's own error of a save is no Exception.
            if not isinstance(error, (Exception, CheckpointException)):
                raise
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written, and what was there before is kept: "
                + advice(_cause(error))
            ) from error
        if ranks.rank == 0:
            self._delete_others(path, name)

    def _write_rest(self, rest: dict[str, Any], data: str) -> None:
        with self._files(data).writing(locations.join(data, REST)) as file:
            archive.write(rest, file)

    def _write_manifest(self, entries: dict[str, Any], path: str) -> None:
        entries["size"] = sum(size for size, _ in entries["files"].values())
        entries["checksum"] = _sum_of(entries["files"])
        with self._files(path).writing(locations.join(path, MANIFEST)) as file:
            file.write(json.dumps(entries, indent=1).encode())

    def load(self, path: str, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at ``path`` without running any code from it.

        Raises:
            CheckpointError: There is none, or it was cut short or altered, or holds code.
        """
        data = self._verified(path)
        index = self._index(data)
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.state_dict_metadata.items()
        }
        self._read_tensors(tensors, data, index)
        rest = super().load(locations.join(data, REST), map_location)
        return with_tensors(rest, tensors, map_location)  # type: ignore[no-any-return]

    def view(self, path: str, is_verified: bool = False) -> dict[str, Any]:
        """Return the checkpoint at ``path``; large tensors of it stay in its files until used.

        Args:
            path: The checkpoint, which must stay there.
            is_verified: Whether all of it was read before, so that only what is used need be.

        Raises:
            CheckpointError: As in `load`.
        """
        entries = self._all_of(path)
        data = locations.join(path, entries["data"]) if is_verified else self._verified(path)
        index, large = self._index(data), _LARGE if "format" in entries else ("",)
        tensors: dict[str, Any] = {}
        for key, entry in index.state_dict_metadata.items():
            size, dtype = entry.size, entry.properties.dtype
            if key.startswith(large) and size.numel() * dtype.itemsize > _SMALL:
                tensors[key] = StoredTensor(size, dtype, partial(self._read_one, key, data, index))
            else:
                tensors[key] = torch.empty(size, dtype=dtype)
        self._read_tensors(
            {k: t for k, t in tensors.items() if not isinstance(t, StoredTensor)}, data, index
        )
        rest = super().load(locations.join(data, REST))
        return with_tensors(rest, tensors, "cpu")  # type: ignore[no-any-return]

    def _index(self, data: str) -> Any:
        with self._files(data).reading(locations.join(data, ".metadata")) as file:
            return read_index(file)

    def _read_one(self, key: str, data: str, index: Any, target: Any) -> None:
        self._read_tensors({key: target}, data, index)

    def _read_tensors(self, tensors: dict[str, Any], data: str, index: Any) -> None:
        """Fill ``tensors``, of those in parts this rank's; other ranks take no part."""
        try:
            with _quiet(), torch.no_grad():
                load(tensors, storage_reader=self._reader(data, index), no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(
                f"The tensors in {data!r} cannot be read: {advice(_cause(error))}"
            ) from error

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

    def _sums(
        self, data: str, is_asked: Callable[[str], bool] = lambda _: True
    ) -> dict[str, tuple[int, str]]:
        """Return size and checksum of each file in ``data`` whose name ``is_asked`` for."""
        files, sums = self._files(data), {}
        for name in filter(is_asked, files.names(data) or ()):
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


def _is_of(rank: int, name: str) -> bool:
    """Return whether ``rank`` has written the file ``name``."""
    if not name.endswith(".distcp"):
        return rank == 0
    return name.startswith(f"__{rank}_")


def _cause(error: BaseException) -> Exception:
    """Return what went wrong on a rank, rather than torch's account of all."""
    if isinstance(error, CheckpointException):
        return next(failure for failure, _ in error.failures.values())  # type: ignore[return-value]
    return error  # type: ignore[return-value]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from saying that one process saves or loads alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield
