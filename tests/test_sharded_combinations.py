"""Sharded strategies together with what else a Trainer is asked for: steps in backward, recomputed
and compiled blocks, summaries, runs in a row, single files.
"""

import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from leyden import ConfigError, Module, checkpoints
from leyden.plugins import ModelSummary
from leyden.strategies import DDP, FSDP, Mesh
from leyden.testing import on_ranks, quiet_trainer

STRATEGIES = {
    "ddp": DDP, "fsdp": FSDP, "hsdp": lambda: FSDP(replicate=2), "tp": lambda: Mesh(tp=2),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(Module):
    """Blocks between an embedding and a head that share a weight; float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("seen", torch.zeros(2))
        self.double()
        self.losses = []

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - 1).square().mean()
        self.seen += 1
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", (self(batch) - 1).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test", (self(batch) - 1).square().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def parallelize(self, mesh):
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def data(count=4, part=0, of=1):
    """Return this part of each of ``count`` batches of eight."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, 4, generator=generator, dtype=torch.float64)
    return [batch.chunk(of)[part] for batch in x]


def own_data(name, count=4):
    split = name != "tp" and "RANK" in os.environ
    return data(count, int(os.environ.get("RANK", "0")), 2) if split else data(count)


def trainer_for(name, **options):
    ranks = 1 if name == "one" else 2
    strategy = "single_device" if name == "one" else STRATEGIES[name]()
    return quiet_trainer(accelerator="cpu", devices=ranks, strategy=strategy, **options)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(module):
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def joint(module):
    losses = torch.stack(module.losses)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(losses)
        losses /= torch.distributed.get_world_size()
    return losses


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


def trained(name, **options):
    module = Net()
    trainer_for(name, **options).fit(module, own_data(name))
    return weights(module), joint(module)


# One file of a sharded checkpoint


def saved(name, folder):
    module = Net()
    trainer = trainer_for(name, checkpointer="sharded")
    trainer.fit(module, own_data(name))
    trainer.save_checkpoint(f"{folder}/a.sharded")
    return weights(module)


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "tp"])
@pytest.mark.parametrize("most", [None, 300])
def test_parts_of_all_ranks_are_brought_together_in_safetensors_files(tmp_path, name, most):
    expected = on_ranks(2, saved, name, str(tmp_path))[0]
    target = tmp_path / "w.safetensors"
    checkpoints.convert(tmp_path / "a.sharded", target, max_shard_size=most)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors*"))
    if most is None:
        assert files == ["w.safetensors"]
    else:
        assert len(files) > 2
        target = tmp_path / "w.safetensors.index.json"
    checkpoints.convert(tmp_path / "a.sharded", tmp_path / "w.pt")
    plain = torch.load(tmp_path / "w.pt")
    assert plain["head.weight"].data_ptr() == plain["embed.weight"].data_ptr()
    assert_close(plain, expected)
    module = Net()
    module.load_weights(target)
    assert module.head.weight is module.embed.weight
    assert_close(weights(module), expected)
    held = _names_in(tmp_path)
    assert len(held) == len(expected) - 1  # what is tied is there once
    assert ("embed.weight" in held) != ("head.weight" in held)


def _names_in(folder):
    from safetensors import safe_open

    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


# Steps in backward


def stepped_in_backward():
    found = [trained(name, optimizer_in_backward=True) for name in ("fsdp", "hsdp", "tp")]
    with pytest.raises(ConfigError, match="average their gradients after backward"):
        trained("ddp", optimizer_in_backward=True)
    return found


def test_steps_in_backward_end_with_the_weights_of_plain_steps():
    expected = trained("one")
    for found in on_ranks(2, stepped_in_backward):
        for ended, losses in found:
            assert_close(ended, expected[0])
            torch.testing.assert_close(losses, expected[1], rtol=0, atol=1e-12)


# Recomputed and compiled blocks


def compiled(name, options):
    from torch._dynamo.utils import counters

    module, compilations = Net(), []

    def count(*_):
        compilations.append(counters["stats"]["unique_graphs"])

    module.on_train_batch_end = count
    before = list(module.state_dict())
    trainer = trainer_for(name, max_epochs=3, **options)
    trainer.fit(module, own_data(name), own_data(name)[:2])
    assert list(module.state_dict()) == before == [n for n in weights(Net())]
    return weights(module), joint(module), compilations


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "fsdp",
            {
                "activation_checkpointing": "full",
                "compile": {"blocks": True, "backend": "aot_eager"},
            },
        ),
        ("fsdp", {"activation_checkpointing": "selective"}),
        ("hsdp", {"activation_checkpointing": "full"}),
        ("tp", {"activation_checkpointing": "full"}),
        ("tp", {"activation_checkpointing": "selective"}),
    ],
)
def test_recomputed_and_compiled_blocks_train_the_same_under_the_same_names(name, options):
    module = Net()
    quiet_trainer(max_epochs=3).fit(module, data())
    for ended, losses, compilations in on_ranks(2, compiled, name, options):
        torch.testing.assert_close(losses, joint(module), rtol=0, atol=1e-10)
        assert_close(ended, weights(module))
        if "compile" in options:
            assert compilations[0] > 0
            assert set(compilations[4:]) == {compilations[4]}  # the first epoch's validation too


# What is shown


def summarized(name, options):
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        trainer_for(name, callbacks=ModelSummary(), **options).fit(Net(), own_data(name))
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("fsdp", "dp_shard=2"), ("hsdp", "dp_replicate=2"), ("tp", "tp=2")],
)
def test_the_summary_counts_all_parts_and_shows_where_they_lie(name, mesh):
    first, second = on_ranks(2, summarized, name, {})
    assert not second
    size = 16 + 2 * 4 + 3 * (2 * 24 + 6 + 4)
    assert f"{size} in all" in first
    assert mesh in first
    held = {"fsdp": size // 2, "hsdp": size, "tp": 8 + 16 + 3 * (24 + 3 + 4)}[name]
    assert f"3 of Block and the rest: {held} of {size} parameters are on this rank" in first


# Runs in a row


def in_a_row(name):
    alone = trainer_for(name)
    module = Net()
    before = alone.validate(module, own_data(name))[0]["val"]
    tested = alone.test(module, own_data(name))[0]["test"]
    predictions = torch.cat(alone.predict(module, own_data(name)))
    trainer = trainer_for(name)
    trainer.fit(module, own_data(name), own_data(name))
    between = trainer.validate(module, own_data(name))[0]["val"]
    trainer.max_epochs = 2
    trainer.fit(module, own_data(name))
    ended = weights(module)
    again = trainer_for(name)
    again.fit(module, own_data(name))
    return before, tested, between, ended, weights(module), joint(module), predictions


def several_in_a_row():
    return {name: in_a_row(name) for name in STRATEGIES}


def test_runs_of_one_module_follow_each_other():
    before, tested, between, ended, last, losses, predictions = in_a_row("one")
    for rank, of_rank in enumerate(on_ranks(2, several_in_a_row)):
        for name, found in of_rank.items():
            assert found[:3] == pytest.approx((before, tested, between), abs=1e-6), name
            assert_close(found[3], ended)
            assert_close(found[4], last)
            torch.testing.assert_close(found[5], losses, rtol=0, atol=1e-10)
            rows = predictions.view(4, 8, 4)
            own = rows if name == "tp" else rows.chunk(2, 1)[rank]
            torch.testing.assert_close(found[6], own.reshape(-1, 4), rtol=0, atol=1e-10)
