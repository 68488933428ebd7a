"""The plugin contract: every hook leyden calls, in the order a run meets them.

Three kinds stand here. ``register_*`` functions are asked once, when a Trainer is made. The methods
of `RunHooks` are told, once or many times in a run, and return nothing. Any told hook may be
wrapped with ``@hookimpl(wrapper=True)``. What a Module may override instead of being told (batch
transfer, the optimizer's step, data loaders) is in ``overrides.py``.

A Module or a `Callback` implements a hook by defining a method of its name, and is called
positionally: a Callback with the arguments written here, a Module without ``trainer`` and
``module``. Any other object marks its method with ``@hookimpl`` and takes any subset of the
arguments, by name. An argument that a later version adds stands at the end and, like
``dataloader_idx``, may be left out by a Callback; to remove or rename one breaks plugins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from leyden.module import Module
    from leyden.trainer import Trainer

    Factory = Callable[..., Any] | str

Stage = Literal["fit", "validate", "test", "predict"]
hookspec = pluggy.HookspecMarker("leyden")
hookimpl = pluggy.HookimplMarker("leyden")

# Registration: name -> factory, or the factory's "package.module:attribute", imported on use.


@hookspec
def register_strategies() -> Mapping[str, Factory] | None:
    """Return strategies by name: how a module is placed, sharded and kept in step."""


@hookspec
def register_precisions() -> Mapping[str, Factory] | None:
    """Return precisions by name: the dtypes of forward, backward and update."""


@hookspec
def register_checkpointers() -> Mapping[str, Factory] | None:
    """Return checkpointers by name: how a checkpoint is written and read back."""


@hookspec
def register_loggers() -> Mapping[str, Factory] | None:
    """Return loggers by name: where metrics and hyperparameters go."""


@hookspec
def register_callbacks() -> Mapping[str, Factory] | None:
    """Return callbacks by name: anything that hooks into a run."""


@hookspec
def register_launchers() -> Mapping[str, Factory] | None:
    """Return launchers by name: how the processes of a run come to be."""


@hookspec
def register_profilers() -> Mapping[str, Factory] | None:
    """Return profilers by name: what measures where a run's time goes."""


@hookspec
def register_templates() -> Mapping[str, str] | None:
    """Return project templates by name: the folder that ``leyden new`` renders."""


class RunHooks:
    """The hooks a run tells, in the order it meets them."""

    @hookspec
    def setup(self, trainer: Trainer, module: Module, stage: Stage) -> None:
        """A run begins: before the model is configured, placed or restored."""

    @hookspec
    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Everything is placed and restored, and no batch has been read."""

    @hookspec
    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """A few validation batches are about to be tried before training."""

    @hookspec
    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """The sanity check is over and its metrics are forgotten."""

    @hookspec
    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Training begins or resumes; the first epoch comes next."""

    @hookspec
    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """A pass over the training data begins, or resumes in its middle."""

    @hookspec
    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """The gradients of the last step are about to be dropped."""

    @hookspec
    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """``batch`` is on the device and ``training_step`` comes next."""

    @hookspec
    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        """``training_step`` returned ``loss``, here as it is differentiated."""

    @hookspec
    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        """The gradients of this batch are added, still scaled in 16-mixed."""

    @hookspec
    def on_before_optimizer_step(
        self, trainer: Trainer, module: Module, optimizer: Optimizer
    ) -> None:
        """The gradients of a step are complete and unscaled, and not yet clipped."""

    @hookspec
    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is done and counted; ``outputs`` is what the step returned, detached."""

    @hookspec
    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """A validation begins and no validation batch has been read."""

    @hookspec
    def on_validation_model_eval(self, trainer: Trainer, module: Module) -> None:
        """The module and all its parts have just been put in eval mode."""

    @hookspec
    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """The module is in eval mode and keeps no graph."""

    @hookspec
    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """``batch`` is on the device and ``validation_step`` comes next."""

    @hookspec
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """``validation_step`` returned ``outputs``."""

    @hookspec
    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """All validation batches are done and their metrics can still be added to."""

    @hookspec
    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """The metrics of this validation are complete in ``trainer.callback_metrics``."""

    @hookspec
    def on_validation_model_train(self, trainer: Trainer, module: Module) -> None:
        """Every part of the module is back in the mode it had before the validation."""

    @hookspec
    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """A pass is done, its validation too; per-epoch schedules step after this."""

    @hookspec
    def on_save_point(
        self, trainer: Trainer, module: Module, at: Literal["step", "epoch", "end"]
    ) -> None:
        """A checkpoint saved here resumes exactly: after a step, an epoch, or the last of them.

        At ``"step"``, the step's logging and any validation due are done. At ``"epoch"``,
        ``trainer.current_epoch`` already counts the epoch and schedules have stepped.
        """

    @hookspec
    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Training is over, for the reason in ``trainer.state.stop``."""

    @hookspec
    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """The last hook of a fit that did not fail."""

    @hookspec
    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """A test begins and no test batch has been read."""

    @hookspec
    def on_test_model_eval(self, trainer: Trainer, module: Module) -> None:
        """The module and all its parts have just been put in eval mode."""

    @hookspec
    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """The module is in eval mode and keeps no graph."""

    @hookspec
    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """``batch`` is on the device and ``test_step`` comes next."""

    @hookspec
    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """``test_step`` returned ``outputs``."""

    @hookspec
    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """All test batches are done and their metrics can still be added to."""

    @hookspec
    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """The metrics of this test are complete in ``trainer.callback_metrics``."""

    @hookspec
    def on_test_model_train(self, trainer: Trainer, module: Module) -> None:
        """Every part of the module is back in the mode it had before the test."""

    @hookspec
    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """A prediction begins and no batch has been read."""

    @hookspec
    def on_predict_model_eval(self, trainer: Trainer, module: Module) -> None:
        """The module and all its parts have just been put in eval mode."""

    @hookspec
    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """The module is in eval mode and keeps no graph."""

    @hookspec
    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """``batch`` is on the device and ``predict_step`` comes next."""

    @hookspec
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """``predict_step`` returned ``outputs``."""

    @hookspec
    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """All batches are predicted."""

    @hookspec
    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        """The last hook of a prediction that did not fail."""

    @hookspec
    def on_predict_model_train(self, trainer: Trainer, module: Module) -> None:
        """Every part of the module is back in the mode it had before the prediction."""

    @hookspec
    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """``checkpoint`` is complete and about to be written; entries of your own may be added."""

    @hookspec
    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """``checkpoint`` is read and about to be restored."""

    @hookspec
    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """``exception`` ends the run; it is raised again after everyone has seen it."""

    @hookspec
    def teardown(self, trainer: Trainer, module: Module, stage: Stage) -> None:
        """The run is over, well or not; told in reverse order, and to everyone."""
