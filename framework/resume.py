"""What moves in a run, as a checkpoint holds it, and how another run takes it over."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import encoding, rng
from .callback import Callback
from .errors import CheckpointError, ConfigError, PluginError, did_you_mean
from .metric_state import metric_state, restore_metrics
from .open_step import restore_window, window_state
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
    from .protocols import Strategy
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
    """Return what each rank has of its own, and which part of the data it saw."""
    return {
        "place": [run.strategy.data_rank, run.strategy.data_world_size],
        "rng": rng.capture(),
        "data": run.train.position(is_used=not run.is_in_step),
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
    own = own_of(checkpoint, run.strategy)
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
            restore_window(run, checkpoint.get("window", own.get("window")))
    if "random" in parts and "rng" in own:
        with taking_over("state of random generators"):
            rng.restore(own["rng"])
        run.resumed_rng = own["rng"]
        tell_dealt_anew(checkpoint, run.strategy)
    if "data" in parts:
        restore_data(run, checkpoint, own)
    elif run.state.batch:
        run.state.batch = 0
        rank_zero_info(
            "Epoch %d begins again: its place in the data is not restored.", run.state.epoch
        )
    tell_difference(run, checkpoint.get("trainer", {}))


def own_of(checkpoint: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return what the checkpoint holds for this rank alone; nothing where others wrote it.

    Where the data was dealt to another number of ranks, the first takes over what all of them had
    counted, and the others draw from generators of their own.
    """
    ranks = checkpoint.get("ranks", [])
    if not ranks:
        return {}
    alone = [0, 1]
    places = [tuple(own.get("place", alone)) for own in ranks]
    here = (strategy.data_rank, strategy.data_world_size)
    if strategy.rank < len(ranks) and places[strategy.rank] == here:
        found = ranks[strategy.rank]
    elif here in places:
        found = ranks[places.index(here)]
    else:
        return {**ranks[0], **_dealt_anew(ranks, places, strategy.data_rank)}
    return found | {"metrics": [found["metrics"]]} if "metrics" in found else dict(found)


def _dealt_anew(
    ranks: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int]], data_rank: int
) -> dict[str, Any]:
    """Return what differs from rank 0's where the data is dealt to another number of ranks."""
    by_place = {place: own for place, own in zip(reversed(places), reversed(ranks), strict=True)}
    seen = [by_place[place]["metrics"] for place in sorted(by_place)]
    if data_rank:
        seen = [{**seen[0], "entries": [], "objects": {}}]
    return {"metrics": seen, "rng": rng.derived(ranks[0]["rng"], data_rank)}


def tell_dealt_anew(checkpoint: Mapping[str, Any], strategy: Strategy) -> None:
    """Say what cannot go on as it was because the data is dealt to another number of ranks."""
    ranks = checkpoint.get("ranks", [])
    saved = ranks[0].get("place", [0, 1])[1] if ranks else strategy.data_world_size
    if saved != strategy.data_world_size:
        rank_zero_info(
            "The checkpoint's data was dealt to %d ranks and now is to %d: what ranks but the "
            "first draw at random is not what they would have drawn.",
            saved,
            strategy.data_world_size,
        )


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
