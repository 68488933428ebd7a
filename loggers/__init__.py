"""Where metrics go. Names load what they need on first use: importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .csv import CSVLogger
    from .jsonl import JSONLLogger
    from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "JSONLLogger", "TensorBoardLogger"]

_FILES = {"CSVLogger": "csv", "JSONLLogger": "jsonl", "TensorBoardLogger": "tensorboard"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
