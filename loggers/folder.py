"""The folder a logger writes in, and files in it that are read and replaced whole."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from leyden.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    Values = dict[str, int | float]


class FolderLogger:
    """A logger that writes in one folder, the hyperparameters in ``hparams.json`` there.

    A Trainer gives it the folder of the run. Used alone, it makes ``save_dir/name/version_N``
    when it first has something to write. Its state holds what was logged at the newest step: a run
    that was saved in the middle of what it logs at a step, and killed later, has the rest once.

    Args:
        save_dir: The folder for its runs; None for the folder of the Trainer's run.
        name: A folder in ``save_dir`` for runs that belong together; None for none.
        version: The run's folder in there: a number N means ``version_N``, None the next free one.
    """

    FILES: ClassVar[str]
    """Pattern of the names of the files that metrics are in."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
    ) -> None:
        self.save_dir = None if save_dir is None else os.fspath(save_dir)
        self.name = name
        self.version = version
        self._folder: Path | None = None
        self._resumes: Path | None = None
        self._hparams: dict[str, Any] = {}
        self._step: int | None = None
        """The newest with metrics: -1 before any, None where there may be others' already."""
        self._newest: list[Values] = []
        self._saved: tuple[int, list[Values]] | None = None

    @property
    def log_dir(self) -> str | None:
        return None if self._folder is None else str(self._folder)

    @property
    def folder(self) -> Path:
        """The folder it writes in, made and opened if need be.

        Raises:
            ConfigError: It has none and no ``save_dir`` to make one in.
        """
        if self._folder is None:
            self.open(self._resumes or self._own_folder())
        assert self._folder is not None
        return self._folder

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        with self._usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        if folder != self._folder:
            self._step = None if any(folder.glob(self.FILES)) else -1
        self._folder = folder
        if self._hparams:
            self._write_hparams()

    def _take_up(self, resumed_at: int | None) -> tuple[int | None, list[tuple[Values, int]]]:
        """Return the last step whose metrics stay, and those to write again with their step.

        A run may have been saved in the middle of what it logs at a step.
        """
        saved, self._saved = self._saved, None
        if resumed_at is None or saved is None or saved[0] > resumed_at:
            return resumed_at, []
        if not any(self.folder.glob(self.FILES)):
            return resumed_at, []
        self._step, self._newest = saved
        return max(self._step, 0) - 1, [(values, self._step) for values in self._newest]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: number(value) for name, value in metrics.items()}
        if self._step is None or step > self._step:
            self._step, self._newest = step, []
        if step == self._step:
            self._newest.append(values)
        self._record(values, step)

    def _record(self, values: Values, step: int) -> None:
        """Write ``values``, which were logged at ``step``."""
        raise NotImplementedError

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        # Without a folder they wait: a Trainer that comes later may bring one.
        self._hparams.update(params)
        if self._folder is not None:
            self._write_hparams()

    def log_graph(self, module: nn.Module) -> None:
        """Do nothing: there is no place for a graph."""

    def flush(self) -> None:
        if self._hparams:
            _ = self.folder  # opening it writes them

    def close(self, status: Literal["success", "failed", "interrupted"] = "success") -> None:
        self.flush()
        self._hparams = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "folder": self.log_dir,
            "version": self.version,
            "step": self._step,
            "newest": list(self._newest),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = state_dict.get("folder")
        self._resumes = Path(folder) if folder else None
        self.version = state_dict.get("version", self.version)
        step = state_dict.get("step")
        self._saved = None if step is None else (step, list(state_dict["newest"]))

    def _write_hparams(self) -> None:
        with replacing(self.folder / "hparams.json") as file:
            json.dump(plain(self._hparams), file, indent=2)
            file.write("\n")

    def _own_folder(self) -> Path:
        if self.save_dir is None:
            raise ConfigError(
                f"{type(self).__name__} has no folder to write in. Pass save_dir=…, or hand it to "
                "a Trainer, which gives it the folder of the run."
            )
        runs = Path(self.save_dir, self.name or "")
        if isinstance(self.version, str):
            return runs / self.version
        if self.version is not None:
            return runs / f"version_{self.version}"
        with self._usable(runs):
            runs.mkdir(parents=True, exist_ok=True)
            return next_version(runs)

    @contextmanager
    def _usable(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{type(self).__name__} cannot write in {str(folder)!r}: {error.strerror}. "
                "Pass a save_dir that is a folder you may write in, or that can become one."
            ) from error

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{str(path)!r} is not what {type(self).__name__} writes ({error!r}). "
                "Move it away, or log to another folder."
            ) from error


def next_version(runs: Path) -> Path:
    """Make and return ``version_N`` in ``runs``, N above all others, also if others race for it."""
    names = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    number = max((int(name) for name in names if name.isdecimal()), default=-1)
    while True:
        number += 1
        folder = runs / f"version_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Give a new file that takes the place of ``path``, whole, when the block ends well."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", newline="", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines of ``path``, but not a last one that a kill left without its end."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.endswith("\n"))


def number(value: Any) -> int | float:
    """Return ``value``, a number or a tensor or array of one, as Python's own."""
    # item() alone takes a tensor that requires grad without a warning.
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, int) else float(value)


def plain(value: Any) -> Any:
    """Return ``value`` as strict JSON has it; NaN and infinities become strings, as do objects."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # "NaN", "Infinity", "-Infinity": what float() reads back
    return value if isinstance(value, str | int | float | None) else str(value)
