"""Progress as plain lines, few of them: for pipes, files and the logs of jobs."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, Any

from leyden.callback import Callback
from leyden.errors import ConfigError

from .progress_text import Meter, begin_epoch, evaluation_meter, metric_texts, update_training

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.trainer import Trainer


class PlainProgress(Callback):
    """Prints a line of progress now and then: a run's log stays short however long the run.

    A line comes every ``every_seconds``, the first after a fifth of it; one more at the end of an
    epoch, unless such a line came less than ``every_seconds`` ago; and one when all is done.

    Args:
        every_seconds: Seconds between lines, above 0.

    Raises:
        ConfigError: ``every_seconds`` is not above 0.
    """

    is_progress_bar = True

    def __init__(self, every_seconds: float = 10.0) -> None:
        if not every_seconds > 0:
            raise ConfigError(f"every_seconds={every_seconds!r} must be a number above 0.")
        self.every_seconds = every_seconds
        self._fits = False
        self._due = self._epoch_due = math.inf
        self._train = self._evaluation = Meter()

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Wait a little before the first line; ranks other than 0 wait for ever."""
        self._fits = stage == "fit"
        wait = self.every_seconds if trainer.is_global_zero else math.inf
        self._due, self._epoch_due = monotonic() + wait / 5, monotonic() + wait

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._train = Meter()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        begin_epoch(self._train, trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._train.done += 1
        if monotonic() >= self._due:
            self._print_training(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if monotonic() >= self._epoch_due:
            self._epoch_due = monotonic() + self.every_seconds
            self._print_training(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if trainer.is_global_zero:
            self._print_training(trainer, finished=True)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._train.update(trainer.data_wait)
        self._evaluation = evaluation_meter(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self._evaluation.done += 1
        if monotonic() >= self._due:
            self._evaluation.update()
            self._print(self._evaluation.cells())

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._train.resume(trainer.data_wait)
        if trainer.is_global_zero and not self._fits:
            self._evaluation.update()
            self._print(self._evaluation.cells(finished=True))

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def _print_training(self, trainer: Trainer, *, finished: bool = False) -> None:
        update_training(self._train, trainer)
        self._print([*self._train.cells(finished=finished), *metric_texts(trainer)])

    def _print(self, cells: list[str]) -> None:
        self._due = monotonic() + self.every_seconds
        print("  ".join(filter(None, cells)), flush=True)
