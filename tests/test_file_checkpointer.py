"""FileCheckpointer: one file a checkpoint, whole or absent, and altered ones recognised."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch

from leyden import CheckpointError
from leyden.locations import is_remote, join, local
from leyden.plugins import FileCheckpointer
from leyden.testing import Regression, batches, quiet_trainer

SAVE_FOR_EVER = """
import sys, torch
from leyden.plugins import FileCheckpointer
print("ready", flush=True)
for turn in range(1, 100_000):
    state = {"leyden": {"total_batches": turn}, "w": torch.full((400_000,), float(turn))}
    FileCheckpointer().save(state, sys.argv[1])
"""


class Opaque:
    """Something a checkpoint must not hold."""


def reached(path):
    return fsspec.url_to_fs(path if is_remote(path) else str(local(path)))


def files_in(folder):
    """Return all that is in ``folder`` and below it, hidden files too."""
    system, place = reached(folder)
    system.invalidate_cache()
    return sorted(found.removeprefix(f"{place}/") for found in system.find(place))


def written(path):
    system, place = reached(path)
    return system.cat_file(place)


def rewrite(path, content):
    system, place = reached(path)
    if not is_remote(path):
        local(path).parent.mkdir(parents=True, exist_ok=True)
    system.pipe_file(place, content)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "epoch=1.ckpt"
    FileCheckpointer().save({"leyden": {"time": 5.0}, "w": torch.ones(500)}, str(path))
    return path


@contextmanager
def full_disk():
    """Let no file grow beyond 2,000 bytes inside, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        yield
    finally:  # before anything is reported, which may go into a file too
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_is_read_by_torch_alone(saved):
    for mmap in (False, True):
        loaded = torch.load(saved, weights_only=True, mmap=mmap)
        assert loaded["leyden"] == {"time": 5.0}
        assert loaded["w"].sum() == 500


def test_manifest_is_the_comment_of_the_archive(saved):
    text, own_sum = zipfile.ZipFile(saved).comment.rsplit(b"\n", 1)
    manifest = json.loads(text)
    assert own_sum == b"crc32:%08x" % zlib.crc32(text)
    body = saved.read_bytes()[: manifest["size"]]
    assert manifest["checksum"] == f"crc32:{zlib.crc32(body[:-2] + bytes(2)):08x}"
    assert FileCheckpointer().manifest(str(saved)) == manifest


@pytest.mark.parametrize("entries", [0, 1, 3000])
def test_state_of_any_number_of_parts_is_whole(tmp_path, entries):
    state = {str(i): torch.full((i % 7,), i) for i in range(entries)}
    FileCheckpointer().save(state, str(tmp_path / "a.ckpt"))
    FileCheckpointer().verify(str(tmp_path / "a.ckpt"))
    loaded = FileCheckpointer().load(str(tmp_path / "a.ckpt"))
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)


def test_any_flipped_bit_is_recognised_before_anything_is_loaded(saved):
    whole, rng = saved.read_bytes(), random.Random(0)
    comment = FileCheckpointer().manifest(str(saved))["size"]
    ends = [*range(64), *range(comment - 30, len(whole))]
    for at in ends + rng.sample(range(len(whole)), 200):
        altered = bytearray(whole)
        altered[at] ^= 1 << rng.randrange(8)
        saved.write_bytes(altered)
        for ask in (FileCheckpointer().load, FileCheckpointer().verify):
            with pytest.raises(CheckpointError, match="Copy it again, or resume from an") as raised:
                ask(str(saved))
            assert "cannot be read:" not in str(raised.value)  # torch's words


def test_any_truncated_file_is_recognised(saved):
    whole, rng = saved.read_bytes(), random.Random(0)
    comment = FileCheckpointer().manifest(str(saved))["size"]
    sizes = [*range(30), *range(comment - 30, len(whole)), *rng.sample(range(len(whole)), 100)]
    for size in sizes:
        saved.write_bytes(whole[:size])
        assert not FileCheckpointer().exists(str(saved))
        with pytest.raises(CheckpointError, match=rf"\({size:,} bytes\) is not a checkpoint, or"):
            FileCheckpointer().load(str(saved))


@pytest.mark.parametrize("added", [b"\0", b"\n", b"PK\x05\x06" + bytes(18), bytes(70_000)])
def test_file_with_more_at_its_end_is_recognised(saved, added):
    saved.write_bytes(saved.read_bytes() + added)
    assert not FileCheckpointer().find(str(saved.parent)) or added.startswith(b"PK")
    with pytest.raises(CheckpointError, match="Copy it again, or resume from an older one"):
        FileCheckpointer().load(str(saved))


def test_file_without_a_manifest_is_taken_as_it_is(tmp_path):
    path = tmp_path / "foreign.ckpt"
    torch.save({"w": torch.ones(500)}, path)
    os.utime(path, (100, 100))
    checkpointer = FileCheckpointer()
    assert checkpointer.exists(str(path))
    assert checkpointer.load(str(path))["w"].sum() == 500
    assert checkpointer.manifest(str(path)) == {"size": path.stat().st_size, "time": 100.0}
    for name, age in (("older", 99.0), ("newer", 101.0)):
        checkpointer.save({"leyden": {"time": age}}, str(tmp_path / f"{name}.ckpt"))
    found = [Path(p).name for p in checkpointer.find(str(tmp_path))]
    assert found == ["newer.ckpt", "foreign.ckpt", "older.ckpt"]
    altered = bytearray(path.read_bytes())
    altered[altered.index(torch.ones(500).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(altered)
    with pytest.raises(CheckpointError, match="checksum of its part 'foreign/data/0' does not"):
        checkpointer.verify(str(path))


def test_file_from_before_archives_is_read(tmp_path):
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert FileCheckpointer().load(str(tmp_path / "a.pt"))["w"].sum() == 5


def test_save_on_a_full_disk_says_so_and_leaves_the_older_file(saved):
    before, message = saved.read_bytes(), r"is kept: File too large\. Make room there"
    with pytest.raises(CheckpointError, match=message), full_disk():
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


def test_signal_in_the_midst_of_writing_leaves_the_older_file_and_nothing_else(saved, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before, handler = saved.read_bytes(), signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.002, 0.01, 0.02):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(KeyboardInterrupt):
                FileCheckpointer().save({"w": torch.zeros(30_000_000)}, str(saved))
            assert saved.read_bytes() == before
            assert list(saved.parent.iterdir()) == [saved]
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_killed_save_leaves_the_older_or_the_newer_state(saved):
    rng, turn, torn = random.Random(1), 0, 0
    for _ in range(8):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(saved)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.05, 0.2))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        loaded = FileCheckpointer().load(str(saved))
        turn = loaded["leyden"].get("total_batches", turn)
        assert (loaded["w"] == max(turn, 1)).all()
        assert FileCheckpointer().find(str(saved.parent)) == [str(saved)]
        torn += len(list(saved.parent.iterdir())) > 1
        FileCheckpointer().prepare(str(saved.parent))
        assert list(saved.parent.iterdir()) == [saved]
    assert turn > 1
    assert torn > 0  # some were killed in the midst of a save


def test_symbolic_name_of_a_link_never_takes_the_place_of_the_file(saved):
    last, checkpointer = str(saved.with_name("last.ckpt")), FileCheckpointer()
    checkpointer.copy(str(saved), last, symbolic=True)
    checkpointer.copy(last, str(saved), symbolic=True)
    checkpointer.copy(str(saved), str(saved), symbolic=True)
    assert checkpointer.load(last)["w"].sum() == checkpointer.load(str(saved))["w"].sum() == 500
    assert not saved.is_symlink()
    checkpointer.copy(str(saved), last)
    saved.unlink()
    assert checkpointer.load(last)["w"].sum() == 500


def test_symbolic_name_leads_nowhere_when_its_file_is_gone(saved):
    last, checkpointer = str(saved.with_name("last.ckpt")), FileCheckpointer()
    checkpointer.copy(str(saved), last, symbolic=True)
    checkpointer.remove(str(saved))
    assert not checkpointer.exists(last)
    assert checkpointer.find(str(saved.parent)) == []


def test_save_below_a_file_names_the_obstacle(saved):
    with pytest.raises(CheckpointError, match="Pass another path: this one has something else in"):
        FileCheckpointer().save({}, str(saved / "a.ckpt"))


def test_save_over_a_folder_names_the_obstacle(saved):
    with pytest.raises(CheckpointError, match="Pass another path: this one has something else in"):
        FileCheckpointer().save({}, str(saved.parent))
    assert saved.exists()


def test_pipe_is_no_checkpoint_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "a.ckpt")
    assert not FileCheckpointer().exists(str(tmp_path / "a.ckpt"))
    assert FileCheckpointer().find(str(tmp_path)) == []
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        FileCheckpointer().load(str(tmp_path / "a.ckpt"))
    with pytest.raises(CheckpointError, match=r"is there and is no file\. Pass another path"):
        FileCheckpointer().save({}, str(tmp_path / "a.ckpt"))


def test_manifest_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint\['leyden'\] is too long by \d+ bytes"):
        FileCheckpointer().save({"leyden": {"note": "x" * 70_000}}, str(tmp_path / "a.ckpt"))


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"folder '.*/absent' does not exist"):
        FileCheckpointer().load(str(tmp_path / "absent" / "a.ckpt"))


def test_file_with_an_object_in_it_is_refused_by_the_name_of_its_class(tmp_path):
    torch.save({"x": Opaque()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"holds .*Opaque, no tensor or plain value"):
        FileCheckpointer().load(str(tmp_path / "a.ckpt"))


def test_file_that_holds_no_dict_is_no_checkpoint(tmp_path):
    torch.save(torch.ones(2), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds a Tensor, not a checkpoint"):
        FileCheckpointer().load(str(tmp_path / "a.ckpt"))


def test_saved_file_can_be_read_by_those_whom_the_umask_allows(saved):
    (saved.parent / "plain").touch()
    assert saved.stat().st_mode == (saved.parent / "plain").stat().st_mode


def test_file_that_is_not_whole_does_not_count(anywhere):
    path, checkpointer = join(anywhere, "a.ckpt"), FileCheckpointer()
    checkpointer.save({"leyden": {}, "w": torch.arange(6.0)}, path)
    whole = written(path)
    for content in (whole[:-1], whole[:-400], whole[: len(whole) // 2], whole + b"\0", b"x"):
        rewrite(path, content)
        assert not checkpointer.exists(path)
        assert checkpointer.find(anywhere) == []
        for ask in (checkpointer.load, checkpointer.manifest, checkpointer.verify):
            with pytest.raises(CheckpointError, match=r"cut short or altered.*an older one"):
                ask(path)


def test_altered_file_is_recognised(anywhere):
    path, checkpointer = join(anywhere, "a.ckpt"), FileCheckpointer()
    checkpointer.save({"leyden": {}, "w": torch.arange(6.0)}, path)
    whole = bytearray(written(path))
    whole[whole.index(torch.arange(6.0).numpy().tobytes()) + 7] ^= 4
    rewrite(path, bytes(whole))
    for ask in (checkpointer.load, checkpointer.verify):
        with pytest.raises(CheckpointError, match="was altered: its checksum does not fit"):
            ask(path)


def test_prepared_folder_is_cleared_of_temporary_files_of_the_dead_alone(anywhere, monkeypatch):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    gone = [f".last.ckpt.{host}-{dead.pid}.tmp", f"deep/.a.ckpt.{host}-{dead.pid}.tmp"]
    waiting = [f".last.ckpt.{host}-{os.getpid()}.tmp", ".a.ckpt.other-1.tmp"]
    others = [".mine.tmp", "a.ckpt", "deep/b.ckpt"]
    for name in [*gone, *waiting, *others]:
        rewrite(join(anywhere, name), b"half")
    FileCheckpointer().prepare(anywhere)
    assert files_in(anywhere) == sorted(waiting + others)
    tomorrow = time.time() + 86_500
    monkeypatch.setattr("time.time", lambda: tomorrow)
    FileCheckpointer().prepare(anywhere)
    assert files_in(anywhere) == sorted(others)


def test_file_of_format_1_is_read_and_gone_on_from():
    path = str(Path(__file__).parent / "data" / "format_1.ckpt")
    FileCheckpointer().verify(path)
    assert FileCheckpointer().manifest(path)["format"] == 1
    weight = FileCheckpointer().load(path)["state_dict"]["layer.weight"]
    expected = torch.tensor([[-0.08797, -0.95841, 0.06637]])
    torch.testing.assert_close(weight, expected, rtol=0, atol=5e-5)
    trainer = quiet_trainer(max_epochs=2, enable_checkpointing=False)
    trainer.fit(Regression(), batches(3), ckpt_path=path)
    assert trainer.global_step == 6
