"""Checkpoints as local files that are whole or absent: a name never stands for half a file."""

from __future__ import annotations

import errno
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from leyden.errors import CheckpointError, ConfigError, did_you_mean


class FileCheckpointer:
    """Keeps a checkpoint in one file, written beside its name and moved there when complete."""

    extension = ".ckpt"

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write ``checkpoint`` at ``path``, replacing what was there only when complete.

        Raises:
            CheckpointError: It cannot be written; what was at ``path`` before is unchanged.
        """
        target = local_path(path)
        if target.exists() and not target.is_file():
            raise CheckpointError(
                f"{path!r} is there and is no file, so no checkpoint takes its place. Pass another "
                "path."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written, and what was there before is kept. "
                + _refusal(error)
            ) from error

    def load(self, path: str, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at ``path`` without running any code from it.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        target = local_path(path)
        if not target.is_file():
            raise CheckpointError(f"There is no checkpoint {path!r}. {_beside(target)}")
        try:
            checkpoint = torch.load(target, map_location=map_location, weights_only=True)
        # A damaged file can fail in any way, so what it is decides the message, not the error.
        except Exception as error:
            raise CheckpointError(_unreadable(path, target, error)) from error
        if not isinstance(checkpoint, dict):
            raise CheckpointError(
                f"{path!r} holds a {type(checkpoint).__name__}, not a checkpoint. Pass a file that "
                "trainer.save_checkpoint or a ModelCheckpoint has written."
            )
        return checkpoint

    def remove(self, path: str) -> None:
        """Delete the checkpoint at ``path``; nothing happens if there is none."""
        local_path(path).unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        """Return whether a complete checkpoint is at ``path``.

        The index stands at the end of the file, so one that was cut short does not count.
        """
        return zipfile.is_zipfile(local_path(path))


def local_path(path: str) -> Path:
    """Return the file that ``path`` names, a plain path or one that begins with ``file://``."""
    scheme, separator, rest = str(path).partition("://")
    if separator and scheme != "file":
        raise ConfigError(
            f"Checkpoints cannot be kept at {path!r}: remote saves are not available yet. "
            "Pass a local path."
        )
    return Path(rest if separator else path).expanduser()


def make_folder(path: str) -> None:
    """Make the folder at ``path`` if there is none, before training has cost anything.

    Raises:
        ConfigError: It cannot be made, or not be written in.
    """
    folder = local_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write there")
    except OSError as error:
        raise ConfigError(
            f"Checkpoints cannot be saved in {path!r}: {error.strerror}. Pass another dirpath."
        ) from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a hidden name beside ``target``; what is made there takes its place on leaving.

    On an error the hidden file is deleted and ``target`` stays as it was.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened, and need not be
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def link(existing: str, name: str, symbolic: bool) -> bool:
    """Make ``name`` stand for the checkpoint ``existing``, at once and without a copy.

    Returns:
        False where the file system, or a checkpoint of this kind, does not allow it.
    """
    source, target = local_path(existing), local_path(name)
    try:
        with replacing(target) as temporary:
            if symbolic:
                temporary.symlink_to(os.path.relpath(source, target.parent))
            else:
                temporary.hardlink_to(source)
    except OSError:
        return False
    return True


def _refusal(error: Exception) -> str:
    # torch's writer hides the reason (a full disk, say) behind an assertion of its own.
    first = error
    while not isinstance(first, OSError) and isinstance(first.__context__, Exception):
        first = first.__context__
    if isinstance(first, OSError):
        return f"{first}. Make room there, or save in a folder that can be written."
    return f"{error}. Put only tensors and plain values in what is saved."


def _beside(target: Path) -> str:
    """Return what is there instead of the missing ``target``."""
    if target.is_dir():
        return f"It is a folder, which holds: {_names(target)}."
    if not target.parent.is_dir():
        return f"The folder {str(target.parent)!r} does not exist."
    names = [entry.name for entry in target.parent.iterdir()]
    return f"Its folder holds: {_names(target.parent)}.{did_you_mean(target.name, names)}"


def _names(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "nothing") + more


def _unreadable(path: str, target: Path, error: Exception) -> str:
    if not zipfile.is_zipfile(target):
        return (
            f"{path!r} ({target.stat().st_size} bytes) is not a checkpoint, or was cut short when "
            "it was written or copied. Copy it again, or resume from an older one."
        )
    if isinstance(error, UnpicklingError):
        name = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"{path!r} holds {name[1] if name else 'something'}, no tensor or plain value: "
            "loading it could run code. Save it again with plain values in its place."
        )
    return f"{path!r} cannot be read: {error}"
