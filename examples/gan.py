"""Learn a ring of eight Gaussians with a GAN: two optimizers, stepped by hand.

    python examples/gan.py

Shows manual optimization: with ``automatic_optimization = False``, ``training_step`` decides which
optimizer steps when. ``toggle_optimizer`` keeps the discriminator out of the generator's backward.
A generator that fails typically leaves some of the eight out. Takes seconds on a CPU.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from leyden import Module, Trainer, seed_everything

ANGLES = torch.arange(8) * (math.pi / 4)
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # (8, 2)
SPREAD = 0.1


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(Module):
    """Draws points in the plane that a second network cannot tell from real ones.

    Source: Goodfellow et al., Generative Adversarial Nets (2014), the non-saturating loss of
    section 3.
    """

    def __init__(self, noise: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(noise, 2)
        self.discriminator = mlp(2, 1)

    def forward(self, count: int) -> Tensor:
        """Return ``count`` drawn points, shape ``(count, 2)``."""
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, real: Tensor, batch_idx: int) -> None:  # (B, 2)
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_discriminator)
        fake = self(len(real)).detach()
        loss = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake))
        self.log("train/discriminator", loss.mean(), prog_bar=True)
        for_discriminator.zero_grad()
        self.manual_backward(loss.mean())
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        loss = F.softplus(-self.discriminator(self(len(real))))
        self.log("train/generator", loss.mean(), prog_bar=True)
        for_generator.zero_grad()
        self.manual_backward(loss.mean())
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        for schedule in self.lr_schedulers():
            schedule.step()

    def validation_step(self, real: Tensor, batch_idx: int) -> None:
        self.log_dict(quality(self(len(real))), prog_bar=True)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.99))
            for part in (self.generator, self.discriminator)
        ]
        steps = self.trainer.estimated_stepping_batches
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in optimizers]
        return optimizers, schedules


def quality(points: Tensor) -> dict[str, float]:
    """Return the share of ``points`` within three spreads of a centre, and the centres they cover.

    A centre counts as covered by a third of the eighth of the points that it should have.
    """
    distance, nearest = torch.cdist(points.cpu(), CENTRES).min(dim=1)
    on_ring = distance < 3 * SPREAD
    shares = nearest[on_ring].bincount(minlength=8) / len(points)
    return {
        "val/on_ring": on_ring.float().mean().item(),
        "val/covered": float((shares > 1 / 24).sum()),
    }


class Ring(IterableDataset):
    """Draws batches of points around the centres without end."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            centres = CENTRES[torch.randint(8, (self.count,))]
            yield centres + SPREAD * torch.randn(self.count, 2)


def main(argv: list[str] | None = None) -> dict:
    """Train, and return how good the drawn points are."""
    parser = argparse.ArgumentParser(description="Learn a ring of eight Gaussians.")
    parser.add_argument("--max-steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    # The data has no end and so no epochs: limits and intervals are in steps.
    trainer = Trainer(
        max_steps=args.max_steps,
        val_check_interval="500 steps",
        validate_at="end",
        limit_val_batches=1,
    )
    result = trainer.fit(
        GAN(), DataLoader(Ring(256), batch_size=None), DataLoader(Ring(4000), batch_size=None)
    )
    covered, on_ring = result.metrics["val/covered"], result.metrics["val/on_ring"]
    print(f"{on_ring:.0%} of the points drawn are on the ring, at {covered:.0f} of its 8 centres.")
    return result.metrics


if __name__ == "__main__":
    main()
