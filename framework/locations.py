"""Places of files by name: local paths, and URLs such as ``s3://bucket/runs``, as plain strings."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
"""A URL's beginning; one letter before a colon is a drive of Windows."""


def is_remote(location: str | Path) -> bool:
    """Return whether ``location`` is a URL other than one of ``file://``."""
    text = str(location)
    return _SCHEME.match(text) is not None and not text.startswith("file://")


def local(location: str | Path) -> Path:
    """Return the local path that ``location``, a path or a ``file://`` URL, stands for."""
    text = str(location)
    return Path(text.removeprefix("file://")).expanduser()


def absolute(location: str | Path) -> str:
    """Return ``location`` so that it stays the same place when the working directory changes."""
    return str(location) if is_remote(location) else str(local(location).absolute())


def join(folder: str | Path, *names: str) -> str:
    """Return the place of ``names`` below ``folder``; the double slash of a URL survives."""
    if not is_remote(folder):
        return str(Path(local(folder), *names))
    return "/".join([str(folder).rstrip("/"), *(name.strip("/") for name in names)])


def folder_of(location: str | Path) -> str:
    """Return the folder that ``location`` is in."""
    if not is_remote(location):
        return str(local(location).parent)
    return str(location).rstrip("/").rpartition("/")[0]


def name_of(location: str | Path) -> str:
    """Return the last part of ``location``."""
    return (
        str(location).rstrip("/").rpartition("/")[2]
        if is_remote(location)
        else local(location).name
    )
