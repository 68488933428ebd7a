"""The format of a checkpoint file: an archive of torch's that carries a manifest as its comment.

Whatever reads torch's archives reads it, ``torch.load(weights_only=True)`` among them, and
``unzip -z`` shows the manifest: JSON, then a line with the JSON's own checksum. The manifest's
``size`` and ``checksum`` are those of all the bytes before the comment, the two of its length,
which end them, taken as zero.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import IO, Any
from zlib import crc32

import torch

END = 22 + 65_535
"""How many bytes from its end tell all about an archive: its last record and the longest comment"""
_CHUNK = 1 << 20  # at a time, so that no copy of a large tensor is made on the way
_READS_AT = hasattr(os, "preadv")
_LAST_RECORD = b"PK\x05\x06"
_BEFORE_ARCHIVES = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # torch's, before 1.6
_PLAIN = (str, int, float, bool, type(None))


class Damaged(Exception):
    """A file is not as it was written: in what way, in words that follow its name."""


class Unsavable(Exception):
    """Something in a checkpoint cannot be stored, wherever that may be."""


def write(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """Write ``checkpoint`` and its manifest, ``checkpoint["leyden"]``, to ``file``.

    Raises:
        Unsavable: It holds what cannot be stored. Errors of ``file`` come as they are.
    """
    try:
        entries = dict(checkpoint.get("leyden", {}))
        room = END - len(_comment({**entries, "size": 1 << 63, "checksum": _named(0)})) - 22
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsavable(f"checkpoint['leyden'] is no dict of plain values: {error}") from error
    if room < 0:
        raise Unsavable(f"checkpoint['leyden'] is too long by {-room} bytes")
    stream = _Summed(file)
    try:
        with stream.adder:
            torch.save(checkpoint, stream)  # type: ignore[arg-type]
    except BaseException as error:
        # torch's writer hides the reason (a full disk, say) behind an assertion of its own.
        if stream.error is not None:
            raise stream.error from None
        if isinstance(error, Exception):
            raise Unsavable(str(error)) from error
        raise
    comment = _comment({**entries, "size": stream.size, "checksum": _named(stream.sum)})
    stream.finish(len(comment).to_bytes(2, "little") + comment)


def manifest(end: bytes, size: int) -> dict[str, Any] | None:
    """Return what a file says of itself; None where it is an archive without a manifest.

    Args:
        end: The last `END` bytes of the file, or all of it.
        size: Bytes of the whole file.

    Raises:
        Damaged: It is no whole archive, or the manifest was altered.
    """
    at = end.rfind(_LAST_RECORD)
    comment = end[at + 22 :]
    if at < 0 or at + 22 > len(end) or end[at + 20 : at + 22] != len(comment).to_bytes(2, "little"):
        raise Damaged(f"({size:,} bytes) is not a checkpoint, or was cut short or altered")
    if not comment:
        return None
    text, _, own_sum = comment.rpartition(b"\n")
    if own_sum.decode("latin-1") != _named(crc32(text)):
        raise Damaged("was altered: the checksum of its manifest does not fit")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"has a manifest that cannot be read ({error})") from error
    if not _is_sound(entries):
        raise Damaged("has a manifest that leyden has not written")
    if entries["size"] != size - len(comment):
        raise Damaged(
            f"was altered: it holds {size - len(comment):,} bytes where {entries['size']:,} were "
            "written"
        )
    return entries  # type: ignore[no-any-return]


def verify(file: IO[bytes]) -> None:
    """Read all of ``file``.

    Raises:
        Damaged: It is not as it was written.
    """
    entries = _manifest_of(file, file.seek(0, 2))
    if entries is not None:
        _check_sum(file, entries)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    except Exception as error:  # zipfile knows many ways to fail
        raise Damaged(f"is no whole archive ({error})") from error
    if wrong is not None:
        raise Damaged(f"was altered: the checksum of its part {wrong!r} does not fit")


def read(file: IO[bytes], map_location: Any) -> Any:
    """Return what ``file``, one of the operating system's, holds, without running code from it.

    A file of other origin, which is no archive or has no manifest, is read as torch reads it.

    Raises:
        Damaged: It is not as it was written, or no archive that torch would write.
    """
    entries, is_sure = None, True
    if file.read(len(_BEFORE_ARCHIVES)) != _BEFORE_ARCHIVES:
        size = file.seek(0, 2)
        entries = _manifest_of(file, size)
        is_sure = _has_sound_pickle(file, size)
    if entries is not None and not (is_sure and _READS_AT):
        _check_sum(file, entries)
        entries = None
    # What is unpickled is known to be sound here. The tensors are summed while they are loaded.
    with ThreadPoolExecutor(1) as pool:
        summed = pool.submit(_check_sum, file, entries) if entries is not None else None
        try:
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True)
        finally:
            if summed is not None:
                summed.result()  # damage is what explains any other error


def view(file: IO[bytes], is_verified: bool = False) -> Any:
    """Return what ``file``, a local one, holds; its tensors stay in it until they are used.

    They are the process's own: what is written to them never reaches the file.

    Args:
        file: As for `read`.
        is_verified: Whether all of it was read before, and was as it was written.

    Raises:
        Damaged: As in `read`.
    """
    if file.read(len(_BEFORE_ARCHIVES)) == _BEFORE_ARCHIVES:
        file.seek(0)
        return read(file, "cpu")  # nothing of it can be mapped
    size = file.seek(0, 2)
    entries = _manifest_of(file, size)
    _has_sound_pickle(file, size)
    if entries is not None and not is_verified:
        _check_sum(file, entries)
    return torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)


def _has_sound_pickle(file: IO[bytes], size: int) -> bool:
    """Return whether the archive's own checksum fits its pickle.

    Raises:
        Damaged: It would grow when it is unpacked, or holds names that lead elsewhere.
    """
    try:
        archive = zipfile.ZipFile(file)
        parts = archive.infolist()
    except Exception as error:  # zipfile knows many ways to fail
        raise Damaged(f"is no whole archive ({error})") from error
    if any(p.compress_type for p in parts) or sum(p.file_size for p in parts) > size:
        raise Damaged("is packed, or says it holds more than its size, as torch never writes it")
    for part in parts:
        name = PurePosixPath(part.filename)
        if name.is_absolute() or ".." in name.parts or "\\" in part.filename:
            raise Damaged(f"holds a part {part.filename!r}, which leads out of it")
    try:
        return all(archive.read(p) for p in parts if p.filename.endswith("/data.pkl"))
    except Exception:
        return False


def _manifest_of(file: IO[bytes], size: int) -> dict[str, Any] | None:
    file.seek(max(0, size - END))
    return manifest(file.read(END), size)


def _check_sum(file: IO[bytes], entries: dict[str, Any]) -> None:
    found, at, last, chunk = 0, 0, entries["size"] - 2, memoryview(bytearray(_CHUNK))
    while at < last:
        view = chunk[: last - at]
        if _READS_AT:  # whatever another thread reads meanwhile
            count = os.preadv(file.fileno(), [view], at)
        else:
            file.seek(at)
            count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            break
        found, at = crc32(view[:count], found), at + count
    if entries["checksum"] != _named(crc32(b"\0\0", found)):
        raise Damaged("was altered: its checksum does not fit")


def _is_sound(entries: Any) -> bool:
    if not isinstance(entries, dict):
        return False
    numbers = [entries.get("time", 0), entries.get("total_batches", 0)]
    return (
        all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and type(entries.get("size")) is int
        and type(entries.get("checksum")) is str
    )


def _comment(entries: dict[str, Any]) -> bytes:
    for name, value in entries.items():
        if not isinstance(value, _PLAIN):
            raise TypeError(f"{name!r} is a {type(value).__name__}")
    text = json.dumps(entries, indent=1).encode()
    return text + b"\n" + _named(crc32(text)).encode()


def _named(checksum: int) -> str:
    return f"crc32:{checksum:08x}"


class _Summed:
    """Counts and sums what is written through it, and keeps back the last two bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._held = b""
        self.size = self.sum = 0
        self.error: BaseException | None = None
        self.adder = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        is_small = len(view) < _CHUNK
        try:
            # Both release the interpreter's lock: the sum is made while the data is written.
            adding = None if is_small else self.adder.submit(crc32, view, self.sum)
            for start in range(0, len(view), _CHUNK):
                self._write(view[start : start + _CHUNK])
            self.sum = crc32(view, self.sum) if adding is None else adding.result()
        except BaseException as error:
            self.error = self.error or error
            raise
        self.size += len(view)
        return len(view)

    def _write(self, chunk: memoryview) -> None:
        if len(chunk) < 2:
            chunk = memoryview(self._held + bytes(chunk))
            self._held = b""
        if self._held:
            self._file.write(self._held)
        self._file.write(chunk[:-2])
        self._held = bytes(chunk[-2:])

    def flush(self) -> None:
        """Do nothing: torch flushes at its end, which is not the file's."""

    def finish(self, ending: bytes) -> None:
        """Write ``ending`` in place of the two bytes kept back, an archive's comment length."""
        self._file.write(ending)
