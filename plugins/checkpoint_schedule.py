"""When a ModelCheckpoint saves."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from leyden.state import State
    from leyden.trainer import Trainer

    At = Literal["step", "epoch", "end"]

NOTHING = -1
"""Stands for batches and steps where no state is saved."""


class Schedule:
    """Knows what was saved last, and whether a save is due.

    Args:
        every_n_train_steps: Optimizer steps between saves.
        train_time_interval: Time in training between saves.
        every_n_epochs: Epochs between those that are saved in.
        on_train_epoch_end: Save at the end of epochs, or after validations; None chooses.
        save_last: Whether the state at the end of training is saved in any case.
        max_share: Most of the training time that saves after epochs may take.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        train_time_interval: timedelta | None,
        every_n_epochs: int | None,
        on_train_epoch_end: bool | None,
        save_last: bool,
        max_share: float,
    ) -> None:
        self._every_n_steps, self._interval = every_n_train_steps, train_time_interval
        self._every_n_epochs, self._on_train_epoch_end = every_n_epochs, on_train_epoch_end
        self._save_last, self._max_share = save_last, max_share
        self.waits_for_validation = every_n_train_steps is None and train_time_interval is None
        """Whether nothing is due after a step that was not validated."""
        self.begun_batches = self.saved_batches = self._saved_step = 0
        self.saved_elapsed = self.took = 0.0

    def begin(self, state: State, is_scored: bool) -> None:
        """Take ``state``, which a fit begins with, as saved: it is new, or was loaded.

        Args:
            state: Where training is.
            is_scored: Whether it is validated first, to be saved with its score.
        """
        self.begun_batches = state.total_batches
        self.mark(state)
        if is_scored or state.pending_validation:
            self.saved_batches = self._saved_step = NOTHING

    def mark(self, state: State) -> None:
        """Note that ``state`` is saved."""
        self.saved_batches, self._saved_step = state.total_batches, state.step
        self.saved_elapsed = state.elapsed

    def has_unsaved(self, state: State) -> bool:
        """Return whether this fit has trained since the last save."""
        return state.total_batches not in (self.saved_batches, self.begun_batches)

    def is_due(self, trainer: Trainer, at: At) -> bool:
        """Return whether to save now; the same on every rank."""
        if at == "step":
            return self._is_due_after_step(trainer, trainer.state)
        return self._is_due_after_epoch(trainer, trainer.state, at)

    def _is_due_after_step(self, trainer: Trainer, state: State) -> bool:
        if self._every_n_steps is not None:
            return state.step != self._saved_step and state.step % self._every_n_steps == 0
        if self._interval is not None:
            waited = timedelta(seconds=state.elapsed - self.saved_elapsed)
            return bool(trainer.broadcast(waited >= self._interval))
        return (
            state.validated_batch == state.total_batches
            and state.batch < trainer.num_training_batches
            and (state.epoch + 1) % (self._every_n_epochs or 1) == 0
            and self._saves_after_validation(trainer)
        )

    def _is_due_after_epoch(self, trainer: Trainer, state: State, at: At) -> bool:
        if at == "end" and self._save_last:
            return True
        if not self.waits_for_validation:
            return False
        if (epoch_of(state) + 1) % (self._every_n_epochs or 1):
            return False
        passed = state.elapsed - self.saved_elapsed
        if at == "epoch" and trainer.broadcast(self.took > self._max_share * passed):
            return False
        has_validated = state.validated_batch == state.total_batches
        return (
            (at == "end" and state.batch > 0)
            or has_validated
            or not self._saves_after_validation(trainer)
        )

    def _saves_after_validation(self, trainer: Trainer) -> bool:
        if self._on_train_epoch_end is not None:
            return not self._on_train_epoch_end
        return self._every_n_epochs is None and sum(trainer.num_val_batches) > 0


def epoch_of(state: State) -> int:
    """Return the index of the epoch that the last batch was of."""
    return max(0, state.epoch - (state.batch == 0))
