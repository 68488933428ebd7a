"""Where the time of a run goes: a table of its phases, or torch's trace of every operation."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from leyden.callback import Callback
from leyden.errors import ConfigError
from leyden.hookspecs import RunHooks, hookimpl

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.trainer import Trainer

WAITING, BETWEEN = "waiting for data", "the loop itself"
AFTER = {
    "setup": "setting up",
    "on_before_zero_grad": "zero_grad",
    "on_train_batch_start": "training_step",
    "on_before_backward": "backward",
    "on_before_optimizer_step": "optimizer step",
    "on_validation_epoch_start": "validation data",
    "on_validation_batch_start": "validation_step",
    "on_validation_batch_end": "validation data",
    "on_test_epoch_start": "test data",
    "on_test_batch_start": "test_step",
    "on_test_batch_end": "test data",
    "on_predict_epoch_start": "predict data",
    "on_predict_batch_start": "predict_step",
    "on_predict_batch_end": "predict data",
}
"""What the loop does when it has told a hook."""


class SimpleProfiler(Callback):
    """Prints, when a run is over, how long its phases and hooks took; also after an error.

    Every moment counts once: a phase lasts from the end of one hook to the beginning of the next,
    and what of it was spent waiting for training data is taken out. A fit leaves the table in its
    folder as ``profile.txt``. In manual optimization, what follows an optimizer's step counts with
    it until the next hook. A GPU goes on working while later phases pass: see `PyTorchProfiler`.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase and hook of the run, or of the last one."""
        self.calls: Counter[str] = Counter()
        """How often each phase and hook came."""
        self._label = BETWEEN
        self._outer: list[str] = []
        self._since = self._waited = 0.0

    def _start(self, trainer: Trainer) -> None:
        self.seconds.clear()
        self.calls.clear()
        self._label, self._outer = BETWEEN, []
        self._since, self._waited = perf_counter(), trainer.data_wait

    def _switch(self, label: str, trainer: Trainer) -> None:
        """Count the time until now for what ran, and the time from now for ``label``."""
        now, waited = perf_counter(), trainer.data_wait
        self.seconds[WAITING] += waited - self._waited
        self.seconds[self._label] += now - self._since - (waited - self._waited)
        self._label, self._since, self._waited = label, now, waited

    def _enter(self, hook: str, trainer: Trainer) -> None:
        self._outer.append(self._label)
        self._switch(hook, trainer)
        self.calls[hook] += 1

    def _leave(self, hook: str, trainer: Trainer) -> None:
        outer = self._outer.pop()
        phase = outer if self._outer else AFTER.get(hook, BETWEEN)
        self._switch(phase, trainer)
        if phase != outer and phase != BETWEEN:
            self.calls[phase] += 1

    def _report(self, trainer: Trainer, stage: str) -> None:
        if not trainer.is_global_zero:
            return
        table = f"Profile of {stage}\n{self}"
        print(table, flush=True)
        if stage == "fit" and trainer.run_dir is not None:
            (trainer.run_dir / "profile.txt").write_text(f"{table}\n", encoding="utf-8")

    def __str__(self) -> str:
        total = sum(self.seconds.values()) or 1.0
        largest = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [item for item in largest if item[1] >= 0.001 * total]
        rest = total - sum(seconds for _, seconds in shown)
        lines = [f"{'Phase or hook':<28}{'Seconds':>10}{'Share':>9}{'Calls':>9}{'Each':>13}"]
        for label, seconds in (*shown, ("all others", rest), ("in all", total)):
            calls = self.calls[label]
            each = f"{calls:>9}{seconds / calls * 1e3:>10.3f} ms" if calls else ""
            lines.append(f"{label:<28}{seconds:>10.3f}{seconds / total:>9.1%}{each}")
        return "\n".join(lines)


def _timed(hook: str) -> Any:
    """Return a wrapper around all that implement ``hook``."""

    @hookimpl(wrapper=True)
    def told(
        self: SimpleProfiler, trainer: Trainer, module: Module, *rest: Any
    ) -> Generator[None, Any, Any]:
        if hook == "setup":
            self._start(trainer)
        self._enter(hook, trainer)
        try:
            return (yield)
        finally:
            self._leave(hook, trainer)
            if hook == "teardown":
                self._report(trainer, *rest)

    return told


for _hook in vars(RunHooks):
    if not _hook.startswith("_"):
        setattr(SimpleProfiler, _hook, _timed(_hook))


class PyTorchProfiler(Callback):
    """Records every operation of a few training batches with ``torch.profiler``.

    Each rank writes a trace into the ``profile`` folder of the run, for https://ui.perfetto.dev,
    Chrome's ``chrome://tracing`` or TensorBoard.

    Args:
        wait: Batches to leave out at first, at least 0.
        warmup: Batches to trace and throw away, for the first ones are slow; at least 0.
        active: Batches to record, at least 1.
        repeat: How often to wait, warm up and record.
        options: More arguments for ``torch.profiler.profile``, such as ``with_stack=True``.

    Raises:
        ConfigError: A number is too small.
    """

    def __init__(
        self, wait: int = 1, warmup: int = 1, active: int = 3, repeat: int = 1, **options: Any
    ) -> None:
        self._cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        for name, value in self._cycle.items():
            least = 1 if name in ("active", "repeat") else 0
            if value < least:
                raise ConfigError(f"{name}={value!r} must be at least {least}.")
        self._options = options
        self._profile: torch.profiler.profile | None = None
        self._traces: list[Path] = []

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        folder = (trainer.run_dir or Path(trainer.default_root_dir)) / "profile"
        self._traces = []

        def write(profile: torch.profiler.profile) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank{trainer.global_rank}-batch{profile.step_num}.pt.trace.json"
            profile.export_chrome_trace(str(path))
            self._traces.append(path)

        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(**self._cycle), on_trace_ready=write, **self._options
        )
        self._profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._stop()
        if not self._traces:
            warnings.warn(
                f"No trace was recorded: training ended before {self._cycle['wait']} batches of "
                f"wait, {self._cycle['warmup']} of warmup and one more. Train for longer, or lower "
                "them in PyTorchProfiler(...).",
                stacklevel=2,
            )
        elif trainer.is_global_zero:
            print(f"Traces of torch.profiler: {', '.join(map(str, self._traces))}", flush=True)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
