"""What a Module or a DataModule may override, and the hooks a Module is told.

The told hooks are those of `RunHooks` without ``trainer`` and ``module``: the Module has both as
``self.trainer`` and itself. An override is asked instead of told, and its value is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ModuleError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from .hookspecs import Stage


class DataHooks:
    """Where data comes from and how a batch reaches the device: of Modules and DataModules."""

    def prepare_data(self) -> None:
        """Download or build what is on disk. Runs in one process of each node, before `setup`."""

    def setup(self, stage: Stage) -> None:
        """Make what the run needs; in every process, before the model is placed."""

    def teardown(self, stage: Stage) -> None:
        """Let go of what `setup` made; also after an error."""

    def train_dataloader(self) -> Any:
        """Return the loader of training batches, or a dict or list of loaders read together."""
        raise ModuleError(_no_loader(self, "train"))

    def val_dataloader(self) -> Any:
        """Return the loader of validation batches, or several, read one after the other."""
        raise ModuleError(_no_loader(self, "val"))

    def test_dataloader(self) -> Any:
        """Return the loader of test batches, or several, read one after the other."""
        raise ModuleError(_no_loader(self, "test"))

    def predict_dataloader(self) -> Any:
        """Return the loader of batches to predict, or several, read one after the other."""
        raise ModuleError(_no_loader(self, "predict"))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return ``batch`` as it is to be moved to the device."""
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return ``batch`` on ``device``: for batches whose parts leyden cannot find."""
        from .data.transfer import move

        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return ``batch`` as the step is to see it, now on the device."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """``exception`` ends the run."""


def _no_loader(owner: object, stage: str) -> str:
    return (
        f"{type(owner).__name__} has no {stage}_dataloader(). Define it, or pass the loaders to "
        "the Trainer's method."
    )


class TrainingHooks:
    """How a Module is configured and stepped, and what it is told of a run."""

    def configure_model(self) -> None:
        """Make or wrap layers; called once per run in every process, before placement."""

    def parallelize(self, mesh: Any) -> Any:
        """Split layers over the ranks of ``mesh["tp"]``; called where there are several.

        Args:
            mesh: The run's ``DeviceMesh``, with axes by name.

        Returns:
            A plan for torch's ``parallelize_module``, such as ``{"up": ColwiseParallel(), "down":
            RowwiseParallel()}``, or None where it has applied one itself.
        """
        raise ModuleError(
            f"The mesh's tp axis splits layers, and {type(self).__name__} has no "
            "parallelize(mesh) to say how. Define it, or leave tp out of the mesh."
        )

    def configure_callbacks(self) -> Any:
        """Return a callback, or several, that belong to this Module's runs."""
        return []

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step ``optimizer``; skip the call to it to skip the update."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the last step."""
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of ``loss``, already scaled where the precision scales."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step ``scheduler``, with ``metric`` where it is one that adapts to what it monitors."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the unscaled gradients ``optimizer`` is about to use."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[attr-defined]

    def on_fit_start(self) -> None:
        """Everything is placed and restored, and no batch has been read."""

    def on_fit_end(self) -> None:
        """The last hook of a fit that did not fail."""

    def on_sanity_check_start(self) -> None:
        """A few validation batches are about to be tried before training."""

    def on_sanity_check_end(self) -> None:
        """The sanity check is over and its metrics are forgotten."""

    def on_train_start(self) -> None:
        """Training begins or resumes; the first epoch comes next."""

    def on_train_end(self) -> None:
        """Training is over, for the reason in ``self.trainer.state.stop``."""

    def on_train_epoch_start(self) -> None:
        """A pass over the training data begins, or resumes in its middle."""

    def on_train_epoch_end(self) -> None:
        """A pass is done, its validation too; per-epoch schedules step after this."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """``batch`` is on the device and ``training_step`` comes next."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is done and counted; ``outputs`` is what the step returned, detached."""

    def on_save_point(self, at: str) -> None:
        """A checkpoint saved here resumes exactly; ``at`` is "step", "epoch" or "end"."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """The gradients of the last step are about to be dropped."""

    def on_before_backward(self, loss: Tensor) -> None:
        """``training_step`` returned ``loss``, here as it is differentiated."""

    def on_after_backward(self) -> None:
        """The gradients of this batch are added, still scaled in 16-mixed."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The gradients of a step are complete and unscaled, and not yet clipped."""

    def on_validation_start(self) -> None:
        """A validation begins and no validation batch has been read."""

    def on_validation_end(self) -> None:
        """The metrics of this validation are complete."""

    def on_validation_epoch_start(self) -> None:
        """The module is in eval mode and keeps no graph."""

    def on_validation_epoch_end(self) -> None:
        """All validation batches are done; what is logged here joins their metrics."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """``batch`` is on the device and ``validation_step`` comes next."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """``validation_step`` returned ``outputs``."""

    def on_validation_model_eval(self) -> None:
        """The module and all its parts have just been put in eval mode."""

    def on_validation_model_train(self) -> None:
        """Every part of the module is back in the mode it had before the validation."""

    def on_test_start(self) -> None:
        """A test begins and no test batch has been read."""

    def on_test_end(self) -> None:
        """The metrics of this test are complete."""

    def on_test_epoch_start(self) -> None:
        """The module is in eval mode and keeps no graph."""

    def on_test_epoch_end(self) -> None:
        """All test batches are done; what is logged here joins their metrics."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """``batch`` is on the device and ``test_step`` comes next."""

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """``test_step`` returned ``outputs``."""

    def on_test_model_eval(self) -> None:
        """The module and all its parts have just been put in eval mode."""

    def on_test_model_train(self) -> None:
        """Every part of the module is back in the mode it had before the test."""

    def on_predict_start(self) -> None:
        """A prediction begins and no batch has been read."""

    def on_predict_end(self) -> None:
        """The last hook of a prediction that did not fail."""

    def on_predict_epoch_start(self) -> None:
        """The module is in eval mode and keeps no graph."""

    def on_predict_epoch_end(self) -> None:
        """All batches are predicted."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """``batch`` is on the device and ``predict_step`` comes next."""

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """``predict_step`` returned ``outputs``."""

    def on_predict_model_eval(self) -> None:
        """The module and all its parts have just been put in eval mode."""

    def on_predict_model_train(self) -> None:
        """Every part of the module is back in the mode it had before the prediction."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` is complete and about to be written; entries of your own may be added."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` is read and about to be restored."""
