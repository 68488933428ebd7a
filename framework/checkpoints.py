"""What a checkpoint holds, and how a run or a Module takes it back.

A checkpoint is a dict that ``torch.load(weights_only=True)`` reads. ``state_dict``, ``epoch`` and
``global_step`` stand under Lightning's keys; everything of leyden's own is described in `gathered`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import encoding, hparams, rng
from .callback import Callback
from .errors import CheckpointError, PluginError
from .manager import Registry

if TYPE_CHECKING:
    from .protocols import Checkpointer
    from .run import Run

FORMAT = 1
OWN = frozenset(
    [
        "leyden",
        "epoch",
        "global_step",
        "state",
        "state_dict",
        "folder",
        "hyper_parameters",
        "datamodule_hyper_parameters",
        "optimizer_states",
        "lr_schedulers",
        "precision",
        "callbacks",
        "loggers",
        "rng",
        "epoch_rng",
        "window",
        "datamodule",
    ]
)
"""Every entry that leyden writes; others were added by ``on_save_checkpoint``."""
COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a compiled part's parameters; never in a file."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a fit leaves in memory for the next fit of the same Module by the same Trainer."""

    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    precision: dict[str, Any]
    epoch_rng: dict[str, Any] | None


def gathered(run: Run, weights_only: bool = False) -> dict[str, Any]:
    """Return the checkpoint of ``run`` as it stands.

    Args:
        run: The run to save.
        weights_only: Leave out all that only a resumed training needs.
    """
    state = run.state
    if run.losses is not None:
        run.losses.read()  # so that the count of those that are not finite is up to date
    checkpoint: dict[str, Any] = {
        "leyden": {"format": FORMAT, "version": metadata.version("leyden")},
        "epoch": state.epoch,
        "global_step": state.step,
        "state": state.as_dict(),
        "state_dict": {clean(name): t for name, t in run.module.state_dict().items()},
        "folder": str(run.folder.path) if run.folder.is_made else None,
        **run.hyperparameters,
    }
    if not weights_only:
        checkpoint |= {
            "optimizer_states": [optimizer.state_dict() for optimizer in run.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in run.schedulers],
            "precision": run.precision.state_dict(),
            "callbacks": {
                key: as_data(callback.state_dict(), f"The state_dict() of {key}")
                for key, callback in stateful(run.callbacks).items()
            },
            "loggers": [logger.state_dict() for logger in run.loggers],
            "rng": rng.capture(),
            "epoch_rng": run.epoch_rng,
            "window": window_state(run),
        }
        if run.datamodule is not None:
            state_dict = run.datamodule.state_dict()
            checkpoint["datamodule"] = as_data(state_dict, "The state_dict() of the DataModule")
    for hook in run.hooks.on_save_checkpoint:
        hook(run.trainer, run.module, checkpoint)
    added = {name: value for name, value in checkpoint.items() if name not in OWN}
    return checkpoint | as_data(added, "What on_save_checkpoint added")


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
    """Write the checkpoint of ``run`` at ``path``."""
    checkpoint = gathered(run, weights_only)
    if run.strategy.rank == 0:
        run.checkpointer.save(checkpoint, path)
    run.strategy.barrier()


def load(checkpointer: Checkpointer, path: str) -> dict[str, Any]:
    """Return the checkpoint at ``path``, on the CPU.

    Raises:
        CheckpointError: There is none, it is damaged, or a newer leyden wrote it.
    """
    checkpoint = checkpointer.load(path)
    written = checkpoint.get("leyden", {})
    if written.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path!r} was written by leyden {written.get('version')} in format "
            f"{written['format']}, and this one reads up to {FORMAT}. Install leyden "
            f"{written.get('version')} or newer."
        )
    added = {name: encoding.decode(value) for name, value in checkpoint.items() if name not in OWN}
    return checkpoint | added


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
    own = {clean(name): name for name in module.state_dict()}
    named = {own.get(clean(name), name): tensor for name, tensor in saved.items()}
    try:
        module.load_state_dict(named, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"The checkpoint's weights do not fit {type(module).__name__}: {error} To load those "
            "that fit by name, pass strict=False or set strict_loading = False on the Module."
        ) from error


def restore_progress(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over everything but the weights, into a run that is wired and not begun.

    Raises:
        CheckpointError: The file holds weights alone, or another number of optimizers.
    """
    if "optimizer_states" not in checkpoint:
        raise CheckpointError(
            "This checkpoint holds weights alone, so training cannot go on from it. Load it with "
            f"{type(run.module).__name__}.load_from_checkpoint(path) to begin anew from them."
        )
    restore_callbacks(run, checkpoint)
    states, schedules = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    restore_optimizers(run, states, schedules, checkpoint.get("precision", {}))
    restore_window(run, checkpoint.get("window"))
    run.epoch_rng = checkpoint.get("epoch_rng")
    saved_rng = checkpoint.get("rng")
    if saved_rng is not None:
        rng.restore(saved_rng)
        run.resumed_rng = saved_rng if run.state.batch else None
    if run.datamodule is not None and "datamodule" in checkpoint:
        run.datamodule.load_state_dict(encoding.decode(checkpoint["datamodule"]))


def restore_counters(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over where training was, before loaders are made for it."""
    if "state" in checkpoint:
        run.state.restore(checkpoint["state"])
    else:
        run.state.epoch, run.state.step = checkpoint["epoch"], checkpoint["global_step"]


def restore_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over the state of every callback that is in the checkpoint."""
    saved = dict(checkpoint.get("callbacks", {}))
    for key, callback in stateful(run.callbacks).items():
        if key in saved:
            callback.load_state_dict(encoding.decode(saved.pop(key)))
    if left := sorted(key for key, state in saved.items() if state):
        warnings.warn(
            f"The checkpoint holds the state of callbacks this run does not have: "
            f"{', '.join(left)}. It is left out; pass the same callbacks to take it over.",
            stacklevel=2,
        )


def restore_optimizers(
    run: Run,
    states: Sequence[dict[str, Any]],
    schedules: Sequence[dict[str, Any]],
    precision: dict[str, Any],
) -> None:
    """Take over the states of optimizers, schedules and precision.

    Raises:
        CheckpointError: There are more or fewer of them than this run has.
    """
    for kind, saved, own in (
        ("optimizers", states, run.optimizers),
        ("schedulers", schedules, run.schedulers),
    ):
        if len(saved) != len(own):
            raise CheckpointError(
                f"The checkpoint holds {len(saved)} {kind} and configure_optimizers() returned "
                f"{len(own)}. Return as many, or begin anew from the weights alone with "
                "load_from_checkpoint."
            )
    for optimizer, state in zip(run.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    for config, state in zip(run.schedulers, schedules, strict=True):
        config.scheduler.load_state_dict(state)
    run.precision.load_state_dict(precision)


def window_state(run: Run) -> dict[str, Any] | None:
    """Return what there is of an optimizer step that is not complete, or None between steps."""
    window = run.window
    if not window.used:
        return None
    gradients = [parameter.grad for parameter in run.parameters()]
    return {
        "divisor": window.divisor,
        "used": window.used,
        "weight": window.weight,
        "gradients": gradients,
    }


def restore_window(run: Run, saved: dict[str, Any] | None) -> None:
    """Take over the part of an optimizer step that the checkpoint was saved in."""
    if saved is None:
        return
    window, device = run.window, run.strategy.device
    window.open, window.divisor, window.used = True, saved["divisor"], saved["used"]
    weight = saved["weight"]
    window.weight = weight.to(device) if isinstance(weight, Tensor) else weight
    for parameter, gradient in zip(run.parameters(), saved["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(device)


def position(run: Run) -> Position:
    """Return what the next fit of the same Module goes on from."""
    return Position(
        [optimizer.state_dict() for optimizer in run.optimizers],
        [config.scheduler.state_dict() for config in run.schedulers],
        run.precision.state_dict(),
        run.epoch_rng,
    )


def stateful(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the callbacks that keep state, by their key.

    Raises:
        PluginError: Two have the same key, so that their states could not be told apart.
    """
    found: dict[str, Any] = {}
    for callback in callbacks:
        # It may be empty now and full later.
        if getattr(callback.state_dict, "__func__", None) is Callback.state_dict:
            continue
        if callback.state_key in found:
            raise PluginError(
                f"Two callbacks would save their state under one key, {callback.state_key!r}. "
                f"Give {type(callback).__name__} a state_key property that includes the settings "
                "that tell the two apart."
            )
        found[callback.state_key] = callback
    return found


def clean(name: str) -> str:
    """Return a parameter's name without what torch.compile adds to it."""
    return name.replace(COMPILED, "")


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
    checkpoint = load(Registry().make("checkpointer", "file"), str(path))
    known = [*hparams.types_in_annotations(cls), *types]
    saved = hparams.decode(checkpoint.get("hyper_parameters", {}), known)
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
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    restore_weights(module, checkpoint, module.strict_loading if strict is None else strict)
    if map_location is not None:
        module.to(map_location)
    return module
