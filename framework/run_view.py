"""What a Trainer shows of its current run, or of its last one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import choices
from .data.transfer import mapped
from .dtensors import local
from .errors import LeydenError, did_you_mean
from .optimizers import LoopOptimizer
from .rank_zero import rank
from .state import State
from .training import expected_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .optimizers import SchedulerConfig
    from .protocols import Checkpointer, Logger, Precision, Strategy
    from .run import Evaluation, Run


class RunView:
    """Read-through properties: nothing here is kept twice."""

    _run: Run | None = None
    _state: State
    logger_choices: list[Any]
    precision_choice: Any
    devices: int | list[int]
    num_nodes: int
    is_running: bool = False
    """Whether a method of the Trainer is at work."""

    def __getattr__(self, name: str) -> Any:
        gone = choices.GONE
        hint = f" Use {gone[name]}." if name in gone else did_you_mean(name, dir(type(self)))
        raise AttributeError(f"Trainer has no attribute {name!r}.{hint}")

    def _current(self) -> Run:
        if self._run is None:
            raise LeydenError(
                "The Trainer has not run anything yet. Ask during or after fit, validate, test or "
                "predict."
            )
        return self._run

    @property
    def state(self) -> State:
        """Where training is."""
        return self._state

    @property
    def global_step(self) -> int:
        """Iterations that updated weights."""
        return self._state.step

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch; after fit, the epochs that are complete."""
        return self._state.epoch

    @property
    def should_stop(self) -> bool:
        """Whether training ends at the next step boundary. Set it to True, or to a reason."""
        return self._run.agreement.is_asked() if self._run else self._state.stop is not None

    @should_stop.setter
    def should_stop(self, reason: bool | str) -> None:
        why = ("trainer.should_stop was set" if reason is True else reason) or None
        self._run.agreement.ask(why) if self._run else setattr(self._state, "stop", why)

    def skip_epoch(self) -> None:
        """End the current epoch before its next batch; it counts as complete.

        One rank may ask: all end it after the same batch, once they have heard, in about a second.
        """
        self._current().agreement.skip()

    @property
    def module(self) -> Any:
        """The Module of the run."""
        return self._current().module

    lightning_module = model = module

    @property
    def datamodule(self) -> Any:
        """The DataModule of the run, or None."""
        return self._run.datamodule if self._run else None

    @property
    def stage(self) -> str | None:
        """``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``; None outside of a run."""
        return self._run.stage if self._run and self.is_running else None

    def _is_in(self, phase: str) -> bool:
        return self.is_running and self._run is not None and self._run.phase == phase

    @property
    def training(self) -> bool:
        """Whether training batches are being used."""
        return self._is_in("train")

    @property
    def validating(self) -> bool:
        """Whether a validation is under way, during a fit or on its own."""
        return self._is_in("validate")

    @property
    def testing(self) -> bool:
        """Whether a test is under way."""
        return self._is_in("test")

    @property
    def predicting(self) -> bool:
        """Whether a prediction is under way."""
        return self._is_in("predict")

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check is under way."""
        return self._is_in("sanity")

    @property
    def interrupted_by(self) -> int | None:
        """Number of the signal that ended the run, or None."""
        return self._run.interrupted_by if self._run else None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run."""
        return self.interrupted_by is not None

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
        return self._run is not None and self._run.is_last_batch

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything logged, by name, shape ``()``, on its device."""
        values = self._run.metrics.read().callback if self._run else {}
        return {name: _tensor(value) for name, value in values.items()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar=True``; to read them waits for the device."""
        values = self._run.metrics.read().bar if self._run else {}
        return {name: float(value) for name, value in values.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest values that go to the loggers."""
        values = self._run.metrics.read().logger if self._run else {}
        return {name: _tensor(value) for name, value in values.items()}

    @property
    def loggers(self) -> list[Logger]:
        """The loggers, whether a run has opened them or not."""
        return self.logger_choices

    @property
    def logger(self) -> Logger | None:
        """The first logger of the run, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the run, those the Trainer added included."""
        return self._run.callbacks if self._run else []

    def _callbacks_with(self, *names: str) -> list[Any]:
        return [c for c in self.callbacks if all(hasattr(c, name) for name in names)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints and know the best."""
        return self._callbacks_with("best_model_path")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of `checkpoint_callbacks`, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop a run whose metric no longer improves."""
        return self._callbacks_with("wait_count", "patience")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of `early_stopping_callbacks`, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The callback that shows progress, or None."""
        return next(iter(self._callbacks_with("is_progress_bar")), None)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as ``configure_optimizers`` returned them."""
        return self._run.optimizers if self._run else []

    @property
    def blocks(self) -> dict[str, torch.nn.Module]:
        """The Module's blocks that this run recomputes or compiles, by name."""
        return self._run.blocks if self._run else {}

    @property
    def loop_optimizers(self) -> list[LoopOptimizer]:
        """The optimizers as manual optimization steps them."""
        return self._run.loop_optimizers if self._run else []

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedules and when they are stepped."""
        return self._run.schedulers if self._run else []

    @property
    def strategy(self) -> Strategy:
        """How the module is placed and kept in step."""
        return self._current().strategy

    @property
    def precision_plugin(self) -> Precision:
        """The dtypes of forward, backward and update."""
        return self._current().precision

    @property
    def checkpointer(self) -> Checkpointer:
        """How checkpoints are written and read."""
        return self._current().checkpointer

    @property
    def world_size(self) -> int:
        """Processes in the run, or in the one to come."""
        return self._run.strategy.world_size if self._run else self.num_devices * self.num_nodes

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        return self._run.strategy.rank if self._run else rank()

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self._run.strategy.local_rank if self._run else 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first of all."""
        return self.global_rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        return self._current().strategy.broadcast(value)

    @property
    def precision(self) -> str:
        """Name of the precision."""
        choice = self.precision_choice
        return choice if isinstance(choice, str) else choice.name

    @property
    def num_devices(self) -> int:
        """Devices of this machine."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def train_dataloader(self) -> Any:
        """What training batches are read from, or None."""
        return self._run.train.loader if self._run and self._run.stage == "fit" else None

    @property
    def num_training_batches(self) -> float:
        """Training batches in an epoch; infinite where the loader does not say."""
        length = self._current().train.length
        return float("inf") if length is None else length

    def _evaluation(self, name: str) -> Evaluation | None:
        return self._run.evaluations.get(name) if self._run else None

    def _loaders(self, name: str) -> Any:
        evaluation = self._evaluation(name)
        loaders = [source.loader for source in evaluation.sources] if evaluation else None
        return loaders[0] if loaders and len(loaders) == 1 else loaders

    def _counts(self, name: str) -> list[float]:
        evaluation = self._evaluation(name)
        lengths = [source.length for source in evaluation.sources] if evaluation else []
        return [float("inf") if length is None else length for length in lengths]

    @property
    def val_dataloaders(self) -> Any:
        """What validation batches are read from: a loader, a list of them, or None."""
        return self._loaders("validate")

    @property
    def test_dataloaders(self) -> Any:
        """What test batches are read from: a loader, a list of them, or None."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """What is predicted: a loader, a list of them, or None."""
        return self._loaders("predict")

    @property
    def num_val_batches(self) -> list[float]:
        """Validation batches of each loader."""
        return self._counts("validate")

    @property
    def num_test_batches(self) -> list[float]:
        """Test batches of each loader."""
        return self._counts("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches to predict of each loader."""
        return self._counts("predict")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each loader in the sanity check."""
        limit = self._run.sanity_batches if self._run else 0
        return [min(limit, count) for count in self.num_val_batches]

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps that the whole training takes; a ConfigError where no limit tells."""
        return expected_steps(self._current())

    @property
    def data_wait(self) -> float:
        """Seconds this process has waited for training batches since the run began."""
        return self._run.wait.seconds if self._run else 0.0

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, made now if it was not before; None before any run."""
        return self._run.folder.path if self._run else None

    @property
    def log_dir(self) -> str | None:
        """The run's folder as text; None where none was made. Reading makes none."""
        return str(self._run.folder.path) if self._run and self._run.folder.is_made else None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of ``loss`` as the run's precision does; for manual optimization."""
        self._current().backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None, algorithm: str | None = None
    ) -> None:
        """Clip the gradients ``optimizer`` holds by joint norm, or by value, once unscaled."""
        run = self._current()
        limit = choices.positive("gradient_clip_val", gradient_clip_val)
        if limit is None:
            return
        choices.one_of("gradient_clip_algorithm", algorithm or "norm", ("norm", "value"))
        # Its class says it is the inner one, and an inner one may wrap another itself.
        is_wrapped = type(optimizer) is LoopOptimizer
        run.precision.unscale(optimizer.optimizer if is_wrapped else optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            if gradients:
                torch._foreach_clamp_min_(gradients, -limit)
                torch._foreach_clamp_max_(gradients, limit)
        else:
            run.strategy.clip_grad_norm(parameters, limit)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Return the ranks' tensors stacked: each of shape ``(world_size, *tensor.shape)``."""
        gathered = partial(self._current().strategy.all_gather, sync_grads=sync_grads)
        return mapped(data, gathered, lambda value: isinstance(value, Tensor))


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    # One made in inference mode could not take part in training later on.
    with torch.inference_mode(False):
        return torch.tensor(float(value), dtype=torch.float64)
