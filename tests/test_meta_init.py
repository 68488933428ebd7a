"""Layers made in configure_model have no memory until they are sharded, and then right values."""

import os
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from leyden import Module, ModuleError
from leyden.plugins.precision.true import float32
from leyden.strategies import FSDP, Mesh
from leyden.testing import on_ranks, quiet_trainer


class Rotary(nn.Module):
    """Has a table that no checkpoint holds."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.table.copy_(torch.arange(len(self.table), dtype=torch.float64))

    def forward(self, x):
        return x + self.table


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Late(Module):
    """Makes most of itself in configure_model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.early = nn.Linear(5, 5).double()
        self.losses = []

    def configure_model(self):
        torch.set_default_dtype(torch.float64)
        self.rotary = Rotary(5)
        self.blocks = nn.Sequential(*(Block(5) for _ in range(3)))
        self.head = nn.Linear(5, 5)
        self.head.weight = self.early.weight
        torch.set_default_dtype(torch.float32)

    def training_step(self, batch, batch_idx):
        x = self.head(self.blocks(self.rotary(self.early(batch))))
        self.losses.append(x.square().mean().item())
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ByItself(Late):
    """Fills itself, the same way wherever that happens."""

    def configure_model(self):
        super().configure_model()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        torch.manual_seed(5)
        self.rotary.reset_parameters()
        for block in self.blocks:
            block.norm.reset_parameters()
            nn.init.trunc_normal_(block.linear.weight, std=0.3)
            nn.init.uniform_(block.linear.bias)
        nn.init.normal_(self.head.bias)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def begun(kind, strategy="single_device", ranks=1):
    """Return all tensors at the beginning, and each batch's loss on this rank."""
    module = kind()
    found = {}

    def keep(*_):
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        found.update((n, whole(t.detach()).clone()) for n, t in named)

    module.on_fit_start = keep
    if ranks > 1:
        torch.manual_seed(
            100 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 7
        )
    trainer = quiet_trainer(accelerator="cpu", devices=ranks, strategy=strategy)
    torch.manual_seed(2)
    data = torch.randn(4, 6, 5, dtype=torch.float64)
    trainer.fit(module, list(data))
    return found, module.losses, module.head.weight is module.early.weight


def sharded(kind, options):
    return begun(kind, FSDP(**options), 2)


@pytest.mark.parametrize("options", [{}, {"replicate": 2}, {"ignored": ["head"]}])
def test_what_init_weights_draws_is_drawn_in_parts(options):
    expected, losses, is_tied = begun(ByItself)
    assert is_tied
    for found, own, still_tied in on_ranks(2, sharded, ByItself, options):
        assert still_tied
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-15)
        assert own[0] == pytest.approx(losses[0], rel=1e-12)


def test_without_init_weights_each_layer_fills_itself():
    (first, _, _), (second, _, _) = on_ranks(2, sharded, Late, {})
    expected, _, _ = begun(Late)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.isfinite().all()
    for name in (
        "early.weight",
        "rotary.table",
        "blocks.0.norm.weight",
        "blocks.0.norm.running_var",
    ):
        assert torch.equal(first[name], expected[name])
    bound = 5**-0.5  # of nn.Linear's uniform distribution
    weights = torch.cat([first[f"blocks.{i}.linear.weight"].flatten() for i in range(3)])
    assert weights.abs().max() <= bound and 0.1 < weights.std() < 0.4
    assert not torch.equal(first["blocks.0.linear.weight"], first["blocks.1.linear.weight"])


class Bare(Late):
    def configure_model(self):
        super().configure_model()
        self.scale = nn.Parameter(torch.ones(5))


class Forgets(ByItself):
    def configure_model(self):
        super().configure_model()
        self.register_buffer("mask", torch.ones(5), persistent=False)


def refused(kind):
    with pytest.raises(ModuleError) as raised:
        begun(kind, "fsdp", 2)
    return str(raised.value)


@pytest.mark.parametrize(("kind", "name"), [(Bare, "scale"), (Forgets, "mask")])
def test_what_nothing_gives_a_value_is_named(kind, name):
    for message in on_ranks(2, refused, kind):
        assert f"Nothing gives {name} a value" in message
        assert "init_weights()" in message


class Large(Module):
    """Ten billion parameters, of which one rank of 1024 fills its part."""

    def configure_model(self):
        self.layers = nn.ModuleList(nn.Linear(16384, 16384, bias=False) for _ in range(38))

    def init_weights(self):
        for layer in self.layers:
            nn.init.constant_(layer.weight, 0.5)

    def parallelize(self, mesh):
        return {"layers.*": ColwiseParallel()}


def resident():
    """Return the bytes of this process's memory that no file holds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


def one_of_many(sizes):
    """Build the large Module as rank 3 of 1024, whose others are only counted on."""
    os.environ.update(RANK="3", WORLD_SIZE="1024")
    dist.init_process_group("fake", store=dist.HashStore(), rank=3, world_size=1024)
    new_group = dist.new_group
    dist.new_group = lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})
    strategy, module = Mesh(**sizes), Large()
    strategy.broadcast = lambda value: value
    before, began = resident(), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these groups have no timeouts
        strategy.connect("cpu", 1024, 1)
    with strategy.creating():
        module.configure_model()
    strategy.parallelize(module)
    strategy.place(module, float32())
    took, grown = time.monotonic() - began, resident() - before
    parts = [parameter.to_local() for parameter in module.parameters()]
    assert all(bool((part == 0.5).all()) for part in parts)
    return took, grown, module.layers[0].weight.numel() * 38, sum(part.nbytes for part in parts)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("sizes", [{"dp_shard": 1024}, {"dp_shard": 128, "tp": 8}])
def test_ten_billion_parameters_are_built_in_seconds_in_the_memory_of_a_part(sizes):
    ((took, grown, size, own),) = on_ranks(1, one_of_many, sizes)
    assert size > 10e9
    assert own == size * 4 // 1024
    assert grown < 2 * own + 32 * 2**20  # the rest is what torch imports
    assert took < 10
