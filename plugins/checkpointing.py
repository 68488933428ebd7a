"""FileCheckpointer: checkpoints as files, local or remote, that are whole or absent."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pickle import UnpicklingError
from typing import Any, TypeVar

from leyden import locations
from leyden.errors import CheckpointError, ConfigError, did_you_mean

from . import archive
from .filesystems import Files, LocalFiles, Sight

T = TypeVar("T")


class FileCheckpointer:
    """Keeps a checkpoint in one file, which appears at its name when it is complete.

    A name is a local path or a URL that fsspec knows, such as ``s3://bucket/runs/last.ckpt``. What
    is at a URL is copied to the folder for temporary files while it is loaded.

    Args:
        storage_options: What fsspec needs to know for URLs, such as an endpoint or a key.
        retries: How often to try again after an error of the network.
    """

    extension = ".ckpt"

    def __init__(self, storage_options: dict[str, Any] | None = None, retries: int = 3) -> None:
        if not isinstance(storage_options, dict | None):
            raise ConfigError(
                f"storage_options={storage_options!r} is no dict. Pass what fsspec is to know, "
                "such as {'endpoint_url': 'https://…'}."
            )
        if type(retries) is not int or retries < 0:
            raise ConfigError(f"retries={retries!r} must be a whole number from 0 on.")
        self.storage_options = storage_options or {}
        self.retries = retries

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write ``checkpoint`` at ``path``, replacing what was there only when complete.

        Raises:
            CheckpointError: It cannot be written; what was at ``path`` before is unchanged.
        """
        files = self._files(path)

        def write() -> None:
            with files.writing(path) as file:
                archive.write(checkpoint, file)

        try:
            files.attempt(write)
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written, and what was there before is kept: "
                + advice(error)
            ) from error

    def load(self, path: str, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at ``path`` without running any code from it.

        Raises:
            CheckpointError: There is none, or it was cut short or altered, or holds code.
        """
        return self._dict_at(path, lambda file: archive.read(file, map_location))

    def view(self, path: str, is_verified: bool = False) -> dict[str, Any]:
        """Return the checkpoint at ``path``; a local file's tensors stay in it until they are used.

        Args:
            path: The file.
            is_verified: Whether all of it was read before, so that only what is used need be.

        Raises:
            CheckpointError: As in `load`.
        """
        if locations.is_remote(path):
            return self.load(path)
        return self._dict_at(path, lambda file: archive.view(file, is_verified))

    def _dict_at(self, path: str, reader: Callable[[Any], Any]) -> dict[str, Any]:
        checkpoint = self._read(path, reader)
        if not isinstance(checkpoint, dict):
            raise CheckpointError(
                f"{path!r} holds a {type(checkpoint).__name__}, not a checkpoint. Pass a file that "
                "trainer.save_checkpoint or a ModelCheckpoint has written."
            )
        return checkpoint

    def manifest(self, path: str) -> dict[str, Any]:
        """Return what the checkpoint at ``path`` says of itself; reads its end only.

        A file without a manifest, as others write it, has ``size`` and ``time`` alone.

        Raises:
            CheckpointError: There is none, or its end was cut short or altered.
        """
        try:
            sight = self._see(path)
            return _entries(sight, archive.manifest(sight.end, sight.size))
        except archive.Damaged as error:
            raise _damaged(path, error) from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise self._missing(path) from error

    def verify(self, path: str) -> None:
        """Read all of the checkpoint at ``path``.

        Raises:
            CheckpointError: There is none, or it is not as it was written.
        """
        self._read(path, archive.verify)

    def exists(self, path: str) -> bool:
        """Return whether a complete checkpoint is at ``path``; looks at its end only.

        Raises:
            CheckpointError: This cannot be known: the network fails, or access is denied.
        """
        try:
            sight = self._see(path)
            archive.manifest(sight.end, sight.size)
        except (archive.Damaged, FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def find(self, folder: str) -> list[str]:
        """Return the complete checkpoints in ``folder`` and below it, the newest first.

        One that has several names in a folder, as links or copies, is listed once: as the one that
        begins with ``last`` if there is such a name, else as the shortest. Hidden files are left
        out.

        Raises:
            CheckpointError: The folder is there and cannot be listed.
        """
        files = self._files(folder)
        try:
            sights = files.attempt(lambda: list(files.search(folder, self.extension, archive.END)))
        except Exception as error:
            raise CheckpointError(f"{folder!r} cannot be listed: {advice(error)}") from error
        found: dict[Any, tuple[tuple[float, int], str]] = {}
        for sight in sorted(sights, key=preference, reverse=True):
            with suppress(archive.Damaged):
                own = archive.manifest(sight.end, sight.size)
                entries = _entries(sight, own)
                age = (entries["time"], entries.get("total_batches", 0))
                same = str(own) if own else sight.identity
                found[locations.folder_of(sight.path), same] = (age, sight.path)
        return [path for _, path in sorted(found.values(), key=lambda f: f[0], reverse=True)]

    def copy(self, existing: str, path: str, symbolic: bool = False) -> None:
        """Make ``path`` stand for ``existing``: a link, a copy by the server, or a copy.

        Raises:
            CheckpointError: It cannot be made; what was at ``path`` before is unchanged.
        """
        source, target = self._files(existing), self._files(path)
        if existing == path and self.exists(path):
            return

        def duplicate() -> None:
            if source.system == target.system and target.duplicate(existing, path, symbolic):
                return
            with source.reading(existing) as old, target.writing(path) as new:
                shutil.copyfileobj(old, new, 1 << 20)

        try:
            target.attempt(duplicate)
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not self.exists(existing):
                raise self._missing(existing) from error
            raise CheckpointError(
                f"The checkpoint {existing!r} cannot be kept as {path!r} too, and what was there "
                f"before is kept: {advice(error)}"
            ) from error

    def remove(self, path: str) -> None:
        """Delete the checkpoint at ``path``; nothing happens if there is none.

        Raises:
            CheckpointError: It cannot be deleted.
        """
        files = self._files(path)
        try:
            files.attempt(lambda: files.remove(path))
        except Exception as error:
            raise CheckpointError(f"{path!r} cannot be deleted: {advice(error)}") from error

    def prepare(self, folder: str) -> None:
        """Make ``folder`` if need be, and clear away what killed saves have left in it.

        Raises:
            ConfigError: It cannot be made, or not be written in.
        """
        files = self._files(folder)
        try:
            files.attempt(lambda: files.prepare(folder))
        except Exception as error:
            raise ConfigError(
                f"Checkpoints cannot be saved in {folder!r}: {_reason(error)}. Pass another folder."
            ) from error

    def _files(self, path: str) -> Files:
        if not locations.is_remote(path):
            return LocalFiles()
        from .remote_files import RemoteFiles  # fsspec takes time to import

        return RemoteFiles(path, self.storage_options, self.retries)

    def _see(self, path: str) -> Sight:
        files = self._files(path)
        try:
            return files.attempt(lambda: files.see(path, archive.END))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"{path!r} cannot be read: {advice(error)}") from error

    def _read(self, path: str, reader: Callable[[Any], T]) -> T:
        files = self._files(path)
        try:
            with files.reading(path) as file:
                return reader(file)
        except archive.Damaged as error:
            raise _damaged(path, error) from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise self._missing(path) from error
        except UnpicklingError as error:
            name = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{path!r} holds {name[1] if name else 'something'}, no tensor or plain value: "
                "loading it could run code. Save it again with plain values in its place."
            ) from error
        except Exception as error:  # a file made by others can fail in any way
            raise CheckpointError(f"{path!r} cannot be read: {advice(error)}") from error

    def _missing(self, path: str) -> CheckpointError:
        """Return the error that says what is there instead of ``path``."""
        files, folder = self._files(path), locations.folder_of(path)
        within = beside = None
        with suppress(Exception):
            within, beside = files.names(path), files.names(folder)
        if within is not None:
            instead = f"It is a folder, which holds: {_listed(within)}."
        elif beside is None:
            instead = f"The folder {folder!r} does not exist."
        else:
            near = did_you_mean(locations.name_of(path), beside)
            instead = f"Its folder holds: {_listed(beside)}.{near}"
        return CheckpointError(f"There is no checkpoint {path!r}. {instead}")


def _entries(sight: Sight, own: dict[str, Any] | None) -> dict[str, Any]:
    return {"size": sight.size, "time": sight.changed} | (own or {})


def preference(sight: Sight) -> tuple[bool, int, str]:
    """Return what sorts the several names of one checkpoint, the one to list first."""
    name = locations.name_of(sight.path)
    return (not name.startswith("last"), len(name), name)


def _damaged(path: str, error: archive.Damaged) -> CheckpointError:
    return CheckpointError(f"{path!r} {error}. Copy it again, or resume from an older one.")


def _listed(names: list[str]) -> str:
    shown = sorted(name for name in names if not name.startswith("."))
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return (", ".join(shown[:10]) or "nothing") + more


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.rstrip(".")
    return str(error).rstrip(".") or repr(error)


def advice(error: Exception) -> str:
    """Return what is wrong, and what to do about it."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, archive.Unsavable):
        advice = "Put only tensors and plain values in what is saved"
    elif code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "Make room there, or take another folder"
    elif isinstance(error, PermissionError) or code == errno.EROFS:
        advice = "Allow access (permissions of the folder, credentials of the URL), or take another"
    elif isinstance(error, FileNotFoundError):
        advice = "See that the folder or bucket exists"
    elif isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        advice = "Pass another path: this one has something else in its way"
    elif isinstance(error, OSError) or "." in type(error).__module__:
        advice = "See that the disk, or the network and the credentials, are in order"
    else:
        advice = "Copy it again, or resume from an older one"
    return f"{_reason(error)}. {advice}."
