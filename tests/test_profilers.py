"""Profilers: the time they report is the time that was spent."""

import json
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import PyTorchProfiler, SimpleProfiler

WORK = 0.01


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What a profiler writes by default stays out of the checkout."""
    monkeypatch.chdir(tmp_path)


class Slow(Module):
    """Works for a known time in its steps."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(3 * WORK)
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        time.sleep(2 * WORK)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowData(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(5 * WORK)
        return torch.ones(2)


class SlowSaver(Callback):
    def on_save_point(self, trainer, module, at):
        if at == "epoch":
            time.sleep(5 * WORK)


def trainer(**choices):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, **quiet, **choices}
    )


def test_simple_profiler_tells_each_phase_its_own_time(tmp_path):
    profiler = SimpleProfiler()
    run = trainer(profiler=profiler, callbacks=[SlowSaver()], default_root_dir=tmp_path)
    started = time.perf_counter()
    run.fit(Slow(), DataLoader(SlowData()), [torch.ones(1, 2)] * 3)
    took = time.perf_counter() - started
    spent = {
        "training_step": 4 * 3 * WORK,
        "waiting for data": 4 * 5 * WORK,
        "validation_step": (2 + 3) * 2 * WORK,  # the sanity check's too
        "on_save_point": 5 * WORK,
    }
    for phase, seconds in spent.items():
        assert profiler.seconds[phase] >= seconds, phase
    assert profiler.calls["training_step"] == profiler.calls["on_train_batch_end"] == 4
    assert sum(profiler.seconds.values()) <= took


def test_a_hook_told_within_a_hook_counts_once(tmp_path):
    class Saves(Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "a.ckpt")
            time.sleep(5 * WORK)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            time.sleep(10 * WORK)

    profiler = SimpleProfiler()
    run = trainer(max_steps=1, logger=False, profiler=profiler, callbacks=[Saves()])
    started = time.perf_counter()
    run.fit(Slow(), [torch.ones(1, 2)])
    assert profiler.seconds["on_save_checkpoint"] >= 10 * WORK
    assert profiler.seconds["on_train_end"] >= 5 * WORK
    assert sum(profiler.seconds.values()) <= time.perf_counter() - started


def test_simple_profiler_prints_its_table_and_leaves_it_in_the_run(capsys, tmp_path):
    run = trainer(profiler="simple", logger="csv", default_root_dir=tmp_path)
    run.fit(Slow(), [torch.ones(1, 2)] * 2)
    table = (run.run_dir / "profile.txt").read_text()
    assert table in capsys.readouterr().out
    head, titles, largest, *_, total = table.splitlines()
    assert head == "Profile of fit" and titles.split()[-1] == "Each"
    assert largest.startswith("training_step ") and total.startswith("in all ")
    assert largest.split()[3] == "2"


def test_simple_profiler_reports_a_run_that_failed(capsys):
    class Fails(Slow):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(profiler="simple", logger=False).fit(Fails(), [torch.ones(1, 2)])
    assert "Profile of fit" in capsys.readouterr().out


def test_pytorch_profiler_leaves_a_trace_of_the_batches_asked_for(capsys, tmp_path):
    profiler = PyTorchProfiler(wait=1, warmup=1, active=2)
    run = trainer(profiler=profiler, logger="csv", default_root_dir=tmp_path)
    run.fit(Slow(), [torch.ones(1, 2)] * 6)
    (path,) = (run.run_dir / "profile").iterdir()
    assert f"Traces of torch.profiler: {path}" in capsys.readouterr().out
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [
        "ProfilerStep#2", "ProfilerStep#3"
    ]  # fmt: skip
    assert names.count("aten::linear") == 2


def test_pytorch_profiler_says_that_a_run_was_too_short():
    with pytest.warns(UserWarning, match="training ended before 1 batches of wait, 1 of warmup"):
        trainer(profiler="pytorch", logger=False).fit(Slow(), [torch.ones(1, 2)])


@pytest.mark.parametrize(("name", "value"), [("wait", -1), ("active", 0), ("repeat", 0)])
def test_pytorch_profiler_refuses_a_schedule_that_records_nothing(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value} must be at least"):
        PyTorchProfiler(**{name: value})
