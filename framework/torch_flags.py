"""torch's process-wide switches, set for a run and put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trainer import Trainer


@contextmanager
def torch_flags(trainer: Trainer) -> Iterator[None]:
    """Apply ``deterministic``, ``benchmark`` and ``detect_anomaly`` inside the block."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    anomaly = torch.is_anomaly_enabled()
    if trainer.deterministic is not None:
        wanted = bool(trainer.deterministic)
        torch.use_deterministic_algorithms(wanted, warn_only=trainer.deterministic == "warn")
        if wanted:
            # cuBLAS reads it when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = trainer.benchmark
    if trainer.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)
