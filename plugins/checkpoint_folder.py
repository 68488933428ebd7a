"""Where a ModelCheckpoint keeps its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.locations import is_remote, join

if TYPE_CHECKING:
    from leyden.trainer import Trainer


def own_folder(trainer: Trainer, restored: str) -> str:
    """Return the folder for the checkpoints of this run, where no other was chosen.

    Args:
        trainer: Whose run it is.
        restored: The folder of the run that goes on; empty where none does.
    """
    folder, root = trainer.run_dir, trainer.default_root_dir
    assert folder is not None
    if not is_remote(root) or any(logger.save_dir is not None for logger in trainer.loggers):
        return str((folder / "checkpoints").absolute())
    runs = join(root, trainer.name)
    if trainer.state.total_batches and is_in(runs, restored):
        return restored  # this machine may have given the run's local folder another number
    return join(runs, folder.name, "checkpoints")


def is_in(folder: str, path: str) -> bool:
    """Return whether ``path`` is below ``folder``."""
    return path.startswith(join(folder, "x")[:-1])
