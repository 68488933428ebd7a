"""Writes what a ModelCheckpoint saves, while training waits or while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leyden.rank_zero import told_of

from .background import HostCopies, InBackground
from .retention import Files, Save

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.protocols import Checkpointer
    from leyden.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a save.

    Attributes:
        files: What there is after it.
        is_saved: Whether the state is safe.
        error: What went wrong, if anything did.
    """

    files: Files
    is_saved: bool
    error: Exception | None = None


class Writer:
    """Writes one save at a time.

    Args:
        asynchronous: Whether training goes on meanwhile.
        symbolic: Whether the name of the newest state is a symbolic link.
    """

    def __init__(self, asynchronous: bool, symbolic: bool) -> None:
        self._asynchronous, self._symbolic = asynchronous, symbolic
        self._copies: HostCopies | None = None
        self.wants_memory = False
        """Whether a fit has begun that will need memory for copies."""
        self._task: InBackground[Outcome] | None = None
        self._outcome: Outcome | None = None
        self.save: Save | None = None
        """The one that was begun, until its outcome is taken."""

    def prepare(self) -> None:
        """Learn that a fit begins; what another has left is given up."""
        self.save = self._task = None
        self.wants_memory = self._asynchronous

    def reserve(self, trainer: Trainer, module: Module) -> None:
        """Take the memory for copies, as far as the state can be known between two steps."""
        self.wants_memory = False
        if _writes(trainer):
            self._copies = HostCopies()
            optimizers = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            self._copies.reserve([*module.parameters(), *module.buffers(), optimizers])

    def begin(self, trainer: Trainer, checkpoint: dict[str, Any], save: Save) -> None:
        """Write ``checkpoint``, or begin to; it is free to change afterwards.

        Rank 0 does, and the others too where each writes its parts.
        """
        self._task = None
        write = partial(written, trainer.checkpointer, save=save, symbolic=self._symbolic)
        if not trainer.is_global_zero:
            write = partial(written_in_part, trainer.checkpointer, save=save)
        if not _writes(trainer):
            self._outcome = None
        elif self._asynchronous:
            self._begin_in_background(trainer, checkpoint, save, write)
        else:
            self._outcome = write(checkpoint)
        self.save = save

    def _begin_in_background(
        self,
        trainer: Trainer,
        checkpoint: dict[str, Any],
        save: Save,
        write: Callable[[dict[str, Any]], Outcome],
    ) -> None:
        self._copies = self._copies or HostCopies()
        copied, error = None, None
        try:
            copied = self._copies.take(checkpoint)
        except (MemoryError, RuntimeError) as failure:  # torch has no other for host memory
            error = failure
        if _is_sharded(trainer):  # none of the ranks may wait for one that does not come
            trainer.checkpointer.join()  # type: ignore[attr-defined]
            error = next(filter(None, trainer.strategy.gather(error)), None)
        if error is not None or copied is None:
            self._outcome = Outcome(save.before, False, error)
            return
        self._task = InBackground(partial(write, copied))

    def is_done(self) -> bool:
        """Return whether nothing is being written on this rank."""
        return self._task is None or self._task.is_done()

    def is_seen_done(self, trainer: Trainer) -> bool:
        """Return whether this is so on every rank, as far as can be seen without asking them."""
        return trainer.world_size == 1 and self.is_done()

    def finish(self, trainer: Trainer) -> tuple[Save, Outcome]:
        """Wait until the save that was begun is complete; the same on every rank."""
        save, own = self.finish_alone()
        error = None if own.error is None else told_of(own.error)
        told: Outcome = trainer.broadcast(replace(own, error=error))
        return save, own if trainer.is_global_zero else told

    def finish_alone(self) -> tuple[Save, Outcome]:
        """Do so for what this rank writes of it, without asking others, who may be gone."""
        assert self.save is not None
        save, own = self.save, self._outcome if self._task is None else self._task.result()
        self.save = self._task = None
        return save, own or Outcome(save.before, False)

    def stop(self) -> None:
        """Give up a save that is not complete by now."""
        if self._task is not None and not self._task.stop():
            self.save = self._task = None

    def free(self) -> None:
        """Let the memory of copies go."""
        self._copies = None


def _is_sharded(trainer: Trainer) -> bool:
    return getattr(trainer.checkpointer, "is_sharded", False)


def _writes(trainer: Trainer) -> bool:
    """Return whether this rank writes anything of a checkpoint."""
    return trainer.is_global_zero or _is_sharded(trainer)


def written_in_part(checkpointer: Checkpointer, checkpoint: dict[str, Any], save: Save) -> Outcome:
    """Write what a rank other than 0 has of ``checkpoint``."""
    try:
        checkpointer.save(checkpoint, save.path)
    except Exception as error:
        return Outcome(save.before, False, error)
    return Outcome(save.after, True)


def written(
    checkpointer: Checkpointer, checkpoint: dict[str, Any], save: Save, symbolic: bool
) -> Outcome:
    """Write ``checkpoint``, point "last" at it, then delete what it replaces.

    Nothing is deleted where something went wrong.
    """
    before, after = save.before, save.after
    try:
        checkpointer.save(checkpoint, save.path)
    except Exception as error:
        return Outcome(before, False, error)
    if after.last not in ("", save.path):
        try:
            checkpointer.copy(save.path, after.last, symbolic=symbolic)
        except Exception as error:
            return Outcome(replace(after, last=before.last), True, error)
    left = []
    for path in after.doomed:
        try:
            checkpointer.remove(path)
        except Exception as error:
            log.warning("%s It is tried again after the next save.", error)
            left.append(path)
    return Outcome(replace(after, doomed=tuple(left)), True)
