"""Trainer: the choices of a training, and what can be done with them."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from . import choices, launch, loop, parts, results, resume, saving
from .errors import ConfigError
from .explanation import explanation
from .hookspecs import Stage
from .limits import Limits
from .manager import Registry
from .metrics import to_floats
from .protocols import Checkpointer, Precision, Strategy
from .results import FitResult
from .run import Run
from .run_folder import RunFolder, script_name
from .run_view import RunView
from .session import session
from .starting_point import chosen_checkpoint
from .state import State
from .wiring import Request


class Trainer(Limits, RunView):
    """Choices for training and evaluating Modules, checked when made.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"`` or ``"mps"``.
        strategy: Name of a registered strategy, or one. ``"auto"`` is a single device, or DDP
            where there are several.
        devices: How many devices of each machine, or which; -1 for all. ``"auto"`` is what a
            launcher has started, or one.
        num_nodes: Machines that take part; None is what a launcher has started, or one.
        launcher: What starts the processes where none are started: ``"auto"``, a registered name,
            or a launcher.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"64-true"``, ``"bf16-true"``,
            ``"16-true"``, any other registered name, or a precision.
        logger: True or None for TensorBoard where it is installed and CSV elsewhere, False for
            none, a registered name, a logger, or a list of these.
        callbacks: A callback, a registered name, or a list of these.
        plugins: Objects with methods marked ``@leyden.hookimpl``.
        max_epochs: Passes over the training data; -1 for no limit. 1000 if nothing else limits.
        min_epochs: Passes before a request to stop is heard.
        max_steps: Optimizer steps; -1 for no limit.
        min_steps: Optimizer steps before a request to stop is heard.
        max_time: Time in training: ``"DD:HH:MM:SS"``, a timedelta, or its arguments in a dict.
        limit_train_batches: Batches of an epoch at most, or a share of them.
        limit_val_batches: Batches of a validation at most, or a share; 0 switches it off.
        limit_test_batches: Batches of a test at most, or a share of them.
        limit_predict_batches: Batches of a prediction at most, or a share of them.
        fast_dev_run: Try everything with one batch, or this many, writing nothing.
        overfit_batches: Train and validate on this many first batches, or share, in order.
        val_check_interval: Batches (int) or share of an epoch (float) between validations, or a
            string with a unit: ``"500 steps"``, ``"2 epochs"``, ``"30 min"``.
        check_val_every_n_epoch: Epochs between those validated in; None counts batches across
            epochs.
        validate_at: Further moments to validate at: ``"start"``, ``"end"``, or both.
        num_sanity_val_steps: Validation batches tried before training; -1 for all.
        log_every_n_steps: Optimizer steps between records of step values in the loggers.
        enable_checkpointing: Whether a ModelCheckpoint is added where there is none.
        enable_progress_bar: Whether progress is shown.
        enable_model_summary: Whether the layers are listed before training.
        accumulate_grad_batches: Batches whose gradients one optimizer step takes together.
        gradient_clip_val: Largest norm, or value, of the gradients; None does not clip.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        deterministic: True for deterministic algorithms or an error, ``"warn"`` for a warning.
        benchmark: Whether cuDNN tries which algorithms are fastest.
        inference_mode: Whether evaluations use ``torch.inference_mode`` or ``torch.no_grad``.
        detect_anomaly: Whether autograd looks for the operation that made a NaN.
        nonfinite_loss: What a NaN or infinite loss does: ``"continue"`` counts it,
            ``"skip"`` leaves its batch out, ``"stop"`` raises.
        seed_samples: How what the data draws is seeded, so that it is the same after resume and
            for any number of workers: by ``"batch"``; by ``"sample"``, which holds for another
            batch size too; or False, as torch does.
        reload_dataloaders_every_n_epochs: Epochs after which the methods that make the loaders of
            training and validation are called again.
        use_distributed_sampler: Whether samplers are split over ranks.
        sync_batchnorm: Whether batch norms see the batches of all ranks.
        default_root_dir: Where runs are kept.
        name: Folder of this kind of run in it; by default the script's name.
        profiler: Name of a registered profiler, or one.
        checkpointer: Name of a registered checkpointer, or one.
        activation_checkpointing: What of each block is computed again in backward rather than
            kept: ``"full"`` for all, ``"selective"`` for all but matrix products, convolutions and
            attention, or a policy as torch's ``create_selective_checkpoint_contexts`` takes it.
        activation_offload: Whether what is kept for backward waits in the CPU's memory.
        optimizer_in_backward: Whether each parameter is stepped as its gradient is ready, which is
            then freed.
        compile: True compiles the steps, ``"blocks"`` each block; a dict has torch.compile's
            options, with ``"blocks": True`` for blocks.
        blocks: The Module's blocks: their class, a tuple of classes, or a function of name and
            part. By default the parts that a list or sequence in it repeats.

    Raises:
        ConfigError: A choice is out of its range, or a name is not registered.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int | None = None,
        launcher: Any = "auto",
        precision: Any = "32-true",
        logger: Any = None,
        callbacks: Any = None,
        plugins: Any = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        fast_dev_run: int | bool = False,
        overfit_batches: float = 0,
        val_check_interval: float | str | None = None,
        check_val_every_n_epoch: int | None = 1,
        validate_at: str | Sequence[str] = (),
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        nonfinite_loss: Literal["continue", "skip", "stop"] = "continue",
        seed_samples: Literal["batch", "sample"] | bool = "batch",
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        default_root_dir: str | Path | None = None,
        name: str | None = None,
        profiler: Any = None,
        checkpointer: Any = "file",
        activation_checkpointing: Any = None,
        activation_offload: bool = False,
        optimizer_in_backward: bool = False,
        compile: Any = None,
        blocks: Any = None,
        **unexpected: Any,
    ) -> None:
        given = dict(locals())
        choices.unexpected(unexpected, Trainer.__init__.__annotations__)
        switch = choices.switch
        self.registry = Registry(choices.listed(plugins))
        self.registry.check()
        self.accelerator = parts.accelerator(accelerator)
        num_nodes = num_nodes and choices.whole("num_nodes", num_nodes, 1)
        world = launch.world(self.registry, launcher, devices, num_nodes, self.accelerator)
        self.devices, self.num_nodes, self.launcher = world
        if strategy == "auto":
            strategy = "single_device" if world.size == 1 else "ddp"
        precision = choices.precision_name(precision)
        self.strategy_choice = parts.named(self.registry, "strategy", strategy, Strategy)
        self.precision_choice = parts.named(self.registry, "precision", precision, Precision)
        self.checkpointer_choice = parts.named(
            self.registry, "checkpointer", checkpointer, Checkpointer
        )

        self._take(given)
        self.default_root_dir = str(default_root_dir or "runs")
        self.name = str(name or script_name())
        self.ckpt_path: str | None = None
        self.logger_choices = parts.loggers(self.registry, False if self.fast_dev_run else logger)
        self._callbacks = parts.callbacks(
            self.registry,
            choices.listed(callbacks),
            model_checkpoint=switch("enable_checkpointing", enable_checkpointing, True)
            and not self.fast_dev_run,
            progress=switch("enable_progress_bar", enable_progress_bar, True),
            summary=switch("enable_model_summary", enable_model_summary, True),
            max_time=max_time,
            profiler=profiler,
        )
        self._state = State()
        self.position: resume.Position | None = None
        self.positions: list[resume.Position] = []  # of ranks that ran in processes of their own
        self.folder: RunFolder | None = None
        self._fitted: Any = None

    @launch.on_every_rank
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        restore: str | Sequence[str] | None = None,
    ) -> FitResult:
        """Train ``model``.

        Args:
            model: The Module.
            train_dataloaders: Where batches come from, or a dict or list read side by side. By
                default ``train_dataloader()`` of the DataModule or the Module.
            val_dataloaders: One or several, read one after the other. By default
                ``val_dataloader()``.
            datamodule: A DataModule instead of loaders.
            ckpt_path: Checkpoint to go on from: a path or URL, ``"last"``, ``"best"``, or
                ``"auto"`` for the newest complete one in the folders of this Trainer's
                ModelCheckpoints, and none where there is none. A job that torchrun or Slurm has
                started again takes ``"auto"`` by itself.
            restore: Parts to take from it: some of ``"weights"``, ``"optimizer"``,
                ``"schedule"`` (with rates and other options), ``"counters"``, ``"callbacks"``,
                ``"data"`` and ``"random"``; None for all.

        Returns:
            Why it ended and where.

        Raises:
            LeydenError: A choice, the Module or the data cannot be used; the message says why.
        """
        train_dataloaders, datamodule = parts.as_datamodule(train_dataloaders, datamodule)
        module = parts.unwrapped(model)[0]
        if module is not self._fitted:
            # Limits are absolute for the training of one Module; another one begins its own.
            self.folder = self.folder if self._fitted is None else None
            self._state, self.position, self._fitted = State(), None, module
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        taken = resume.checked_parts(restore)
        with self._running("fit", model, loaders, datamodule, ckpt_path, taken) as run:
            loop.fit(run)
        return results.of_fit(self, run)

    @launch.on_every_rank
    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data.

        Args:
            model: The Module; by default the one fitted last, with its best checkpoint if any.
            dataloaders: One or several, by default ``val_dataloader()``.
            datamodule: A DataModule instead of loaders.
            ckpt_path: Checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
            verbose: Whether to print the results.

        Returns:
            What was logged, a dict for each loader.
        """
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    @launch.on_every_rank
    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data; arguments and result as in `validate`."""
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def _evaluate(
        self, stage: Stage, model: Any, loaders: Any, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        model, ckpt_path = self._last_fitted(model, ckpt_path, stage)
        loaders, datamodule = parts.as_datamodule(loaders, datamodule)
        kind = "val" if stage == "validate" else stage
        with self._running(stage, model, {kind: loaders}, datamodule, ckpt_path) as run:
            evaluation = run.evaluations[stage]
            loop.evaluate(run, evaluation)
        values = to_floats(run.metrics.finished.callback)
        found = results.by_loader(values, len(evaluation.sources))
        if verbose and self.is_global_zero:
            print(results.table(stage, found))
        return found

    @launch.on_every_rank
    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
        stream: bool = False,
        gather: bool = False,
    ) -> Any:
        """Run ``predict_step`` over the data to predict.

        Args:
            model: The Module; by default the one fitted last, with its best checkpoint if any.
            dataloaders: One or several, by default ``predict_dataloader()``.
            datamodule: A DataModule instead of loaders.
            return_predictions: False keeps nothing, for a callback that takes each prediction.
            ckpt_path: Checkpoint to take the weights from: a path, ``"last"`` or ``"best"``.
            stream: Yield each batch's prediction as it is made and keep nothing. The run ends when
                the iterator does, or when it is closed.
            gather: Return, on every rank, what all ranks have predicted, each sample once and in
                the order of the data, on the CPU. False returns what this rank has.

        Returns:
            A list of predictions, one per batch, or a list of such lists where there are several
            loaders; None where nothing is kept; an iterator to stream.

        Raises:
            ConfigError: ``gather`` is asked for, and nothing is kept.
            DataError: ``gather`` is asked for, and a loader is not dealt out to the ranks.
        """
        if gather and (stream or not return_predictions):
            raise ConfigError(
                "predict(gather=True) returns what all ranks have predicted, so it has to keep it. "
                "Leave out stream=True and return_predictions=False, or gather=True."
            )
        model, ckpt_path = self._last_fitted(model, ckpt_path, "predict")
        dataloaders, datamodule = parts.as_datamodule(dataloaders, datamodule)
        request = model, {"predict": dataloaders}, datamodule, ckpt_path
        if stream:
            return results.streamed(self._streaming(*request))
        with self._running("predict", *request) as run, closing(loop.predict(run)) as outputs:
            if gather:
                results.refuse_to_gather(run)
            kept = results.by_batch(outputs, return_predictions)
            if gather:
                kept = results.gathered(kept, run)
        return results.shaped(kept, self.num_predict_batches) if return_predictions else None

    def _streaming(self, *request: Any) -> Generator[tuple[int, Any]]:
        with self._running("predict", *request) as run, closing(loop.predict(run)) as outputs:
            yield from outputs

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the current run at ``path``, whole or not at all.

        Every rank calls it, and every rank learns if it fails.

        Args:
            path: Where to.
            weights_only: Leave out all that only a resumed training needs.
        """
        saving.save(self._current(), str(path), weights_only)

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return what `save_checkpoint` would write: the run's own tensors, and plain values."""
        return saving.gathered(self._current(), weights_only)

    def explain(self, model: Any = None) -> str:
        """Print and return who is called at each hook, in order, and where they come from.

        Args:
            model: A Module whose own hooks are to be among them.
        """
        text = explanation(self, model)
        print(text)
        return text

    @property
    def callbacks(self) -> builtins.list[Any]:
        """The callbacks of the current or last run; before any, the Trainer's own."""
        return self._run.callbacks if self._run else self._callbacks

    def _running(
        self,
        stage: Stage,
        model: Any,
        loaders: dict[str, Any],
        datamodule: Any,
        ckpt_path: Any,
        restore: frozenset[str] = frozenset(["weights"]),
    ) -> AbstractContextManager[Run]:
        module, compile_step = parts.unwrapped(model)
        path = chosen_checkpoint(self, stage, ckpt_path)
        return session(
            self, Request(stage, module, loaders, datamodule, path, compile_step, restore)
        )

    def _last_fitted(self, model: Any, ckpt_path: Any, stage: str) -> tuple[Any, Any]:
        if model is not None:
            return model, ckpt_path
        if self._fitted is None:
            raise ConfigError(f"There is no model to {stage}. Pass one: trainer.{stage}(model, …).")
        best = getattr(self.checkpoint_callback, "best_model_path", None)
        return self._fitted, ckpt_path or best or None
