"""A run goes on from a checkpoint on other ranks, laid out otherwise, as if never stopped."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchmetrics import MeanMetric

from leyden import Callback, CheckpointError, Module, Trainer, checkpoints
from leyden.plugins import ModelCheckpoint
from leyden.plugins.sharded_checkpointing import ShardedCheckpointer
from leyden.strategies import Mesh
from leyden.testing import on_ranks

BATCH, STEPS = 8, 3
LAYOUTS = {
    "one": (1, lambda: "single_device"),
    "ddp2": (2, lambda: "ddp"),
    "fsdp2": (2, lambda: "fsdp"),
    "fsdp4": (4, lambda: "fsdp"),
    "tp2x2": (4, lambda: Mesh(dp_shard=2, tp=2)),
}
"""Layouts of the parameters: how many ranks each takes, and what makes its strategy."""


class Net(Module):
    """Layers whose rows cannot be dealt out evenly, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.double()
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.down(self.up(inputs).tanh()) * self.scale - targets).square().mean()
        self.seen += self.trainer.strategy.data_world_size * len(inputs)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("largest", inputs.abs().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.mean.update(loss.detach(), len(inputs))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        rest = [*self.down.parameters(), self.scale]
        groups = [{"params": self.up.parameters(), "lr": 0.02}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)

    def parallelize(self, mesh):
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def data(part, of):
    """Return this part of each of four global batches."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(4 * BATCH, 5).double(), torch.randn(4 * BATCH, 3).double()
    parts = [tensor.chunk(4 * of)[part::of] for tensor in (inputs, targets)]
    return list(zip(*parts, strict=True))


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-12)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(layout, steps, resume=None, save=None, **options):
    """Return each batch's mean loss over ranks, all weights and metrics after ``steps`` steps."""
    (ranks, make), rank = LAYOUTS[layout], int(os.environ.get("RANK", "0"))
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False,
    }  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=make(), max_steps=steps, max_epochs=-1,
        **(quiet | options),
    )  # fmt: skip
    net = Net()
    place = (rank // 2, 2) if layout == "tp2x2" else (rank, ranks)
    metrics = trainer.fit(net, data(*place), ckpt_path=resume).metrics
    if save:
        trainer.save_checkpoint(save)
    weights = {name: whole(tensor.detach()) for name, tensor in net.state_dict().items()}
    losses = torch.tensor(net.losses, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(losses)
    return losses / ranks, weights, metrics


def run(layout, *args, **options):
    ranks, _ = LAYOUTS[layout]
    if ranks == 1:
        return train(layout, *args, **options)
    return on_ranks(ranks, call, layout, args, options, timeout=90)[0]


def call(layout, args, options):
    return train(layout, *args, **options)


@pytest.mark.parametrize(
    ("checkpointer", "chain"),
    [
        ("file", ["ddp2", "fsdp4", "one", "tp2x2", "fsdp2"]),
        ("sharded", ["ddp2", "fsdp4", "one", "tp2x2", "ddp2"]),
        ("sharded", ["fsdp2", "tp2x2", "fsdp4"]),
    ],
)
def test_a_chain_of_layouts_ends_as_the_unbroken_run(tmp_path, checkpointer, chain):
    expected, weights, _ = train("one", STEPS * len(chain))
    last, losses = None, []
    for number, layout in enumerate(chain, 1):
        path = str(tmp_path / f"{number}.{'sharded' if checkpointer == 'sharded' else 'ckpt'}")
        found, ended, _ = run(
            layout, STEPS * number, resume=last, save=path, checkpointer=checkpointer
        )
        losses, last = [*losses, found], path
    torch.testing.assert_close(torch.cat(losses), expected, rtol=1e-12, atol=1e-12)
    assert_close(ended, weights)


class SavesAt(Callback):
    """Saves after a batch, wherever in an optimizer step that is."""

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Return checkpoints of each layout, saved after three of four batches, two to a step."""
    folder = tmp_path_factory.mktemp("cut")
    options = {"accumulate_grad_batches": 2}
    layouts = ("one", "ddp2", "fsdp2", "tp2x2")
    paths = {layout: str(folder / f"{layout}.ckpt") for layout in layouts}
    ends = [run(layout, 2, callbacks=SavesAt(2, path), **options) for layout, path in paths.items()]
    return paths, ends[0]


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        ("one", "ddp2"),
        ("ddp2", "ddp2"),
        ("ddp2", "fsdp4"),
        ("fsdp2", "one"),
        ("fsdp2", "fsdp2"),
        ("tp2x2", "ddp2"),
    ],
)
def test_an_open_step_and_the_epochs_means_go_on_on_other_ranks(cut, saved, layout):
    paths, (losses, weights, metrics) = cut
    found, ended, seen = run(layout, 2, resume=paths[saved], accumulate_grad_batches=2)
    torch.testing.assert_close(found, losses[3:], rtol=1e-12, atol=1e-12)
    assert_close(ended, weights)
    assert seen == pytest.approx(metrics, rel=1e-6)  # torchmetrics computes in float32


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_saves_in_the_background_hold_the_step_they_were_begun_at(tmp_path, layout):
    saved = {}
    for asynchronous in (False, True):
        saver = ModelCheckpoint(
            tmp_path / str(asynchronous), "{step}", auto_insert_metric_name=False, save_top_k=-1,
            every_n_train_steps=1, save_last=True, asynchronous=asynchronous,
        )  # fmt: skip
        run(layout, 3, callbacks=saver, checkpointer="sharded", enable_checkpointing=True)
        keeper = ShardedCheckpointer()
        paths = sorted((tmp_path / str(asynchronous)).iterdir())
        saved[asynchronous] = {path.name: keeper.load(str(path)) for path in paths}
    blocking, background = saved[False], saved[True]
    assert [*blocking] == [*background] == [f"{n}.sharded" for n in ("1", "2", "3", "last")]
    for name, checkpoint in blocking.items():
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_same(checkpoint[part], background[name][part])


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(found, (dict, list)):
        keys = found if isinstance(found, dict) else range(len(found))
        assert len(found) == len(expected)
        for key in keys:
            assert_same(found[key], expected[key])
    else:
        assert found == expected


def draws(layout, resume, save):
    """Return what this rank draws at the second step."""
    drawn = []

    class Draws(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            drawn.append(torch.rand(()).item())

    torch.manual_seed(1)
    train(layout, 2 if resume else 1, resume=resume, save=save, callbacks=Draws())
    return drawn[-1]


def test_ranks_that_were_not_there_draw_apart(tmp_path):
    path = str(tmp_path / "a.ckpt")
    on_ranks(2, draws, "ddp2", None, path)
    same = on_ranks(2, draws, "fsdp2", path, None)
    first, second, third, fourth = on_ranks(4, draws, "fsdp4", path, None)
    assert first == same[0] != same[1]
    assert len({first, second, third, fourth}) == 4
    once, again, *_ = on_ranks(4, draws, "tp2x2", path, None)
    assert once == again == same[0]  # they see the same data


# Memory

WHOLE = 32 * 256 * 4096 * 4
"""Bytes of all parameters."""


class Big(Module):
    """Notes how much more memory this process took until its weights were there."""

    def __init__(self):
        super().__init__()
        self.grown = None

    def configure_model(self):
        self.parts = nn.ParameterList(torch.empty(256, 4096) for _ in range(32))

    def init_weights(self):
        for part in self.parts:
            nn.init.ones_(part)

    def training_step(self, batch, batch_idx):
        return (self.parts[0][0, :2] * batch.mean()).sum()

    def configure_optimizers(self):
        self.grown = self.grown and self.grown.bytes()
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Peak:
    """The most memory that this process had since this was made, less what it had then."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self.read("VmRSS")

    def read(self, name):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])

    def bytes(self):
        return self.read("VmHWM") - self.before


def save_and_load(folder, checkpointer):
    path, ranks = f"{folder}/a.{'sharded' if checkpointer == 'sharded' else 'ckpt'}", 4
    options = {
        "accelerator": "cpu", "devices": ranks, "max_epochs": -1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "checkpointer": checkpointer,
    }  # fmt: skip
    trainer = Trainer(strategy="fsdp", max_steps=1, **options)
    trainer.fit(Big(), [torch.ones(1)])
    saving = Peak()
    trainer.save_checkpoint(path)
    grown = saving.bytes()
    module = Big()
    module.grown = Peak()
    again = Trainer(strategy="fsdp", max_steps=2, **options)
    again.fit(module, [torch.ones(1)], ckpt_path=path)
    first = module.parts[0].full_tensor()[0, :3].tolist()
    return grown, module.grown, first


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("checkpointer", ["file", "sharded"])
def test_no_rank_but_the_one_that_writes_a_file_holds_all_of_a_tensor(tmp_path, checkpointer):
    """PL #16815, #8043: each rank used to hold the whole file."""
    found = on_ranks(4, save_and_load, str(tmp_path), checkpointer, timeout=120)
    for rank, (saving, loading, first) in enumerate(found):
        assert first == [-1.0, -1.0, 1.0]
        # Its part of the model, of the checkpoint, and of the file as far as it was read.
        assert loading < 0.9 * WHOLE
        assert saving < 0.5 * WHOLE or (rank == 0 and checkpointer == "file")


class FromWeights(Big):
    """Begins with the weights of a file."""

    path = ""

    def init_weights(self):
        self.load_weights(self.path)


def begin_from(path, small):
    load_on_ranks("fsdp4", small)  # what is imported and allocated once
    module = FromWeights()
    module.path, module.grown = path, Peak()
    trainer = Trainer(
        strategy="fsdp", accelerator="cpu", devices=4, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, [torch.ones(1)])
    return module.grown, [whole(module.parts[i])[i, :3].tolist() for i in (0, 31)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["w.safetensors", "w.sharded"])
def test_weights_go_straight_into_the_parts_of_what_had_no_memory(tmp_path, name):
    rows = torch.arange(32.0 * 256).view(32, 256, 1).expand(32, 256, 4096)
    torch.save({f"parts.{i}": part.clone() for i, part in enumerate(rows)}, tmp_path / "w.pt")
    checkpoints.convert(tmp_path / "w.pt", tmp_path / name)
    torch.save(Net().state_dict(), tmp_path / "s.pt")
    checkpoints.convert(tmp_path / "s.pt", tmp_path / f"s{name}")
    places = str(tmp_path / name), str(tmp_path / f"s{name}")
    for grown, (first, last) in on_ranks(4, begin_from, *places):
        assert first == [-1, -1, 0]
        assert last == [31 * 256 + 31] * 3
        assert grown < 0.9 * WHOLE


def load_on_ranks(layout, path):
    """Return the weights that a file's gave, and which of them are in parts."""
    net = Net()

    class Loads(Callback):
        def on_fit_start(self, trainer, module):
            module.load_weights(path)
            self.weights = {n: whole(t.detach()) for n, t in module.state_dict().items()}

    trainer = Trainer(
        accelerator="cpu", devices=LAYOUTS[layout][0], strategy=LAYOUTS[layout][1](), max_steps=1,
        logger=False, enable_progress_bar=False, enable_checkpointing=False, callbacks=Loads(),
    )  # fmt: skip
    trainer.fit(net, data(0, 2))
    split = [name for name, tensor in net.state_dict().items() if isinstance(tensor, DTensor)]
    return trainer.callbacks[0].weights, split


@pytest.mark.parametrize("name", ["w.safetensors", "w.safetensors.index.json", "w.sharded", "w.pt"])
def test_weights_are_loaded_into_parts_that_lie_across_both_axes(tmp_path, name):
    torch.manual_seed(9)
    weights = {n: torch.randn_like(tensor) for n, tensor in Net().state_dict().items()}
    torch.save(weights, tmp_path / "w.pt")
    if name != "w.pt":
        target, most = tmp_path / name.removesuffix(".index.json"), 100 if "json" in name else None
        checkpoints.convert(tmp_path / "w.pt", target, max_shard_size=most)
    found, split = on_ranks(4, load_on_ranks, "tp2x2", str(tmp_path / name))[3]
    assert {"up.weight", "down.weight", "scale"} <= {*split}
    for key, tensor in weights.items():
        assert torch.equal(found[key], tensor)


def test_weights_for_parameters_without_memory_are_refused(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    module = Module()
    module.net = net
    with pytest.raises(CheckpointError, match=r"no memory for net\.weight, net\.bias yet"):
        module.load_weights(tmp_path / "w.pt")
