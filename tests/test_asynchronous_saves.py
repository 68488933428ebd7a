"""Saves that are written while training goes on."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, CheckpointError, Module, Trainer
from leyden.plugins import FileCheckpointer, ModelCheckpoint
from leyden.plugins.background import HostCopies

PATIENCE = 30.0


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.layers[0].weight

    def training_step(self, batch, batch_idx):
        return self.tied(self.layers(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layers(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Held(FileCheckpointer):
    """Holds a save back until it is let go; tells how many were begun."""

    def __init__(self):
        super().__init__()
        self.begun, self.gate, self.holds = [], threading.Event(), False

    def save(self, checkpoint, path):
        self.begun.append(checkpoint["state"]["step"])
        self.holds = True
        try:
            assert self.gate.wait(PATIENCE)
        finally:
            self.holds = False
        super().save(checkpoint, path)


def joined():
    """Return when nothing is being written."""
    for thread in threading.enumerate():
        if thread.name == "leyden-save":
            thread.join(PATIENCE)


class Acts(Callback):
    """Calls ``action`` at the end of a step, before savers do anything."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.action()


def trained(tmp_path, *callbacks, data=None, ckpt_path=None, **options):
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path / "runs",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    data = data or list(torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(1)))
    val = DataLoader(torch.ones(4, 4), batch_size=4)
    trainer.fit(Net(), data, val, ckpt_path=ckpt_path)
    return trainer


def saver(folder, **options):
    options = {"save_top_k": -1, "every_n_train_steps": 2, "asynchronous": True, **options}
    return ModelCheckpoint(folder, "{step}", **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flat(value, prefix=""):
    """Yield names and values of everything in a checkpoint but when it was saved."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in ("time", "elapsed", "validated_at", "size", "checksum", "folder"):
                yield from flat(entry, f"{prefix}.{name}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from flat(entry, f"{prefix}.{index}")
    else:
        yield prefix, value


def assert_same(one, other):
    one, other = dict(flat(one)), dict(flat(other))
    assert list(one) == list(other)
    for name, value in one.items():
        same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        assert same or value != value, name


def left(folder, *callbacks, checkpointer="file", val_check_interval=None, **options):
    """Return what a run leaves in a folder: its files by name, loaded; and their sizes."""
    saves = saver(folder / "c", **options)
    trainer = trained(
        folder, saves, *callbacks, checkpointer=checkpointer, val_check_interval=val_check_interval
    )
    found = {path.name: FileCheckpointer().load(str(path)) for path in (folder / "c").iterdir()}
    sizes = {path.name: path.stat().st_size for path in (folder / "c").iterdir()}
    shutil.rmtree(folder)
    return trainer, found, sizes


def test_file_is_the_state_at_the_boundary_bit_for_bit(tmp_path):
    """Two steps are taken while the first save is held back."""
    held, folder = Held(), tmp_path / "run"
    _, expected, sizes = left(folder, asynchronous=False)
    _, found, own_sizes = left(folder, Acts(4, held.gate.set), checkpointer=held)
    assert sorted(found) == sorted(expected) == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    for name, checkpoint in found.items():
        assert_same(checkpoint, expected[name])
        weights = checkpoint["state_dict"]
        assert weights["tied.weight"].data_ptr() == weights["layers.0.weight"].data_ptr()
        assert own_sizes[name] < 1.02 * sizes[name]


@pytest.mark.parametrize(
    "options",
    [
        {"save_top_k": 1},
        {"save_top_k": 2, "monitor": "val/loss", "save_last": True},
        {"save_top_k": 1, "save_last": "link", "keep_newest": 2},
        {"save_top_k": 0, "save_last": True, "every_n_train_steps": 3},
        {"save_top_k": 1, "every_n_train_steps": None, "monitor": "val/loss"},
    ],
)
def test_it_leaves_the_files_that_a_blocking_save_leaves(tmp_path, options):
    folder = tmp_path / "run"
    first, expected, _ = left(folder, asynchronous=False, val_check_interval=2, **options)
    second, found, _ = left(folder, val_check_interval=2, **options)
    assert sorted(found) == sorted(expected)
    assert all(assert_same(found[name], expected[name]) is None for name in found)
    one, other = first.checkpoint_callback, second.checkpoint_callback
    assert_same(one.state_dict(), other.state_dict())


def test_it_writes_to_urls(tmp_path):
    folder = f"memory://{uuid4().hex}/c"
    callback = saver(folder, save_top_k=1, save_last=True)
    trained(tmp_path, callback)
    assert callback.best_model_path == f"{folder}/step=8.ckpt"
    assert len(FileCheckpointer().find(folder)) == 1
    assert FileCheckpointer().load(callback.last_model_path)["state"]["step"] == 8


def test_resume_from_one_ends_as_an_unbroken_run(tmp_path):
    whole = trained(tmp_path, saver(tmp_path / "a"))
    resume = tmp_path / "a" / "step=4.ckpt"
    trainer = trained(tmp_path, saver(tmp_path / "b"), ckpt_path=resume)
    for one, other in zip(whole.module.parameters(), trainer.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_names_change_at_the_first_boundary_after_the_file_is_complete(tmp_path):
    held, seen = Held(), []
    callback = saver(tmp_path / "c", save_last=True, every_n_train_steps=5)

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((callback.best_model_path, callback.last_model_path))
            if trainer.global_step == 6:
                assert names(tmp_path / "c") == []
                held.gate.set()
                joined()

    trained(tmp_path, callback, Looks(), checkpointer=held)
    after = (str(tmp_path / "c" / "step=5.ckpt"), str(tmp_path / "c" / "last.ckpt"))
    assert seen == [("", "")] * 6 + [after] * 2


class Watching(FileCheckpointer):
    def __init__(self):
        super().__init__()
        self.there = []

    def remove(self, path):
        self.there.append([one.rpartition("/")[2] for one in self.find(path.rpartition("/")[0])])
        super().remove(path)


def test_file_is_deleted_only_after_the_one_that_replaces_it_is_complete(tmp_path):
    watching = Watching()
    trained(tmp_path, saver(tmp_path / "c", save_top_k=1), checkpointer=watching)
    assert watching.there == [[f"step={n + 2}.ckpt", f"step={n}.ckpt"] for n in (2, 4, 6)]


def test_save_that_is_due_meanwhile_waits(tmp_path):
    held = Held()
    trained(tmp_path, saver(tmp_path / "c"), Acts(4, held.gate.set), checkpointer=held)
    assert held.begun == [2, 4, 6, 8]
    assert names(tmp_path / "c") == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]


def test_save_that_is_due_meanwhile_is_skipped_if_asked_unless_it_is_the_last(tmp_path):
    held = Held()

    class LetsGo(Callback):
        """Holds step 2 until step 5, and step 6 until the end."""

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                assert held.begun == [2]
                held.gate.set()
                joined()
                held.gate.clear()

        def on_save_point(self, trainer, module, at):
            if at == "end":
                assert held.begun == [2, 6]
                held.gate.set()

    callback = saver(tmp_path / "c", when_busy="skip")
    trained(tmp_path, callback, LetsGo(), checkpointer=held)
    assert held.begun == [2, 6, 8]
    assert names(tmp_path / "c") == [f"step={step}.ckpt" for step in (2, 6, 8)]


class SlowAtTheEnd(FileCheckpointer):
    def save(self, checkpoint, path):
        if checkpoint["state"]["step"] == 8:
            threading.Event().wait(0.2)
        super().save(checkpoint, path)


def test_last_save_is_safe_when_training_ends(tmp_path):
    callback, seen = saver(tmp_path / "c", every_n_train_steps=3, save_last=True), []

    class Ends(Callback):
        def on_train_end(self, trainer, module):
            seen.append(FileCheckpointer().load(callback.last_model_path)["state"]["step"])

    trained(tmp_path, callback, Ends(), checkpointer=SlowAtTheEnd())
    assert seen == [8]


class Full(FileCheckpointer):
    def save(self, checkpoint, path):
        raise CheckpointError(f"{path!r} cannot be written: the disk is full.")


@pytest.mark.parametrize(("every", "last_step"), [(2, 4), (8, 8)])
def test_error_is_raised_at_a_boundary_or_at_the_end(tmp_path, every, last_step):
    steps = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            steps.append(trainer.global_step)

    with pytest.raises(CheckpointError, match=r"step=.*the disk is full"):
        callback = saver(tmp_path / "c", every_n_train_steps=every)
        trained(tmp_path, callback, Notes(), checkpointer=Full())
    assert steps[-1] <= last_step
    assert callback.best_model_path == ""


def test_signal_waits_for_the_save_under_way_and_saves_once_more(tmp_path):
    held = Held()

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        held.gate.set()

    callback = saver(tmp_path / "c", save_top_k=1, save_last=True)
    with pytest.raises(SystemExit):
        trained(tmp_path, callback, Acts(3, interrupt), checkpointer=held)
    assert held.begun == [2, 3]
    assert names(tmp_path / "c") == ["last.ckpt", "step=3.ckpt"]
    assert FileCheckpointer().load(callback.last_model_path)["state"]["step"] == 3


class Stuck(Held):
    """Asks twice that the run ends while its save hangs."""

    def save(self, checkpoint, path):
        if not self.begun:
            os.kill(os.getpid(), signal.SIGINT)
            while not self.trainer.interrupted:
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        super().save(checkpoint, path)


def test_second_signal_waits_for_nothing(tmp_path):
    stuck = Stuck()

    class Introduces(Callback):
        def on_fit_start(self, trainer, module):
            stuck.trainer = trainer

    callback = saver(tmp_path / "c")
    with pytest.raises(KeyboardInterrupt):
        trained(
            tmp_path, callback, Introduces(), checkpointer=stuck, max_epochs=-1, max_steps=10**9
        )
    assert stuck.holds
    assert names(tmp_path / "c") == []
    stuck.gate.set()
    joined()
    trained(tmp_path, callback)  # in a notebook both can be used again
    steps = {FileCheckpointer().load(path)["state"]["step"] for path in callback.best_k_models}
    assert steps == {2, 4, 6, 8}


ENDED_TWICE = """
import os, signal, threading
from pathlib import Path
import torch
from leyden import Trainer
from leyden.plugins import FileCheckpointer, ModelCheckpoint
from leyden.testing import Regression, batches

class Big(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.zeros(25_000_000))

def end_twice():
    while not list(Path({folder!r}).glob(".*.tmp")):
        pass
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        while not trainer.interrupted:
            pass

saver = ModelCheckpoint({folder!r}, every_n_train_steps=1, asynchronous=True)
trainer = Trainer(
    callbacks=saver, max_epochs=-1, max_steps=10**9, logger=False, enable_progress_bar=False
)
threading.Thread(target=end_twice, daemon=True).start()
trainer.fit(Big(), batches(2))
"""


def test_process_exits_with_its_code_in_the_middle_of_a_save(tmp_path):
    """torch's writer would abort it."""
    script = tmp_path / "train.py"
    script.write_text(ENDED_TWICE.format(folder=str(tmp_path / "c")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 143, done.stderr
    assert [name for name in names(tmp_path / "c") if name.endswith(".tmp")] == []


def test_error_of_the_users_waits_for_the_save_under_way(tmp_path):
    held = Held()

    def fail():
        threading.Timer(0.05, held.gate.set).start()
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        trained(tmp_path, saver(tmp_path / "c"), Acts(3, fail), checkpointer=held)
    assert names(tmp_path / "c") == ["step=2.ckpt", "step=3.ckpt"]


def test_exit_that_the_user_asks_for_waits_for_the_save_under_way(tmp_path):
    held = Held()

    def leave():
        threading.Timer(0.05, held.gate.set).start()
        raise SystemExit(3)

    callback = saver(tmp_path / "c")
    with pytest.raises(SystemExit):
        trained(tmp_path, callback, Acts(3, leave), checkpointer=held)
    assert names(tmp_path / "c") == ["step=2.ckpt"]
    assert callback.best_model_path == str(tmp_path / "c" / "step=2.ckpt")


def test_workers_can_be_started_while_a_save_is_written(tmp_path):
    data = DataLoader(torch.randn(32, 4), batch_size=4, num_workers=2)
    callback = saver(tmp_path / "c", every_n_train_steps=8)
    trained(tmp_path, callback, data=data, max_epochs=3)
    assert names(tmp_path / "c") == [f"step={step}.ckpt" for step in (16, 24, 8)]


# Copies in host memory


def pointers(value):
    return [
        t.data_ptr() for _, t in flat(value) if torch.is_tensor(t) and t.numel() and not t.is_sparse
    ]


def example():
    base = torch.randn(5, 6)
    return {
        "tensors": {"a": base, "tied": base, "view": base[1:3, ::2], "t": base.t()},
        "kinds": [torch.ones(3, dtype=torch.bool), torch.tensor(2), torch.empty(0, 4)],
        "parameter": nn.Parameter(torch.ones(2)),
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "plain": {"list": [1, [2.5, None]], "text": "x", "tuple": (1, torch.ones(1))},
    }


def test_copy_is_equal_and_shares_what_the_original_shares():
    original = example()
    copied = HostCopies().take(original)
    for (name, one), (other_name, other) in zip(flat(original), flat(copied), strict=True):
        assert name == other_name
        if torch.is_tensor(one):
            one, other = (x.to_dense() if x.is_sparse else x for x in (one, other))
            assert torch.equal(one, other), name
            assert one.dtype == other.dtype
            assert (one.stride(), one.requires_grad) == (other.stride(), other.requires_grad)
        else:
            assert one is other or name == ".plain.tuple"
    assert torch.equal(copied["plain"]["tuple"][1], torch.ones(1))
    views = copied["tensors"]
    assert views["a"].data_ptr() == views["tied"].data_ptr() == views["t"].data_ptr()
    views["a"][1, 2] = 7.0
    assert views["view"][0, 1] == 7.0
    assert not {*pointers(original)} & {*pointers(copied)}


def test_copy_does_not_change_with_the_original():
    original = example()
    copied = HostCopies().take(original)
    expected = [str(value) for _, value in flat(copied)]
    original["tensors"]["a"].zero_()
    original["plain"]["list"][1][0] = "changed"
    del original["kinds"][0]
    assert [str(value) for _, value in flat(copied)] == expected


def test_memory_is_used_again_for_the_next_copy():
    state = {f"{size}": torch.randn(size) for size in (1000, 1000, 3000)}
    copies = HostCopies()
    first = pointers(copies.take(state))
    for _ in range(3):
        assert sorted(pointers(copies.take(state))) == sorted(first)


def test_memory_of_what_is_gone_is_let_go_before_more_is_taken():
    copies = HostCopies()
    copies.take({"a": torch.randn(1000), "b": torch.randn(2000)})
    copies.take({"a": torch.randn(1000), "c": torch.randn(3000)})
    assert sum(buffer.nbytes() for buffer in copies._buffers) == 4 * 4000


def test_memory_is_let_go_at_the_end_of_fit(tmp_path):
    def all_copies():
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) is HostCopies}

    before = all_copies()
    callback = saver(tmp_path / "c")
    trained(tmp_path, callback)
    assert all_copies() <= before


def test_host_memory_that_does_not_suffice_is_a_failed_save(tmp_path, monkeypatch):
    class Short(HostCopies):
        def take(self, checkpoint):
            if checkpoint["state"]["step"] == 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().take(checkpoint)

    monkeypatch.setattr("leyden.plugins.checkpoint_writer.HostCopies", Short)
    with pytest.warns(UserWarning, match=r"can't allocate memory\. Training goes on from step 4"):
        trained(tmp_path, saver(tmp_path / "c", when_failed="warn"))
    assert names(tmp_path / "c") == [f"step={step}.ckpt" for step in (2, 6, 8)]


def test_memory_that_was_reserved_is_what_the_first_copy_takes():
    state = [torch.randn(1000), torch.randn(3000)]
    copies = HostCopies()
    copies.reserve(state)
    reserved = copies._reserved.result()
    assert sorted(pointers(copies.take({"a": state}))) == sorted(one.data_ptr() for one in reserved)
