"""What a fit does with its optimizers: which function runs a batch, and how weights are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from . import step
from .data.feed import overrides
from .errors import ConfigError, ModuleError
from .in_backward import step_in_backward
from .optimizers import LoopOptimizer, configured, needs_closure
from .overrides import TrainingHooks
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .run import Run


def wire_optimizers(run: Run) -> None:
    """Call ``configure_optimizers`` and bind all that steps what it returns.

    Raises:
        ModuleError: What it returned cannot train this Module.
        ConfigError: The Trainer's choices do not fit it.
    """
    module = run.module
    owner = type(module).__name__
    try:
        returned = module.configure_optimizers()
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise ModuleError(
                f"{owner}.configure_optimizers() made an optimizer over no parameters. Give the "
                "Module layers in __init__ or configure_model, and pass self.parameters()."
            ) from error
        raise
    by_hand = not module.automatic_optimization
    run.optimizers, run.schedulers = configured(returned, owner, by_hand)
    run.step_schedulers = [config for config in run.schedulers if config.interval == "step"]
    check_parameters(run)
    run.loop_optimizers = [
        LoopOptimizer(
            optimizer,
            run.precision,
            partial(before_step, run) if by_hand else lambda _: None,
            partial(toggled, run),
        )
        for optimizer in run.optimizers
    ]
    run.backward = _backward(run)
    if by_hand:
        _wire_manual(run)
    else:
        _wire_automatic(run)
    if run.trainer.optimizer_in_backward:
        step_in_backward(run)
    step.warn_of_unheld(run)


def _wire_manual(run: Run) -> None:
    trainer = run.trainer
    for name, value, possible, instead in (
        ("accumulate_grad_batches", trainer.accumulate_grad_batches, (1,), "Step less often there"),
        ("gradient_clip_val", trainer.gradient_clip_val, (None,), "Call self.clip_gradients there"),
        ("nonfinite_loss", trainer.nonfinite_loss, ("continue", "stop"), "Check the loss there"),
    ):
        if value not in possible:
            raise ConfigError(
                f"{name}={value!r} is for automatic optimization, and this Module steps its "
                f"optimizers itself, in training_step. {instead}, and leave {name} out."
            )
    run.train_batch = step.train_batch_by_hand
    run.backward = partial(_backward_by_hand, run, run.backward)


def _wire_automatic(run: Run) -> None:
    module = run.module
    if not run.optimizers:
        if run.max_epochs == inf and run.max_steps != inf:
            raise ConfigError(
                f"max_steps={run.max_steps} would never be reached: it counts optimizer steps, and "
                "configure_optimizers() returned no optimizer. Pass max_epochs."
            )
        rank_zero_warn(
            "configure_optimizers() returned no optimizer, so this fit runs its steps and trains "
            "nothing."
        )
        run.train_batch = step.train_batch_by_hand
        return
    if len(run.optimizers) > 1:
        raise ModuleError(
            f"{type(module).__name__} has {len(run.optimizers)} optimizers, and automatic "
            "optimization steps one. Set self.automatic_optimization = False in __init__ and step "
            "them in training_step with self.optimizers() and self.manual_backward(loss)."
        )
    run.clip, run.zero_grad = _clip(run), _zero_grad(run)
    run.optimizer_step = run.precision.step
    if overrides(module, "optimizer_step", TrainingHooks):
        run.optimizer_step = partial(_step_through_module, run)
    run.train_batch = step.train_batch
    if needs_closure(run.optimizers[0]):
        _check_closure(run)
        run.train_batch = step.train_batch_in_closure


def _check_closure(run: Run) -> None:
    for name, value, possible in (
        ("accumulate_grad_batches", run.accumulate, (1,)),
        ("nonfinite_loss", run.trainer.nonfinite_loss, ("continue", "stop")),
    ):
        if value not in possible:
            raise ConfigError(
                f"{name}={value!r} cannot be used with {type(run.optimizers[0]).__name__}, which "
                "evaluates the loss of one batch as often as it likes. Leave it out."
            )


def _step_through_module(run: Run, _: Optimizer, closure: Callable[[], Any] = lambda: None) -> bool:
    """Let the Module's own ``optimizer_step`` decide, and return whether it updated."""
    optimizer = run.loop_optimizers[0]
    optimizer.updates = 0
    run.module.optimizer_step(run.state.epoch, run.state.batch, optimizer, closure)
    return optimizer.updates > 0


def _backward(run: Run) -> Callable[..., None]:
    if not overrides(run.module, "backward", TrainingHooks):
        return run.precision.backward
    own, scale = run.module.backward, run.precision.scale
    return lambda loss, *args, **kwargs: own(scale(loss), *args, **kwargs)


def _backward_by_hand(
    run: Run, backward: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any
) -> None:
    """Add gradients where the user says so, and tell of it as in automatic optimization."""
    if loss.ndim == 0:
        run.losses.accept(loss)
    for hook in run.hooks.on_before_backward:
        hook(run.trainer, run.module, loss)
    run.strategy.prepare_backward(loss)
    run.agreement.backwards += 1
    backward(loss, *args, **kwargs)
    for hook in run.hooks.on_after_backward:
        hook(run.trainer, run.module)


def _zero_grad(run: Run) -> Callable[[Optimizer], None]:
    zero_grad: Callable[[Optimizer], None] = methodcaller("zero_grad")
    if overrides(run.module, "optimizer_zero_grad", TrainingHooks):
        own, state = run.module.optimizer_zero_grad, run.state

        def zero_grad(optimizer: Optimizer) -> None:
            own(state.epoch, state.batch, optimizer)

    if not run.hooks.on_before_zero_grad:
        return zero_grad

    def told(optimizer: Optimizer) -> None:
        for hook in run.hooks.on_before_zero_grad:
            hook(run.trainer, run.module, optimizer)
        zero_grad(optimizer)

    return told


def _clip(run: Run) -> Callable[[Optimizer], None] | None:
    trainer, module = run.trainer, run.module
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if overrides(module, "configure_gradient_clipping", TrainingHooks):
        return lambda optimizer: module.configure_gradient_clipping(optimizer, value, algorithm)
    if value is None:
        return None
    return lambda optimizer: trainer.clip_gradients(optimizer, value, algorithm)


def before_step(run: Run, optimizer: Optimizer) -> None:
    """Give gradients their true size before an optimizer that the user steps, and tell of it."""
    run.precision.unscale(optimizer)
    for hook in run.hooks.on_before_optimizer_step:
        hook(run.trainer, run.module, optimizer)


@contextmanager
def toggled(run: Run, optimizer: LoopOptimizer, sync_grad: bool) -> Iterator[None]:
    """Let only ``optimizer``'s parameters require gradients, exchanged or not over ranks."""
    run.module.toggle_optimizer(optimizer)
    run.strategy.sync_gradients(sync_grad)
    try:
        yield
    finally:
        run.strategy.sync_gradients(True)
        run.module.untoggle_optimizer(optimizer)


def check_parameters(run: Run) -> None:
    """Refuse an optimizer over parameters that are not the Module's.

    Raises:
        ModuleError: None of its parameters is one of the Module's.
    """
    own = {id(parameter) for parameter in run.module.parameters()}
    for optimizer in run.optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        kind, owner = type(optimizer).__name__, type(run.module).__name__
        if not held:
            raise ModuleError(
                f"{kind} of {owner}.configure_optimizers() holds no parameters. Pass "
                "self.parameters(), or those of a part."
            )
        foreign = sum(id(parameter) not in own for parameter in held)
        if foreign == len(held):
            raise ModuleError(
                f"{kind} of {owner}.configure_optimizers() holds {foreign} parameters, none of "
                f"which is in {owner}. Pass self.parameters(), and assign the network to self."
            )
        if foreign:
            rank_zero_warn(
                f"{kind} holds {foreign} parameters that are not in {owner}, so no checkpoint of "
                "it has them. Assign the network they belong to, to self."
            )


def expected_steps(run: Run) -> int:
    """Return the optimizer steps that the whole training takes, by its limits.

    Raises:
        ConfigError: No limit tells.
    """
    length = run.train.limit if run.train.length is None else run.train.length
    by_epochs = float("inf")
    if length is not None:
        by_epochs = -(-length // run.accumulate) * run.max_epochs
    total = min(run.max_steps, by_epochs)
    if total == float("inf"):
        raise ConfigError(
            "The number of steps is not known: the training data has no length or max_epochs "
            "no limit. Pass Trainer(max_steps=…)."
        )
    return int(total)
