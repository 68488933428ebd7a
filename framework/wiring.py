"""Turn a Trainer's choices into a Run. Every decision that depends on them is taken here, once.

The order, which plugins may rely on: the strategy connects → prepare_data → setup →
configure_model, on the meta device where sharded → the precision converts → layers are split over
ranks → blocks are recomputed and compiled → the strategy places: moves, shards or wraps → weights
are restored → data → configure_optimizers → the rest is restored → the steps are prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from . import hparams, resume, rng, saving
from .agreement import Alone, Together
from .callback import Callback
from .data.feed import overrides, require_step
from .errors import ModuleError
from .evaluations import wire_evaluations
from .hook_names import check_module, owner_of
from .hookspecs import Stage
from .implementations import implementations, in_order, of_module, refuse_twice
from .manager import Hooks
from .memory import offloaded, step_compiler, treat_blocks
from .metrics import Metrics
from .module import Module
from .overrides import DataHooks, TrainingHooks
from .parts import with_module_callbacks
from .prepared import prepared
from .protocols import Checkpointer, Logger, Precision, Strategy
from .rank_zero import on_first, rank_zero_info, rank_zero_warn
from .reading import read_train, reload
from .run import LossWatch, Run
from .run_folder import RunFolder
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
    parts = [strategy, precision, checkpointer, *trainer.logger_choices]
    hooks = hooks_of(trainer, callbacks, parts, module, request.datamodule)
    # One that was passed as a plugin keeps its state like the others.
    callbacks = [p for p, _ in trainer.registry.plugins if isinstance(p, Callback)] + callbacks
    resume.stateful(callbacks)
    sizer = module.count_samples if overrides(module, "count_samples", Module) else None
    run = Run(
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
        folder=folder_of(trainer),
    )
    run.agreement = Alone(run)
    run.compile_step = request.compile_step or step_compiler(run)
    return run


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


def folder_of(trainer: Trainer) -> RunFolder:
    """Return the folder of a run: the one a logger names, or a new one.

    All runs of a Trainer are in one until it is given another Module to train.
    """
    if trainer.folder is not None:
        return trainer.folder
    for logger in trainer.logger_choices:
        # One that was used before this Trainer's first run has a folder already.
        if trainer._run is None and logger.log_dir is not None:
            return RunFolder(trainer.default_root_dir, trainer.name, existing=Path(logger.log_dir))
    return RunFolder(*home(trainer))


def folder_resumed(trainer: Trainer, request: Request) -> RunFolder | None:
    """Return the folder of the run whose checkpoint is resumed, if it is there."""
    saved = (request.checkpoint or {}).get("folder") if request.takes("counters") else None
    if saved and Path(saved).is_dir():
        return RunFolder(trainer.default_root_dir, trainer.name, existing=Path(saved))
    return None


def wire(run: Run, request: Request) -> None:
    """Connect the parts of ``run`` with the user's code and data, in the published order."""
    trainer, module = run.trainer, run.module
    has_run = module._trainer is not None
    module.__dict__["_trainer"] = trainer
    if run.datamodule is not None:
        run.datamodule.trainer = trainer
    check_steps(run, request)
    join(run, request)
    run.precision.connect(run.strategy.device)
    run.hyperparameters = encoded_hyperparameters(run)
    open_loggers(run, request.checkpoint if request.takes("counters") else None)
    for owner in (run.datamodule, module):
        if owner is not None and overrides(owner, "prepare_data") and run.strategy.local_rank == 0:
            owner.prepare_data()
    run.strategy.barrier()
    before = dict(module.named_parameters()) if has_run else {}
    for hook in run.hooks.setup:
        hook(trainer, module, run.stage)
    if request.checkpoint is None:
        refuse_lost(module, before)

    with run.strategy.creating():
        module._configure_once()
    run.precision.convert_module(module)
    run.strategy.parallelize(module)
    if trainer.sync_batchnorm:
        run.strategy.sync_batchnorm(module)
    treat_blocks(run)
    run.strategy.place(module, run.precision)
    if request.checkpoint is not None:
        for hook in run.hooks.on_load_checkpoint:
            hook(trainer, module, request.checkpoint)
    if request.checkpoint is not None and (run.stage != "fit" or request.takes("weights")):
        saving.restore_weights(module, request.checkpoint, module.strict_loading)

    if run.stage == "fit":
        wire_training(run, request)
        # To trace a forward takes every rank where parameters are sharded.
        traces = run.strategy.rank == 0 and not run.strategy.is_lockstep
        for logger in run.loggers if traces else ():
            logger.log_graph(module)
    wire_evaluations(run, request.loaders)
    announce(run)


def join(run: Run, request: Request) -> None:
    """Find the other ranks, and begin where and from what all of them do."""
    trainer, strategy = run.trainer, run.strategy
    strategy.connect(trainer.accelerator, trainer.devices, trainer.num_nodes)
    if strategy.world_size > 1:
        run.agreement = Together(run)
        run.metrics.join(strategy)
    savers = [one for one in run.callbacks if hasattr(one, "best_model_path")]
    trainer.ckpt_path, request.checkpoint = read_checkpoint(
        trainer,
        run.checkpointer,
        savers,
        request.ckpt_path,
        request.restore if request.stage == "fit" else frozenset(["weights"]),
        type(run.module).__name__,
        partial(on_first, strategy),
    )
    resumed = on_first(strategy, partial(folder_resumed, trainer, request))
    run.folder = trainer.folder = resumed or run.folder
    if strategy.world_size > 1:
        keeps = request.stage == "fit" and not trainer.fast_dev_run
        saves = keeps and any(getattr(saver, "dirpath", None) is None for saver in savers)
        run.folder.agree(partial(on_first, strategy), is_needed=saves or bool(run.loggers))


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
    run.losses = LossWatch(state, trainer.nonfinite_loss, run.strategy)

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

    if run.resumed_rng is None and run.strategy.world_size > 1:
        draw_apart(run)
    run.training_step = prepared(run, "training_step")
    if trainer.activation_offload:
        run.training_step = offloaded(run.training_step, run.strategy.device.type == "cuda")


def draw_apart(run: Run) -> None:
    """Let ranks that see different data draw differently, and those that see the same alike."""
    seed, state = run.strategy.broadcast(torch.initial_seed()), run.state
    rng.reseed(f"{seed} {run.strategy.data_rank} {state.total_batches}".encode())


def _unlimited(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def announce(run: Run) -> None:
    """Say in one line what runs where, on rank 0."""
    from importlib import metadata
    from os import environ

    listed = run.trainer.registry.plugins
    plugins = [owner_of(plugin) for plugin, origin in listed if origin != "leyden"]
    choice, ranks = run.trainer.strategy_choice, run.strategy.world_size
    rank_zero_info(
        "leyden %s: %s on %s, precision %s, strategy %s, plugins %s, seed %s",
        metadata.version("leyden"),
        run.stage,
        run.strategy.device if ranks == 1 else f"{ranks} x {run.strategy.device.type}",
        run.precision.name,
        choice if isinstance(choice, str) else type(choice).__name__,
        ", ".join(plugins) or "none",
        environ.get("LEYDEN_SEED", "not set"),
    )
