"""One training batch, and the optimizer step that it may close."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data.transfer import mapped
from .dtensors import local
from .errors import ModuleError, unknown
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .optimizers import SchedulerConfig
    from .run import Run


def open_window(run: Run, batch_idx: int) -> None:
    """Begin the batches of one optimizer step with no gradients."""
    for optimizer in run.optimizers:
        run.zero_grad(optimizer)
    length = run.train.length
    # Where the end of the data is not known, gradients are divided when the window closes.
    run.window.divisor = 1 if length is None else max(1, min(run.accumulate, length - batch_idx))
    run.window.open = True


def train_batch(run: Run, batch: Any, batch_idx: int, closes: bool) -> Any:
    """Run forward and backward on one batch, and the optimizer where it ``closes`` a step.

    Returns:
        What ``training_step`` returned, detached; the loss in it is undivided.
    """
    window = run.window
    # Set before the forward, so that accumulation needs no second code path.
    if closes is not run.is_synced:
        run.is_synced = closes
        run.strategy.sync_gradients(closes)
    result = run.training_step(batch, batch_idx)
    plain = isinstance(result, Tensor) and result.ndim == 0
    loss = result if plain else loss_of(run, result)

    if loss is not None and run.losses.accept(loss):
        if not plain or window.weight is not None:
            differentiate(run, share_of(run, result, loss))
        else:
            # A rank whose part of the global batch is larger than others' counts for more.
            divisor = window.divisor / run.train.share_factor
            differentiate(run, loss if divisor == 1 else loss / divisor)
        window.used += 1

    if closes:
        update(run)
    return result.detach() if plain else detached(result)


def train_batch_by_hand(run: Run, batch: Any, batch_idx: int, closes: bool) -> Any:
    """Run a ``training_step`` that steps its optimizers itself, and count what it did."""
    result = run.training_step(batch, batch_idx)
    state, optimizers = run.state, run.loop_optimizers
    if any(optimizer.updates for optimizer in optimizers):
        state.step += 1
    elif any(optimizer.skips for optimizer in optimizers):
        state.skipped += 1
    for index, optimizer in enumerate(optimizers):
        state.optimizer_steps[index] += optimizer.updates
        optimizer.updates = optimizer.skips = 0
    return detached(result)


def train_batch_in_closure(run: Run, batch: Any, batch_idx: int, closes: bool) -> Any:
    """Run an optimizer that evaluates the loss as often as it likes, such as LBFGS."""
    optimizer = run.optimizers[0]
    outputs: list[Any] = []

    def closure() -> Tensor:
        if outputs:
            run.zero_grad(optimizer)
        result = run.training_step(batch, batch_idx)
        loss = loss_of(run, result)
        if loss is None:
            raise ModuleError(
                f"{type(run.module).__name__}.training_step returned no loss, and "
                f"{type(optimizer).__name__} needs one each time it evaluates a batch."
            )
        outputs.append(detached(result))
        run.losses.accept(loss)
        differentiate(run, loss)
        for hook in run.hooks.on_before_optimizer_step:
            hook(run.trainer, run.module, optimizer)
        if run.clip is not None:
            run.clip(optimizer)
        return loss

    run.window.open = False
    count_update(run, run.optimizer_step(optimizer, closure))
    return outputs[0] if outputs else None


def loss_of(run: Run, result: Any) -> Tensor | None:
    """Return the loss in what ``training_step`` returned, or None where it left the batch out.

    Raises:
        ModuleError: There is neither.
    """
    loss = result.get("loss", result) if isinstance(result, dict) else result
    if loss is None or (isinstance(loss, Tensor) and loss.ndim == 0):
        return loss
    if isinstance(loss, Tensor):
        kind = f"a tensor of shape {tuple(loss.shape)}"
    elif isinstance(loss, dict):
        kind = f"a dict without 'loss': {sorted(map(str, loss))}"
    else:
        kind = f"{type(loss).__name__} {loss!r:.80}"
    raise ModuleError(
        f"{type(run.module).__name__}.training_step returned {kind}. Return the loss as a tensor "
        "of shape (), a dict with it under 'loss', or None to leave this batch out."
    )


def share_of(run: Run, result: Any, loss: Tensor) -> Tensor:
    """Return what ``loss`` adds to its window: weighted, where the step returned a weight.

    Raises:
        ModuleError: The weight is no number, or only some batches of the window have one.
    """
    window, owner = run.window, type(run.module).__name__
    weight = result.get("weight") if isinstance(result, dict) else None
    if (weight is None) != (window.weight is None) and window.used:
        raise ModuleError(
            f"{owner}.training_step returned a 'weight' for some batches of an optimizer step and "
            "none for others. Return one for each batch, or for none."
        )
    if weight is None:
        return loss / window.divisor
    if isinstance(weight, Tensor):
        weight = weight.detach()
    is_number = not getattr(weight, "ndim", 0) and hasattr(weight, "__float__")
    # A tensor's value is not waited for.
    if not is_number or not (isinstance(weight, Tensor) or 0 <= weight < math.inf):
        raise ModuleError(
            f"{owner}.training_step returned the weight {weight!r:.80}. Return how many items the "
            "loss is the mean of: a number from 0 on, or a tensor of shape ()."
        )
    window.weight = weight if window.weight is None else window.weight + weight
    return loss * weight


def differentiate(run: Run, loss: Tensor) -> None:
    """Add the gradients of ``loss``.

    Raises:
        ModuleError: It depends on no parameter.
    """
    for hook in run.hooks.on_before_backward:
        hook(run.trainer, run.module, loss)
    run.agreement.backwards += 1
    try:
        run.backward(loss)
    except RuntimeError as error:
        if loss.requires_grad:
            raise
        raise ModuleError(
            f"{type(run.module).__name__}.training_step returned a loss that depends on no "
            "parameter. Compute it with the Module's layers, outside of torch.no_grad(), and "
            "return it without detach() or item()."
        ) from error
    for hook in run.hooks.on_after_backward:
        hook(run.trainer, run.module)


def update(run: Run) -> None:
    """Step the optimizer on the gradients of the window, and the schedules that count steps."""
    window, optimizer = run.window, run.optimizers[0]
    window.open = False
    if not window.used:
        count_update(run, False)
        return
    if window.weight is not None or window.used != window.divisor:
        average_gradients(run)
    window.used, window.weight = 0, None
    run.precision.unscale(optimizer)
    for hook in run.hooks.on_before_optimizer_step:
        hook(run.trainer, run.module, optimizer)
    if run.clip is not None:
        run.clip(optimizer)
    count_update(run, run.optimizer_step(optimizer))


def count_update(run: Run, updated: bool) -> None:
    """Count an update that was due, and step the per-step schedules where it took place."""
    state = run.state
    if not updated:
        state.skipped += 1
        return
    state.step += 1
    state.optimizer_steps[0] += 1
    for config in run.step_schedulers:
        if state.step % config.frequency == 0:
            step_schedule(run, config)


def average_gradients(run: Run) -> None:
    """Make the gradients of the window a mean over what it came to hold, in place."""
    window, parameters = run.window, run.parameters()
    factor: Tensor | float = window.divisor / window.used
    if window.weight is not None:
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device=run.strategy.device)
        total = run.strategy.reduce(zero + window.weight, "mean")
        # Where every weight is zero, so is every gradient, and stays it.
        factor = 1 / total.clamp(min=torch.finfo(dtype).tiny)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def step_schedule(run: Run, config: SchedulerConfig) -> None:
    """Step one schedule, with the metric it watches."""
    metric = None
    if config.reduce_on_plateau:
        assert config.monitor is not None, "configured() refuses it"
        known = run.metrics.read().callback
        metric = known.get(config.monitor)
        if run.strategy.world_size > 1:
            # A step's value is its rank's own, and rates must not part.
            metric = run.strategy.broadcast(None if metric is None else float(metric))
        if metric is None:
            if config.strict and not (run.evaluations and run.state.validations == 0):
                raise unknown(
                    "metric a scheduler can monitor",
                    config.monitor,
                    known,
                    "Log it, or set the scheduler's 'strict' to False to go without.",
                )
            return
    run.module.lr_scheduler_step(config.scheduler, metric)


def warn_of_unheld(run: Run) -> None:
    """Warn once of each parameter that requires a gradient and that no optimizer holds."""
    held = {id(parameter) for parameter in run.parameters()}
    new = [
        name
        for name, parameter in run.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in held and name not in run.unheld
    ]
    if new and run.optimizers:
        run.unheld.update(new)
        shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
        rank_zero_warn(
            f"No optimizer holds {shown}, so it is not trained. Give it to an optimizer in "
            "configure_optimizers(), freeze it with requires_grad_(False), and make layers in "
            "__init__, not in forward."
        )


def detached(result: Any) -> Any:
    """Return ``result`` with every tensor in it cut from its graph."""
    return mapped(result, Tensor.detach, lambda value: isinstance(value, Tensor))


def refuse_standstill(run: Run, epochs: int) -> None:
    """Refuse to go on without end where ``epochs`` in a row have updated nothing.

    Raises:
        ModuleError: No limit on epochs would end it. A gradient scaler finds its scale sooner.
    """
    if epochs >= 100 and run.max_epochs == float("inf"):
        raise ModuleError(
            f"{epochs} epochs in a row updated no weights: each loss was None or left out, or no "
            "optimizer was stepped. max_steps is not going to be reached: pass max_epochs."
        )
