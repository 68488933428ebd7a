"""Checkpoints at URLs: uploads that end half-way, networks that fail, and how to reach them."""

import os
import random
import signal
import subprocess
import sys
import time

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.core import S3File

from leyden import CheckpointError, ConfigError
from leyden.plugins import FileCheckpointer
from leyden.plugins.archive import END

BLOCK = {"default_block_size": 5 << 20}  # S3's least, so that a small state has many parts
SAVE_FOR_EVER = """
import sys, torch
from leyden.plugins import FileCheckpointer
checkpointer = FileCheckpointer({"default_block_size": 5 << 20})
print("ready", flush=True)
for turn in range(1, 100_000):
    checkpointer.save({"turn": turn, "w": torch.full((4_000_000,), float(turn))}, sys.argv[1])
"""


class Unreliable(MemoryFileSystem):
    """Memory behind a network that fails as often as it is told to, and counts what is read."""

    protocol = "unreliable"
    failures = 0
    error = ConnectionResetError("Connection reset by peer")
    read = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unreliable://"))

    def _fail(self):
        if Unreliable.failures > 0:
            Unreliable.failures -= 1
            raise self.error

    def _open(self, path, mode="rb", **options):
        self._fail()
        return super()._open(path, mode, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self._fail()
        content = super().cat_file(path, start, end, **options)
        Unreliable.read += len(content)
        return content

    def find(self, path, *args, **options):
        self._fail()
        return super().find(path, *args, **options)

    def rm_file(self, path):
        if path.endswith(".ckpt"):  # clearing away is not tried again
            self._fail()
        return super().rm_file(path)


@pytest.fixture
def unreliable(monkeypatch):
    """URL of a folder whose file system fails ``Unreliable.failures`` times."""
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    monkeypatch.setattr("leyden.plugins.remote_files.FIRST_WAIT", 0.0)
    monkeypatch.setattr(Unreliable, "failures", 0)
    monkeypatch.setattr(Unreliable, "read", 0)
    monkeypatch.setattr(Unreliable, "store", {})
    return "unreliable://runs"


def uploads(bucket):
    """Return the uploads to ``bucket`` that have begun and were neither completed nor given up."""
    return fsspec.filesystem("s3").list_multipart_uploads(bucket.removeprefix("s3://"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_upload_that_fails_is_given_up_and_leaves_the_older_one(s3, monkeypatch, error):
    checkpointer, path, upload = FileCheckpointer(BLOCK), f"{s3}/a.ckpt", S3File._upload_chunk
    checkpointer.save({"w": torch.ones(3)}, path)

    def fail_at_third_part(file, final=False):
        if len(file.parts or ()) == 2:
            assert len(uploads(s3)) == 1
            raise error("Quota")
        return upload(file, final)

    monkeypatch.setattr(S3File, "_upload_chunk", fail_at_third_part)
    with pytest.raises((KeyboardInterrupt, CheckpointError), match="Quota"):
        checkpointer.save({"w": torch.zeros(4_000_000)}, path)
    assert checkpointer.load(path)["w"].sum() == 3
    assert checkpointer.find(s3) == [path]
    assert uploads(s3) == []


def test_upload_in_parts_is_whole(s3):
    state = {"w": torch.arange(6_000_000.0), "leyden": {"time": 1.0}}
    checkpointer, path = FileCheckpointer(BLOCK), f"{s3}/a.ckpt"
    checkpointer.save(state, path)
    torch.testing.assert_close(checkpointer.load(path)["w"], state["w"], rtol=0, atol=0)
    assert checkpointer.manifest(path)["size"] > 24_000_000


def test_killed_upload_leaves_nothing_that_can_be_seen(s3):
    path, checkpointer, rng = f"{s3}/a.ckpt", FileCheckpointer(), random.Random(0)
    checkpointer.save({"turn": 0, "w": torch.zeros(1)}, path)
    for _ in range(3):
        command = [sys.executable, "-c", SAVE_FOR_EVER, path]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.1, 1.0))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        loaded = checkpointer.load(path)
        assert (loaded["w"] == loaded["turn"]).all()
        assert checkpointer.find(s3) == [path]


def test_error_of_the_network_is_tried_again(unreliable):
    checkpointer, path = FileCheckpointer(), f"{unreliable}/a.ckpt"
    for action in (
        lambda: checkpointer.save({"w": 1}, path),
        lambda: checkpointer.load(path),
        lambda: checkpointer.exists(path),
        lambda: checkpointer.find(unreliable),
        lambda: checkpointer.prepare(unreliable),
        lambda: checkpointer.remove(path),
    ):
        Unreliable.failures = 3
        action()
        assert Unreliable.failures == 0


def test_network_that_stays_away_is_said_and_the_older_one_is_kept(unreliable):
    checkpointer, path = FileCheckpointer(retries=1), f"{unreliable}/a.ckpt"
    checkpointer.save({"w": 1}, path)
    for action in (
        lambda: checkpointer.save({"w": 2}, path),
        lambda: checkpointer.load(path),
        lambda: checkpointer.exists(path),
        lambda: checkpointer.find(unreliable),
        lambda: checkpointer.remove(path),
    ):
        Unreliable.failures = 2
        with pytest.raises(CheckpointError, match=r"Connection reset by peer\. See that the disk,"):
            action()
    Unreliable.failures = 0
    assert checkpointer.load(path) == {"w": 1}
    assert list(Unreliable.store) == ["/runs/a.ckpt"]


def test_error_that_will_not_pass_is_not_tried_again(unreliable, monkeypatch):
    monkeypatch.setattr(Unreliable, "error", PermissionError("Forbidden"))
    Unreliable.failures = 5
    with pytest.raises(CheckpointError, match=r"Forbidden\. Allow access"):
        FileCheckpointer().save({"w": 1}, f"{unreliable}/a.ckpt")
    assert Unreliable.failures == 4


def test_listing_reads_only_the_ends(unreliable):
    checkpointer = FileCheckpointer()
    for age in range(3):
        state = {"leyden": {"time": age}, "w": torch.zeros(300_000)}
        checkpointer.save(state, f"{unreliable}/{age}.ckpt")
    Unreliable.read = 0
    assert len(checkpointer.find(unreliable)) == 3
    assert Unreliable.read == 3 * END < 3 * 1_200_000


def test_storage_options_say_how_to_reach_it(s3, monkeypatch):
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    FileCheckpointer(options).save({"w": 1}, f"{s3}/a.ckpt")
    assert FileCheckpointer(options).find(s3) == [f"{s3}/a.ckpt"]


def test_missing_bucket_is_named_with_what_to_do(s3):
    with pytest.raises(CheckpointError, match=r"bucket does not exist\. See that the folder or"):
        FileCheckpointer().save({"w": 1}, "s3://bucket-that-is-not-there/a.ckpt")
    assert FileCheckpointer().find("s3://bucket-that-is-not-there/runs") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/a.ckpt", r"no file system is called 's4'\. Known: .* s3,"),
        ("memry://a.ckpt", r"no file system is called 'memry'\. Did you mean 'memory'"),
        ("gs://bucket/a.ckpt", r"cannot be reached: .*[iI]nstall"),
    ],
)
def test_url_that_cannot_be_reached_says_what_is_missing(url, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=message):
        FileCheckpointer().load(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage_options": "https://host"}, "is no dict. Pass what fsspec is to know"),
        ({"retries": -1}, "retries=-1 must be a whole number from 0 on"),
        ({"retries": "3"}, "retries='3' must be a whole number from 0 on"),
    ],
)
def test_impossible_choice_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        FileCheckpointer(**options)


def test_local_paths_import_no_fsspec(tmp_path):
    code = (
        "import sys; from leyden.plugins import FileCheckpointer; "
        f"FileCheckpointer().save({{}}, 'file://{tmp_path}/a.ckpt'); "
        f"assert FileCheckpointer().find({str(tmp_path)!r}); assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
