"""What moves in a run, as a checkpoint holds it, and how another run takes it over."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import encoding, rng
from .callback import Callback
from .errors import CheckpointError, ConfigError, PluginError, did_you_mean
from .metric_state import metric_state, restore_metrics
from .optimizer_state import (
    optimizer_state,
    replaced_options,
    restore_optimizers,
    taking_over,
    tell_replaced,
)
from .rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from .metrics import Metrics
    from .run import Run


PARTS = ("weights", "optimizer", "schedule", "counters", "callbacks", "data", "random")
"""What a fit may take over from a checkpoint, each alone or with others."""
HELD_IN = {
    "weights": "state_dict",
    "optimizer": "optimizer_states",
    "schedule": "optimizer_states",
    "counters": "global_step",
    "callbacks": "global_step",
    "data": "epoch",
    "random": "epoch",
}
"""The entry that a checkpoint must have for each of them."""
DECISIVE = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "nonfinite_loss",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
    "sync_batchnorm",
    "world_size",
)
"""The Trainer's choices that change what training comes to."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a fit leaves in memory for the next fit of the same Module by the same Trainer."""

    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    precision: dict[str, Any]
    data: dict[str, Any]
    window: dict[str, Any] | None
    metrics: Metrics | None
    """What was logged so far, where the fit ended in the middle of an epoch."""


def position(run: Run) -> Position:
    """Return what the next fit of the same Module goes on from."""
    return Position(
        [optimizer_state(run, optimizer) for optimizer in run.optimizers],
        [config.scheduler.state_dict() for config in run.schedulers],
        run.precision.state_dict(),
        run.train.position(is_used=not run.is_in_step),
        window_state(run),
        run.metrics if run.state.batch else None,
    )


def of_rank(run: Run) -> dict[str, Any]:
    """Return what each rank has of its own."""
    return {
        "rng": rng.capture(),
        "data": run.train.position(is_used=not run.is_in_step),
        "window": window_state(run),
        "metrics": metric_state(run),
    }


def restore_position(run: Run, left: Position) -> None:
    """Go on from what an earlier fit of the same Trainer and Module has left in memory."""
    restore_optimizers(run, left.optimizers, left.schedulers, left.precision)
    restore_window(run, left.window)
    restore_data(run, {}, {"data": left.data})
    if left.metrics is not None:
        run.metrics.train, run.metrics.finished = left.metrics.train, left.metrics.finished
    run.resumed_rng = rng.capture()


def require_progress(checkpoint: Mapping[str, Any], owner: str, parts: frozenset[str]) -> None:
    """Refuse a checkpoint that training cannot go on from, before a run has left any trace.

    Raises:
        CheckpointError: It is one.
    """
    lacking = {HELD_IN[part] for part in parts} - set(checkpoint)
    if lacking:
        raise CheckpointError(
            f"Training cannot go on from this checkpoint: it lacks {', '.join(sorted(lacking))}, "
            "as one does that holds weights alone. Begin anew from its weights instead: pass "
            f"restore=('weights',), or use {owner}.load_from_checkpoint(path)."
        )


def checked_parts(restore: Any) -> frozenset[str]:
    """Return the parts of a checkpoint that ``fit(restore=…)`` names; all for None.

    Raises:
        ConfigError: One is unknown, or of no use without another.
    """
    if restore is None:
        return frozenset(PARTS)
    named = [restore] if isinstance(restore, str) else list(restore)
    for part in named:
        if part not in PARTS:
            raise ConfigError(
                f"restore={restore!r}: there is no part {part!r}.{did_you_mean(str(part), PARTS)} "
                f"Known: {', '.join(map(repr, PARTS))}."
            )
    if "data" in named and "counters" not in named:
        raise ConfigError(
            f"restore={restore!r} asks for the place in the data and not for the epoch it is in. "
            "Add 'counters', or leave 'data' out."
        )
    return frozenset(named)


def restore_progress(run: Run, checkpoint: Mapping[str, Any], parts: frozenset[str]) -> None:
    """Take over ``parts`` but for the weights, into a run that is wired and not begun.

    Raises:
        CheckpointError: Something in the file does not fit this run.
    """
    if "callbacks" in parts:
        restore_callbacks(run, checkpoint)
    own = own_of(checkpoint, run.strategy.rank)
    takes_options = {"schedule", "optimizer"} <= parts
    replaced = replaced_options(run, checkpoint["optimizer_states"]) if takes_options else []
    restore_optimizers(
        run,
        checkpoint["optimizer_states"] if "optimizer" in parts else None,
        checkpoint.get("lr_schedulers", []) if "schedule" in parts else None,
        checkpoint.get("precision", {}) if "optimizer" in parts else None,
    )
    tell_replaced(replaced)
    if {"weights", "optimizer", "data"} <= parts:
        with taking_over("open optimizer step"):
            restore_window(run, own.get("window"))
    if "random" in parts and "rng" in own:
        with taking_over("state of random generators"):
            rng.restore(own["rng"])
        run.resumed_rng = own["rng"]
    if "data" in parts:
        restore_data(run, checkpoint, own)
    elif run.state.batch:
        run.state.batch = 0
        rank_zero_info(
            "Epoch %d begins again: its place in the data is not restored.", run.state.epoch
        )
    tell_difference(run, checkpoint.get("trainer", {}))


def own_of(checkpoint: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return what the checkpoint holds of ``rank`` alone; nothing where it was not there."""
    ranks = checkpoint.get("ranks", [])
    return ranks[rank] if rank < len(ranks) else {}


def restore_data(run: Run, checkpoint: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Take over the place in the training data, and what was logged on the way there."""
    if "data" in own:
        with taking_over("place in the data"):
            run.train.restore(own["data"])
            run.state.batch = run.train.start if run.state.batch else 0
    elif run.state.batch:  # saved by another framework
        run.train.start = run.state.batch
    warn_of_shorter(run)
    if "metrics" in own:
        with taking_over("metrics of the epoch so far"):
            restore_metrics(run, own["metrics"])
    if run.datamodule is not None and "datamodule" in checkpoint:
        run.datamodule.load_state_dict(encoding.decode(checkpoint["datamodule"]))


def warn_of_shorter(run: Run) -> None:
    """Warn that a resumed epoch has fewer batches than were already read of it."""
    length = run.train.length
    if length is not None and run.state.batch > length > 0:
        rank_zero_warn(
            f"The checkpoint was saved after batch {run.state.batch} of an epoch, which now has "
            f"{length}: nothing is left of it. Resume with the data and limits it was saved with."
        )


def restore_counters(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over where training was, before loaders are made for it."""
    if "state" in checkpoint:
        run.state.restore(checkpoint["state"])
    else:
        run.state.epoch, run.state.step = checkpoint["epoch"], checkpoint["global_step"]


def choices_of(run: Run) -> dict[str, Any]:
    """Return the Trainer's choices that change what training comes to."""
    return {name: getattr(run.trainer, name) for name in DECISIVE} | {
        "seed_samples": run.train.seed_samples
    }


def tell_difference(run: Run, saved: Mapping[str, Any]) -> None:
    """Warn of choices that are not those the checkpoint was saved with, naming both."""
    own = choices_of(run)
    changed = [
        f"{name}={own[name]!r} ({saved[name]!r} until then)"
        for name in own
        if name in saved and saved[name] != own[name]
    ]
    if changed:
        rank_zero_warn(
            f"This run goes on with {', '.join(changed)}, so it will not end as the one it resumes "
            "would have."
        )


def restore_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over the state of every callback that is in the checkpoint."""
    saved = dict(checkpoint.get("callbacks", {}))
    for key, callback in stateful(run.callbacks).items():
        if key in saved:
            with taking_over(f"state of {key}"):
                callback.load_state_dict(encoding.decode(saved.pop(key)))
    if left := sorted(key for key, state in saved.items() if state):
        warnings.warn(
            f"The checkpoint holds the state of callbacks this run does not have: "
            f"{', '.join(left)}. It is left out; pass the same callbacks to take it over.",
            stacklevel=2,
        )


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
