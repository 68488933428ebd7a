"""What a checkpoint holds, and how a run or a Module takes it back.

A checkpoint is a dict that ``torch.load(weights_only=True)`` reads. ``state_dict``, ``epoch`` and
``global_step`` stand under Lightning's keys; everything of leyden's own is described in `gathered`.
What differs between ranks is in ``ranks``, an entry for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import encoding, foreign, hparams, rng
from .errors import CheckpointError, did_you_mean
from .manager import Registry
from .manifest import FORMAT, manifest
from .open_step import shared_window
from .optimizer_state import clean, optimizer_state
from .rank_zero import on_first
from .resume import choices_of, of_rank, stateful
from .shards import laid_out, together

if TYPE_CHECKING:
    from .protocols import Checkpointer, Strategy
    from .run import Run

OWN = frozenset(
    [
        "leyden",
        "epoch",
        "global_step",
        "state",
        "state_dict",
        "trainer",
        "folder",
        "hyper_parameters",
        "datamodule_hyper_parameters",
        "optimizer_states",
        "lr_schedulers",
        "precision",
        "callbacks",
        "loggers",
        "ranks",
        "window",
        "datamodule",
    ]
)
"""Every entry that leyden writes; others were added by ``on_save_checkpoint``."""
SHAPE: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "leyden",
            "state",
            "state_dict",
            "trainer",
            "callbacks",
            "precision",
            "hyper_parameters",
            "datamodule_hyper_parameters",
        ),
        dict,
    ),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "loggers", "ranks"), list),
    "folder": (str, type(None)),
    "window": (dict, type(None)),
}
"""What some entries are, which a damaged or foreign file may hold otherwise."""


def misshapen(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the entries that are not what a Trainer saves."""
    found = [
        n for n, kind in SHAPE.items() if n in checkpoint and not isinstance(checkpoint[n], kind)
    ]
    states = checkpoint.get("optimizer_states", [])
    if "optimizer_states" not in found and not all(
        isinstance(state, dict) and isinstance(state.get("param_groups"), list) for state in states
    ):
        found.append("optimizer_states")
    ranks = checkpoint.get("ranks", [])
    if "ranks" not in found and not all(isinstance(rank, dict) for rank in ranks):
        found.append("ranks")
    return found


def gathered(run: Run, weights_only: bool = False) -> dict[str, Any]:
    """Return the checkpoint of ``run`` as it stands; every rank takes part.

    Rank 0's is the one to be written. Tensors that lie in parts on several ranks are whole in it,
    and empty shells elsewhere, unless the run's checkpointer takes each rank's parts.

    Args:
        run: The run to save.
        weights_only: Leave out all that only a resumed training needs.
    """
    state = run.state
    if run.losses is not None:
        run.losses.read()  # so that the count of those that are not finite is up to date
    checkpoint: dict[str, Any] = {
        "leyden": manifest(run, weights_only),
        "epoch": max(0, state.epoch - (state.batch == 0)),  # the one its last batch was of
        "global_step": state.step,
        "state": state.as_dict(),
        "state_dict": {clean(name): t for name, t in run.module.state_dict().items()},
        "folder": str(run.folder.path) if run.folder.is_made else None,
        **run.hyperparameters,
    }
    if not weights_only:
        for logger in run.loggers if run.strategy.rank == 0 else ():
            logger.flush()  # what was logged up to here must outlive a kill as the checkpoint does
        checkpoint |= {
            "trainer": choices_of(run),
            "optimizer_states": [optimizer_state(run, optimizer) for optimizer in run.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in run.schedulers],
            "precision": run.precision.state_dict(),
            "callbacks": {
                key: as_data(callback.state_dict(), f"The state_dict() of {key}")
                for key, callback in stateful(run.callbacks).items()
            },
            "loggers": [log.state_dict() for log in run.loggers if run.strategy.rank == 0],
            "ranks": _of_all(of_rank(run), run.strategy),
            "window": shared_window(run),
        }
        if run.datamodule is not None:
            state_dict = run.datamodule.state_dict()
            checkpoint["datamodule"] = as_data(state_dict, "The state_dict() of the DataModule")
    for hook in run.hooks.on_save_checkpoint:
        hook(run.trainer, run.module, checkpoint)
    added = {name: value for name, value in checkpoint.items() if name not in OWN}
    checkpoint |= as_data(added, "What on_save_checkpoint added")
    try:
        checkpoint = encoding.readable(checkpoint)
    except encoding.NotData as error:
        raise CheckpointError(
            f"The checkpoint's {error} Let the state_dict() it comes from hold tensors and plain "
            "values alone."
        ) from error
    takes_parts = getattr(run.checkpointer, "is_sharded", False)
    return checkpoint if takes_parts else together(checkpoint, run.strategy)


def _of_all(own: dict[str, Any], strategy: Strategy) -> list[dict[str, Any]]:
    """Return on rank 0 what each rank has of its own; elsewhere nothing."""
    if strategy.world_size == 1:
        return [own]
    packed = BytesIO()
    torch.save(own, packed)  # plain pickle fails for some dtypes
    told = strategy.gather(packed.getvalue())
    if strategy.rank != 0:
        return []
    return [torch.load(BytesIO(one), map_location="cpu", weights_only=True) for one in told]


def as_data(value: dict[str, Any], what: str) -> dict[str, Any]:
    """Return ``value`` as a file holds it.

    Raises:
        CheckpointError: Something in it is no data, but an object with code.
    """
    try:
        return encoding.encode(value)  # type: ignore[no-any-return]
    except encoding.NotData as error:
        raise CheckpointError(
            f"{what}: {error} Save what it takes to make the object again instead."
        ) from error


def save(run: Run, path: str, weights_only: bool = False) -> None:
    """Write the checkpoint of ``run`` at ``path``; every rank takes part, and learns of failure."""
    checkpoint = gathered(run, weights_only)
    if getattr(run.checkpointer, "is_sharded", False):
        run.checkpointer.save(checkpoint, path)
        return
    on_first(run.strategy, partial(run.checkpointer.save, checkpoint, path))


def checkpointer_for(path: str, storage_options: Mapping[str, Any] | None = None) -> Checkpointer:
    """Return what reads and writes ``path`` outside of a run.

    It is the registered checkpointer whose name ``path`` ends in, as in ``last.sharded``, or else
    the one for files.
    """
    registry, ending = Registry(), path.rpartition(".")[2]
    name = ending if ending in registry.listed("checkpointer") else "file"
    made: Checkpointer = registry.make("checkpointer", name, storage_options=storage_options)
    return made


def load(
    checkpointer: Checkpointer, path: str, read: Callable[[str], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the checkpoint at ``path``, on the CPU.

    Args:
        checkpointer: What wrote it.
        path: Where it is.
        read: What reads it instead of the checkpointer's ``load``.

    Raises:
        CheckpointError: There is none, it is damaged, or a newer leyden wrote it.
    """
    checkpoint = foreign.load(checkpointer, path, read or checkpointer.load)
    if damaged := misshapen(checkpoint):
        raise CheckpointError(
            f"{path!r} is damaged: its {', '.join(map(repr, damaged))} is not what a Trainer saves."
            " Use another checkpoint."
        )
    written = checkpoint.get("leyden", {})
    if written.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path!r} was written by leyden {written.get('version')} in format "
            f"{written['format']}, and this one reads up to {FORMAT}. Install leyden "
            f"{written.get('version')} or newer."
        )
    added = {name: encoding.decode(value) for name, value in checkpoint.items() if name not in OWN}
    return checkpoint | added


def view(checkpointer: Checkpointer, path: str, is_verified: bool = False) -> dict[str, Any]:
    """Return the checkpoint at ``path`` for a run, which takes of each tensor the part it needs.

    Where the checkpointer can, tensors stay in the file until they are used.

    Args:
        checkpointer: What wrote it.
        path: Where it is.
        is_verified: Whether another rank has read all of it already.

    Raises:
        CheckpointError: There is none, it is damaged, or a newer leyden wrote it.
    """
    own = getattr(checkpointer, "view", None)
    return load(checkpointer, path, own and partial(own, is_verified=is_verified))


def restore_weights(module: nn.Module, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
    """Load the checkpoint's weights into ``module``, whichever of its parts are compiled.

    Raises:
        CheckpointError: They do not fit.
    """
    saved = checkpoint.get("state_dict")
    if saved is None:
        raise CheckpointError(
            f"This file holds no 'state_dict'; it holds {sorted(map(str, checkpoint))}. Pass a "
            "checkpoint that a Trainer saved."
        )
    own = {clean(name): (name, tensor) for name, tensor in module.state_dict().items()}
    named = {}
    for name, tensor in saved.items():
        key, like = own.get(clean(name), (name, None))
        named[key] = laid_out(tensor, like)
    try:
        module.load_state_dict(named, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint's weights do not fit {type(module).__name__}: {error} To load those "
            "that fit by name, pass strict=False or set strict_loading = False on the Module."
        ) from error


def rebuilt(
    cls: type[Any],
    path: Any,
    map_location: Any,
    strict: bool | None,
    types: Sequence[type],
    arguments: Mapping[str, Any],
) -> Any:
    """Return a Module of class ``cls`` from the checkpoint at ``path``.

    Its constructor's random numbers are drawn apart, so that loading changes nothing that follows.
    """
    checkpoint = load(checkpointer_for(str(path)), str(path))
    known = [*hparams.types_in_annotations(cls), *types]
    saved = hparams.decode(checkpoint.get("hyper_parameters", {}), known)
    for name in set(arguments) - set(hparams.matching(cls.__init__, arguments)):
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        raise CheckpointError(
            f"load_from_checkpoint({name}=…): {cls.__name__}.__init__ has no such argument."
            f"{did_you_mean(name, names)} Known: {', '.join(names) or 'none'}."
        )
    saved.update(arguments)
    with rng.isolated():
        try:
            module = cls(**hparams.matching(cls.__init__, saved))
        except TypeError as error:
            raise CheckpointError(
                f"{cls.__name__} cannot be made from the hyperparameters in {str(path)!r}: {error}."
                " Pass what is missing to load_from_checkpoint, or call "
                "self.save_hyperparameters() in __init__."
            ) from error
        module._configure_once()
    module.on_load_checkpoint(checkpoint)
    restore_weights(module, checkpoint, module.strict_loading if strict is None else strict)
    if map_location is not None:
        module.to(map_location)
    return module
