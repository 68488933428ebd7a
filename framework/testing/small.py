"""A small Module, its data, and a Trainer that writes and shows nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..module import Module
from ..trainer import Trainer


def quiet_trainer(**choices: Any) -> Trainer:
    """Return a Trainer of one epoch without logger, checkpoints, bar and summary.

    Args:
        **choices: Any argument of the Trainer, over these defaults.
    """
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **choices})


def batches(count: int = 8, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches of a linear problem: inputs ``(size, 3)``, targets ``(size, 1)``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, size, 3, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]])
    return list(zip(inputs, targets, strict=True))


class Regression(Module):
    """Linear regression by SGD; the same weights whenever it is made."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions ``(B, 1)`` for inputs ``(B, 3)``."""
        return self.layer(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of ``batch``."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean squared error of ``batch``."""
        inputs, targets = batch
        self.log("val/loss", nn.functional.mse_loss(self(inputs), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
