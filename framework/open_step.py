"""What there is of an optimizer step that is not complete, as a checkpoint holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtensors import is_split
from .optimizer_state import clean
from .rank_zero import rank_zero_warn
from .shards import laid_out

if TYPE_CHECKING:
    from .protocols import Strategy
    from .run import Run


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


def shared_window(run: Run) -> dict[str, Any] | None:
    """Return `window_state` as any number of ranks can take it over: averaged, by names.

    The step's gradient is the average over ranks, so each may go on from that of all.
    """
    strategy = run.strategy
    if run.window.used:
        strategy.share_gradients()
    own = window_state(run)
    if own is None:
        return None
    weight = own["weight"]
    held = _names(run)
    gradients = dict(zip(held, own["gradients"], strict=True))
    if strategy.data_world_size > 1:
        told = strategy.gather([name for name, grad in gradients.items() if grad is not None])
        known = {name for names in told for name in names}
        if not known:
            rank_zero_warn(
                f"{type(strategy).__name__} keeps the gradients of a step that is not complete to "
                "itself, so the checkpoint lacks them: a run that resumes from it goes on after "
                f"the {own['used']} batches of that step without what they came to."
            )
            return None
        for name, parameter in zip(held, run.parameters(), strict=True):
            if name in known:
                gradients[name] = _average(gradients[name], parameter, strategy)
        if weight is not None:
            weight = strategy.reduce(torch.as_tensor(weight), "mean")
    return own | {"weight": weight, "gradients": gradients}


def _names(run: Run) -> list[str]:
    """Return the name of each parameter that an optimizer holds; its number if it has none."""
    names = {id(p): clean(name) for name, p in run.module.named_parameters()}
    return [names.get(id(parameter), str(i)) for i, parameter in enumerate(run.parameters())]


def _average(gradient: Tensor | None, parameter: Tensor, strategy: Strategy) -> Tensor:
    """Return a gradient averaged over the data's ranks; only rank 0 keeps it where all have it."""
    own = torch.zeros_like(parameter) if gradient is None else gradient
    if is_split(own):
        return own  # averaged in backward already
    averaged = strategy.reduce(own, "mean")
    return averaged if strategy.rank == 0 else averaged.to("meta")


def restore_window(run: Run, saved: dict[str, Any] | None) -> None:
    """Take over the part of an optimizer step that the checkpoint was saved in."""
    if saved is None:
        return
    window, device = run.window, run.strategy.device
    window.open, window.divisor, window.used = True, saved["divisor"], saved["used"]
    weight = saved["weight"]
    window.weight = weight.to(device) if isinstance(weight, Tensor) else weight
    gradients = saved["gradients"]
    if isinstance(gradients, dict):
        gradients = [gradients[name] for name in _names(run)]
    for parameter, gradient in zip(run.parameters(), gradients, strict=True):
        laid = laid_out(gradient, parameter)
        parameter.grad = None if laid is None else laid.to(parameter.device)
