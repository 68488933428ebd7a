"""Which checkpoint a run starts from, and what it takes from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import locations, resume, saving
from .errors import CheckpointError, ConfigError, LeydenError
from .protocols import Checkpointer
from .rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from .trainer import Trainer

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Where launchers say how often they have started this job again."""


def is_restart() -> bool:
    """Return whether a launcher has started this same command before."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS)


def chosen_checkpoint(trainer: Trainer, stage: str, choice: Any) -> str | None:
    """Return what ``ckpt_path`` asks for: a path, ``"auto"``, ``"last"`` to be found, or None.

    Raises:
        LeydenError: ``"best"`` is asked for, and there is none.
        ConfigError: ``"auto"`` is asked for where nothing goes on.
    """
    if choice is None and stage == "fit" and is_restart():
        return "auto"
    if choice is None or choice not in ("best", "last", "auto"):
        return None if choice is None else str(choice)
    if choice == "auto":
        if stage != "fit":
            raise ConfigError(
                f"{stage}(ckpt_path='auto'): only fit goes on where it was. Pass a path, 'best' or "
                "'last'."
            )
        return "auto"
    path = getattr(trainer.checkpoint_callback, f"{choice}_model_path", "")
    if not path and choice == "best":
        raise LeydenError(
            "ckpt_path='best': there is no such checkpoint. Fit with ModelCheckpoint(monitor=…) "
            "first, or pass a path."
        )
    return str(path) or "last"


def _last(trainer: Trainer, checkpointer: Checkpointer, savers: Sequence[Any]) -> str:
    """Return the newest checkpoint called ``last`` in the folders.

    Raises:
        LeydenError: There is none.
    """
    looked_in = folders(trainer, savers)
    for path in in_folders(checkpointer, looked_in):
        if locations.name_of(path).startswith("last."):
            return path
    raise LeydenError(
        f"ckpt_path='last': there is no such checkpoint in {', '.join(looked_in)}. Fit with "
        "ModelCheckpoint(save_last=True) first, or pass a path."
    )


def home(trainer: Trainer) -> tuple[str, str, int | str | None]:
    """Return root, name and version of the folders that runs of ``trainer`` are kept in.

    A logger that was told where to write takes the rest of the run with it.
    """
    for logger in trainer.logger_choices:
        if logger.save_dir is not None:
            return str(logger.save_dir), logger.name or trainer.name, logger.version
    return trainer.default_root_dir, trainer.name, None


def folders(trainer: Trainer, savers: Sequence[Any]) -> list[str]:
    """Return where ``savers`` keep checkpoints: in folders of their own, or in those of runs."""
    root, name, _ = home(trainer)
    runs = locations.join(root, name)
    own = [str(getattr(saver, "dirpath", None) or runs) for saver in savers]
    return list(dict.fromkeys(own)) or [runs]


def in_folders(checkpointer: Checkpointer, looked_in: Sequence[str]) -> Iterator[str]:
    """Yield the complete checkpoints in the folders, the newest first."""
    found = [path for folder in looked_in for path in checkpointer.find(folder)]
    if len(looked_in) > 1:
        found.sort(key=lambda path: checkpointer.manifest(path).get("time", 0.0), reverse=True)
    yield from found


def newest(
    trainer: Trainer, checkpointer: Checkpointer, savers: Sequence[Any]
) -> tuple[str, dict[str, Any]] | None:
    """Return path and content of the newest checkpoint that training can go on from, or None.

    One that is damaged is passed over, which is said.
    """
    for path in in_folders(checkpointer, folders(trainer, savers)):
        if checkpointer.manifest(path).get("kind") != "training":
            continue
        try:
            return path, saving.view(checkpointer, path)
        except CheckpointError as error:
            rank_zero_warn(f"'auto' passes over {path}, and takes the one before. {error}")
    return None


def read_checkpoint(
    trainer: Trainer,
    checkpointer: Checkpointer,
    savers: Sequence[Any],
    path: str | None,
    required: frozenset[str],
    owner: str,
    on_first: Callable[[Callable[[], Any]], Any],
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the path and the content of the checkpoint a run starts from, or None for both.

    Args:
        trainer: Whose run it is.
        checkpointer: What reads it.
        savers: Callbacks of the run that keep checkpoints.
        path: A path, ``"auto"``, ``"last"`` or None.
        required: Parts that it must have.
        owner: The Module's class, for messages.
        on_first: Calls on rank 0, and returns what it returned there on every rank.

    Raises:
        LeydenError: There is none called ``last``.
        CheckpointError: It cannot be read, or lacks a part.
    """
    if path is None:
        return None, None
    own: list[dict[str, Any]] = []

    def verified(asked: str) -> str | None:
        found: tuple[str, dict[str, Any]] | None
        if asked == "auto":
            found = newest(trainer, checkpointer, savers)
        else:
            asked = _last(trainer, checkpointer, savers) if asked == "last" else asked
            found = asked, saving.view(checkpointer, asked)
        own.extend([found[1]] if found else [])
        return found[0] if found else None

    chosen = on_first(partial(verified, path))  # rank 0 reads all; the others rely on that
    if chosen is None:
        looked_in = ", ".join(folders(trainer, savers))
        rank_zero_info("No checkpoint to go on from in %s: training begins.", looked_in)
        return None, None
    path = str(chosen)
    checkpoint = own[0] if own else saving.view(checkpointer, path, is_verified=True)
    rank_zero_info("Taking up %s", path)
    resume.require_progress(checkpoint, owner, required)
    if not checkpoint.get("leyden", {}).get("exact", True):
        rank_zero_warn(_inexact(path, checkpoint))
    return path, checkpoint


def _inexact(path: str, checkpoint: dict[str, Any]) -> str:
    batch, epoch = checkpoint["state"]["batch"], checkpoint["state"]["epoch"]
    data = checkpoint["ranks"][0].get("data", {})
    becomes = "trained again" if data.get("batches", batch) == batch else "left out"
    return (
        f"{path} was saved when an error had ended batch {batch} of epoch {epoch} half-way. The "
        f"batch is {becomes}; what it had drawn and counted until then may differ from a run that "
        "was not broken."
    )
