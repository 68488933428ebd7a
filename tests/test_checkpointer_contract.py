"""What every registered checkpointer keeps to."""

import pytest
import torch

from leyden.errors import CheckpointError
from leyden.manager import Registry
from leyden.protocols import Checkpointer

REGISTRY = Registry()
CHECKPOINT = {
    "state_dict": {"net.weight": torch.arange(6.0).reshape(2, 3)},
    "optimizer": [{"momentum": torch.ones(3, dtype=torch.bfloat16)}],
    "state": {"step": 7, "elapsed": 1.5, "stop": None, "names": ["a", "b"]},
}


@pytest.fixture(params=sorted(REGISTRY.listed("checkpointer")))
def checkpointer(request):
    return REGISTRY.make("checkpointer", request.param)


def test_checkpointer_has_what_the_loop_asks_of_one(checkpointer):
    assert isinstance(checkpointer, Checkpointer)
    assert checkpointer.extension.startswith(".")


def test_loaded_checkpoint_equals_the_saved_one(checkpointer, tmp_path):
    path = str(tmp_path / f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    loaded = checkpointer.load(path)
    assert loaded["state"] == CHECKPOINT["state"]
    for part in ("state_dict", "optimizer"):
        torch.testing.assert_close(loaded[part], CHECKPOINT[part], rtol=0, atol=0)


def test_save_makes_the_folders_of_its_path(checkpointer, tmp_path):
    path = str(tmp_path / "new" / "folder" / f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    assert checkpointer.exists(path)


def test_second_save_replaces_the_first(checkpointer, tmp_path):
    path = str(tmp_path / f"a{checkpointer.extension}")
    checkpointer.save({"state": {"step": 1}}, path)
    checkpointer.save({"state": {"step": 2}}, path)
    assert checkpointer.load(path) == {"state": {"step": 2}}


def test_failed_save_leaves_the_checkpoint_before_it_and_nothing_else(checkpointer, tmp_path):
    path = str(tmp_path / f"a{checkpointer.extension}")
    checkpointer.save({"state": {"step": 1}}, path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpointer.save({"state": {"step": 2}, "function": lambda: None}, path)
    assert checkpointer.load(path) == {"state": {"step": 1}}
    assert sorted(tmp_path.rglob("*")) == before


def test_removed_checkpoint_is_gone_and_can_be_removed_again(checkpointer, tmp_path):
    path = str(tmp_path / f"a{checkpointer.extension}")
    assert not checkpointer.exists(path)
    checkpointer.save(CHECKPOINT, path)
    assert checkpointer.exists(path)
    checkpointer.remove(path)
    checkpointer.remove(path)
    assert not checkpointer.exists(path)
    assert list(tmp_path.iterdir()) == []


def test_loading_a_missing_checkpoint_is_refused(checkpointer, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpointer.load(str(tmp_path / f"a{checkpointer.extension}"))


def test_tensors_are_loaded_where_map_location_says(checkpointer, tmp_path):
    path = str(tmp_path / f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    loaded = checkpointer.load(path, map_location="meta")
    assert loaded["state_dict"]["net.weight"].device.type == "meta"
