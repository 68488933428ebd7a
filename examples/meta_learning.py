"""Learn to learn sine waves: MAML, with gradients taken through an inner loop.

    python examples/meta_learning.py

Shows that a ``training_step`` may differentiate on its own: ``torch.func`` adapts a copy of the
parameters to each task, and the Trainer's backward goes through that adaptation, second derivatives
included. Takes seconds on a CPU.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from leyden import Module, Trainer, seed_everything


class Maml(Module):
    """Finds weights from which a few gradient steps on ten points fit any sine wave.

    Source: Finn, Abbeel, Levine, Model-agnostic meta-learning (2017), algorithm 2 and section 5.1.
    """

    def __init__(self, width: int = 40, lr: float = 3e-3, inner_lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the error of the net with ``weights`` on points (P, 1)."""
        return F.mse_loss(functional_call(self.net, weights, (x,)), y)

    def adapted_loss(self, x: Tensor, y: Tensor, steps: int) -> Tensor:
        """Return each task's error on its second half after ``steps`` on its first: (B,)."""

        def one_task(x: Tensor, y: Tensor) -> Tensor:  # (P, 1) each
            (seen, unseen), (seen_y, unseen_y) = x.chunk(2), y.chunk(2)
            weights = dict(self.net.named_parameters())
            for _ in range(steps):
                slopes = grad(self.loss)(weights, seen, seen_y)
                weights = {k: w - self.hparams.inner_lr * slopes[k] for k, w in weights.items()}
            return self.loss(weights, unseen, unseen_y)

        return vmap(one_task)(x, y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.adapted_loss(*batch, steps=1).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for steps in (0, 1, 10):
            loss = self.adapted_loss(*batch, steps=steps).mean()
            self.log(f"val/loss_after_{steps}", loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def waves(tasks: int, points: int = 20) -> TensorDataset:
    """Return waves of random height and phase, each as x and y of shape ``(points, 1)``."""
    height = torch.empty(tasks, 1, 1).uniform_(0.1, 5.0)
    phase = torch.empty(tasks, 1, 1).uniform_(0.0, math.pi)
    x = torch.empty(tasks, points, 1).uniform_(-5.0, 5.0)
    return TensorDataset(x, height * torch.sin(x - phase))


def main(argv: list[str] | None = None) -> dict:
    """Train, and return the error on new waves before and after adapting to them."""
    parser = argparse.ArgumentParser(description="Meta-learn sine waves.")
    parser.add_argument("--max-epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    # The inner loop differentiates in validation too, which inference mode would forbid.
    trainer = Trainer(max_epochs=args.max_epochs, inference_mode=False)
    result = trainer.fit(
        Maml(),
        DataLoader(waves(6_400), 25, shuffle=True),
        DataLoader(waves(500), 500),
    )
    before, after = (result.metrics[f"val/loss_after_{steps}"] for steps in (0, 10))
    print(f"On new waves the error falls from {before:.2f} to {after:.2f} in ten steps.")
    return result.metrics


if __name__ == "__main__":
    main()
