"""Balance a pole by trial and error: REINFORCE, with the environment in this file.

    python examples/reinforce.py

Shows training without a data set: the loader yields where episodes start, and ``training_step``
plays them with the policy as it is at that moment. Takes seconds on a CPU.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from leyden import Module, Trainer, seed_everything

LONGEST = 200


class CartPoles:
    """Many carts at once, each with a pole hinged on it, pushed left or right fifty times a second.

    Source: Barto, Sutton, Anderson, Neuronlike adaptive elements that can solve difficult learning
    control problems (1983), without friction.
    """

    def __init__(self, start: Tensor) -> None:
        self.state = start  # (B, 4): position, velocity, angle, angular velocity

    def step(self, right: Tensor) -> Tensor:
        """Push every cart ``right`` or left for 20 ms, and return which still stand, (B,)."""
        _, velocity, angle, spin = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (torch.where(right, 10.0, -10.0) + 0.05 * spin.square() * sin) / 1.1
        spin_rate = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        acceleration = push - 0.05 * spin_rate * cos / 1.1
        rates = torch.stack([velocity, acceleration, spin, spin_rate], dim=1)
        self.state = self.state + 0.02 * rates
        return (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < math.radians(12))


class Policy(Module):
    """Says how likely a push to the right is, and learns from how long the pole stood.

    Source: Williams, Simple statistical gradient-following algorithms for connectionist
    reinforcement learning (1992), with a baseline.
    """

    def __init__(self, width: int = 64, lr: float = 1e-2, discount: float = 0.99) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits of a push to the right: (..., 4) -> (...)."""
        return self.net(states).squeeze(-1)

    @torch.no_grad()
    def play(self, start: Tensor, explore: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Play an episode from every ``start`` until all have ended.

        Returns:
            States (T, B, 4), pushes to the right (T, B), and which episodes were going on (T, B).
        """
        poles, going = CartPoles(start), torch.ones_like(start[:, 0], dtype=torch.bool)
        played = []
        while going.any() and len(played) < LONGEST:
            chance = self(poles.state).sigmoid()
            right = chance > (torch.rand_like(chance) if explore else 0.5)
            played.append((poles.state, right, going))
            going = going & poles.step(right)
        states, pushes, alive = zip(*played, strict=True)
        return torch.stack(states), torch.stack(pushes), torch.stack(alive)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        states, pushes, going = self.play(batch[0], explore=True)
        self.log("train/return", going.sum(0).float().mean(), prog_bar=True)

        returns, later = [], torch.zeros_like(going[0], dtype=torch.float32)
        for alive in going.flip(0):
            later = alive * (1 + self.hparams.discount * later)
            returns.append(later)
        to_come = torch.stack(returns).flip(0)  # (T, B)
        baseline = to_come.sum(1, keepdim=True) / going.sum(1, keepdim=True)
        advantage = (to_come - baseline)[going]
        advantage = advantage / (advantage.std() + 1e-6)
        surprise = F.binary_cross_entropy_with_logits(
            self(states)[going], pushes[going].float(), reduction="none"
        )
        return (surprise * advantage).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, _, going = self.play(batch[0], explore=False)
        self.log("val/return", going.sum(0).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def starts(count: int) -> TensorDataset:
    """Return ``count`` carts near the middle, with poles that almost stand."""
    return TensorDataset(torch.empty(count, 4).uniform_(-0.05, 0.05))


def main(argv: list[str] | None = None) -> dict:
    """Train, and return for how many pushes the pole stands on average, of 200 at most."""
    parser = argparse.ArgumentParser(description="Balance a pole with REINFORCE.")
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    model, val = Policy(), DataLoader(starts(64), 64)
    trainer = Trainer(max_epochs=args.max_epochs, log_every_n_steps=5)
    (before,) = trainer.validate(model, val)
    result = trainer.fit(model, DataLoader(starts(256), 16, shuffle=True), val)
    untrained, trained = before["val/return"], result.metrics["val/return"]
    print(f"The pole stands for {trained:.0f} pushes of {LONGEST}; untrained, for {untrained:.0f}.")
    return {"before": untrained, "after": trained}


if __name__ == "__main__":
    main()
