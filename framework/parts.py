"""The parts that a Trainer's choices stand for, made by name and checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from . import choices
from .datamodule import DataModule
from .errors import ConfigError, ModuleError, unknown
from .implementations import check_callback, refuse_twice
from .module import Module
from .protocols import Logger

if TYPE_CHECKING:
    from .manager import Registry

COMING = ("deepspeed",)

SAID_OTHERWISE = {
    "ddp_spawn": "Pass 'ddp': how its processes are started is found out.",
    "ddp_fork": "Pass 'ddp': how its processes are started is found out.",
    "ddp_notebook": "Pass 'ddp': how its processes are started is found out.",
    "dp": "Pass 'ddp': each device has a process of its own.",
    "fsdp2": "Pass 'fsdp', which is FSDP2.",
    "mesh": "Pass leyden.strategies.Mesh(dp_shard=…, tp=…), an object, for its axes have sizes.",
    "model_parallel": "Pass leyden.strategies.Mesh(dp_shard=…, tp=…), an object.",
    "tp": "Pass leyden.strategies.Mesh(tp=…), an object.",
}
"""Names of strategies elsewhere."""


def accelerator(name: str) -> str:
    """Return the device type ``name`` stands for on this machine.

    Raises:
        ConfigError: There is no such device here.
    """
    choices.one_of("accelerator", name, choices.ACCELERATORS)
    there: dict[str, Callable[[], bool]] = {
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


def named(registry: Registry, kind: str, choice: Any, protocol: type) -> Any:
    """Return ``choice`` if something of ``kind`` has this name, or if it is such a thing itself.

    Raises:
        ConfigError: Nothing has the name, or the object lacks what the loop will ask for.
    """
    if not isinstance(choice, str):
        return registry.resolved(kind, choice, protocol)
    known = registry.listed(kind)
    if kind == "strategy" and choice.startswith(COMING) and choice not in known:
        raise ConfigError(
            f"strategy={choice!r} comes with the strategies of a later release. For now use "
            f"{', '.join(map(repr, known))}, or install a plugin that provides it."
        )
    if kind == "strategy" and choice in SAID_OTHERWISE and choice not in known:
        raise ConfigError(f"strategy={choice!r} has another name here. {SAID_OTHERWISE[choice]}")
    if choice not in known:
        raise unknown(kind, choice, known)
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
    """Return the callbacks given, names made, and those that the Trainer's switches add."""
    found = [registry.resolved("callback", one) for one in given]
    for one in found:
        check_callback(one, "Trainer(callbacks=[…])")
    refuse_twice([*registry.plugins, *((one, "Trainer(callbacks=[…])") for one in found)])
    added: list[tuple[str, dict[str, Any]]] = []
    if progress and not any(hasattr(one, "is_progress_bar") for one in found):
        can_draw = getattr(sys.stdout, "isatty", bool)() and os.environ.get("TERM") != "dumb"
        added.append(("rich_progress" if can_draw else "plain_progress", {}))
    if summary and not any(type(one).__name__ == "ModelSummary" for one in found):
        added.append(("model_summary", {}))
    if model_checkpoint and not any(hasattr(one, "best_model_path") for one in found):
        # Nobody who asked for no saver waits for one: short epochs are not all saved.
        added.append(("model_checkpoint", {"max_share": 0.02}))
    for name, options in added:
        default = registry.make("callback", name, **options)
        default.is_default = True
        found.append(default)
    if max_time is not None:
        found.append(registry.make("callback", "timer", duration=max_time))
    if profiler is not None:
        profiler = registry.resolved("profiler", profiler)
        check_callback(profiler, "Trainer(profiler=…)")
        found.append(profiler)
    return found


def with_module_callbacks(own: list[Any], module: Any) -> list[Any]:
    """Return the Trainer's callbacks, then the Module's, which replace the Trainer's defaults."""
    given = module.configure_callbacks()
    if given is None:
        raise ModuleError(
            "configure_callbacks() returned None. Return a callback or a list of them."
        )
    theirs = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in theirs:
        check_callback(one, "configure_callbacks()")
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
    if isinstance(model, type):
        raise ModuleError(f"{model.__name__} is a class. Pass an object: {model.__name__}(…).")
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


def as_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return ``(loaders, datamodule)``, where the first may have been a DataModule."""
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise ConfigError(
            f"datamodule={datamodule!r:.80} is no DataModule. Derive its class from "
            "leyden.DataModule, or pass loaders as dataloaders."
        )
    return loaders, datamodule
