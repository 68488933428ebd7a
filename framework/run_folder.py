"""A run's folder: found, numbered and made so that no two runs share one by accident."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .locations import is_remote, local


class RunFolder:
    """The folder ``root/name/version_N`` of one run, made when it is first asked for.

    Args:
        root: The Trainer's ``default_root_dir``, or the folder a logger was told to use. Under a
            URL go checkpoints alone; what loggers write stays in ``runs`` on this machine.
        name: What kind of run it is.
        version: A number or a name of its own; None takes the next free number.
        existing: The folder of a run that goes on, taken over as it is.
    """

    def __init__(
        self,
        root: str | Path,
        name: str,
        version: int | str | None = None,
        existing: Path | None = None,
    ) -> None:
        self.root = Path("runs") if is_remote(root) else local(root)
        self.name, self.version = name, version
        self._path = existing

    @property
    def is_made(self) -> bool:
        """Whether the folder exists."""
        return self._path is not None

    @property
    def path(self) -> Path:
        """The folder, made now if it was not before.

        Raises:
            ConfigError: It cannot be made.
        """
        if self._path is None:
            parent = self.root / self.name
            try:
                parent = parent.absolute()  # the script may change its working directory
                parent.mkdir(parents=True, exist_ok=True)
                self._path = self._named(parent) if self.version is not None else _numbered(parent)
            except OSError as error:
                raise ConfigError(
                    f"The run's folder cannot be made in {str(parent)!r}: {error.strerror}. Pass "
                    "another default_root_dir, or logger=False with enable_checkpointing=False."
                ) from error
        return self._path

    def agree(self, on_first: Callable[[Callable[[], Any]], Any], is_needed: bool) -> None:
        """Let every rank have rank 0's folder; every rank calls it at the same place.

        Args:
            on_first: Calls on rank 0, and returns what it returned there on every rank.
            is_needed: Whether it is made now. Otherwise a rank that asks for it makes it, and
                another run that begins meanwhile may choose the same one.

        Raises:
            ConfigError: It cannot be made.
        """

        def choice() -> Path | int | str:
            if is_needed or self.is_made:
                return self.path
            return self.version or _next_number((self.root / self.name).absolute())

        chosen = on_first(choice)
        if isinstance(chosen, Path):
            self._path = chosen
        else:
            self.version = chosen

    def _named(self, parent: Path) -> Path:
        is_number = isinstance(self.version, int)
        path = parent / (f"version_{self.version}" if is_number else str(self.version))
        path.mkdir(parents=True, exist_ok=True)
        return path


def _numbered(parent: Path) -> Path:
    """Make and return the folder after the highest ``version_N``.

    ``mkdir`` fails where another run was faster, which makes it the judge of who has the number.
    """
    number = _next_number(parent)
    while True:
        path = parent / f"version_{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _next_number(parent: Path) -> int:
    entries = parent.iterdir() if parent.is_dir() else ()
    taken = [re.fullmatch(r"version_(\d+)", entry.name) for entry in entries]
    return max((int(found[1]) for found in taken if found), default=-1) + 1


def script_name() -> str:
    """Return the name of the script that runs, or ``"interactive"`` at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return "interactive"
    stem = Path(path).stem
    return Path(path).parent.name if stem == "__main__" else stem
