"""Checkpoints in a folder: whole or absent, and read without running code from them."""

import copy
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from leyden import CheckpointError
from leyden.plugins import ModelCheckpoint
from leyden.plugins.sharded_checkpointing import ShardedCheckpointer
from leyden.plugins.stored_tensors import StoredTensor
from leyden.testing import Regression, batches, on_ranks, quiet_trainer

CHECKPOINT = {
    "leyden": {"format": 1, "time": 7.5, "total_batches": 3, "kind": "training"},
    "state_dict": {"net.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)},
    "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3, dtype=torch.bfloat16)}}}],
    "pair": (1, torch.zeros(0)),
}
keeper = ShardedCheckpointer()


def saved(folder, name="a", **changed):
    path = str(folder / f"{name}.sharded")
    keeper.save(CHECKPOINT | changed, path)
    return path


def data_of(path):
    return json.loads(Path(path, "manifest.json").read_text())["data"]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)
    else:
        assert one == other


@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_what_is_loaded_is_what_was_saved(place, tmp_path, request):
    folder = {"local": str(tmp_path), "memory": f"memory://{tmp_path.name}"}.get(place)
    path = f"{folder or request.getfixturevalue('s3')}/x/a.sharded"
    keeper.save(CHECKPOINT, path)
    assert_same(keeper.load(path), CHECKPOINT)
    assert keeper.exists(path)
    assert keeper.manifest(path)["total_batches"] == 3
    keeper.copy(path, path.replace("a.sh", "b.sh"))
    keeper.save({**CHECKPOINT, "leyden": {"time": 9.0}}, path)
    assert keeper.find(path.rpartition("/")[0]) == [path, path.replace("a.sh", "b.sh")]
    assert_same(keeper.load(path.replace("a.sh", "b.sh")), CHECKPOINT)
    keeper.remove(path)
    assert not keeper.exists(path)


def test_a_save_replaces_all_of_the_one_before(tmp_path):
    path = saved(tmp_path)
    saved(tmp_path, more=torch.ones(2))
    data = data_of(path)
    assert {entry.name for entry in Path(path).iterdir()} == {"manifest.json", data}


def test_one_without_its_manifest_is_none(tmp_path):
    path = saved(tmp_path)
    Path(path, "manifest.json").unlink()
    assert not keeper.exists(path)
    assert keeper.find(str(tmp_path)) == []
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*It is a folder"):
        keeper.load(path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "rest.pt"])
def test_a_flipped_bit_in_any_file_is_found_before_it_is_loaded(tmp_path, name):
    path = saved(tmp_path)
    file = Path(path, data_of(path), name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for read in (keeper.load, keeper.verify):
        with pytest.raises(CheckpointError, match=rf"its file '{name}' is not as it was written"):
            read(path)


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def forged(path, index):
    """Give the checkpoint another index, and a manifest that fits it."""
    manifest = Path(path, "manifest.json")
    entries = json.loads(manifest.read_text())
    data = Path(path, entries["data"])
    (data / ".metadata").write_bytes(index)
    entries["files"] = keeper._sums(str(data))
    listed = json.dumps(entries["files"], sort_keys=True).encode()
    entries["checksum"] = f"crc32:{crc32(listed):08x}"
    manifest.write_text(json.dumps(entries))


def test_an_index_that_would_run_code_is_refused(tmp_path):
    path, canary = saved(tmp_path), tmp_path / "canary"
    forged(path, pickle.dumps(Hostile(str(canary))))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which is no description"):
        keeper.load(path)
    assert not canary.exists()


def test_a_pickled_item_is_refused(tmp_path):
    path, other = saved(tmp_path), tmp_path / "other"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"item": {1, 2}}, checkpoint_id=str(other), no_dist=True)
    forged(path, (other / ".metadata").read_bytes())
    with pytest.raises(CheckpointError, match=r"BytesStorageMetadata, which is no description"):
        keeper.load(path)


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    path = saved(tmp_path)
    data = Path(path, data_of(path))
    index = (data / ".metadata").read_bytes()
    assert b"__0_0.distcp" in index
    forged(path, index.replace(b"__0_0.distcp", b"../../outsid"))
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./outsid', which is not beside"):
        keeper.load(path)


def test_a_run_is_saved_and_resumed_in_folders(tmp_path):
    def fitted(steps):
        saver = ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_last=True)
        trainer = quiet_trainer(
            max_steps=steps, max_epochs=-1, callbacks=saver, checkpointer=ShardedCheckpointer(),
            enable_checkpointing=True,
        )  # fmt: skip
        torch.manual_seed(1)
        module = Regression()
        trainer.fit(module, batches(3), ckpt_path="auto")
        return module, saver

    fitted(4)
    resumed, saver = fitted(7)
    unbroken = Regression()
    torch.manual_seed(1)
    unbroken = Regression()
    quiet_trainer(max_steps=7, max_epochs=-1).fit(unbroken, batches(3))
    assert saver.last_model_path.endswith("last.sharded")
    assert_same(dict(resumed.state_dict()), dict(unbroken.state_dict()))


# Several ranks


def split(whole, dim=0):
    """Return ``whole`` in parts, of which every rank has one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, [Shard(dim)])


def join():
    dist.init_process_group("gloo")
    return dist.get_rank()


def parts_of(rank):
    """Return a checkpoint that differs between ranks as those of a run do."""
    tensors = {
        "split": split(torch.arange(35.0).reshape(7, 5)),
        "wide": split(torch.arange(12.0, dtype=torch.float64).reshape(2, 6), 1),
        "plain": torch.full((3,), float(rank)),
    }
    return {"leyden": {"time": 1.0}, "state_dict": tensors, "callbacks": {"rank": rank}}


def save_parts(path, environment=()):
    os.environ.update(environment)
    rank = join()
    keeper.save(parts_of(rank), path)
    keeper.teardown()


WHOLE = {
    "leyden": {"time": 1.0},
    "state_dict": {
        "split": torch.arange(35.0).reshape(7, 5),
        "wide": torch.arange(12.0, dtype=torch.float64).reshape(2, 6),
        "plain": torch.zeros(3),
    },
    "callbacks": {"rank": 0},
}


@pytest.mark.parametrize("place", ["local", "s3"])
def test_each_rank_writes_its_parts_and_rank_0_all_else(place, tmp_path, request):
    folder = str(tmp_path) if place == "local" else request.getfixturevalue("s3")
    path = f"{folder}/a.sharded"
    on_ranks(3, save_parts, path, {k: v for k, v in os.environ.items() if k.startswith("AWS_")})
    assert_same(keeper.load(path), WHOLE)
    assert keeper.find(folder) == [path]
    if place == "local":
        names = {entry.name for entry in Path(path, data_of(path)).iterdir()}
        assert names == {".metadata", "rest.pt", *(f"__{rank}_0.distcp" for rank in range(3))}


class FullDisk(ShardedCheckpointer):
    """Cannot write on one rank: its tensors, or what rank 0 writes besides."""

    def __init__(self, rank, method):
        super().__init__()
        self.on, self.method = rank, method

    def _fails(self, name):
        if self.method == name and dist.get_rank() == self.on:
            raise OSError(28, "No space left on device")

    def _writer(self, data):
        writer = super()._writer(data)
        if self.method == "tensors" and dist.get_rank() == self.on:
            writer.write_data = lambda *_: self._fails("tensors")
        return writer

    def _write_rest(self, rest, data):
        self._fails("rest")
        super()._write_rest(rest, data)


def fail_to_save(path, rank, method):
    own = join()
    with pytest.raises(CheckpointError, match=r"what was there before is kept: No space left"):
        FullDisk(rank, method).save(parts_of(own), path)
    return keeper.load(path)["state_dict"]["plain"]


@pytest.mark.parametrize(("rank", "method"), [(0, "rest"), (1, "tensors"), (0, "tensors")])
def test_what_one_rank_cannot_write_is_an_error_on_all(tmp_path, rank, method):
    path = saved(tmp_path, state_dict={"plain": torch.ones(1)})
    for plain in on_ranks(2, fail_to_save, path, rank, method):
        assert_same(plain, torch.ones(1))
    assert {entry.name for entry in Path(path).iterdir()} == {"manifest.json", data_of(path)}


class Killed(ShardedCheckpointer):
    def _writer(self, data):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._writer(data)


def save_and_die(path, left):
    rank = join()
    try:
        Killed().save(parts_of(rank), path)
    except CheckpointError as error:
        Path(left).write_text(str(error))


def test_rank_killed_in_a_save_leaves_the_one_before(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(AssertionError, match="rank 1 died"):
        on_ranks(2, save_and_die, path, str(tmp_path / "left"))
    assert_same(keeper.load(path), CHECKPOINT)
    assert "cannot be written" in (tmp_path / "left").read_text()


def read_parts(path):
    join()
    view, target = keeper.view(path, is_verified=True), split(torch.zeros(7, 5))
    stored = view["state_dict"]["split"]
    if hasattr(stored, "read_into"):
        stored.read_into(target)
    else:
        target = split(stored)
    return target.to_local(), target.full_tensor()


def test_ranks_read_their_parts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("leyden.plugins.sharded_checkpointing._SMALL", 0)
    path = str(tmp_path / "a.sharded")
    on_ranks(3, save_parts, path)
    assert_same(keeper.load(path), WHOLE)
    for _, full in on_ranks(2, read_parts, path):
        assert_same(full, WHOLE["state_dict"]["split"])


def stored(tmp_path, monkeypatch):
    monkeypatch.setattr("leyden.plugins.sharded_checkpointing._SMALL", 0)
    return keeper.view(saved(tmp_path))["state_dict"]["net.weight"], torch.arange(6.0).reshape(2, 3)


def test_a_viewed_tensor_is_read_as_it_is_used(tmp_path, monkeypatch):
    tensor, expected = stored(tmp_path, monkeypatch)
    assert isinstance(tensor, StoredTensor)
    assert (tensor.shape, tensor.dtype, tensor.numel()) == ((2, 3), torch.float32, 6)
    assert repr(tensor) == "StoredTensor([2, 3], torch.float32)"
    assert_same(tensor + 1, expected + 1)
    assert_same(tensor[1:, ::2], expected[1:, ::2])
    assert_same(torch.zeros(2, 3).copy_(tensor), expected)
    assert_same(tensor.clone(), expected)
    assert tensor.numpy().tolist() == tensor.tolist() == expected.tolist()
    assert_same(pickle.loads(pickle.dumps(tensor)), expected)
    assert copy.deepcopy(tensor).detach() is tensor.detach()
    torch.save({"a": tensor}, tmp_path / "b.pt")
    assert_same(torch.load(tmp_path / "b.pt"), {"a": expected})


def test_a_viewed_tensor_whose_file_is_gone_says_so(tmp_path, monkeypatch):
    tensor, _ = stored(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "a.sharded")
    with pytest.raises(CheckpointError, match=r"The tensors in .* cannot be read: No such file"):
        tensor.clone()
