"""leyden: a training framework for PyTorch. `import leyden` loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoints as checkpoints
    from .callback import Callback as Callback
    from .datamodule import DataModule as DataModule
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DataError as DataError
    from .errors import LeydenError as LeydenError
    from .errors import ModuleError as ModuleError
    from .errors import NonFiniteLossError as NonFiniteLossError
    from .errors import PluginError as PluginError
    from .hookspecs import hookimpl as hookimpl
    from .module import Module as Module
    from .rank_zero import rank_zero_debug as rank_zero_debug
    from .rank_zero import rank_zero_info as rank_zero_info
    from .rank_zero import rank_zero_only as rank_zero_only
    from .rank_zero import rank_zero_warn as rank_zero_warn
    from .results import FitResult as FitResult
    from .rng import seed_everything as seed_everything
    from .state import State as State
    from .trainer import Trainer as Trainer

_HOMES = {
    "callback": ("Callback",),
    "datamodule": ("DataModule",),
    "errors": (
        "CheckpointError", "ConfigError", "DataError", "LeydenError", "ModuleError",
        "NonFiniteLossError", "PluginError",
    ),
    "hookspecs": ("hookimpl",),
    "module": ("Module",),
    "rank_zero": ("rank_zero_debug", "rank_zero_info", "rank_zero_only", "rank_zero_warn"),
    "rng": ("seed_everything",),
    "state": ("State",),
    "results": ("FitResult",),
    "trainer": ("Trainer",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_LIGHTNING = {
    "LightningModule": "leyden.Module",
    "LightningDataModule": "leyden.DataModule",
    "MisconfigurationException": "leyden.ConfigError",
    "ModelCheckpoint": "leyden.plugins.ModelCheckpoint",
    "EarlyStopping": "leyden.plugins.EarlyStopping",
    "LearningRateMonitor": "leyden.plugins.LearningRateMonitor",
    "TensorBoardLogger": "leyden.loggers.TensorBoardLogger",
    "CSVLogger": "leyden.loggers.CSVLogger",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    if name == "checkpoints":
        return importlib.import_module(".checkpoints", __name__)
    hint = f" It is {_LIGHTNING[name]} here." if name in _LIGHTNING else ""
    raise AttributeError(f"module 'leyden' has no attribute {name!r}.{hint}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, "checkpoints"]
