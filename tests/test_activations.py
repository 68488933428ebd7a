"""Activations are recomputed block by block: the same numbers, the same names, less kept."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from leyden import Callback, ConfigError, Module, Trainer
from leyden.blocks import blocks_of
from leyden.testing import on_ranks, quiet_trainer

DATA = [(x, x.sum(1, keepdim=True)) for x in torch.randn(4, 4, 8)]
NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]


class Block(nn.Module):
    """Two matrix products, a GELU and a dropout."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.b(F.gelu(self.a(x))))


class Net(Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fitted(kind=Net, **choices):
    torch.manual_seed(0)
    module = kind()
    quiet_trainer(**{"max_epochs": 2, **choices}).fit(module, DATA)
    return module


def is_plain(module):
    return all("forward" not in part.__dict__ for part in module.modules())


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def keeps_gelu(context, operation, *args, **kwargs):
    kept = operation == torch.ops.aten.gelu.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHOICES = ["full", "selective", keeps_gelu, [torch.ops.aten.gelu.default]]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("choice", CHOICES)
def test_weights_are_those_without_it_bit_for_bit(choice, precision):
    recomputed = fitted(activation_checkpointing=choice, precision=precision)
    assert same(recomputed, fitted(precision=precision))
    assert is_plain(recomputed)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Counts(Callback):
    """Counts the operations of one batch, and the bytes that its forward keeps for backward."""

    def __init__(self):
        self.kept = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.operations, self.kept = Operations(), 0
        self.hooks = saved_tensors_hooks(self.pack, lambda packed: packed)
        self.operations.__enter__()
        self.hooks.__enter__()

    def pack(self, tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, nn.Parameter):
            self.kept += tensor.numel() * tensor.element_size()
        return tensor

    def on_before_backward(self, trainer, module, loss):
        self.hooks.__exit__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.operations.__exit__(None, None, None)
        self.found = self.operations.counts["addmm"], self.operations.counts["gelu"]


@pytest.mark.parametrize(
    ("choice", "products", "gelus"),
    [
        (None, 7, 3),  # three blocks of two layers, and the head
        ("full", 7 + 6, 6),
        ("selective", 7, 6),
        (keeps_gelu, 7 + 6, 3),
    ],
)
def test_what_backward_computes_again(choice, products, gelus):
    counts = Counts()
    fitted(activation_checkpointing=choice, callbacks=[counts])
    # Backward stops where it has what it needs: a block's last product may be left out.
    at_least = products - (3 if choice in ("full", keeps_gelu) else 0)
    assert at_least <= counts.found[0] <= products
    assert counts.found[1] == gelus


def test_less_is_kept():
    kept = {}
    for choice in (None, "full"):
        counts = Counts()
        fitted(activation_checkpointing=choice, callbacks=[counts])
        kept[choice] = counts.kept
    # Of a block, its input alone: (4, 8) in float32. Without: both inputs of products at least.
    assert kept["full"] < kept[None] - 3 * 4 * 32 * 4


def test_names_are_the_same_while_it_runs_and_after():
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append([name for name, _ in module.named_parameters()])
            seen.append(list(trainer.dump_checkpoint()["state_dict"]))

    fitted(activation_checkpointing="full", callbacks=[Looks()])
    names = [f"blocks.{i}.{name}" for i in range(3) for name in NAMES]
    assert all(one == [*names, "head.weight", "head.bias"] for one in seen)


def test_a_copy_made_while_it_runs_runs_its_own_layers():
    copies = []

    class Copies(Callback):
        def on_train_start(self, trainer, module):
            copies.append(copy.deepcopy(module.blocks[0]))
            copies.append(pickle.loads(pickle.dumps(module.blocks[0])))

    fitted(activation_checkpointing="full", callbacks=[Copies()])
    for block in copies:
        x = torch.ones(1, 8)
        block.eval()
        with torch.no_grad():
            block.b.weight.zero_()
            assert torch.equal(block(x), x + block.b.bias)


@pytest.mark.parametrize("choice", CHOICES[:2])
def test_an_error_gives_the_blocks_back(choice):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            assert not is_plain(self)
            raise ZeroDivisionError

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(activation_checkpointing=choice).fit(module, DATA)
    assert is_plain(module)


def test_an_evaluation_alone_recomputes_nothing():
    class Looks(Callback):
        def on_validation_start(self, trainer, module):
            assert is_plain(module)

    trainer = quiet_trainer(activation_checkpointing="full", callbacks=[Looks()])
    trainer.validate(Net(), DATA, verbose=False)


def test_a_forward_that_a_block_was_given_stays_its_own():
    class Patched(Net):
        def __init__(self):
            super().__init__()
            self.calls = 0
            own = self.blocks[0].forward

            def forward(x):
                self.calls += 1
                return own(x)

            self.blocks[0].forward = self.given = forward

    module = fitted(Patched, activation_checkpointing="full")
    assert module.calls == 2 * 8
    assert module.blocks[0].forward is module.given


def test_manual_optimization_recomputes_too():
    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    assert same(fitted(ByHand, activation_checkpointing="selective"), fitted(ByHand))


@pytest.mark.parametrize("choice", [None, "full", "selective"])
def test_offloading_changes_no_number_and_leaves_nothing(choice):
    module = fitted(activation_checkpointing=choice, activation_offload=True)
    assert same(module, fitted())
    assert is_plain(module)


def on_two_ranks(choice, compiles):
    options = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}
    plain = fitted(**options)
    treated = fitted(activation_checkpointing=choice, compile=compiles, **options)
    return same(plain, treated)


@pytest.mark.parametrize(
    ("choice", "compiles"),
    [("full", None), ("selective", {"blocks": True, "backend": "aot_eager"})],
)
def test_copies_on_two_ranks_train_as_without_it(choice, compiles):
    assert on_ranks(2, on_two_ranks, choice, compiles) == [True, True]


def test_blocks_are_the_repeated_parts_or_those_that_are_named():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(2)
            self.mlp = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.ReLU(), nn.LayerNorm(1))
            self.one = nn.ModuleDict({"only": Block()})

    tower = Tower()
    # Neither ReLUs, which have no parameters, nor what occurs once.
    assert list(blocks_of(tower)) == ["net.blocks.0", "net.blocks.1"]
    assert list(blocks_of(tower, Block)) == ["net.blocks.0", "net.blocks.1", "one.only"]
    assert list(blocks_of(tower, (nn.LayerNorm, nn.ModuleList))) == ["net.blocks", "mlp.3"]
    # What lies inside a block is none.
    assert list(blocks_of(tower, lambda name, part: name.startswith("net"))) == ["net"]
    assert blocks_of(nn.Linear(1, 1)) == {}


def test_blocks_that_are_chosen_are_the_ones_recomputed():
    counts = Counts()
    fitted(
        activation_checkpointing="full",
        blocks=lambda name, part: name == "blocks.1",
        callbacks=[counts],
    )
    assert counts.found[1] == 4


class Flat(Net):
    def __init__(self):
        super().__init__(1)


def test_without_blocks_the_error_says_how_to_name_them():
    with pytest.raises(ConfigError, match=r"Flat has no repeated parts. Pass\s+Trainer\(blocks="):
        fitted(Flat, activation_checkpointing="full")
    with pytest.raises(ConfigError, match=r"compile='blocks' works on blocks"):
        fitted(Flat, compile="blocks", blocks=nn.Conv2d)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"activation_checkpointing": "ful"}, "Did you mean 'full'"),
        ({"activation_checkpointing": True}, "activation_checkpointing=True is not known"),
        ({"activation_offload": 1}, "activation_offload=1 is a switch"),
        ({"optimizer_in_backward": "yes"}, "optimizer_in_backward='yes' is a switch"),
        ({"blocks": "Block"}, "blocks='Block' names no blocks"),
        ({"blocks": ()}, r"blocks=\(\) names no blocks"),
        ({"compile": "block"}, "compile='block' is not known"),
        ({"compile": {"backedn": "eager"}}, "Did you mean 'backend'"),
        (
            {"compile": {"backend": "eager"}, "activation_checkpointing": "full"},
            "backend 'eager' draws other random numbers",
        ),
    ],
)
def test_a_wrong_choice_is_refused_with_what_is_allowed(choices, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(**choices)
