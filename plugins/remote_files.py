"""Files that fsspec reaches by a URL, such as ``s3://bucket/runs/last.ckpt``."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from leyden.errors import ConfigError, did_you_mean

from .filesystems import Sight, is_left_over, temporary_name

T = TypeVar("T")
log = logging.getLogger(__name__)

WHOLE = frozenset(["s3", "s3a", "gs", "gcs"])
"""Where a file is seen once it is complete, and replaces another then. Others get a temporary name.

Azure's is not among them: there the older file is deleted as soon as a newer one is begun.
"""
FIRST_WAIT = 0.5
"""Seconds before a failed action is tried again; the next wait is twice as long."""
_CHANGED = ("LastModified", "last_modified", "mtime", "updated", "created")


class RemoteFiles:
    """The files of one file system of fsspec's.

    Args:
        url: One of them or of their folders.
        options: What fsspec needs to know, such as an endpoint.
        retries: How often to try again what has failed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], retries: int) -> None:
        self._options, self._retries = options, retries
        self.system, _ = _reached(url, options)
        self.system.invalidate_cache()  # others write too
        protocol = self.system.protocol
        self._shows_whole = bool(WHOLE & {*([protocol] if isinstance(protocol, str) else protocol)})

    def attempt(self, action: Callable[[], T]) -> T:
        for attempt in range(self._retries):
            try:
                return action()
            except Exception as error:
                if not _may_pass(error):
                    raise
                log.info("Trying again after %r", error)
            time.sleep(FIRST_WAIT * 2**attempt)
        return action()

    @contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        # It is read twice, to be verified and to be loaded, and must be the same both times.
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            copy = Path(folder, "checkpoint")
            self.attempt(lambda: self.system.get_file(self._place(path), str(copy)))
            with copy.open("rb") as file:
                yield file

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        with self._replacing(path) as place:
            file = self.system.open(place, "wb")
            try:
                yield file
                file.close()
            except BaseException:
                _discard(file)
                raise

    @contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Give a place to write to; what is there takes the name ``path`` on leaving."""
        place = self._place(path)
        if self._shows_whole:
            yield place
            return
        folder, slash, name = place.rpartition("/")
        temporary = f"{folder}{slash}{temporary_name(name)}"
        self.system.makedirs(folder, exist_ok=True)
        try:
            yield temporary
            self.system.mv(temporary, place)
        except BaseException:
            with suppress(Exception):
                self.system.rm_file(temporary)
            raise

    def see(self, path: str, length: int) -> Sight:
        place = self._place(path)
        info = self.system.info(place)
        if info["type"] != "file":
            raise IsADirectoryError(f"{path!r} is there and is no file")
        end = self.system.cat_file(place, start=max(0, info["size"] - length), end=info["size"])
        return Sight(path, info["size"], end, _changed(info), place)

    def search(self, folder: str, ending: str, length: int) -> Iterator[Sight]:
        root = self._place(folder).strip("/")
        found = {
            place: info
            for place, info in self._below(folder).items()
            if place.endswith(ending)
            and not place.rpartition("/")[2].startswith(".")
            and place.strip("/") != root  # it is a folder
        }
        sizes = [info["size"] for info in found.values()]
        starts = [max(0, size - length) for size in sizes]
        ends = self.system.cat_ranges(list(found), starts, sizes, on_error="return")
        for (place, info), end in zip(found.items(), ends, strict=True):
            if isinstance(end, FileNotFoundError):  # deleted meanwhile
                continue
            if isinstance(end, Exception):
                raise end
            path = f"{folder.rstrip('/')}/{place.strip('/')[len(root) :].strip('/')}"
            yield Sight(path, info["size"], end, _changed(info), place)

    def duplicate(self, existing: str, path: str, symbolic: bool) -> bool:
        try:
            with self._replacing(path) as place:
                self.system.cp_file(self._place(existing), place)
        except NotImplementedError:
            return False
        return True

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(self._place(path))

    def prepare(self, folder: str) -> None:
        place = self._place(folder)
        if not self._shows_whole:  # the others have no folders, and would make a bucket
            self.system.makedirs(place, exist_ok=True)
        probe = f"{place}/{temporary_name('probe')}"
        self.system.pipe_file(probe, b"Can this folder be written in?")
        self.system.rm_file(probe)
        for left, info in self._below(folder).items():
            if is_left_over(left.rpartition("/")[2], _changed(info)):
                with suppress(FileNotFoundError):
                    self.system.rm_file(left)

    def names(self, folder: str) -> list[str] | None:
        try:
            places = self.system.ls(self._place(folder), detail=False)
        except FileNotFoundError:
            return None
        return [place.rstrip("/").rpartition("/")[2] for place in places]

    def _below(self, folder: str) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return self.system.find(self._place(folder), detail=True)  # type: ignore[no-any-return]
        return {}

    def _place(self, path: str) -> str:
        return str(_reached(path, self._options)[1])


def _reached(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that ``url`` is of, and its name there."""
    import fsspec

    try:
        return fsspec.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigError(
            f"{url!r} cannot be reached: {error}. For s3://, `pip install 'leyden[remote]'`."
        ) from error
    except ValueError as error:
        scheme, known = url.partition("://")[0], fsspec.available_protocols()
        if scheme in known:
            raise
        raise ConfigError(
            f"{url!r} cannot be reached: no file system is called {scheme!r}."
            f"{did_you_mean(scheme, known)} Known: {', '.join(sorted(known))}."
        ) from error
    except TypeError as error:
        raise ConfigError(
            f"{url!r} cannot be reached with these storage_options: {error}"
        ) from error


def _may_pass(error: Exception) -> bool:
    """Return whether ``error`` is one of the network, which may have gone by the next time."""
    if isinstance(error, OSError):
        lasting = (
            FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError,
            PermissionError,
        )  # fmt: skip
        return not isinstance(error, lasting)
    # Libraries of networks have errors of their own; Python's and ours are no matter of luck.
    return type(error).__module__.partition(".")[0] not in ("builtins", "leyden", "fsspec")


def _discard(file: Any) -> None:
    """Give up what was begun to be written: closing it would make it appear, cut short."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True
    with suppress(Exception):
        file.close()


def _changed(info: Mapping[str, Any]) -> float:
    """Return when a file was changed, in Unix seconds; 0 where its file system does not tell."""
    changed: Any = next((info[name] for name in _CHANGED if info.get(name)), 0.0)
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed)
    return float(changed.timestamp() if isinstance(changed, datetime) else changed)
