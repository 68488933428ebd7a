"""Under every strategy and mesh, training is what one process makes of the joined batches."""

import functools
import os

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from leyden import Module
from leyden.strategies import DDP, FSDP, Mesh
from leyden.testing import on_ranks, quiet_trainer

BATCH, STEPS = 8, 20
LAYOUTS = {
    "ddp2": (2, DDP),
    "ddp4": (4, DDP),
    "fsdp2": (2, FSDP),
    "fsdp4": (4, FSDP),
    "hsdp2x2": (4, functools.partial(FSDP, replicate=2)),
    "tp2": (2, functools.partial(Mesh, tp=2)),
    "replicate2": (2, functools.partial(Mesh, dp_replicate=2)),
    "fsdp2xtp2": (4, functools.partial(Mesh, dp_shard=2, tp=2)),
}
"""Layouts: how many ranks each takes, and what makes its strategy."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(Module):
    """Blocks between an embedding and a head, with a parameter of its own; float64."""

    dtype_made = torch.float64

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.to(self.dtype_made)
        self.losses = []

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def loss(self, batch):
        x, y = batch
        return (self(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        rest = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1)

    def parallelize(self, mesh):
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class Mixed(Net):
    """In float32, against a target that bfloat16 cannot hold."""

    dtype_made = torch.float32

    def loss(self, batch):
        x, y = batch
        assert y.dtype is torch.float32
        return (self(x) - y).square().mean() + 0 * (y + 1.001 - y).sum()


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TwoNetworks(Net):
    """Two networks stepped in turn, one of them through a window of two batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        first.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5)
        first.step()
        if batch_idx % 2 == 0:
            second.zero_grad()
            with self.no_sync():
                self.manual_backward((self.other(x) - y).square().mean())
        else:
            target = self(x).detach()  # of the weights that were just updated
            self.manual_backward((self.other(x) - target).square().mean())
            second.step()

    def configure_optimizers(self):
        other = [*self.other.parameters()]
        own = [p for n, p in self.named_parameters() if not n.startswith("other")]
        return [torch.optim.AdamW(own, lr=0.02), torch.optim.SGD(other, lr=0.1)]


CASES = {
    "plain": (Net, {}),
    "bf16-mixed": (Mixed, {"precision": "bf16-mixed"}),
    "accumulation": (Net, {"accumulate_grad_batches": 2}),
    "clipping": (Net, {"gradient_clip_val": 0.1}),
    "frozen": (Frozen, {"gradient_clip_val": 0.1}),
    "tied": (Tied, {"gradient_clip_val": 0.1}),
    "manual": (TwoNetworks, {}),
}


def data(part, of, count, dtype):
    """Return this part of each global batch."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, count * BATCH, 5, generator=generator, dtype=torch.float64)
    parts = [tensor.to(dtype).chunk(count * of)[part::of] for tensor in (x, y)]
    return list(zip(*parts, strict=True))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(case, layout="one"):
    """Return each batch's mean loss over ranks, and all weights, after 20 steps."""
    kind, options = CASES[case]
    ranks, make = LAYOUTS.get(layout, (1, lambda: "single_device"))
    rank, split = int(os.environ.get("RANK", "0")), 2 if "tp" in layout else 1
    net = kind()
    if rank:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)  # every rank begins as rank 0
    trainer = quiet_trainer(
        accelerator="cpu", devices=ranks, strategy=make(), max_epochs=1, **options
    )
    batches = STEPS * options.get("accumulate_grad_batches", 1)
    own = data(rank // split, ranks // split, batches, kind.dtype_made)
    result = trainer.fit(net, own, own[:3])
    assert "training_step" not in vars(net)
    assert type(net).__name__ == kind.__name__
    losses = torch.stack(net.losses)
    if ranks > 1:
        dist.all_reduce(losses)
    weights = {name: whole(tensor.detach()) for name, tensor in net.named_parameters()}
    if case == "tied":
        assert net.head.weight is net.embed.weight
    return losses / ranks, weights, result.metrics.get("val/loss")


def all_cases(layout):
    return {case: train(case, layout) for case in CASES}


@functools.cache
def expected(case):
    return train(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_one_process(layout):
    for found in on_ranks(LAYOUTS[layout][0], all_cases, layout, timeout=110):
        for case, (losses, weights, validation) in found.items():
            right, right_weights, right_validation = expected(case)
            # A short dtype rounds sums of other parts otherwise.
            atol = 0.03 if case == "bf16-mixed" else 1e-10
            close = functools.partial(
                torch.testing.assert_close, rtol=0, msg=lambda m, case=case: f"{case}: {m}"
            )
            close(losses, right, atol=atol)
            assert weights.keys() == right_weights.keys()
            for name, tensor in right_weights.items():
                close(weights[name], tensor, atol=atol)
            assert validation == pytest.approx(right_validation, rel=1e-6 + atol)
