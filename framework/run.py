"""Run: the wired parts of one call, handed to the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .data.source import Source, Wait
from .errors import NonFiniteLossError
from .metrics import Metrics
from .optimizers import LoopOptimizer, SchedulerConfig
from .protocols import Checkpointer, Logger, Precision, Strategy
from .rank_zero import rank_zero_warn
from .run_folder import RunFolder
from .state import State

if TYPE_CHECKING:
    from .agreement import Agreement
    from .hookspecs import Stage
    from .manager import Hooks
    from .trainer import Trainer

Phase = Literal["train", "sanity", "validate", "test", "predict"]


@dataclass(slots=True)
class Window:
    """The batches whose gradients one optimizer step takes together."""

    open: bool = False
    divisor: int = 1
    """What each loss was divided by: how many batches the window was to hold."""
    used: int = 0
    """Batches whose gradients it holds."""
    weight: Tensor | float | None = None
    """Sum of the weights that steps returned, where they do."""


class LossWatch:
    """Counts losses that are not finite, and decides what becomes of them."""

    def __init__(
        self, state: State, policy: Literal["continue", "skip", "stop"], strategy: Strategy
    ) -> None:
        self.state, self.strategy = state, strategy
        note = self._look if strategy.device.type == "cpu" else self._note
        self.accept = {"continue": note, "skip": self._skip, "stop": self._stop}[policy]
        self._unread: list[Tensor] = []

    def _look(self, loss: Tensor) -> bool:
        if not math.isfinite(loss.item()):
            self._count(1)
        return True

    def _note(self, loss: Tensor) -> bool:
        self._unread.append(loss.detach())
        if len(self._unread) >= 1024:
            self.read()
        return True

    def _skip(self, loss: Tensor) -> bool:
        # A batch is left out on every rank or on none: gradients are exchanged together.
        finite = bool(self.strategy.reduce(torch.isfinite(loss).to(loss.dtype), "min"))
        if not finite:
            self._count(1)
        return finite

    def _stop(self, loss: Tensor) -> bool:
        if not torch.isfinite(loss):
            self.state.nonfinite += 1
            raise NonFiniteLossError(
                f"The loss is {loss.item()} at batch {self.state.batch} of epoch "
                f"{self.state.epoch}, after {self.state.step} steps. Lower the learning rate, clip "
                "gradients, or look at this batch; nonfinite_loss='skip' would leave it out."
            )
        return True

    def read(self) -> None:
        """Count the losses seen since the last read; waits for the device."""
        if self._unread:
            losses, self._unread = torch.stack(self._unread), []
            self._count(int(losses.isfinite().logical_not().sum()))

    def _count(self, found: int) -> None:
        if found and not self.state.nonfinite:
            rank_zero_warn(
                f"The loss became NaN or infinite before step {self.state.step + 1}. "
                "trainer.state.nonfinite counts such losses; nonfinite_loss='skip' leaves their "
                "batches out, and 'stop' raises at the first."
            )
        self.state.nonfinite += found


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """A validation, test or prediction: its data, its step and whom it tells."""

    phase: Phase
    step: Callable[..., Any]
    sources: list[Source]
    no_grad: Callable[[], AbstractContextManager[Any]]
    takes_index: bool
    """Whether the step is passed the index of its loader."""
    on_start: tuple[Callable[..., None], ...]
    on_model_eval: tuple[Callable[..., None], ...]
    on_epoch_start: tuple[Callable[..., None], ...]
    on_batch_start: tuple[Callable[..., None], ...]
    on_batch_end: tuple[Callable[..., None], ...]
    on_epoch_end: tuple[Callable[..., None], ...]
    on_end: tuple[Callable[..., None], ...]
    on_model_train: tuple[Callable[..., None], ...]


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one call of a Trainer's method.

    They are wired once. What changes while it runs stands last.
    """

    trainer: Trainer
    module: Any
    datamodule: Any
    stage: Stage
    state: State
    hooks: Hooks
    strategy: Strategy
    precision: Precision
    checkpointer: Checkpointer
    loggers: list[Logger]
    callbacks: list[Any]
    metrics: Metrics
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    folder: RunFolder
    agreement: Agreement = None  # type: ignore[assignment]
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint holds of them, encoded."""
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    """The Module's blocks that are recomputed or compiled, by name."""
    compile_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """What compiles the steps, where something does."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What gives the Module and its parts back as they were."""

    # Set by wiring where the run trains.
    optimizers: list[Optimizer] = field(default_factory=list)
    loop_optimizers: list[LoopOptimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    step_schedulers: list[SchedulerConfig] = field(default_factory=list)
    train: Source = field(default_factory=lambda: Source((), 0, None))
    reload: Callable[[], None] = lambda: None
    training_step: Callable[..., Any] = lambda *_: None
    train_batch: Callable[..., Any] = lambda *_: None
    losses: LossWatch = None  # type: ignore[assignment]
    backward: Callable[..., None] = lambda *_: None
    zero_grad: Callable[[Optimizer], None] = lambda *_: None
    clip: Callable[[Optimizer], None] | None = None
    optimizer_step: Callable[..., bool] = lambda *_: False
    validation_due: Callable[[State, bool, bool], bool] = lambda *_: False
    accumulate: int = 1
    log_every_n_steps: int = 50
    max_steps: float = float("inf")
    max_epochs: float = float("inf")
    min_steps: int = 0
    min_epochs: int = 0
    sanity_batches: int = 0
    validate_at: frozenset[str] = frozenset()

    # Changes while it runs.
    phase: Phase = "train"
    window: Window = field(default_factory=Window)
    wait: Wait = field(default_factory=Wait)
    began: float = 0.0
    """Where ``perf_counter`` stood when this fit's elapsed time was zero."""
    is_last_batch: bool = False
    is_synced: bool = True
    """Whether backward averages gradients over ranks, as the strategy was last told."""
    is_in_step: bool = False
    """Whether a batch has begun to change what a checkpoint holds, and has not been counted."""
    epoch_is_skipped: bool = False
    unheld: set[str] = field(default_factory=set)
    """Parameters that no optimizer holds, of which the user was warned."""
    interrupted_by: int | None = None
    resumed_rng: dict[str, Any] | None = None
    """Every random generator as it was where the run goes on; None once it goes on."""

    def sources(self) -> list[Source]:
        """Return all that is read."""
        return [self.train, *(s for e in self.evaluations.values() for s in e.sources)]

    def parameters(self) -> list[nn.Parameter]:
        """Return every parameter that an optimizer holds."""
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
