"""What moves in a run, as a checkpoint holds it, and how another run takes it over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import encoding, rng
from .callback import Callback
from .errors import CheckpointError, LeydenError, PluginError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .run import Run


COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a compiled part's parameters; never in a file."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a fit leaves in memory for the next fit of the same Module by the same Trainer."""

    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    precision: dict[str, Any]
    epoch_rng: dict[str, Any] | None


def position(run: Run) -> Position:
    """Return what the next fit of the same Module goes on from."""
    return Position(
        [optimizer_state(run, optimizer) for optimizer in run.optimizers],
        [config.scheduler.state_dict() for config in run.schedulers],
        run.precision.state_dict(),
        run.epoch_rng,
    )


def require_progress(checkpoint: Mapping[str, Any], owner: str) -> None:
    """Refuse a checkpoint that training cannot go on from, before a run has left any trace.

    Raises:
        CheckpointError: It is one.
    """
    lacking = {"state_dict", "epoch", "global_step", "optimizer_states"} - set(checkpoint)
    if lacking:
        raise CheckpointError(
            f"Training cannot go on from this checkpoint: it lacks {', '.join(sorted(lacking))}, "
            "as one does that holds weights alone. Begin anew from its weights instead, with "
            f"{owner}.load_from_checkpoint(path)."
        )


def restore_progress(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Take over everything but the weights, into a run that is wired and not begun.

    Raises:
        CheckpointError: The file holds weights alone, or another number of optimizers.
    """
    restore_callbacks(run, checkpoint)
    states, schedules = checkpoint["optimizer_states"], checkpoint.get("lr_schedulers", [])
    restore_optimizers(run, states, schedules, checkpoint.get("precision", {}))
    with taking_over("open optimizer step"):
        restore_window(run, checkpoint.get("window"))
    run.epoch_rng = checkpoint.get("epoch_rng")
    saved_rng = checkpoint.get("rng")
    if saved_rng is not None:
        with taking_over("state of random generators"):
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
            with taking_over(f"state of {key}"):
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
        with taking_over(f"state of {type(optimizer).__name__}"):
            check_same(run, optimizer, state)
            optimizer.load_state_dict({k: v for k, v in state.items() if k != "leyden"})
    for config, state in zip(run.schedulers, schedules, strict=True):
        with taking_over(f"state of {type(config.scheduler).__name__}"):
            config.scheduler.load_state_dict(state)
    with taking_over("state of the precision"):
        run.precision.load_state_dict(precision)


@contextmanager
def taking_over(what: str) -> Iterator[None]:
    """Raise whatever goes wrong inside as what it is: a checkpoint that does not fit."""
    try:
        yield
    except LeydenError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint's {what} does not fit this run, or is damaged: "
            f"{type(error).__name__}: {error}. Resume with the code and the settings it was saved "
            "with, or begin anew from the weights alone with load_from_checkpoint."
        ) from error


def optimizer_state(run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer``, with its kind and the names of what it holds."""
    return {**optimizer.state_dict(), "leyden": identity(run, optimizer)}


def identity(run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return what must be the same for a state to be taken over: torch goes by position alone."""
    names = {id(p): clean(name) for name, p in run.module.named_parameters()}
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "parameters": groups}


def check_same(run: Run, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a state of another optimizer, or of the same over other parameters.

    Raises:
        CheckpointError: It is one.
    """
    saved, own = state.get("leyden"), identity(run, optimizer)
    if saved is not None and saved != own:
        which = "kind" if saved["kind"] != own["kind"] else "parameters"
        raise CheckpointError(
            f"The checkpoint's optimizer and that of configure_optimizers() differ in {which}: "
            f"{saved[which]!s:.200} was saved, and {own[which]!s:.200} is there. Return the same "
            "optimizer over the same parameters in the same order, or begin anew from the weights "
            "alone with load_from_checkpoint."
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


def clean(name: str) -> str:
    """Return a parameter's name without what torch.compile adds to it."""
    return name.replace(COMPILED, "")
