"""Modules of unusual make under sharded strategies train as they do in one process."""

import functools
import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from leyden import ConfigError, Module
from leyden.strategies import FSDP
from leyden.testing import on_ranks, quiet_trainer


def linear(inputs=4, outputs=4):
    return nn.Linear(inputs, outputs).double()


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.make()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - 1).square().mean()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", (self(batch) - 1).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


class Twice(Net):
    """Blocks are called twice, each with its second call on what the others made."""

    def make(self):
        self.blocks = nn.Sequential(linear(), linear())

    def forward(self, x):
        return self.blocks(self.blocks(x).tanh())


class OneBlockShared(Net):
    """One layer stands in the list twice."""

    def make(self):
        one = linear()
        self.blocks = nn.ModuleList([one, linear(), one])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


class TiedBlocks(Net):
    """Two blocks share a weight."""

    def make(self):
        self.blocks = nn.ModuleList([linear(), linear(), linear()])
        self.blocks[2].weight = self.blocks[0].weight

    forward = OneBlockShared.forward


class Alone(Net):
    """No blocks: parameters of its own, one without elements, one of a single number."""

    def make(self):
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.T * self.scale + self.empty.sum()


class FrozenRoot(Net):
    """All but the blocks is frozen, and the first block too."""

    def make(self):
        self.embed, self.head = linear(), linear()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.blocks = nn.Sequential(linear(), linear())
        for frozen in (self.embed, self.head, self.blocks[0]):
            frozen.requires_grad_(False)
        self.scale.requires_grad_(False)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x))) * self.scale


class Counting(Net):
    """Buffers of its own and of its blocks change in the step."""

    def make(self):
        self.blocks = nn.Sequential(linear(), linear())
        for part in (self, self.blocks[1]):
            part.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.blocks[1].seen.add_(2)
        return self.blocks(x)


class Outside(Net):
    """Its forward and its parameters are used outside of the steps, by itself and by others."""

    def make(self):
        self.blocks = nn.Sequential(linear(), linear())
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        return self.blocks(x)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for part in (self, self.blocks):
            self.mean += part(torch.ones(1, 4, dtype=torch.float64))[0]

    def on_train_epoch_end(self):
        self.total = sum(whole(p).sum() for p in self.parameters())


class Mixed(Net):
    """Parameters of two dtypes, in one block and beside it."""

    def make(self):
        self.blocks = nn.ModuleList([linear(), linear()])
        self.blocks[1].extra = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.blocks[0](x).tanh()
        return self.blocks[1](x) * self.scale.double()


KINDS = [
    Twice, OneBlockShared, TiedBlocks, Alone, FrozenRoot, Counting, Outside, Mixed
]  # fmt: skip


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def data(part=0, of=1):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 8, 4, generator=generator, dtype=torch.float64)
    return [batch.chunk(of)[part] for batch in x]


def trained(kind, strategy=None, **options):
    ranks = 1 if strategy is None else 2
    module = kind()
    trainer = quiet_trainer(
        accelerator="cpu", devices=ranks, strategy=strategy or "single_device", **options
    )
    own = data(int(os.environ.get("RANK", "0")) if ranks > 1 else 0, ranks)
    trainer.fit(module, own, own)
    losses = torch.stack(module.losses)
    if ranks > 1:
        torch.distributed.all_reduce(losses)
    return {n: whole(t) for n, t in module.state_dict().items()}, losses / ranks


def all_kinds():
    return {
        (kind.__name__, replicate): trained(kind, FSDP(replicate=replicate), gradient_clip_val=0.5)
        for kind in KINDS
        for replicate in (1, 2)
    }


def test_modules_of_unusual_make_train_as_in_one_process():
    per_rank = on_ranks(2, all_kinds, timeout=100)
    for kind in KINDS:
        expected, losses = trained(kind, gradient_clip_val=0.5)
        for found in per_rank:
            for replicate in (1, 2):
                weights, own = found[kind.__name__, replicate]
                what = f"{kind.__name__}, replicate={replicate}"
                assert weights.keys() == expected.keys()
                close = functools.partial(torch.testing.assert_close, rtol=0)
                close(own, losses, atol=1e-7, msg=f"{what}: losses")
                for name, tensor in expected.items():
                    atol = 1e-6 if kind is Mixed else 1e-10  # norms are of float32 there
                    close(weights[name], tensor, atol=atol, msg=f"{what}: {name}")


class Experts(nn.Module):
    """Each half of a batch goes to the one that its first number chooses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([linear(), linear()])
        self.halves = 1 if torch.distributed.is_initialized() else 2

    def forward(self, x):
        return torch.cat([self.experts[int(h[0, 0] > 0)](h) for h in x.chunk(self.halves)])


class Routed(Net):
    def make(self):
        self.experts = Experts()

    def forward(self, x):
        return self.experts(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def routed():
    strategy = FSDP(shard=(Experts,), find_unused_parameters=True)
    strategy.connect("cpu", 2, 1)  # so that the Module sees the ranks
    return trained(Routed, strategy)


def test_ranks_may_use_different_parameters_of_a_block():
    chosen = [[bool(half[0, 0] > 0) for half in batch.chunk(2)] for batch in data()]
    assert any(one != other for one, other in chosen)
    expected, losses = trained(Routed)
    for weights, own in on_ranks(2, routed):
        torch.testing.assert_close(own, losses, rtol=0, atol=1e-12)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"replicate": "2"}, {"replicate": 0}, {"cpu_offload": "yes"}, {"reshard_after_forward": 1}],
)
def test_an_option_of_another_kind_is_refused_when_it_is_given(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be "):
        FSDP(**options)


class Breaking(Net):
    """Its third step raises, after its forward."""

    def make(self):
        self.blocks = nn.Sequential(linear(), linear())
        self.is_whole = False

    def forward(self, x):
        return self.blocks(x)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and not self.is_whole:
            raise ValueError("broken off")
        return loss


def fitted_after_an_error(strategy="single_device", ranks=1):
    module, results = Breaking(), []
    for _ in range(2):
        trainer = quiet_trainer(
            accelerator="cpu", devices=ranks, strategy=strategy, accumulate_grad_batches=4
        )
        own = data(int(os.environ.get("RANK", "0")) if ranks > 1 else 0, ranks)
        try:
            trainer.fit(module, own)
        except ValueError as error:
            results.append(str(error))
        module.is_whole = True
    assert results == ["broken off"]
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def test_gradients_of_a_step_that_an_error_broke_off_are_not_in_the_next_fit():
    expected = fitted_after_an_error()
    for weights in on_ranks(2, fitted_after_an_error, "fsdp", 2):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-12)
