"""TensorBoardLogger: scalars, hyperparameters and the graph, for TensorBoard."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .folder import FolderLogger, plain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from .folder import Values


class TensorBoardLogger(FolderLogger):
    """Writes metrics to an event file that TensorBoard shows, and ``hparams.json``.

    TensorBoard's table of hyperparameters has the run as a row, with the last value of each metric.
    A resumed run goes on in a new event file, and what the old one has beyond it is not shown.

    Args:
        save_dir: The folder for its runs; None for the folder of the Trainer's run.
        name: A folder in ``save_dir`` for runs that belong together; None for none.
        version: The run's folder in there: a number N means ``version_N``, None the next free one.
        log_graph: Show the graph of the module, traced with its ``example_input_array``.
        prefix: Put before the name of every metric, with a ``-`` between.
    """

    FILES = "events.out.tfevents.*"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        log_graph: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__(save_dir, name, version)
        self._prefix = f"{prefix}-" if prefix else ""
        self._log_graph = log_graph
        self._last_step: int | None = None
        self._again: list[tuple[Values, int]] = []
        self._writer: SummaryWriter | None = None
        self._tags: dict[str, None] = {}
        self._held: list[tuple[Any, int | None, float]] = []
        self._hand_over_at = 0.0

    @property
    def experiment(self) -> SummaryWriter:
        """The run's ``SummaryWriter``, for more than numbers: ``add_image``, ``add_histogram``."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Made on use, not by open: a new writer makes a file and loads a library.
            purge = self._first_step_to_purge()
            self._writer = SummaryWriter(str(self.folder), purge_step=purge, flush_secs=1)
            self._last_step = None
            for values, step in self._again:
                self._hold(values, step)
            self._again = []
            _add(self._writer, self._held)
            # What is held back would be lost at exit.
            weakref.finalize(self, _finish, self._writer, self._held)
            if self._hparams:
                self._write(self._row()[1])
        return self._writer

    def _first_step_to_purge(self) -> int | None:
        before = max((p.name for p in self.folder.glob(self.FILES)), default=None)
        if self._last_step is None or before is None:
            return None
        # Files are read by name, second by second: the one that purges must come in a later one.
        while int(before.split(".")[3]) >= int(time.time()):
            time.sleep(0.01)
        return self._last_step + 1

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        super().open(folder)
        self._last_step, self._again = self._take_up(resumed_at)
        self._tags = {}

    def _record(self, values: Values, step: int) -> None:
        writer = self.experiment  # before a time is noted: what it writes by itself comes first
        self._hold(values, step)
        # Each event wakes the writer's thread, which takes as long as a training step does, and in
        # which it holds the interpreter. Every ten seconds is soon enough for a curve.
        if time.monotonic() >= self._hand_over_at:
            _add(writer, self._held)
            self._hand_over_at = time.monotonic() + 10

    def _hold(self, values: Values, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = {f"{self._prefix}{name}": value for name, value in values.items()}
        # One event holds them all: add_scalar, an event each, takes five times as long.
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._held.append((Summary(value=points), step, time.time()))
        self._tags.update(dict.fromkeys(scalars))

    def _hand_over(self) -> None:
        if self._held:
            _add(self.experiment, self._held)

    def log_graph(self, module: nn.Module) -> None:
        if not self._log_graph or self._last_step is not None:
            return
        example = getattr(module, "example_input_array", None)
        try:
            if example is None:
                raise ValueError("it has no example_input_array")
            with _tracing(module):
                self.experiment.add_graph(*_traceable(module, example), use_strict_trace=False)
        except Exception as error:
            warnings.warn(
                f"The graph of {type(module).__name__} is not shown in TensorBoard: {error}. "
                "Set example_input_array to what forward takes, or log_graph=False.",
                stacklevel=2,
            )

    def flush(self) -> None:
        super().flush()
        self._hand_over()
        if self._writer is not None or self._hparams:
            self.experiment.flush()

    def close(self, status: Literal["success", "failed", "interrupted"] = "success") -> None:
        self._hand_over()
        if self._hparams and status == "success":
            # TensorBoard takes the first of these it finds in a run: only now are they final.
            experiment, _, end = self._row()
            self._write(experiment)
            self._write(end)
        super().close(status)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_hparams(self) -> None:
        super()._write_hparams()
        if self._writer is not None:
            self._write(self._row()[1])

    def _row(self) -> tuple[Any, Any, Any]:
        """Return the summaries of the table of hyperparameters: its columns, begin and end."""
        from torch.utils.tensorboard import summary

        make: Any = summary.hparams  # torch leaves it untyped
        metrics = {tag: None for tag in self._tags if tag != f"{self._prefix}epoch"}
        columns, begin, end = make(dict(_flat(plain(self._hparams))), metrics)
        return columns, begin, end

    def _write(self, summary: Any) -> None:
        _add(self.experiment, [(summary, None, time.time())])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_held": []}


def _add(writer: Any, held: list[tuple[Any, int | None, float]]) -> None:
    """Write what is ``held``, summaries with their step and time, and hold it no longer."""
    for summary in held:
        writer._get_file_writer().add_summary(*summary)
    held.clear()


def _finish(writer: SummaryWriter, held: list[tuple[Any, int | None, float]]) -> None:
    _add(writer, held)
    writer.close()


def _flat(hparams: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names joined by ``/``, and values the table can hold: numbers and strings."""
    for name, value in hparams.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:  # by type: True is an int, and would stand there as 1
            yield prefix + name, value if type(value) in (int, float) else str(value)


class _ByKeyword(nn.Module):
    """Takes positional inputs, as the tracer gives them, and calls ``module`` by keyword."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.module = module
        self.names = tuple(names)

    def forward(self, *values: Any) -> Any:
        return self.module(**dict(zip(self.names, values, strict=True)))


def _traceable(module: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Return a module and its positional inputs, on its device: one tensor, or a tuple."""
    device = next((parameter.device for parameter in module.parameters()), None)
    if isinstance(example, Mapping):
        module, example = _ByKeyword(module, example), tuple(example.values())
    if isinstance(example, Tensor):
        return module, example.to(device)
    return module, tuple(v.to(device) if isinstance(v, Tensor) else v for v in example)


@contextmanager
def _tracing(module: nn.Module) -> Iterator[None]:
    """Run the block, a trace in eval mode, so that training goes on as if it had not been."""
    modes = [(part, part.training) for part in module.modules()]
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, about what it takes for constant
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
