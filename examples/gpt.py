"""Train a small GPT on the manual that comes with Python, and let it write.

    python examples/gpt.py
    python examples/gpt.py --width 256 --layers 8 --max-epochs 20 --precision bf16-mixed
    python examples/gpt.py --strategy fsdp --devices 4 --batch-size 4
    python examples/gpt.py --dp-shard 2 --tp 2 --batch-size 8

The first takes a minute or two on two cores; the second is for a GPU. The others train the same
model in four processes: sharded, and sharded with split layers. Everything a project needs is on
this page: data loaders, a Module (model, losses, optimizer, schedule), a Trainer, and what `fit`
leaves behind.
"""

import argparse
import math
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from leyden import Module, Trainer, seed_everything
from leyden.plugins import ModelCheckpoint
from leyden.strategies import Mesh


class Block(nn.Module):
    """Lets every character look at those before it, then transforms each on its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, self.size))  # (B, T, H, 3, C / H)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, H, T, C / H)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


# How a block is split over several devices: each has some of the heads and of the hidden features,
# and, between the two, some of the positions. So (B, T, C) above is (B, T / devices, C) on each.
BLOCK_PLAN = {
    "norm": SequenceParallel(),
    "qkv": ColwiseParallel(input_layouts=Shard(1)),
    "out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp.0": SequenceParallel(),
    "mlp.1": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.3": RowwiseParallel(output_layouts=Shard(1)),
}


class GPT(Module):
    """Predicts the next character of a text."""

    split_loss: Any = nullcontext

    def __init__(
        self,
        vocabulary: str,
        width: int = 96,
        layers: int = 4,
        heads: int = 4,
        context: int = 64,
        lr: float = 4e-3,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, context, dtype=torch.long)

    def configure_model(self) -> None:  # without memory where parameters are sharded
        size = self.hparams
        self.token = nn.Embedding(len(size.vocabulary), size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, len(size.vocabulary), bias=False)
        self.init_weights()

    def init_weights(self) -> None:  # is called again where they have been sharded
        generator = torch.Generator(self.device).manual_seed(self.hparams.seed)
        for layer in self.modules():
            if isinstance(layer, nn.LayerNorm):
                layer.reset_parameters()
            elif isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02, generator=generator)
            elif isinstance(layer, nn.Linear):
                std = 0.02
                nn.init.normal_(layer.weight, std=std, generator=generator)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        self.split_loss = loss_parallel
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        return {
            "token": split,
            "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            **{f"blocks.*.{name}": how for name, how in BLOCK_PLAN.items()},
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens, following = batch  # both (B, T)
        with self.split_loss():  # each device has the logits of some characters
            return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def backward(self, loss: Tensor) -> None:
        with self.split_loss():
            loss.backward()

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches

        def scale(step: int) -> float:  # a cosine, after a warmup over a twentieth of the steps
            return min(20 * (step + 1) / steps, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def encode(self, text: str) -> Tensor:
        """Return the characters of ``text`` as indices into the vocabulary."""
        return torch.tensor([self.hparams.vocabulary.index(character) for character in text])

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.6) -> str:
        """Return ``prompt`` and ``length`` more characters, drawn from what the model expects."""
        tokens = self.encode(prompt).to(self.device).unsqueeze(0)  # (1, T)
        for _ in range(length):
            logits = self(tokens[:, -self.hparams.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return "".join(self.hparams.vocabulary[token] for token in tokens[0])


def manual() -> str:
    """Return the manual; topics share paragraphs, and each is kept once, tables not at all."""
    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(p for p in paragraphs if "-+" not in p))


def windows(tokens: Tensor, context: int) -> tuple[TensorDataset, TensorDataset]:
    """Return nine tenths of the text, and the rest, in pieces with the token after each token."""
    pieces = tokens.unfold(0, context + 1, context)
    train, val = pieces[: len(pieces) * 9 // 10], pieces[len(pieces) * 9 // 10 :]
    return (
        TensorDataset(train[:, :-1], train[:, 1:]),
        TensorDataset(val[:, :-1], val[:, 1:]),
    )


def main(argv: list[str] | None = None) -> dict:
    """Train, load the best checkpoint, print what it writes; return the numbers and the text."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's manual.")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=-1, help="-1: as many as the epochs have")
    parser.add_argument("--precision", default="32-true", help="bf16-mixed, 16-mixed, ...")
    parser.add_argument("--strategy", default="auto", help="how the model is placed and shared out")
    parser.add_argument("--devices", default="auto", help="how many")
    parser.add_argument("--dp-shard", type=int, default=1, help="devices to shard over")
    parser.add_argument("--tp", type=int, default=1, help="devices to split each layer over")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    text = manual()
    model = GPT("".join(sorted(set(text))), args.width, args.layers, seed=args.seed)
    train, val = windows(model.encode(text), model.hparams.context)
    if args.dp_shard * args.tp > 1:
        args.strategy, args.devices = (
            Mesh(dp_shard=args.dp_shard, tp=args.tp),
            args.dp_shard * args.tp,
        )
    checkpoints = ModelCheckpoint(monitor="val/loss")  # keeps the best
    trainer = Trainer(
        max_epochs=args.max_epochs,
        max_steps=args.max_steps,
        precision=args.precision,
        strategy=args.strategy,
        devices=args.devices,
        gradient_clip_val=1.0,
        validate_at=["start", "end"],  # besides after each epoch
        callbacks=[checkpoints],
    )
    trainer.fit(
        model,
        DataLoader(train, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(val, args.batch_size),
    )

    best = GPT.load_from_checkpoint(checkpoints.best_model_path).eval()
    loss = float(checkpoints.best_model_score)
    written = best.write("The ", length=500) if trainer.is_global_zero else ""
    model.print(f"\nWith a loss of {loss:.2f} nats a character, the model writes:\n\n{written}\n")
    model.print(f"The best checkpoint:  {checkpoints.best_model_path}")
    model.print(f"Its curves:           tensorboard --logdir {trainer.log_dir}")
    return {"loss": loss, "text": written, "checkpoint": checkpoints.best_model_path}


if __name__ == "__main__":
    main()
