"""Checkpoints in a folder: whole or absent, and read without running code from them."""

import json
import os
import pickle
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch.distributed import checkpoint as dcp

from leyden import CheckpointError
from leyden.plugins import ModelCheckpoint
from leyden.plugins.sharded_checkpointing import ShardedCheckpointer
from leyden.testing import Regression, batches, quiet_trainer

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
