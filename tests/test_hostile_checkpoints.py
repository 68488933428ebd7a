"""A hostile checkpoint gives an error, and nothing of what it holds is run or imported."""

import builtins
import functools
import importlib
import io
import json
import os
import pickle
import runpy
import subprocess
import sys
import tarfile
import zipfile
import zlib

import pytest
import torch

from leyden import CheckpointError, LeydenError, checkpoints
from leyden.plugins import FileCheckpointer
from leyden.testing import Regression, batches, quiet_trainer

keeper = FileCheckpointer()


class Calls:
    """Is pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that is made when hostile code runs; `canary_module` makes it when it is imported."""
    (tmp_path / "canary_module.py").write_text("open('canary', 'w')\nclass Thing: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()
    assert "canary_module" not in sys.modules


MAKE = "open('canary', 'w').close()"
INNER = pickle.dumps(Calls(exec, MAKE))
PAYLOADS = {
    "os.system": Calls(os.system, "touch canary"),
    "exec": Calls(exec, MAKE),
    "eval": Calls(eval, MAKE),
    "open": Calls(open, "canary", "w"),
    "Popen": Calls(subprocess.Popen, ["touch", "canary"]),
    "__import__": Calls(builtins.__import__, "canary_module"),
    "import_module": Calls(importlib.import_module, "canary_module"),
    "run_path": Calls(runpy.run_path, "canary_module.py"),
    "run_module": Calls(runpy.run_module, "canary_module"),
    "partial": Calls(functools.partial, exec, MAKE),
    "pickle.loads": Calls(pickle.loads, INNER),
    "torch.load": Calls(torch.load, "other.pt"),
    "_load_from_bytes": Calls(torch.storage._load_from_bytes, INNER),
    "hub": Calls(torch.hub.load, ".", "canary", "local"),
    "jit": Calls(torch.jit.load, "other.pt"),
    "safe_globals": Calls(torch.serialization.add_safe_globals, [exec]),
}


@pytest.fixture(params=sorted(PAYLOADS))
def hostile(request, canary):
    """A file that is whole, manifest and all, with a call in it."""
    keeper.save({"leyden": {"kind": "training"}, "state_dict": PAYLOADS[request.param]}, "a.ckpt")
    return "a.ckpt"


def pickled(path, content):
    """Write an archive of torch's whose pickle is ``content``; return its path."""
    keeper.save({}, path)
    with zipfile.ZipFile(path) as whole:
        parts = {part.filename: whole.read(part) for part in whole.infolist()}
    return packed(path, {**parts, next(n for n in parts if n.endswith("data.pkl")): content})


def packed(path, parts, compression=zipfile.ZIP_STORED, comment=b""):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        archive.comment = comment
    return path


def test_call_in_a_file_is_refused_by_every_door(hostile):
    doors = (
        keeper.load,
        checkpoints.open,
        Regression.load_from_checkpoint,
        Regression().load_weights,
        lambda path: quiet_trainer(max_epochs=1).fit(Regression(), batches(2), ckpt_path=path),
    )
    for door in doors:
        with pytest.raises(CheckpointError, match=r"a\.ckpt"):
            door(hostile)


@pytest.mark.parametrize("name", ["canary_module\nThing", "canary_module\nabsent", "os\nsystem"])
def test_name_of_a_module_imports_nothing(canary, name):
    for content in (f"c{name}\n.", f"c{name}\n)R.", f"c{name}\n)\x81.", f"(i{name}\n."):
        with pytest.raises(CheckpointError):
            keeper.load(pickled("a.ckpt", content.encode("latin-1")))


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch canary\x85R.",
        b"\x80\x02\x82\x01.",  # a number that copyreg has a class for
        b"Pcanary\n.",  # a persistent id that is no storage
        b"(I1\nI2\nt" + b"\x85" * 200_000 + b".",
        b"(" * 100_000 + b"l." * 3,
        b"\x8e" + (1 << 62).to_bytes(8, "little") + b".",  # bytes of four million terabytes
        b"cbuiltins\nbytearray\n(L4611686018427387904L\ntR.",
        b"r\xff\xff\xff\x7f.",
        b"",
        b"garbage",
    ],
)
def test_crooked_pickle_is_refused(canary, content):
    with pytest.raises(CheckpointError):
        keeper.load(pickled("a.ckpt", content))


def test_file_that_is_a_bare_pickle_is_refused(canary):
    for content in (INNER, pickle.dumps({"a": 1}), INNER + b"PK\x05\x06" + bytes(18)):
        (canary.parent / "a.ckpt").write_bytes(content)
        with pytest.raises(CheckpointError):
            keeper.load("a.ckpt")


def test_older_kinds_of_file_run_nothing_either(canary):
    torch.save({"a": Calls(exec, MAKE)}, "old.pt", _use_new_zipfile_serialization=False)
    with tarfile.open("tar.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            part = tarfile.TarInfo(name)
            part.size = len(INNER)
            archive.addfile(part, io.BytesIO(INNER))
    for path in ("old.pt", "tar.pt"):
        with pytest.raises(CheckpointError):
            keeper.load(path)


def test_program_in_an_archive_is_refused(canary):
    torch.save({"a": 1}, "a.ckpt")
    with zipfile.ZipFile("a.ckpt") as whole:
        parts = {part.filename: whole.read(part) for part in whole.infolist()}
    parts |= {"a/constants.pkl": INNER, "a/code/__torch__.py": MAKE.encode()}
    with pytest.raises(CheckpointError):
        keeper.load(packed("a.ckpt", parts))


@pytest.mark.parametrize("name", ["../canary", "/tmp/canary", "a/../../canary", "a\\..\\canary"])
def test_part_that_leads_out_of_the_archive_is_refused(canary, name):
    torch.save({"a": 1}, "a.ckpt")
    with zipfile.ZipFile("a.ckpt", "a") as archive:
        archive.writestr(name, b"canary")
    with pytest.raises(CheckpointError, match="which leads out of it"):
        keeper.load("a.ckpt")


def test_archive_that_grows_is_refused_before_it_does(canary):
    torch.save({"w": torch.zeros(1_000_000)}, "a.ckpt")
    with zipfile.ZipFile("a.ckpt") as whole:
        parts = {part.filename: whole.read(part) for part in whole.infolist()}
    packed("a.ckpt", parts, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is packed, or says it holds more than its size"):
        keeper.load("a.ckpt")


def test_part_that_claims_to_be_larger_than_the_file_is_refused(canary):
    torch.save({"w": torch.zeros(5)}, "a.ckpt")
    content = bytearray((canary.parent / "a.ckpt").read_bytes())
    at = content.index(b"PK\x01\x02")  # the entry of the first part in the index
    content[at + 20 : at + 28] = (0x7FFFFFF0).to_bytes(4, "little") * 2
    (canary.parent / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="is packed, or says it holds more than its size"):
        keeper.load("a.ckpt")


def signed(text):
    return text + b"\n" + b"crc32:%08x" % zlib.crc32(text)


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        (INNER, "the checksum of its manifest does not fit"),
        (b"{}", "the checksum of its manifest does not fit"),
        (signed(INNER), "manifest that cannot be read"),
        (signed(b"[" * 60_000), "manifest that cannot be read"),
        (signed(b"9" * 60_000), "manifest that cannot be read"),
        (signed(b"[]"), "manifest that leyden has not written"),
        (signed(b"{}"), "manifest that leyden has not written"),
        (signed(b'{"size": "1", "checksum": "crc32:0"}'), "leyden has not written"),
        (signed(b'{"size": 1, "checksum": "", "time": "now"}'), "leyden has not written"),
        (signed(b'{"size": 1, "checksum": "", "time": NaN}'), "leyden has not written"),
        (signed(b'{"size": -1, "checksum": ""}'), r"holds [\d,]+ bytes where -1 were written"),
    ],
)
def test_crooked_manifest_is_refused(canary, comment, message):
    torch.save({"w": torch.zeros(5)}, "a.ckpt")
    with zipfile.ZipFile("a.ckpt", "a") as archive:
        archive.comment = comment
    assert not keeper.exists("a.ckpt") and keeper.find(".") == []
    for ask in (keeper.load, keeper.manifest, keeper.verify):
        with pytest.raises(CheckpointError, match=message):
            ask("a.ckpt")


def test_nesting_without_end_is_refused(canary):
    content = b"}X\x10\x00\x00\x00hyper_parameters}X\x01\x00\x00\x00a" + b"]" * 5_000
    path = pickled("a.ckpt", content + b"a" * 4_999 + b"ss.")
    with pytest.raises(LeydenError):
        Regression.load_from_checkpoint(path)


@pytest.mark.parametrize(
    "value",
    [
        {"__leyden__": "dataclass", "class": "canary_module:Thing", "value": {}},
        {"__leyden__": "enum", "class": "os:system", "value": "touch canary"},
        {"__leyden__": "canary_module.Thing", "value": "touch canary"},
        {"__leyden__": "torch.dtype", "value": "ops.load_library"},
        {"__leyden__": [], "value": 1},
    ],
)
def test_class_named_in_hyperparameters_is_not_imported(canary, value):
    module = Regression()
    state = {"state_dict": module.state_dict(), "hyper_parameters": {"a": value}}
    keeper.save(state, "a.ckpt")
    with pytest.raises(LeydenError):
        Regression.load_from_checkpoint("a.ckpt")


ODD = [3, "x", [3], {"a": 3}, torch.ones(2), torch._utils._rebuild_tensor_v2, [{}], {}, None]


@pytest.mark.filterwarnings("ignore:The checkpoint holds the state of callbacks")
def test_wrong_kind_of_any_entry_is_an_error_of_ours_or_does_no_harm(canary):
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(Regression(), batches(2))
    trainer.save_checkpoint("good.ckpt")
    good, strange = keeper.load("good.ckpt"), []
    for name, odd in [(name, odd) for name in good for odd in ODD]:
        if name == "leyden" and not isinstance(odd, dict):
            torch.save(good | {name: odd}, "bad.ckpt")
        else:
            keeper.save(good | {name: odd}, "bad.ckpt")
        other = quiet_trainer(max_epochs=2, enable_checkpointing=False)
        try:
            other.fit(Regression(), batches(2), ckpt_path="bad.ckpt")
        except LeydenError:
            continue
        except Exception as error:
            strange.append(f"{name}={odd!r}: {error!r}")
    assert not strange, "\n".join(strange)


def test_manifest_is_read_without_the_rest(canary):
    keeper.save({"leyden": {"kind": "training"}, "x": Calls(exec, MAKE)}, "a.ckpt")
    assert keeper.manifest("a.ckpt")["kind"] == "training"
    assert keeper.find(".") == ["a.ckpt"]
    keeper.verify("a.ckpt")
    assert json.loads(zipfile.ZipFile("a.ckpt").comment.rpartition(b"\n")[0])["kind"] == "training"
