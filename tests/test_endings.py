"""However a run ends: one whole checkpoint, the right code, nobody left, and a Trainer to use."""

# PL #20187, #19916, #21406

import builtins
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, Module
from leyden.plugins import ModelCheckpoint
from leyden.testing import quiet_trainer

STEPS = 8


def die() -> None:
    """Let the process that trains, or this worker's parent, get a SIGTERM."""
    is_worker = multiprocessing.parent_process() is not None
    os.kill(os.getppid() if is_worker else os.getpid(), signal.SIGTERM)


def raises(error):
    def raise_it():
        raise error

    return raise_it


class Points(Dataset):
    def __init__(self, does, index):
        self.does, self.index = does, index
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4 * STEPS, 3, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.index:
            self.does()
        return self.x[index], self.x[index, :1]


class Net(Module):
    """Does something at the third step, in the place it is told."""

    def __init__(self, place=None, does=lambda: None):
        super().__init__()
        self.place, self.does = place, does
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout()
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def at(self, place):
        if place == self.place and self.global_step in (2, 3):
            self.does()

    def forward(self, inputs):
        self.at("forward")
        return self.layer(self.dropout(inputs))

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        loss.register_hook(lambda gradient: self.at("backward"))
        return loss

    def validation_step(self, batch, batch_idx):
        self.at("validation")
        self.log("val/loss", self.loss(batch))

    def on_save_checkpoint(self, checkpoint):
        self.at("save")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        return optimizer


class Hooks(Callback):
    """Notes the end, and does something in a hook of its own if the Net's place is that."""

    def __init__(self):
        self.told = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.at("callback")

    def teardown(self, trainer, module, stage):
        self.told.append("teardown")


def trainer(tmp_path, *callbacks, **choices):
    return quiet_trainer(
        callbacks=[*callbacks, ModelCheckpoint(every_n_train_steps=3, save_top_k=1)],
        default_root_dir=tmp_path,
        name="run",
        enable_checkpointing=True,
        val_check_interval=3,
        num_sanity_val_steps=0,
        **choices,
    )


def loaders(workers=0, does=lambda: None, index=None):
    return (
        DataLoader(Points(does, index), batch_size=4, num_workers=workers),
        DataLoader(Points(does, None), batch_size=16, num_workers=workers),
    )


def fitted(it, model, data, **options):
    torch.manual_seed(5)
    it.fit(model, *data, **options)
    return model


def saved_steps(tmp_path):
    paths = list(tmp_path.glob("run/version_*/checkpoints/*"))
    return [torch.load(path, weights_only=True)["global_step"] for path in paths]


def same_weights(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


PLACES = ["forward", "backward", "optimizer", "save", "validation", "data"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_anywhere_leaves_one_whole_checkpoint_to_go_on_from(tmp_path, place, workers):
    once = [die]
    model = Net(place, lambda: once and once.pop()())
    data = loaders(workers, die, 10 if place == "data" else None)
    it = trainer(tmp_path, hooks := Hooks())
    with pytest.raises(SystemExit) as ended:
        fitted(it, model, data)
    assert ended.value.code == 143
    assert saved_steps(tmp_path) == [it.global_step]
    assert 0 < it.global_step < STEPS
    assert hooks.told == ["teardown"]
    assert multiprocessing.active_children() == []

    unbroken = fitted(trainer(tmp_path / "unbroken"), Net(), loaders(workers))
    resumed = fitted(trainer(tmp_path), Net(), loaders(workers), ckpt_path="auto")
    assert same_weights(resumed, unbroken)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
from pathlib import Path
from test_endings import *

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell put us aside

def signal_the_group():
    print("workers", *(child.pid for child in multiprocessing.active_children()), flush=True)
    os.killpg(0, {number})

model = Net({place!r}, {does})
trainer(Path({folder!r}), Hooks()).fit(model, *loaders(2))
print("the next line ran")
"""


def run_script(folder, place="forward", does="signal_the_group", number=0):
    """Return the ended script, and the processes it had started."""
    code = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parent), folder=str(folder), place=place, does=does, number=number
    )
    process = [sys.executable, "-c", code]
    done = subprocess.run(
        process, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    first = done.stdout.partition("\n")[0].split()[1:]
    return done, [int(pid) for pid in first]


def is_there(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_to_the_whole_group_ends_the_run_and_its_workers_well(tmp_path, name, code):
    done, workers = run_script(tmp_path, number=int(getattr(signal, name)))
    assert done.returncode == code, done.stderr
    assert saved_steps(tmp_path) == [3]
    assert len(workers) == 2
    assert not any(map(is_there, workers))
    assert "Traceback" not in done.stderr
    assert "the next line ran" not in done.stdout


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
def test_an_error_ends_a_script_with_its_traceback_and_without_orphans(tmp_path):
    does = "lambda: (print('workers', *(c.pid for c in multiprocessing.active_children())), 1 / 0)"
    done, workers = run_script(tmp_path, does=does)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert 'self.at("forward")' in done.stderr
    assert len(workers) == 2
    assert not any(map(is_there, workers))
    assert "the next line ran" not in done.stdout


def at_a_prompt(monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)


def test_at_a_prompt_control_returns_and_the_same_trainer_goes_on(tmp_path, monkeypatch):
    at_a_prompt(monkeypatch)
    once = [die]
    model = Net("forward", lambda: once and once.pop()())
    it = trainer(tmp_path)
    fitted(it, model, data := loaders())
    assert (it.interrupted, it.interrupted_by, it.global_step) == (True, signal.SIGTERM, 3)
    it.fit(model, *data)
    assert (it.interrupted, it.global_step) == (False, STEPS)
    assert same_weights(model, fitted(trainer(tmp_path / "unbroken"), Net(), loaders()))


def test_a_second_interrupt_at_a_prompt_leaves_a_trainer_to_use(tmp_path, monkeypatch):
    at_a_prompt(monkeypatch)
    twice = [signal.SIGINT, signal.SIGINT]
    model = Net("forward", lambda: [signal.raise_signal(twice.pop()) for _ in range(len(twice))])
    it = trainer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fitted(it, model, data := loaders())
    assert saved_steps(tmp_path) == []
    it.fit(model, *data)
    assert it.global_step == STEPS


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


ERRORS = [
    ("forward", raises(ValueError("mine")), 0, ValueError, "mine"),
    ("backward", raises(ValueError("mine")), 0, ValueError, "mine"),
    ("validation", raises(ValueError("mine")), 0, ValueError, "mine"),
    ("callback", raises(ValueError("mine")), 2, ValueError, "mine"),
    ("forward", raises(MemoryError("host is full")), 0, MemoryError, "host is full"),
    ("forward", raises(torch.OutOfMemoryError("device is full")), 0, RuntimeError, "device is"),
    ("data", raises(ValueError("mine")), 0, ValueError, "mine"),
    ("data", raises(ValueError("mine")), 2, ValueError, r"(?s)in DataLoader worker.*mine"),
    # torch notices it when the worker is gone, or when it takes a batch from it.
    ("data", killed, 2, (RuntimeError, ConnectionError), r"worker.*(killed|exited)|reset by peer"),
]


@pytest.mark.parametrize(("place", "does", "workers", "kind", "message"), ERRORS)
def test_an_error_is_raised_as_it_was_after_one_save(tmp_path, place, does, workers, kind, message):
    it = trainer(tmp_path, hooks := Hooks())
    data = loaders(workers, does, (28 if does is killed else 10) if place == "data" else None)
    with pytest.raises(kind, match=message):
        fitted(it, Net(place, does), data)
    assert hooks.told == ["teardown"]
    assert multiprocessing.active_children() == []
    assert saved_steps(tmp_path) == [it.global_step]
    if does is killed:  # at some step on the way to the batch that kills it
        assert 0 < it.global_step < STEPS
    else:
        assert it.global_step == (3 if place == "validation" else 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_error_the_same_trainer_trains_on(tmp_path, workers):
    it, model = trainer(tmp_path), Net("forward", raises(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        fitted(it, model, data := loaders(workers))
    model.place = None
    it.fit(model, *data)
    assert (it.global_step, it.state.epoch) == (STEPS, 1)


def test_a_run_whose_time_is_up_is_saved_and_ends_like_any_other(tmp_path):
    it = trainer(tmp_path, max_time=timedelta(microseconds=1))
    result = it.fit(Net(), *loaders())
    assert "time limit" in result.reason
    assert saved_steps(tmp_path) == [it.global_step] == [1]


def test_a_save_that_fails_hides_no_error(tmp_path, caplog):
    class Full(Net):
        def on_save_checkpoint(self, checkpoint):
            raise OSError("disk is full")

    with pytest.raises(ValueError, match="mine"):
        fitted(trainer(tmp_path), Full("forward", raises(ValueError("mine"))), loaders())
    assert "disk is full" in caplog.text
