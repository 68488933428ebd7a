"""Files by name, local ones and those of URLs, that appear at their names whole or not at all."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from leyden.locations import local

T = TypeVar("T")

HOST = socket.gethostname()
_TEMPORARY = re.compile(rf"\..+\.(?:(?:{re.escape(HOST)})-(\d+)|.+-\d+)\.tmp")
_DAY = 86_400


@dataclass(frozen=True)
class Sight:
    """What is seen of a file without reading all of it.

    Attributes:
        path: Its name.
        size: How many bytes it has.
        end: The last of them.
        changed: When they were written, in Unix seconds.
        identity: The same for two names of one file.
    """

    path: str
    size: int
    end: bytes
    changed: float
    identity: Any


class Files(Protocol):
    """What is asked of a file system. Its errors come as it raises them."""

    system: Any
    """Equal for two that can copy between them."""

    def attempt(self, action: Callable[[], T]) -> T:
        """Return what ``action`` does, tried again where that may help."""

    def reading(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file that stays as it is, whatever becomes of its name."""

    def writing(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Give a file to write, which takes its name when left, unless by an error."""

    def see(self, path: str, length: int) -> Sight:
        """Look at a file and its last ``length`` bytes."""

    def search(self, folder: str, ending: str, length: int) -> Iterator[Sight]:
        """Yield the files below ``folder`` whose names end so, the hidden ones left out."""

    def duplicate(self, existing: str, path: str, symbolic: bool) -> bool:
        """Give a file a second name at once; False where this cannot be done here."""

    def remove(self, path: str) -> None:
        """Delete a file if it is there."""

    def prepare(self, folder: str) -> None:
        """Make a folder, see that it can be written in, and clear it of temporary files."""

    def names(self, folder: str) -> list[str] | None:
        """Return what is in a folder, or None where there is no such folder."""


def temporary_name(name: str) -> str:
    """Return the hidden name of a file that is to be called ``name`` when it is complete."""
    return f".{name}.{HOST}-{os.getpid()}.tmp"


def is_left_over(name: str, changed: float) -> bool:
    """Return whether ``name`` is that of a temporary file whose writer is gone.

    Writers of other hosts are taken to be gone after a day.
    """
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    return time.time() - changed > _DAY or (match[1] is not None and not _lives(int(match[1])))


def _lives(process: int) -> bool:
    if os.name != "posix":  # elsewhere asking would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


class LocalFiles:
    """Files of this machine, those of ``file://`` URLs among them."""

    system = "local"

    def attempt(self, action: Callable[[], T]) -> T:
        return action()

    def reading(self, path: str) -> AbstractContextManager[IO[bytes]]:
        return _no_other_thing(path).open("rb")

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        target = _no_other_thing(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as temporary, temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def see(self, path: str, length: int) -> Sight:
        with _no_other_thing(path).open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - length))
            identity = (status.st_dev, status.st_ino)
            return Sight(path, status.st_size, file.read(length), status.st_mtime, identity)

    def search(self, folder: str, ending: str, length: int) -> Iterator[Sight]:
        for path in self._walk(folder):
            if path.name.endswith(ending) and not path.name.startswith("."):
                # Deleted meanwhile, a link to nothing, no file, or another user's.
                with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                    yield self.see(str(path), length)

    def duplicate(self, existing: str, path: str, symbolic: bool) -> bool:
        source, target = local(existing).resolve(strict=True), local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink() and target.resolve() == source:
            return True  # a link would take the place of what it leads to
        try:
            with _replacing(target) as temporary:
                if symbolic:
                    temporary.symlink_to(os.path.relpath(source, target.parent.resolve()))
                else:
                    temporary.hardlink_to(source)
        except (OSError, NotImplementedError):
            return False
        return True

    def remove(self, path: str) -> None:
        local(path).unlink(missing_ok=True)

    def prepare(self, folder: str) -> None:
        local(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(local(folder), os.W_OK):
            raise PermissionError("no permission to write there")
        for path in self._walk(folder):
            with suppress(OSError):
                if is_left_over(path.name, path.lstat().st_mtime):
                    path.unlink()

    def names(self, folder: str) -> list[str] | None:
        return [p.name for p in local(folder).iterdir()] if local(folder).is_dir() else None

    def _walk(self, folder: str) -> Iterator[Path]:
        for root, _, names in os.walk(local(folder)):
            yield from (Path(root, name) for name in names)


def _no_other_thing(path: str) -> Path:
    """Return the local path; a folder, a device, or a pipe, at which one would wait, is refused."""
    place = local(path)
    if place.exists() and not place.is_file():
        raise IsADirectoryError(f"{path!r} is there and is no file")
    return place


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a hidden name beside ``target``; what is made there takes its place on leaving."""
    temporary = target.with_name(temporary_name(target.name))
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
