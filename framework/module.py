"""Module: what a user writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from . import rng, saving, weights
from .data.samples import known_count
from .errors import ModuleError
from .hparams import KeepsHyperparameters
from .overrides import DataHooks, TrainingHooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .metrics import Logged
    from .protocols import Logger
    from .trainer import Trainer
    from .weights import WeightsReport


class Module(DataHooks, TrainingHooks, KeepsHyperparameters, nn.Module):
    """A model together with how it is trained.

    Define ``training_step`` and ``configure_optimizers`` and pass it to ``Trainer.fit``. Outside of
    a run it is an ordinary ``torch.nn.Module``.
    """

    automatic_optimization: bool = True
    """False to step the optimizers yourself in ``training_step``."""
    example_input_array: Any = None
    """An input of ``forward``, for the summary's sizes and a logger's graph."""
    strict_loading: bool = True
    """Whether a checkpoint must hold exactly this module's parameters and buffers."""

    _trainer: Trainer | None = None
    _logged: Logged | None = None
    _is_configured: bool = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of ``batch``.

        Returns:
            The loss, shape ``()``; a dict with it under ``"loss"``; or None to leave this batch
            out. A ``"weight"`` beside a loss that is a mean says over how many items it is the
            mean: gradients are then weighted means over micro-batches and ranks.
        """
        raise ModuleError(f"{type(self).__name__} has no training_step(batch, batch_idx).")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch and ``self.log`` what it comes to."""
        raise ModuleError(f"{type(self).__name__} has no validation_step(batch, batch_idx).")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch and ``self.log`` what it comes to."""
        raise ModuleError(f"{type(self).__name__} has no test_step(batch, batch_idx).")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the predictions of one batch; by default those of ``forward``."""
        return self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    def configure_optimizers(self) -> Any:
        """Return what updates the parameters, and its schedules.

        Returns:
            An optimizer; a list of optimizers; ``(optimizer, scheduler)``; two lists, of optimizers
            and of schedulers; ``{"optimizer": …, "lr_scheduler": …}``; a list of such dicts; or
            None. A scheduler may be a dict with ``scheduler`` and any of ``interval``,
            ``frequency``, ``monitor``, ``strict`` and ``name``.
        """
        raise ModuleError(f"{type(self).__name__} has no configure_optimizers().")

    def count_samples(self, batch: Any) -> int | None:
        """Return how many samples ``batch`` holds, or None where it does not tell.

        Define it where the first dimension of the batch's tensors does not tell.
        """
        return known_count(batch)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record ``value`` under ``name``.

        Args:
            name: Shown in the bar, in loggers, and to callbacks as a metric to monitor.
            value: A number, a tensor with one element, or a metric object. It is not waited for.
            prog_bar: Show it in the progress bar.
            logger: Send it to the loggers; by default yes.
            on_step: Record the value of the step; the default in ``training_step``. In an
                evaluation it is for the bar and callbacks: loggers count training steps.
            on_epoch: Record its reduction over the epoch; the default everywhere else. With both,
                the names end in ``_step`` and ``_epoch``.
            reduce_fx: ``"mean"`` (weighted by samples), ``"sum"``, ``"min"`` or ``"max"``. A metric
                object reduces by itself.
            enable_graph: For compatibility; the graph of a logged value is never kept.
            sync_dist: Reduce the step's value over ranks; epoch reductions always are.
            sync_dist_group: For compatibility; ranks are those of the strategy.
            add_dataloader_idx: End the name in the loader's index where there are several.
            batch_size: Samples the value is the mean of, where the batch does not tell.
            metric_attribute: For compatibility; a metric object is found without it.
            rank_zero_only: Record rank 0's value alone.

        Raises:
            ModuleError: The value is no number, or nothing can be logged at this moment.
        """
        logged = self._logged
        if logged is None:
            self._refuse_log(name)
            return
        options = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx,
            rank_zero_only,
        )  # fmt: skip
        logged.log(name, value, batch_size, options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Record every value of ``dictionary`` under its name, with the options of `log`.

        A ``MetricCollection`` of torchmetrics is such a dictionary.
        """
        if hasattr(dictionary, "compute"):
            # Without copies, a collection's metrics go on sharing the states they have in common.
            items = dictionary.items(keep_base=False, copy_state=False)  # type: ignore[call-arg]
        else:
            items = dictionary.items()
        for name, value in items:
            self.log(name, value, **options)

    def _configure_once(self) -> None:
        # Twice would put fresh layers in place of trained ones.
        if not self._is_configured:
            self.configure_model()
            self.__dict__["_is_configured"] = True

    def _refuse_log(self, name: str) -> None:
        if self._trainer is None or not self._trainer.is_running:
            warnings.warn(
                f"self.log({name!r}, …) outside of a Trainer's run records nothing.", stacklevel=3
            )
            return
        raise ModuleError(
            f"self.log({name!r}, …) has no epoch to belong to here. Log from on_train_start to "
            "on_train_epoch_end, in a validation or in a test. A prediction's results are what "
            "predict_step returns; elsewhere use self.logger.log_metrics({name: value}, step)."
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: None = None,
        strict: bool | None = None,
        types: Sequence[type] = (),
        **kwargs: Any,
    ) -> Self:
        """Return a Module made from a checkpoint's hyperparameters, with its weights.

        Args:
            checkpoint_path: File that a run saved.
            map_location: Device for the weights; by default the CPU.
            hparams_file: Refused: hyperparameters are in the checkpoint.
            strict: Whether the weights must fit exactly; by default as ``strict_loading`` says.
            types: Dataclasses and enums among the hyperparameters that no annotation names.
            **kwargs: Arguments of ``__init__`` that replace saved ones or were not saved.

        Raises:
            CheckpointError: The file cannot be read, or does not fit this class.
        """
        if hparams_file is not None:
            raise ModuleError("hparams_file is not read. Pass the hyperparameters as arguments.")
        module: Self = saving.rebuilt(cls, checkpoint_path, map_location, strict, types, kwargs)
        return module

    def load_weights(
        self,
        path: str | Path,
        *,
        strict: bool = True,
        prefix: str | Mapping[str, str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        ignore: Sequence[str] = (),
    ) -> WeightsReport:
        """Start from the weights at ``path``, which may be those of another architecture.

        Args:
            path: A checkpoint of leyden or Lightning, a file with a state_dict or with one under
                ``"state_dict"`` or ``"model"``, or a ``.safetensors`` file; local or a URL.
            strict: Whether every weight of the file and of this Module must find its counterpart.
            prefix: Take what the file has below this name, without the prefix. Or old prefixes to
                new ones; weights below none of them keep their names.
            rename: Names, or beginnings of them up to a dot, to new ones; or a function of the
                name, which may return None to leave a weight out.
            ignore: Patterns such as ``"head.*"``, of names in the file or here, to leave alone.

        Returns:
            What matched and what did not; print it.

        Raises:
            CheckpointError: The file cannot be read, or its weights do not fit.
        """
        with rng.isolated():
            self._configure_once()
        return weights.load_weights(self, path, strict, prefix, rename, ignore)

    @property
    def trainer(self) -> Trainer:
        """The Trainer whose run this Module is or was last in.

        Raises:
            ModuleError: It has not been in any.
        """
        if self._trainer is None:
            raise ModuleError(
                f"{type(self).__name__} is not attached to a Trainer: self.trainer is there from "
                "the start of a run on, not in __init__."
            )
        return self._trainer

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the CPU where there is none."""
        if self._trainer is not None and self._trainer.is_running:
            return self._trainer.strategy.device
        for tensor in self._tensors():
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the floating-point parameters, by the first of them."""
        for tensor in self._tensors():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.parameters()
        yield from self.buffers()

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch; 0 outside of a run."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Iterations that updated weights; 0 outside of a run."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Index of this process among all; 0 outside of a run."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine; 0 outside of a run."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger of the run."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the run."""
        return self._trainer.loggers if self._trainer is not None else []

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them, to be stepped in manual optimization.

        Args:
            use_pl_optimizer: False for the bare torch optimizers, whose steps are not counted and
                bypass the precision.
        """
        found = self.trainer.loop_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the schedule, or the list of them, or None, to be stepped by hand."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of ``loss``, shape ``()``, scaled where the precision needs it."""
        if self.automatic_optimization:
            raise ModuleError(
                "manual_backward() belongs to manual optimization. Set "
                "self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self.trainer.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients ``optimizer`` holds, unscaled first where they are scaled.

        Args:
            optimizer: Whose parameters' gradients.
            gradient_clip_val: The largest joint norm, or the largest value; None does nothing.
            gradient_clip_algorithm: ``"norm"`` (the default) or ``"value"``.
        """
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only ``optimizer``'s parameters require gradients until `untoggle_optimizer`."""
        self.untoggle_optimizer()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = {
            parameter: parameter.requires_grad
            for each in self.trainer.optimizers
            for group in each.param_groups
            for parameter in group["params"]
            if id(parameter) not in own
        }
        for parameter in others:
            parameter.requires_grad_(False)
        self.__dict__["_toggled_off"] = others

    def untoggle_optimizer(self, optimizer: Any = None) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_toggled_off", {}).items():
            parameter.requires_grad_(required)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of the backwards inside on their rank, for accumulation by hand."""
        strategy = self.trainer.strategy
        strategy.sync_gradients(False)
        try:
            yield
        finally:
            strategy.sync_gradients(True)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the ranks' tensors stacked: each of shape ``(world_size, *tensor.shape)``.

        Args:
            data: A tensor, or a collection of them.
            group: For compatibility; ranks are those of the strategy.
            sync_grads: Whether gradients flow back to every rank.
        """
        return self.trainer.all_gather(data, sync_grads)

    def freeze(self) -> None:
        """Stop all parameters from requiring gradients and go to eval mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.eval()

    def unfreeze(self) -> None:
        """Let all parameters require gradients and go to train mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        self.train()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of copies and pickles."""
        kept = self.__dict__.copy()
        for name in ("_trainer", "_logged", "_toggled_off", "log"):
            kept.pop(name, None)
        return kept
