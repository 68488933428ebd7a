"""FileCheckpointer: one file a checkpoint, whole or absent."""

import errno
import resource

import pytest
import torch

from leyden import CheckpointError, ConfigError
from leyden.plugins import FileCheckpointer


class Opaque:
    """Something a checkpoint must not hold."""


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "epoch=1.ckpt"
    FileCheckpointer().save({"w": torch.ones(500)}, str(path))
    return path


@pytest.fixture
def full_disk():
    """Let no file grow beyond 2,000 bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_on_a_full_disk_says_so_and_leaves_the_older_file(saved, full_disk):
    before = saved.read_bytes()
    with pytest.raises(CheckpointError, match=r"File too large\. Make room there"):
        FileCheckpointer().save({"w": torch.zeros(5_000)}, str(saved))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_second_name_of_a_file_keeps_what_it_held(saved):
    other = saved.with_name("last.ckpt")
    other.hardlink_to(saved)
    FileCheckpointer().save({"w": torch.zeros(500)}, str(saved))
    assert FileCheckpointer().load(str(other))["w"].sum() == 500


def test_interrupted_save_leaves_the_older_file_and_nothing_else(saved):
    class Interrupting:
        def __reduce__(self):
            raise KeyboardInterrupt

    before = saved.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        FileCheckpointer().save({"a": torch.zeros(500), "b": Interrupting()}, str(saved))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_save_below_a_file_names_the_obstacle(saved):
    with pytest.raises(CheckpointError, match="save in a folder that can be written") as raised:
        FileCheckpointer().save({}, str(saved / "a.ckpt"))
    assert raised.value.__cause__.errno in (errno.EEXIST, errno.ENOTDIR)


def test_save_of_what_cannot_be_pickled_says_what_to_put_in_its_place(tmp_path):
    with pytest.raises(CheckpointError, match="Put only tensors and plain values"):
        FileCheckpointer().save({"f": lambda: None}, str(tmp_path / "a.ckpt"))


def test_missing_file_is_answered_with_what_its_folder_holds(saved):
    with pytest.raises(CheckpointError, match=r"holds: epoch=1\.ckpt\. Did you mean 'epoch"):
        FileCheckpointer().load(str(saved.with_name("epoch=11.ckpt")))


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"folder '.*/absent' does not exist"):
        FileCheckpointer().load(str(tmp_path / "absent" / "a.ckpt"))


def test_folder_in_place_of_a_file_is_answered_with_what_it_holds(saved):
    with pytest.raises(CheckpointError, match=r"It is a folder, which holds: epoch=1\.ckpt"):
        FileCheckpointer().load(str(saved.parent))


@pytest.mark.parametrize("size", [0, 1, 700, -1])
def test_truncated_file_is_no_checkpoint(saved, size):
    saved.write_bytes(saved.read_bytes()[:size])
    assert not FileCheckpointer().exists(str(saved))
    with pytest.raises(CheckpointError, match="not a checkpoint, or was cut short"):
        FileCheckpointer().load(str(saved))


def test_file_with_an_object_in_it_is_refused_by_the_name_of_its_class(tmp_path):
    torch.save({"x": Opaque()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"holds .*Opaque, no tensor or plain value"):
        FileCheckpointer().load(str(tmp_path / "a.ckpt"))


def test_file_that_holds_no_dict_is_no_checkpoint(tmp_path):
    torch.save(torch.ones(2), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds a Tensor, not a checkpoint"):
        FileCheckpointer().load(str(tmp_path / "a.ckpt"))


def test_damaged_content_is_told_with_the_readers_words(saved):
    whole = saved.read_bytes()
    at = whole.index(b"PK\x01\x02")  # the index of the archive, which names every part
    saved.write_bytes(whole[:at] + whole[at:].replace(b"data.pkl", b"data.xyz"))
    with pytest.raises(CheckpointError, match="cannot be read: "):
        FileCheckpointer().load(str(saved))


def test_file_url_is_a_local_path(saved):
    assert FileCheckpointer().exists(f"file://{saved}")
    assert FileCheckpointer().load(f"file://{saved}")["w"].sum() == 500


def test_remote_url_is_refused(saved):
    with pytest.raises(ConfigError, match="remote saves are not available yet"):
        FileCheckpointer().save({}, "s3://bucket/a.ckpt")


def test_saved_file_can_be_read_by_those_whom_the_umask_allows(saved):
    (saved.parent / "plain").touch()
    assert saved.stat().st_mode == (saved.parent / "plain").stat().st_mode
