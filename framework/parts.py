"""The parts a Trainer's choices stand for, and their end: made by name, told, taken down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import choices
from .callback import Callback
from .errors import ConfigError, LeydenError, ModuleError, PluginError, unknown
from .implementations import HOOK_NAMES, check_plugin, implementations, in_order, of_module
from .module import Module
from .protocols import Logger, Precision, Strategy
from .schedule import parse_interval as interval  # noqa: F401  the Trainer checks its argument

if TYPE_CHECKING:
    from .manager import Registry
    from .run import Run
    from .trainer import Trainer

COMING = ("ddp", "fsdp", "hsdp", "deepspeed", "ddp_spawn", "ddp_notebook")


def accelerator(name: str) -> str:
    """Return the device type ``name`` stands for on this machine.

    Raises:
        ConfigError: There is no such device here.
    """
    choices.one_of("accelerator", name, choices.ACCELERATORS)
    there = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    wanted = choices.ACCELERATORS[name]
    if wanted == "auto":
        return next(kind for kind, is_there in there.items() if is_there())
    if not there[wanted]():
        raise ConfigError(
            f"accelerator={name!r} was asked for, and this machine has no {wanted} device that "
            "torch can use. Pass accelerator='auto', or install a build of torch for it."
        )
    return wanted


def strategy(registry: Registry, choice: Any) -> Any:
    """Return the strategy's name or object, checked."""
    if not isinstance(choice, str):
        return registry.resolved("strategy", choice, Strategy)
    choice = "single_device" if choice == "auto" else choice
    known = registry.listed("strategy")
    if choice not in known and choice in COMING:
        raise ConfigError(
            f"strategy={choice!r} comes with the strategies of a later release. For now use "
            f"{', '.join(map(repr, known))}, or install a plugin that provides it."
        )
    if choice not in known:
        raise unknown("strategy", choice, known)
    return choice


def precision(registry: Registry, choice: Any) -> Any:
    """Return the precision's registered name or object, checked."""
    choice = choices.precision_name(choice)
    if not isinstance(choice, str):
        return registry.resolved("precision", choice, Precision)
    known = registry.listed("precision")
    if choice not in known:
        raise unknown("precision", choice, known)
    return choice


def loggers(registry: Registry, choice: Any) -> list[Any]:
    """Return the loggers that ``Trainer(logger=…)`` asks for."""
    if choice is False:
        return []
    if choice is None or choice is True:
        choice = "tensorboard" if find_spec("tensorboard") is not None else "csv"
    wanted = choice if isinstance(choice, (list, tuple)) else [choice]
    return [registry.resolved("logger", one, Logger) for one in wanted]


def callbacks(
    registry: Registry,
    given: Iterable[Any],
    *,
    model_checkpoint: bool,
    progress: bool,
    summary: bool,
    max_time: Any,
    profiler: Any,
) -> list[Any]:
    """Return the callbacks given, names made, with those added that the Trainer's switches ask for."""
    found = [registry.resolved("callback", one) for one in given]
    for one in found:
        if not isinstance(one, Callback):
            raise PluginError(
                f"{one!r} in callbacks is no Callback. Derive it from leyden.Callback, or pass an "
                "object with @leyden.hookimpl methods as plugins=[…]."
            )
        check_plugin(one, "Trainer(callbacks=...)")
    for index, one in enumerate(found):
        if any(one is other for other in found[:index]):
            raise PluginError(f"{one!r} is listed twice among the callbacks. List it once.")
    added = []
    if progress and not any(hasattr(one, "is_progress_bar") for one in found):
        added.append("rich_progress" if sys.stdout.isatty() else "plain_progress")
    if summary and not any(type(one).__name__ == "ModelSummary" for one in found):
        added.append("model_summary")
    if model_checkpoint and not any(hasattr(one, "best_model_path") for one in found):
        added.append("model_checkpoint")
    for name in added:
        default = registry.make("callback", name)
        default.is_default = True
        found.append(default)
    if max_time is not None:
        found.append(registry.make("callback", "timer", duration=max_time))
    if profiler is not None:
        found.append(registry.resolved("profiler", profiler))
    return found


def with_module_callbacks(own: list[Any], module: Any) -> list[Any]:
    """Return the Trainer's callbacks and then the Module's, which replace the Trainer's defaults."""
    given = module.configure_callbacks()
    if given is None:
        raise ModuleError("configure_callbacks() returned None. Return a callback or a list of them.")
    theirs = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in theirs:
        if not isinstance(one, Callback):
            raise PluginError(f"configure_callbacks() returned {one!r}, which is no Callback.")
        check_plugin(one, "configure_callbacks")
    kinds = {type(one) for one in theirs}
    kept = [one for one in own if not (getattr(one, "is_default", False) and type(one) in kinds)]
    return [*kept, *theirs]


def unwrapped(model: Any) -> tuple[Any, Callable[..., Any] | None]:
    """Return the Module in ``model``, and what compiles its step if ``model`` is compiled.

    Raises:
        ModuleError: It is no Module.
    """
    compile_step = None
    if hasattr(model, "_orig_mod") and hasattr(model, "dynamo_ctx"):
        model, compile_step = model._orig_mod, model.dynamo_ctx
    if not isinstance(model, Module):
        kind = type(model).__mro__
        lightning = any(c.__name__ == "LightningModule" for c in kind)
        hint = (
            "It is a LightningModule: change its base to leyden.Module."
            if lightning
            else "Derive your model from leyden.Module, which is a torch.nn.Module."
        )
        raise ModuleError(f"A Trainer runs a leyden.Module, not {type(model).__name__}. {hint}")
    if not hasattr(model, "_parameters"):
        raise ModuleError(
            f"{type(model).__name__}.__init__ did not call super().__init__(). Call it first."
        )
    return model, compile_step


def checkpoint_path(trainer: Trainer, choice: Any) -> str | None:
    """Return the file that ``ckpt_path`` stands for.

    Raises:
        LeydenError: ``"best"`` or ``"last"`` is asked for, and there is none.
    """
    if choice is None or choice not in ("best", "last"):
        return None if choice is None else str(choice)
    saver = trainer.checkpoint_callback
    path = getattr(saver, f"{choice}_model_path", "") or ""
    if not path and choice == "last":
        path = newest_last(Path(trainer.default_root_dir) / trainer.name)
    if not path:
        raise LeydenError(
            f"ckpt_path={choice!r}: no checkpoint is known under that name. "
            + (
                "Use ModelCheckpoint(monitor=…) and fit first, or pass a path."
                if choice == "best"
                else "Use ModelCheckpoint(save_last=True) and fit first, or pass a path."
            )
        )
    return str(path)


def newest_last(root: Path) -> str:
    """Return the newest ``last.ckpt`` of the runs in ``root``, or an empty string."""
    found = sorted(root.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else ""


def tell_everyone(
    hooks: Iterable[Callable[..., None]], *given: Any, after: BaseException | None = None
) -> None:
    """Call every one of ``hooks``, and raise the first error of theirs last.

    Args:
        hooks: Who to tell.
        *given: What they are told.
        after: An error that is already on its way: theirs become notes to it.
    """
    first: BaseException | None = None
    for hook in hooks:
        try:
            hook(*given)
        except BaseException as error:
            if after is not None:
                after.add_note(f"While this was handled, a hook raised {error!r}.")
            first = first or error
    if first is not None and after is None:
        raise first


def take_down(run: Run, status: Literal["success", "failed", "interrupted"]) -> None:
    """End ``run``: tell ``teardown`` to everyone, close loggers and strategy, let the Module go."""
    steps: list[Callable[[], None]] = [
        *((lambda hook=hook: hook(run.trainer, run.module, run.stage)) for hook in run.hooks.teardown),
        *((lambda logger=logger: logger.close(status)) for logger in run.loggers),
        run.strategy.close,
        lambda: run.module.__dict__.update(_logged=None),
    ]
    tell_everyone([lambda step=step: step() for step in steps], after=sys.exc_info()[1])


def by_loader(values: dict[str, float], count: int) -> list[dict[str, float]]:
    """Return metrics apart for each loader, by the ending of their names."""
    if count == 1:
        return [values]
    marker = "/dataloader_idx_"
    return [
        {name: v for name, v in values.items() if marker not in name or name.endswith(f"{marker}{i}")}
        for i in range(count)
    ]


def table(stage: str, results: list[dict[str, float]]) -> str:
    """Return the results of an evaluation as lines for a person."""
    lines = []
    for values in results:
        width = max((len(name) for name in values), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join([f"{stage}:", *(lines or ["  nothing was logged"])])


def explanation(trainer: Trainer, model: Any) -> str:
    """Return who is called at each hook, in order, and where they come from."""
    found = []
    for plugin, origin in trainer.registry.plugins:
        found += implementations(plugin, origin)
    for callback in trainer.callbacks if model is None else trainer.callbacks_for(model):
        found += implementations(callback, type(callback).__module__)
    if model is not None:
        found += of_module(model, Module)
    order = in_order(found)
    lines = []
    for hook in HOOK_NAMES:
        for number, impl in enumerate(order[hook], start=1):
            wrapper = ", wraps the others" if impl.wrapper else ""
            lines.append(f"{hook if number == 1 else '':<28}{number}. {impl.owner} ({impl.origin}{wrapper})")
    return "\n".join(lines) or "No hook is implemented."
