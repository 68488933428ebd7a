"""Optimizer steps in backward: each parameter's as its gradient is ready, which is then freed.

Source: PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .data.feed import overrides
from .errors import ConfigError
from .optimizers import needs_closure
from .overrides import TrainingHooks

if TYPE_CHECKING:
    from .run import Run


def step_in_backward(run: Run) -> None:
    """Let backward step the run's optimizer, one parameter after the other.

    Its states, groups and options stay those of the one optimizer, so that schedules, checkpoints
    and loggers see what they always do. The loop's own call of ``step`` finds no gradients.

    Raises:
        ConfigError: Something in this run needs all gradients together.
    """
    against = obstacles(run)
    if against:
        raise ConfigError(
            f"optimizer_in_backward=True cannot be used here: {'; '.join(against)}. A step in "
            "backward sees one gradient at a time. Change this, or leave the argument out."
        )
    optimizer = run.optimizers[0]
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                step = OneParameter(optimizer, index)
                handle = parameter.register_post_accumulate_grad_hook(step)
                run.undo.append(handle.remove)


def obstacles(run: Run) -> list[str]:
    """Return what in ``run`` needs all gradients of a step together."""
    trainer, module, optimizers = run.trainer, run.module, run.optimizers
    copies = run.strategy.data_world_size > 1 and not run.strategy.is_lockstep
    probe = torch.zeros((), device=run.strategy.device)
    by_hand = not module.automatic_optimization
    found = {
        "the Module steps its optimizers itself (automatic_optimization = False)": by_hand,
        f"configure_optimizers() returned {len(optimizers)} optimizers": len(optimizers) != 1,
        f"accumulate_grad_batches={run.accumulate}": run.accumulate != 1,
        f"gradient_clip_val={trainer.gradient_clip_val}": trainer.gradient_clip_val is not None,
        f"precision={run.precision.name!r} scales gradients": run.precision.scale(probe)
        is not probe,
        "copies of the Module average their gradients after backward": copies,
    }
    for name in ("optimizer_step", "configure_gradient_clipping"):
        found[f"the Module overrides {name}"] = overrides(module, name, TrainingHooks)
    for optimizer in optimizers:
        found[
            f"{type(optimizer).__name__} cannot step one parameter alone, as far as is known"
        ] = not is_elementwise(optimizer)
    return [what for what, is_so in found.items() if is_so]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one of torch's that treat each parameter on its own."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not needs_closure(optimizer)


class OneParameter:
    """Steps one parameter with the state and the options that ``optimizer`` has for it.

    Args:
        optimizer: One that treats each parameter on its own.
        group: Index of the parameter's group.
    """

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        self.optimizer, self.group = optimizer, group
        self.alone = copy.copy(optimizer)

    def __call__(self, parameter: nn.Parameter) -> None:
        # A restored checkpoint replaces states and groups, and a schedule changes options.
        options: dict[str, Any] = self.optimizer.param_groups[self.group]
        self.alone.state = self.optimizer.state
        self.alone.param_groups = [{**options, "params": [parameter]}]
        self.alone.step()
        parameter.grad = None
