"""Read handwritten digits with a small CNN in mixed precision.

    pip install 'leyden[examples]'
    python examples/digits.py

Shows the shortest useful run: three steps (training, validation, test) that share one function, a
built-in precision by name, and a test on digits that training never saw. Takes seconds on a CPU.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from leyden import Module, Trainer, seed_everything


class Digits(Module):
    """Tells the digit on an image of 8 x 8 pixels."""

    def __init__(self, width: int = 32, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, 10)
        return self.net(images)

    def evaluate(self, stage: str, batch: list[Tensor]) -> Tensor:
        images, digits = batch  # (B, 1, 8, 8), (B,)
        logits = self(images)
        loss = F.cross_entropy(logits, digits)
        accuracy = (logits.argmax(1) == digits).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}, prog_bar=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.evaluate("train", batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate("test", batch)

    def configure_optimizers(self) -> tuple:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return optimizer, schedule


def main(argv: list[str] | None = None) -> dict:
    """Train, test, and return the accuracy on held-out digits."""
    parser = argparse.ArgumentParser(description="Train a CNN on scikit-learn's digits.")
    parser.add_argument("--max-epochs", type=int, default=8)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    dataset = TensorDataset(images, torch.tensor(bunch.target))
    train, val, test = random_split(dataset, [1257, 180, 360])

    model = Digits()
    trainer = Trainer(max_epochs=args.max_epochs, precision=args.precision)
    trainer.fit(model, DataLoader(train, 64, shuffle=True), DataLoader(val, 180))
    (metrics,) = trainer.test(model, DataLoader(test, 180))
    print(f"{metrics['test/accuracy']:.1%} of the held-out digits are read correctly.")
    return metrics


if __name__ == "__main__":
    main()
