"""What every registered checkpointer keeps to, wherever the checkpoints are."""

from multiprocessing import get_context

import fsspec
import pytest
import torch

from leyden.errors import CheckpointError, ConfigError
from leyden.locations import is_remote, join, local
from leyden.manager import Registry
from leyden.protocols import Checkpointer

REGISTRY = Registry()
CHECKPOINT = {
    "leyden": {"format": 1, "time": 7.5, "total_batches": 3, "git": None, "host": "Zürich"},
    "state_dict": {"net.weight": torch.arange(6.0).reshape(2, 3)},
    "optimizer": [{"momentum": torch.ones(3, dtype=torch.bfloat16)}],
    "state": {"step": 7, "elapsed": 1.5, "stop": None, "names": ["a", "b"]},
}


def at(time, total_batches=0):
    return {"leyden": {"time": time, "total_batches": total_batches}, "w": torch.tensor(time)}


@pytest.fixture(params=sorted(REGISTRY.listed("checkpointer")))
def checkpointer(request):
    return REGISTRY.make("checkpointer", request.param)


def names_in(folder):
    """Return the names in ``folder``, hidden ones too."""
    system, place = fsspec.url_to_fs(folder if is_remote(folder) else str(local(folder)))
    system.invalidate_cache()
    return sorted({found.removeprefix(f"{place}/").split("/")[0] for found in system.find(place)})


def test_checkpointer_has_what_the_loop_asks_of_one(checkpointer):
    assert isinstance(checkpointer, Checkpointer)
    assert checkpointer.extension.startswith(".")


def test_loaded_checkpoint_equals_the_saved_one(checkpointer, anywhere):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    loaded = checkpointer.load(path)
    assert loaded["state"] == CHECKPOINT["state"]
    assert loaded["leyden"] == CHECKPOINT["leyden"]
    for part in ("state_dict", "optimizer"):
        torch.testing.assert_close(loaded[part], CHECKPOINT[part], rtol=0, atol=0)
    checkpointer.verify(path)


def test_second_save_replaces_the_first(checkpointer, anywhere):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save({"state": {"step": 1}}, path)
    checkpointer.save({"state": {"step": 2}}, path)
    assert checkpointer.load(path) == {"state": {"step": 2}}
    assert names_in(anywhere) == [f"a{checkpointer.extension}"]


@pytest.mark.parametrize("extra", [{"f": lambda: None}, {"leyden": {"a": [1]}}])
def test_failed_save_leaves_the_checkpoint_before_it_and_nothing_else(
    checkpointer, anywhere, extra
):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save({"state": {"step": 1}}, path)
    with pytest.raises(CheckpointError, match=r"cannot be written, and .* Put only tensors"):
        checkpointer.save({"w": torch.ones(500_000), "state": {"step": 2}, **extra}, path)
    assert checkpointer.load(path) == {"state": {"step": 1}}
    assert names_in(anywhere) == [f"a{checkpointer.extension}"]


def test_manifest_is_what_was_saved_with_size_and_checksum(checkpointer, anywhere):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    manifest = checkpointer.manifest(path)
    assert manifest.pop("size") > 0 and manifest.pop("checksum")
    assert manifest == CHECKPOINT["leyden"]


def test_missing_checkpoint_is_told_with_what_is_there(checkpointer, anywhere):
    path = join(anywhere, f"epoch=11{checkpointer.extension}")
    for ask in (checkpointer.load, checkpointer.manifest, checkpointer.verify):
        with pytest.raises(CheckpointError, match=r"There is no checkpoint '.*/epoch=11"):
            ask(path)
    checkpointer.save(at(1), join(anywhere, f"epoch=1{checkpointer.extension}"))
    with pytest.raises(CheckpointError, match=r"holds: epoch=1.*Did you mean 'epoch=1"):
        checkpointer.load(path)
    with pytest.raises(CheckpointError, match="It is a folder, which holds: epoch=1"):
        checkpointer.load(anywhere)
    assert not checkpointer.exists(path)
    assert not checkpointer.exists(anywhere)


def test_found_are_those_below_a_folder_the_newest_first(checkpointer, anywhere):
    names = ["b", "deep/er/a", "c", "d"]
    paths = [join(anywhere, f"{name}{checkpointer.extension}") for name in names]
    for path, age in zip(paths, [(3.0, 1), (2.0, 9), (3.0, 2), (40.0, 0)], strict=True):
        checkpointer.save(at(*age), path)
    checkpointer.save(at(50.0), join(anywhere, f".hidden{checkpointer.extension}"))
    checkpointer.save(at(50.0), join(anywhere, "of another kind"))
    checkpointer.save(at(50.0), join(f"{anywhere}2", f"a{checkpointer.extension}"))
    assert checkpointer.find(anywhere) == [paths[3], paths[2], paths[0], paths[1]]
    assert checkpointer.find(f"{anywhere}/") == checkpointer.find(anywhere)
    assert checkpointer.find(join(anywhere, "deep")) == [paths[1]]
    assert checkpointer.find(join(anywhere, "absent")) == []


def test_checkpoints_of_other_processes_are_seen(checkpointer, anywhere):
    if anywhere.startswith("memory"):
        pytest.skip("memory is a process's own")
    first, second = (join(anywhere, f"{n}{checkpointer.extension}") for n in "ab")
    checkpointer.save(at(1), first)
    assert checkpointer.find(anywhere) == [first]
    with pytest.raises(CheckpointError, match=r"[Nn]o .*checkpoint"):  # which lists the folder
        checkpointer.load(second)
    child = get_context("spawn").Process(target=checkpointer.save, args=(at(2), second))
    child.start()
    child.join()
    assert checkpointer.exists(second)
    assert checkpointer.find(anywhere) == [second, first]
    assert checkpointer.load(second) == at(2)


@pytest.mark.parametrize("symbolic", [False, True])
def test_copy_is_a_second_name_and_found_once(checkpointer, anywhere, symbolic):
    first, last = (join(anywhere, f"{n}{checkpointer.extension}") for n in ("epoch=1", "last"))
    checkpointer.save(at(1), last)
    checkpointer.save(at(2), first)
    checkpointer.copy(first, last, symbolic=symbolic)
    assert checkpointer.load(last) == checkpointer.load(first) == at(2)
    assert checkpointer.find(anywhere) == [last]
    assert len(names_in(anywhere)) == 2
    checkpointer.remove(last)
    assert checkpointer.load(first) == at(2)


def test_first_name_can_be_replaced_without_the_copy(checkpointer, anywhere):
    first, last = (join(anywhere, f"{n}{checkpointer.extension}") for n in ("epoch=1", "last"))
    checkpointer.save(at(1), first)
    checkpointer.copy(first, last)
    checkpointer.copy(last, last)
    checkpointer.save(at(2), first)
    assert checkpointer.load(last) == at(1)
    checkpointer.remove(first)
    assert checkpointer.find(anywhere) == [last]


def test_copy_of_nothing_is_refused_and_changes_nothing(checkpointer, anywhere):
    last = join(anywhere, f"last{checkpointer.extension}")
    checkpointer.save(at(1), last)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint '.*/absent"):
        checkpointer.copy(join(anywhere, f"absent{checkpointer.extension}"), last)
    assert checkpointer.load(last) == at(1)
    assert len(names_in(anywhere)) == 1


def test_copy_goes_to_another_file_system(checkpointer, anywhere, tmp_path):
    here, there = str(tmp_path / "a.ckpt"), join(anywhere, "a.ckpt")
    back = str(tmp_path / "back" / "a.ckpt")
    checkpointer.save(at(1), here)
    checkpointer.copy(here, there)
    checkpointer.copy(there, back)
    assert checkpointer.load(there) == checkpointer.load(back) == at(1)


def test_removed_checkpoint_is_gone_and_can_be_removed_again(checkpointer, anywhere):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    assert checkpointer.exists(path)
    checkpointer.remove(path)
    checkpointer.remove(path)
    assert not checkpointer.exists(path)
    assert names_in(anywhere) == []


def test_folder_that_cannot_be_made_is_refused(checkpointer, anywhere):
    path = join(anywhere, "a.ckpt")
    fsspec.open(path if is_remote(path) else str(local(path)), "wb", auto_mkdir=True).open().close()
    if anywhere.startswith("s3://"):
        path = "s3://bucket-that-is-not-there/runs"
    with pytest.raises(ConfigError, match=r"cannot be saved in .* Pass another folder"):
        checkpointer.prepare(path)


def test_tensors_are_loaded_where_map_location_says(checkpointer, anywhere):
    path = join(anywhere, f"a{checkpointer.extension}")
    checkpointer.save(CHECKPOINT, path)
    loaded = checkpointer.load(path, map_location="meta")
    assert loaded["state_dict"]["net.weight"].device.type == "meta"
