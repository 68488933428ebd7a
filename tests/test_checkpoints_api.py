"""Checkpoints are opened, inspected, listed, verified, converted and compared from Python."""

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, CheckpointError, ConfigError, Module, Trainer, checkpoints
from leyden.plugins import ModelCheckpoint


class Kind(enum.Enum):
    BIG = 1


@dataclasses.dataclass
class Layout:
    depth: int = 2
    kind: Kind = Kind.BIG


class Net(Module):
    def __init__(self, lr: float = 0.1, layout: Layout | None = None, folder: Path | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3, bias=False)
        self.outside = nn.Linear(3, 3, bias=False)
        self.outside.weight = self.inside.weight


class Counts(Callback):
    """Keeps how many batches it saw."""

    count = 0

    def on_train_batch_end(self, *_):
        self.count += 1

    def state_dict(self):
        return {"count": self.count, "places": (1, 2)}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def trained(path, steps=3, weights_only=False, lr=0.1):
    """Train a Net for some steps, save it at ``path``, and return it."""
    torch.manual_seed(0)
    net = Net(lr, Layout(), Path("data"))
    trainer = Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=Counts(),
    )  # fmt: skip
    trainer.fit(net, DataLoader(torch.arange(12.0).reshape(4, 3), batch_size=2))
    trainer.save_checkpoint(path, weights_only=weights_only)
    return net


def test_an_open_checkpoint_shows_what_it_holds(anywhere):
    net = trained(f"{anywhere}/a.ckpt")
    checkpoint = checkpoints.open(f"{anywhere}/a.ckpt")
    assert repr(checkpoint) == (
        f"Checkpoint('{anywhere}/a.ckpt': training, step 3, epoch 1, 3 weights)"
    )
    assert (checkpoint.kind, checkpoint.step, checkpoint.epoch) == ("training", 3, 1)
    assert checkpoint.manifest["format"] == 2
    assert checkpoint.manifest["checksum"].startswith("crc32:")
    assert all(torch.equal(checkpoint.state_dict[n], t) for n, t in net.state_dict().items())
    assert checkpoint.hyper_parameters == {
        "lr": 0.1,
        "layout": {"depth": 2, "kind": "BIG"},
        "folder": Path("data"),
    }
    assert checkpoint.optimizer_states[0]["state"]["layer.weight"]["step"] == 3
    assert checkpoint.lr_schedulers[0]["last_epoch"] == 1
    assert checkpoint.callbacks == {"Counts": {"count": 3, "places": (1, 2)}}


def test_an_open_checkpoint_is_a_mapping_of_the_files_entries_and_cannot_be_changed(tmp_path):
    trained(tmp_path / "a.ckpt")
    checkpoint = checkpoints.open(tmp_path / "a.ckpt")
    assert dict(checkpoint).keys() == torch.load(tmp_path / "a.ckpt", weights_only=True).keys()
    assert checkpoint["state"]["total_batches"] == 3
    with pytest.raises(TypeError, match="does not support item assignment"):
        checkpoint["state"] = {}


def test_a_file_of_weights_alone_opens(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    checkpoint = checkpoints.open(tmp_path / "w.pt")
    assert repr(checkpoint) == f"Checkpoint('{tmp_path}/w.pt': weights, 1 weights)"
    assert checkpoint.state_dict["a"].tolist() == [1, 1]
    assert (checkpoint.step, checkpoint.hyper_parameters) == (None, {})


def test_a_summary_says_what_is_there_and_what_it_is_good_for(anywhere):
    trained(f"{anywhere}/a.ckpt")
    summary = checkpoints.inspect(f"{anywhere}/a.ckpt")
    assert (summary.parameters, summary.dtypes) == (9, {"float32": 8, "int64": 1})
    with fsspec.open(f"{anywhere}/a.ckpt", "rb") as file:
        assert summary.size == len(file.read())
    lines = str(summary).splitlines()
    assert lines[:3] == [
        f"{anywhere}/a.ckpt: training, {summary.size:,} bytes",
        "  weights: 9 numbers (8 float32, 1 int64)",
        "  hyperparameter lr: 0.1",
    ]
    assert "  callback: Counts" in lines
    assert [line for line in lines if "optimizer: AdamW(lr=0.01, betas=(0.9, 0.999)" in line]
    assert lines[-3:] == [
        "  use: trainer.fit(module, data, ckpt_path=path) goes on from it",
        "  use: YourModule.load_from_checkpoint(path) makes the Module again",
        "  use: module.load_weights(path) starts from its weights",
    ]


def test_a_summary_of_weights_alone_promises_no_resume(tmp_path):
    trained(tmp_path / "w.ckpt", weights_only=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    assert [use.partition("(")[0] for use in checkpoints.inspect(tmp_path / "w.ckpt").uses] == [
        "YourModule.load_from_checkpoint",
        "module.load_weights",
    ]
    assert [use.partition("(")[0] for use in checkpoints.inspect(tmp_path / "w.pt").uses] == [
        "module.load_weights"
    ]


def test_a_folder_is_listed_newest_first_with_what_is_not_complete(anywhere):
    trained(f"{anywhere}/a.ckpt", steps=1)
    trained(f"{anywhere}/below/b.ckpt", steps=2, weights_only=True)
    with (
        fsspec.open(f"{anywhere}/a.ckpt", "rb") as file,
        fsspec.open(f"{anywhere}/c.ckpt", "wb") as cut,
    ):
        cut.write(file.read()[:500])
    with fsspec.open(f"{anywhere}/notes.txt", "wb") as other:
        other.write(b"no checkpoint")
    entries = checkpoints.list(anywhere)
    place = anywhere.removeprefix("file://")
    assert [(e.path, e.step, e.epoch, e.kind) for e in entries if e.complete] == [
        (f"{place}/below/b.ckpt", 2, 1, "weights"),
        (f"{place}/a.ckpt", 1, 0, "training"),
    ]
    assert [(e.path, e.step, e.epoch, e.kind, e.size) for e in entries if not e.complete] == [
        (f"{place}/c.ckpt", None, None, None, 500)
    ]
    times = [entry.time for entry in entries]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 1.7e9


def test_what_another_process_has_written_since_is_listed(s3):
    assert [*checkpoints.list(s3)] == []
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{s3}/cut.ckpt", b"PK")
    assert [(entry.path, entry.complete) for entry in checkpoints.list(s3)] == [
        (f"{s3}/cut.ckpt", False)
    ]


def test_a_link_to_a_checkpoint_is_listed_once(tmp_path):
    trained(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    os.link(tmp_path / "a.ckpt", tmp_path / "best.ckpt")
    assert [entry.path for entry in checkpoints.list(tmp_path)] == [str(tmp_path / "last.ckpt")]


def test_a_folder_that_is_empty_or_not_there_lists_nothing(tmp_path):
    assert [*checkpoints.list(tmp_path)] == []
    assert [*checkpoints.list(tmp_path / "none")] == []


def test_verifying_passes_a_whole_file_and_refuses_one_that_was_altered(anywhere):
    trained(f"{anywhere}/a.ckpt")
    assert checkpoints.verify(f"{anywhere}/a.ckpt") is None
    with fsspec.open(f"{anywhere}/a.ckpt", "rb") as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    with fsspec.open(f"{anywhere}/a.ckpt", "wb") as file:
        file.write(content)
    with pytest.raises(CheckpointError, match="was altered"):
        checkpoints.verify(f"{anywhere}/a.ckpt")
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        checkpoints.verify(f"{anywhere}/b.ckpt")


def test_weights_alone_are_what_torch_loads_into_a_module(anywhere):
    net = trained(f"{anywhere}/a.ckpt")
    checkpoints.convert(f"{anywhere}/a.ckpt", f"{anywhere}/w.pt")
    with fsspec.open(f"{anywhere}/w.pt", "rb") as file:
        weights = torch.load(file, weights_only=True)
    assert {type(value) for value in weights.values()} == {torch.Tensor}
    other = Net()
    other.load_state_dict(weights)
    assert torch.equal(other.layer.weight, net.layer.weight)


def test_safetensors_hold_the_same_weights(anywhere):
    net, other = trained(f"{anywhere}/a.ckpt"), Net()
    checkpoints.convert(f"{anywhere}/a.ckpt", f"{anywhere}/w.safetensors")
    assert other.load_weights(f"{anywhere}/w.safetensors").is_complete
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in net.state_dict().items())


def test_the_format_can_be_named(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    checkpoints.convert(tmp_path / "w.pt", tmp_path / "w", to="safetensors")
    with safe_open(tmp_path / "w", "pt") as file:
        assert file.get_tensor("a").tolist() == [1, 1]
    with pytest.raises(ConfigError, match=r"No format is called 'safetensor'\. Did you mean 'safe"):
        checkpoints.convert(tmp_path / "w.pt", tmp_path / "v", to="safetensor")


def test_tied_weights_are_in_safetensors_once_and_fit_a_module_that_ties_them(tmp_path):
    net, other = Tied(), Tied()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    checkpoints.convert(tmp_path / "w.pt", tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert [*file.keys()] == ["inside.weight"]
        assert file.metadata() == {"format": "pt", "outside.weight": "inside.weight"}
    assert other.load_weights(tmp_path / "w.safetensors").is_complete
    assert torch.equal(other.outside.weight, net.inside.weight)


def test_views_of_one_tensor_are_each_written_whole(tmp_path):
    whole, none = torch.arange(6.0).reshape(2, 3), torch.zeros(0)
    weights = {"row": whole[0], "whole": whole, "turned": whole.T, "none": none, "nil": none[:0]}
    torch.save(weights, tmp_path / "w.pt")
    checkpoints.convert(tmp_path / "w.pt", tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        found = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    assert found == {name: tensor.tolist() for name, tensor in weights.items()}


def test_a_target_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    (tmp_path / "file").touch()
    (tmp_path / "d.safetensors").mkdir()
    for name in ("file/w.safetensors", "file/w.ckpt", "d.safetensors"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoints.convert(tmp_path / "w.pt", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.safetensors", "file", "w.pt"]


def test_what_is_no_tensor_does_not_go_into_safetensors(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2), "a._extra_state": 1}}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"a\._extra_state: no tensor(.|\n)*Convert to 'wei"):
        checkpoints.convert(tmp_path / "w.pt", tmp_path / "w.safetensors")


def test_without_safetensors_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match="Install it: pip install safetensors"):
        checkpoints.convert(tmp_path / "w.safetensors", tmp_path / "w.pt")


def many():
    """Return weights of every size and dtype."""
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    small = {f"{dtype}": torch.ones(3, dtype=dtype) for dtype in dtypes}
    return small | {"big": torch.arange(600.0).reshape(20, 30), "none": torch.zeros(0, 2)}


def test_weights_are_dealt_to_several_files_with_an_index(tmp_path):
    torch.save(many(), tmp_path / "w.pt")
    target = tmp_path / "h" / "model.safetensors"
    checkpoints.convert(tmp_path / "w.pt", target, max_shard_size=64)
    index = json.loads((tmp_path / "h" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 24 + 6 + 3 + 24 + 3 + 2400}
    assert index["weight_map"]["big"] == "model-00002-of-00003.safetensors"
    found = {}
    for name in sorted({*index["weight_map"].values()}):
        found |= load_file(tmp_path / "h" / name)
    assert found.keys() == many().keys() == index["weight_map"].keys()
    for name, tensor in many().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].to(torch.float64), tensor.to(torch.float64))
    checkpoints.convert(f"{target}.index.json", tmp_path / "again.pt")
    assert torch.load(tmp_path / "again.pt").keys() == many().keys()


def test_weights_that_fit_into_one_file_have_no_index(tmp_path):
    torch.save(many(), tmp_path / "w.pt")
    checkpoints.convert(tmp_path / "w.pt", tmp_path / "w.safetensors", max_shard_size=10_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pt", "w.safetensors"]


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="names files outside of its folder"):
        Net().load_weights(index)


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"a is of torch\.complex128, which .* cannot hold"):
        checkpoints.convert(tmp_path / "w.pt", tmp_path / "w.safetensors")


@pytest.mark.parametrize(("size", "target"), [(0, "w.safetensors"), (9, "w.pt")])
def test_a_size_of_files_is_for_safetensors_and_more_than_nothing(tmp_path, size, target):
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=rf"max_shard_size={size} must be bytes"):
        checkpoints.convert(tmp_path / "w.pt", tmp_path / target, max_shard_size=size)


def test_a_sharded_checkpoint_becomes_one_file_and_back(tmp_path):
    trained(tmp_path / "a.ckpt")
    checkpoints.convert(tmp_path / "a.ckpt", tmp_path / "b.sharded", to="checkpoint")
    checkpoints.convert(tmp_path / "b.sharded", tmp_path / "c.ckpt", to="checkpoint")
    assert not checkpoints.diff(tmp_path / "a.ckpt", tmp_path / "b.sharded")
    assert not checkpoints.diff(tmp_path / "a.ckpt", tmp_path / "c.ckpt")


def test_two_of_one_run_differ_in_what_training_moved(tmp_path):
    trained(tmp_path / "a.ckpt", steps=1)
    trained(tmp_path / "b.ckpt", steps=2)
    found = checkpoints.diff(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    a, b = (torch.load(tmp_path / n, weights_only=True) for n in ("a.ckpt", "b.ckpt"))
    moved = (a["state_dict"]["layer.bias"] - b["state_dict"]["layer.bias"]).abs().max().item()
    assert found
    assert list(found.weights) == ["layer.weight", "layer.bias"]
    assert found.weights["layer.bias"].max_abs == pytest.approx(moved)
    assert (found.counters["step"].before, found.counters["step"].after) == (1, 2)
    assert found.hyper_parameters == found.versions == found.trainer == {}
    assert str(found.callbacks["Counts.count"]) == "1 -> 2"
    assert "0.param_groups.0.lr" in found.optimizers
    assert f"  layer.bias: differs by up to {moved:.3g}\n" in str(found)


def test_what_else_a_checkpoint_holds_is_compared_too(tmp_path):
    common = {"state_dict": {"a": torch.ones(1)}, "folder": "x"}
    torch.save({**common, "ranks": [{"rng": {"python": [1, 2]}}]}, tmp_path / "a.ckpt")
    torch.save({**common, "ranks": [{"rng": {"python": [1, 3]}}], "ema": 1}, tmp_path / "b.ckpt")
    assert str(checkpoints.diff(tmp_path / "a.ckpt", tmp_path / "b.ckpt")) == (
        "others: 2\n  ranks.0.rng.python.1: 2 -> 3\n  ema: added: 1"
    )


def test_two_of_one_state_differ_in_nothing(tmp_path):
    trained(tmp_path / "a.ckpt")
    first = checkpoints.open(tmp_path / "a.ckpt")
    found = checkpoints.diff(first, tmp_path / "a.ckpt")
    assert not found
    assert str(found) == "no difference"


def test_choices_and_hyperparameters_that_changed_are_named(tmp_path):
    trained(tmp_path / "a.ckpt", lr=0.1)
    trained(tmp_path / "b.ckpt", lr=0.2)
    found = checkpoints.diff(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert {name: str(change) for name, change in found.hyper_parameters.items()} == {
        "lr": "0.1 -> 0.2"
    }


def test_weights_that_only_one_has_or_of_another_kind_are_named(tmp_path):
    nan, one = torch.tensor([float("nan")]), torch.ones(2)
    torch.save({"a": one, "shape": one, "dtype": one, "nan": nan, "gone": one}, tmp_path / "a.pt")
    second = {"a": one, "shape": torch.ones(3), "dtype": one.half(), "nan": nan, "new": one}
    torch.save(second, tmp_path / "b.pt")
    found = checkpoints.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert str(found) == (
        "weights: 4\n"
        "  shape: float32 [2] -> float32 [3]\n"
        "  dtype: float32 [2] -> float16 [2]\n"
        "  gone: removed: float32 [2]\n"
        "  new: added: float32 [2]"
    )


def test_plain_torch_goes_on_from_a_checkpoint_as_the_trainer_does(tmp_path):
    net, plain = trained(tmp_path / "a.ckpt", steps=4), nn.Linear(3, 2)
    trained(tmp_path / "early.ckpt", steps=3)
    saved = torch.load(tmp_path / "early.ckpt", weights_only=True)
    plain.load_state_dict(
        {"weight": saved["state_dict"]["layer.weight"], "bias": saved["state_dict"]["layer.bias"]}
    )
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    plain(torch.arange(12.0).reshape(4, 3)[2:]).square().mean().backward()
    optimizer.step()
    assert torch.equal(plain.weight, net.layer.weight)


def test_a_fit_goes_on_from_what_plain_torch_saved(tmp_path):
    data, path = torch.arange(12.0).reshape(4, 3), tmp_path / "plain.ckpt"
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for batch in data.split(2):
        optimizer.zero_grad()
        net.training_step(batch, 0).backward()
        optimizer.step()
    state = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=-1)
    torch.save(
        {**state, "lr_schedulers": [schedule.state_dict()], "epoch": 1, "global_step": 2}, path
    )
    resumed = Net()
    trainer = Trainer(max_steps=3, logger=False, enable_checkpointing=False)
    trainer.fit(resumed, DataLoader(data, batch_size=2), ckpt_path=path)
    optimizer.zero_grad()
    net.training_step(data[:2], 0).backward()
    optimizer.step()
    assert torch.equal(resumed.layer.weight, net.layer.weight)


def test_an_evaluation_needs_no_state_of_optimizers(tmp_path):
    """PL #20373: to validate from a file of weights alone failed."""
    net = trained(tmp_path / "w.ckpt", weights_only=True)

    class Judge(Net):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx))

    data = torch.arange(12.0).reshape(4, 3)
    trainer = Trainer(logger=False, enable_progress_bar=False)
    (found,) = trainer.validate(Judge(), DataLoader(data, 4), ckpt_path=tmp_path / "w.ckpt")
    assert found["loss"] == pytest.approx(net.training_step(data, 0).item())


def test_every_way_back_to_a_checkpoint_takes_hyperparameters_that_are_objects(tmp_path):
    """PL #21757: files with paths and dataclasses in them were not read by who wrote them."""

    class Judged(Net):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx))

    def fit(**how):
        saver = ModelCheckpoint(dirpath=tmp_path, monitor="loss", save_last=True)
        trainer = Trainer(logger=False, enable_progress_bar=False, callbacks=saver, **how)
        return trainer, Judged(numpy.float64(0.1), Layout(3), Path("data"))

    data = DataLoader(torch.arange(12.0).reshape(4, 3), batch_size=2)
    trainer, net = fit(max_epochs=1)
    trainer.fit(net, data, data)
    trainer.validate(net, data, ckpt_path="best", verbose=False)
    trainer, net = fit(max_epochs=2)
    trainer.fit(net, data, data, ckpt_path=tmp_path / "last.ckpt")
    again = Judged.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.hparams == {"lr": 0.1, "layout": Layout(3), "folder": Path("data")}
    assert [type(value) for value in again.hparams.values()] == [
        numpy.float64, Layout, type(Path())
    ]  # fmt: skip


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    class Odd(Net):
        def configure_optimizers(self):
            (optimizer,), (schedule,) = super().configure_optimizers()
            schedule.noted = Layout()
            return [optimizer], [schedule]

    trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(Odd(), DataLoader(torch.ones(2, 3)))
    with pytest.raises(CheckpointError, match=r"lr_schedulers\.0\.noted is of type Layout, which"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_the_module_is_there_as_an_attribute_and_loads_no_optional_package():
    check = (
        "import leyden, sys; leyden.checkpoints.open; "
        "assert not {'fsspec', 'safetensors', 's3fs'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_page_on_checkpoints_shows_runs(tmp_path):
    """Each block goes on from the ones above it, as a reader does."""
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(code))
    command = [sys.executable, "-W", "error", "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    size = (tmp_path / "runs" / "steps=3.ckpt").stat().st_size
    for line in re.sub(r"20,045", f"{size:,}", first).splitlines():
        assert line in [*done.stdout.splitlines(), "  …"]
    assert all(text in done.stdout for text in shown)


def test_the_page_on_checkpoints_names_every_entry(tmp_path):
    trained(tmp_path / "a.ckpt")
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    rows = {
        n
        for line in page.splitlines()
        if line[:3] == "| `"
        for n in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    checkpoint = checkpoints.open(tmp_path / "a.ckpt")
    optional = {"datamodule_hyper_parameters", "datamodule"}
    assert rows == {*checkpoint, *checkpoint.manifest} | optional
