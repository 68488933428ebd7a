"""Callbacks, precisions, checkpointers and profilers. Importing this loads no torch.

Each name is imported from its own file when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leyden.errors import did_you_mean

if TYPE_CHECKING:
    from .checkpointing import FileCheckpointer as FileCheckpointer
    from .early_stopping import EarlyStopping as EarlyStopping
    from .lr_monitor import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .plain_progress import PlainProgress as PlainProgress
    from .precision.mixed import MixedPrecision as MixedPrecision
    from .precision.true import TruePrecision as TruePrecision
    from .profilers import PyTorchProfiler as PyTorchProfiler
    from .profilers import SimpleProfiler as SimpleProfiler
    from .rich_progress import RichProgress as RichProgress
    from .sharded_checkpointing import ShardedCheckpointer as ShardedCheckpointer
    from .summary import ModelSummary as ModelSummary
    from .summary import Summary as Summary
    from .summary import summarize as summarize
    from .throughput import Throughput as Throughput
    from .timer import Timer as Timer

_HOMES = {
    "EarlyStopping": "early_stopping",
    "FileCheckpointer": "checkpointing",
    "LearningRateMonitor": "lr_monitor",
    "MixedPrecision": "precision.mixed",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "summary",
    "PlainProgress": "plain_progress",
    "PyTorchProfiler": "profilers",
    "RichProgress": "rich_progress",
    "ShardedCheckpointer": "sharded_checkpointing",
    "SimpleProfiler": "profilers",
    "Summary": "summary",
    "Throughput": "throughput",
    "Timer": "timer",
    "TruePrecision": "precision.true",
    "summarize": "summary",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, _HOMES)}"
        )
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
