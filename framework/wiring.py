"""Turn a Trainer's choices into a Run. Every decision that depends on them is taken here, once.

The order, which plugins may rely on: prepare_data → setup → configure_model → the precision
converts → the strategy places → weights are restored → data → configure_optimizers → the rest is
restored → the steps are prepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from . import hparams, resume, saving
from .callback import Callback
from .data.feed import overrides, require_step
from .data.source import Source
from .errors import ModuleError
from .hook_names import check_module, owner_of
from .hookspecs import Stage
from .implementations import implementations, in_order, of_module, refuse_twice
from .manager import Hooks
from .metrics import Metrics
from .module import Module
from .overrides import DataHooks, TrainingHooks
from .parts import with_module_callbacks
from .protocols import Checkpointer, Logger, Precision, Strategy
from .rank_zero import rank_zero_info, rank_zero_warn
from .reading import read_evaluation, read_train, reload
from .run import Evaluation, LossWatch, Run
from .run_folder import RunFolder
from .schedule import make_schedule
from .starting_point import home, read_checkpoint
from .training import wire_optimizers

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(slots=True)
class Request:
    """What one call of a Trainer's method was given."""

    stage: Stage
    module: Any
    loaders: Mapping[str, Any]
    datamodule: Any = None
    ckpt_path: str | None = None
    compile_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    restore: frozenset[str] = frozenset(resume.PARTS)
    """Parts of the checkpoint that a fit takes over."""
    checkpoint: dict[str, Any] | None = None
    """What ``ckpt_path`` holds, once it is read."""

    def takes(self, part: str) -> bool:
        """Return whether a fit takes over ``part`` of a checkpoint."""
        return self.checkpoint is not None and self.stage == "fit" and part in self.restore


def assemble(trainer: Trainer, request: Request) -> Run:
    """Return a Run of the parts chosen, before any of the user's code has run."""
    module = request.module
    for owner in (module, request.datamodule):
        check_module(owner, (*vars(DataHooks), *vars(TrainingHooks)))
    strategy = trainer.registry.resolved("strategy", trainer.strategy_choice, Strategy)
    precision = trainer.registry.resolved("precision", trainer.precision_choice, Precision)
    checkpointer = trainer.registry.resolved(
        "checkpointer", trainer.checkpointer_choice, Checkpointer
    )
    callbacks = with_module_callbacks(trainer._callbacks, module)
    trainer.ckpt_path, request.checkpoint = read_checkpoint(
        trainer,
        checkpointer,
        [one for one in callbacks if hasattr(one, "best_model_path")],
        request.ckpt_path,
        request.restore if request.stage == "fit" else frozenset(["weights"]),
        type(module).__name__,
    )
    parts = [strategy, precision, checkpointer, *trainer.logger_choices]
    hooks = hooks_of(trainer, callbacks, parts, module, request.datamodule)
    # One that was passed as a plugin keeps its state like the others.
    callbacks = [p for p, _ in trainer.registry.plugins if isinstance(p, Callback)] + callbacks
    resume.stateful(callbacks)
    sizer = module.count_samples if overrides(module, "count_samples", Module) else None
    return Run(
        trainer=trainer,
        module=module,
        datamodule=request.datamodule,
        stage=request.stage,
        state=trainer.state,
        hooks=hooks,
        strategy=strategy,
        precision=precision,
        checkpointer=checkpointer,
        loggers=list(trainer.logger_choices),
        callbacks=callbacks,
        metrics=Metrics(sizer),
        folder=folder_of(trainer, request),
    )


def hooks_of(
    trainer: Trainer, callbacks: list[Any], parts: list[Any], module: Any, datamodule: Any = None
) -> Hooks:
    """Return the hooks of everyone in a run, in the published order.

    Raises:
        PluginError: One breaks the contract, or stands twice among plugins, parts and callbacks.
    """
    # One object may serve as two parts.
    others = [*{id(part): part for part in parts}.values(), *callbacks]
    listed = [*trainer.registry.plugins, *((one, type(one).__module__) for one in others)]
    refuse_twice(listed)
    found = [impl for plugin, origin in listed for impl in implementations(plugin, origin)]
    if datamodule is not None:
        found += of_module(datamodule, DataHooks, "DataModule")
    if module is not None:
        found += of_module(module, Module)
    return Hooks(in_order(found))


def folder_of(trainer: Trainer, request: Request) -> RunFolder:
    """Return the run's folder: the one it goes on in, or the one a logger or nobody names.

    A run goes on in the folder of the run whose checkpoint it resumes, and all runs of a Trainer
    in one folder until it is given another Module to train.
    """
    saved = (request.checkpoint or {}).get("folder") if request.takes("counters") else None
    if saved and Path(saved).is_dir():
        return RunFolder(trainer.default_root_dir, trainer.name, existing=Path(saved))
    if trainer.folder is not None:
        return trainer.folder
    for logger in trainer.logger_choices:
        # One that was used before this Trainer's first run has a folder already.
        if trainer._run is None and logger.log_dir is not None:
            return RunFolder(trainer.default_root_dir, trainer.name, existing=Path(logger.log_dir))
    return RunFolder(*home(trainer))


def wire(run: Run, request: Request) -> None:
    """Connect the parts of ``run`` with the user's code and data, in the published order."""
    trainer, module = run.trainer, run.module
    has_run = module._trainer is not None
    module.__dict__["_trainer"] = trainer
    if run.datamodule is not None:
        run.datamodule.trainer = trainer
    check_steps(run, request)
    run.strategy.connect(trainer.accelerator, trainer.devices, trainer.num_nodes)
    run.precision.connect(run.strategy.device)
    run.hyperparameters = encoded_hyperparameters(run)
    open_loggers(run, request.checkpoint if request.takes("counters") else None)
    for owner in (run.datamodule, module):
        if owner is not None and overrides(owner, "prepare_data"):
            owner.prepare_data()
    before = dict(module.named_parameters()) if has_run else {}
    for hook in run.hooks.setup:
        hook(trainer, module, run.stage)
    if request.checkpoint is None:
        refuse_lost(module, before)

    module._configure_once()
    run.precision.convert_module(module)
    run.strategy.place(module, run.precision)
    if request.checkpoint is not None:
        for hook in run.hooks.on_load_checkpoint:
            hook(trainer, module, request.checkpoint)
    if request.checkpoint is not None and (run.stage != "fit" or request.takes("weights")):
        saving.restore_weights(module, request.checkpoint, module.strict_loading)

    if run.stage == "fit":
        wire_training(run, request)
        for logger in run.loggers if run.strategy.rank == 0 else ():
            logger.log_graph(module)
    wire_evaluations(run, request)
    announce(run)


def refuse_lost(module: Module, before: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse layers made anew in place of those that an earlier run has trained.

    Raises:
        ModuleError: ``setup`` has made some.
    """
    lost = [n for n, p in module.named_parameters() if n in before and before[n] is not p]
    if lost:
        raise ModuleError(
            f"setup() made {', '.join(lost[:5])} anew, so what an earlier run had trained is lost. "
            "Make layers in __init__ or configure_model, or only if they are not there yet."
        )


def check_steps(run: Run, request: Request) -> None:
    """Refuse a Module that lacks what the stage calls."""
    module, stage = run.module, run.stage
    if stage == "fit":
        require_step(module, "training_step", Module)
        require_step(module, "configure_optimizers", Module)
    elif stage != "predict":
        require_step(module, "validation_step" if stage == "validate" else "test_step", Module)


def encoded_hyperparameters(run: Run) -> dict[str, Any]:
    """Return a checkpoint's hyperparameters, so that a refusal comes before any training."""
    encoded = {}
    for key, owner in (
        ("hyper_parameters", run.module),
        ("datamodule_hyper_parameters", run.datamodule),
    ):
        if owner is not None and owner._hparams:
            where = f"the hyperparameters of {type(owner).__name__}"
            encoded[key] = hparams.encode(owner.hparams, where)
    return encoded


def open_loggers(run: Run, checkpoint: dict[str, Any] | None) -> None:
    """Open every logger, in the run's folder or its own, and hand over the hyperparameters."""
    if run.strategy.rank != 0:
        return
    resumed_at = run.state.step or None
    if checkpoint is not None:
        resumed_at = checkpoint["global_step"]
        for logger, saved in zip(run.loggers, checkpoint.get("loggers", []), strict=False):
            logger.load_state_dict(saved)
    params: dict[str, Any] = {}
    for owner in (run.datamodule, run.module):
        if owner is not None and owner._hparams and owner._log_hyperparams:
            params |= owner.hparams
    for logger in run.loggers:
        logger.open(folder_for(run, logger), resumed_at)
        if params and run.stage == "fit":
            logger.log_hyperparams(params)


def folder_for(run: Run, logger: Logger) -> Path:
    """Return the run's folder, or the one of the same version that ``logger`` asks for."""
    shared = run.folder.path
    if logger.save_dir is None or logger.log_dir == str(shared):
        return shared
    parent = Path(logger.save_dir) / (logger.name or run.trainer.name)
    if parent.resolve() == shared.parent.resolve() and logger.version is None:
        return shared
    version = shared.name if logger.version is None else logger.version
    return RunFolder(parent.parent, parent.name, version).path


def wire_training(run: Run, request: Request) -> None:
    """Connect what only a fit needs."""
    trainer, module, state = run.trainer, run.module, run.state
    run.max_steps = _unlimited(trainer.max_steps)
    run.max_epochs = _unlimited(trainer.max_epochs)
    run.min_steps, run.min_epochs = trainer.min_steps, trainer.min_epochs
    run.log_every_n_steps = trainer.log_every_n_steps
    run.sanity_batches = trainer.num_sanity_val_steps
    run.accumulate = trainer.accumulate_grad_batches
    run.losses = LossWatch(state, trainer.nonfinite_loss, run.strategy.device)

    if request.checkpoint is not None and request.takes("counters"):
        resume.restore_counters(run, request.checkpoint)
    run.train = read_train(run, request.loaders)
    if not module.training:
        rank_zero_warn(
            f"{type(module).__name__} is in eval mode and trains in it: dropout is off and batch "
            "norms keep their statistics. Call model.train() before fit if that is not meant."
        )

    wire_optimizers(run)
    if request.checkpoint is not None:
        resume.restore_progress(run, request.checkpoint, request.restore)
    elif trainer.position is not None:
        resume.restore_position(run, trainer.position)
    state.optimizer_steps = (state.optimizer_steps or [0] * len(run.optimizers))[
        : len(run.optimizers)
    ]
    state.stop = None if run.interrupted_by is None else state.stop
    run.began = perf_counter() - state.elapsed
    steps = (run.train.length or run.max_steps) * run.max_epochs / run.accumulate
    if run.loggers and min(steps, run.max_steps) < run.log_every_n_steps:
        rank_zero_info(
            "log_every_n_steps=%d is more than the steps of this fit, so that no logger gets the "
            "values of single steps. Pass a lower one to Trainer to see them.",
            run.log_every_n_steps,
        )
    if trainer.reload_dataloaders_every_n_epochs:
        run.reload = partial(reload, run, request.loaders, state.epoch)

    step = prepared(run, "training_step")
    run.training_step = request.compile_step(step) if request.compile_step else step


def _unlimited(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def prepared(run: Run, name: str) -> Callable[..., Any]:
    """Return the Module's method ``name`` as strategy and precision run it.

    A step that takes fewer of ``(batch, batch_idx, dataloader_idx)`` is passed fewer.
    """
    method = getattr(run.module, name)
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise ModuleError(
            f"{type(run.module).__name__}.{name} is async or has a yield, so calling it runs "
            "nothing of it. Define it with def, and return its result."
        )
    step = run.precision.wrap(run.strategy.prepare(run.module, name))
    parameters = list(inspect.signature(getattr(run.module, name)).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(positional) >= 2:
        return step
    if len(positional) == 1:
        return lambda batch, *_: step(batch)
    raise ModuleError(
        f"{type(run.module).__name__}.{name}{inspect.signature(getattr(run.module, name))} takes "
        "no batch. Define it with (self, batch, batch_idx)."
    )


def wire_evaluations(run: Run, request: Request) -> None:
    """Connect the validation of a fit, or the evaluation that the run is."""
    trainer = run.trainer
    phase = "validate" if run.stage == "fit" else run.stage
    sources = read_evaluation(run, request.loaders)
    if sources is None:
        return
    run.evaluations[phase] = evaluation(run, phase, sources)
    if run.stage == "fit":
        run.validate_at = trainer.validate_at
        run.validation_due = make_schedule(
            trainer.val_check_interval, trainer.check_val_every_n_epoch, run.train.length
        )
    else:
        run.phase = phase


def evaluation(run: Run, phase: Any, sources: list[Source]) -> Evaluation:
    """Return an evaluation in ``phase`` with the hooks that belong to it."""
    name = {"validate": "validation"}.get(phase, phase)
    moments = (
        "start",
        "model_eval",
        "epoch_start",
        "batch_start",
        "batch_end",
        "epoch_end",
        "end",
        "model_train",
    )
    hooks = {f"on_{m}": getattr(run.hooks, f"on_{name}_{m}") for m in moments}
    mode: Callable[[], AbstractContextManager[Any]] = (
        torch.inference_mode if run.trainer.inference_mode else torch.no_grad
    )
    return Evaluation(
        phase=phase,
        step=prepared(run, f"{name}_step"),
        sources=sources,
        no_grad=mode,
        takes_index=takes_index(getattr(run.module, f"{name}_step"), len(sources) > 1),
        **hooks,
    )


def takes_index(step: Callable[..., Any], several: bool) -> bool:
    """Say if an evaluation's step is passed its loader's index: needed, or there are several."""
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return several
    third = [p for p in parameters if p.kind is not p.KEYWORD_ONLY][2:3]
    return any(several or p.default is p.empty for p in third if p.kind is not p.VAR_KEYWORD)


def announce(run: Run) -> None:
    """Say in one line what runs where, on rank 0."""
    from importlib import metadata
    from os import environ

    listed = run.trainer.registry.plugins
    plugins = [owner_of(plugin) for plugin, origin in listed if origin != "leyden"]
    choice = run.trainer.strategy_choice
    rank_zero_info(
        "leyden %s: %s on %s, precision %s, strategy %s, plugins %s, seed %s",
        metadata.version("leyden"),
        run.stage,
        run.strategy.device,
        run.precision.name,
        choice if isinstance(choice, str) else type(choice).__name__,
        ", ".join(plugins) or "none",
        environ.get("LEYDEN_SEED", "not set"),
    )
