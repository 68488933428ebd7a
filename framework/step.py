"""One training batch, and the optimizer step that it may close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data.transfer import mapped
from .errors import ModuleError, unknown
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .optimizers import SchedulerConfig
    from .run import Run


def open_window(run: Run, batch_idx: int) -> None:
    """Begin the batches of one optimizer step with no gradients."""
    for optimizer in run.optimizers:
        for hook in run.hooks.on_before_zero_grad:
            hook(run.trainer, run.module, optimizer)
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
    run.strategy.sync_gradients(closes)
    result = run.training_step(batch, batch_idx)
    loss = result if isinstance(result, Tensor) else loss_of(run, result)

    if loss is not None and run.losses.accept(loss):
        share = loss
        if isinstance(result, dict) and "weight" in result:
            share = loss * result["weight"]
            window.weight = result["weight"] + (window.weight or 0.0)
        elif window.divisor != 1:
            share = loss / window.divisor
        for hook in run.hooks.on_before_backward:
            hook(run.trainer, run.module, share)
        run.backward(share)
        for hook in run.hooks.on_after_backward:
            hook(run.trainer, run.module)
        window.used += 1
        del share

    if closes:
        update(run)
    return loss.detach() if result is loss and loss is not None else detached(result)


def train_batch_by_hand(run: Run, batch: Any, batch_idx: int, closes: bool) -> Any:
    """Run a ``training_step`` that steps its optimizers itself, and count what it did."""
    before = [optimizer.updates for optimizer in run.loop_optimizers]
    result = run.training_step(batch, batch_idx)
    after = [optimizer.updates for optimizer in run.loop_optimizers]
    if after != before:
        run.state.step += 1
        run.state.optimizer_steps[:] = after
    run.window.open = False
    return detached(result)


def train_batch_in_closure(run: Run, batch: Any, batch_idx: int, closes: bool) -> Any:
    """Run an optimizer that evaluates the loss as often as it likes, such as LBFGS."""
    first: list[Any] = []

    def closure() -> Tensor:
        run.zero_grad(run.optimizers[0])
        result = run.training_step(batch, batch_idx)
        loss = result if isinstance(result, Tensor) else loss_of(run, result)
        if loss is None:
            raise ModuleError("training_step returned None, and this optimizer needs its loss.")
        first.append(detached(result))
        for hook in run.hooks.on_before_backward:
            hook(run.trainer, run.module, loss)
        run.backward(loss)
        for hook in run.hooks.on_after_backward:
            hook(run.trainer, run.module)
        if run.clip is not None:
            run.clip(run.optimizers[0])
        return loss

    for hook in run.hooks.on_before_optimizer_step:
        hook(run.trainer, run.module, run.optimizers[0])
    run.precision.step(run.optimizers[0], closure)
    count_update(run, True)
    return first[0]


def loss_of(run: Run, result: Any) -> Tensor | None:
    """Return the loss in what ``training_step`` returned, or None where it left the batch out."""
    loss = result.get("loss", result) if isinstance(result, dict) else result
    if loss is None or (isinstance(loss, Tensor) and loss.ndim == 0):
        return loss
    owner = type(run.module).__name__
    kind = f"a dict without 'loss': {sorted(map(str, loss))}" if isinstance(loss, dict) else repr(loss)
    raise ModuleError(
        f"{owner}.training_step returned {kind:.200}. Return the loss as a tensor of shape (), a "
        "dict with it under 'loss', or None to leave this batch out."
    )


def update(run: Run) -> None:
    """Step the optimizer on the gradients of the window, and the schedules that count steps."""
    window, optimizer = run.window, run.optimizers[0]
    if window.used:
        if window.weight is not None:
            scale_gradients(run, 1 / run.strategy.reduce(torch.as_tensor(window.weight), "mean"))
        elif window.used != window.divisor:
            scale_gradients(run, window.divisor / window.used)
        run.precision.unscale(optimizer)
        for hook in run.hooks.on_before_optimizer_step:
            hook(run.trainer, run.module, optimizer)
        if run.clip is not None:
            run.clip(optimizer)
        count_update(run, run.optimizer_step(optimizer))
    window.open, window.used, window.weight = False, 0, None


def count_update(run: Run, updated: bool) -> None:
    """Count an update that was due, and step the per-step schedules where it took place."""
    state = run.state
    run.window.open = False
    if not updated:
        state.skipped += 1
        return
    state.step += 1
    state.optimizer_steps[0] += 1
    for config in run.step_schedulers:
        if state.step % config.frequency == 0:
            step_schedule(run, config)


def scale_gradients(run: Run, factor: Tensor | float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    gradients = [p.grad for p in run.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def step_schedule(run: Run, config: SchedulerConfig) -> None:
    """Step one schedule, with the metric it watches."""
    metric = None
    if config.monitor is not None:
        known = run.metrics.read().callback
        metric = known.get(config.monitor)
        if metric is None:
            evaluates = bool(run.evaluations) and run.state.validations == 0
            if config.strict and not evaluates:
                raise unknown(
                    "metric a scheduler can monitor", config.monitor, known,
                    "Log it, or set the scheduler's 'strict' to False to go without.",
                )  # fmt: skip
            return
    if metric is not None and not config.reduce_on_plateau:
        metric = None
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
