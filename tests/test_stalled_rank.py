"""A rank that does not come: the others end in time, and show it and where it stands."""

import os
import pickle
import re
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from leyden import ConfigError, Module
from leyden.errors import RankError
from leyden.strategies import DDP
from leyden.strategies.flight_recorder import PATH, SIZE
from leyden.strategies.launchers.elastic import Elastic
from leyden.testing import on_ranks, quiet_trainer


class Data(Dataset):
    """Stalls on one rank, after the waits have become short."""

    def __init__(self, folder=None):
        self.folder = folder

    def __len__(self):
        return 400

    def __getitem__(self, index):
        # Rank 0 has the even pairs.
        if self.folder is not None and index > 200 and index % 4 == 2:
            stall_in_data(self.folder)
        return torch.ones(3)


def stall_in_data(folder):
    (folder / "stalled").touch()
    time.sleep(600)


def stall_in_step(folder):
    (folder / "stalled").touch()
    time.sleep(600)


class Line(Module):
    def __init__(self, folder=None):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.folder = folder

    def training_step(self, batch, batch_idx):
        if self.folder is not None and self.global_rank == 1 and batch_idx == 40:
            stall_in_step(self.folder)
        time.sleep(0.01)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder, module, data, workers=0):
    trainer = quiet_trainer(
        strategy=DDP(timeout=2, first_timeout=60, flight_recorder=50), launcher=Elastic(grace=1),
        accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder, name="run",
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 2, num_workers=workers))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for loader workers")
@pytest.mark.parametrize(("where", "workers"), [("step", 0), ("data", 0), ("data", 1)])
def test_a_rank_that_stalls_is_shown_first_with_where_it_stands(tmp_path, where, workers):
    module = Line(tmp_path if where == "step" else None)
    data = Data(tmp_path if where == "data" else None)
    with pytest.raises(RankError) as raised:
        fitted(tmp_path, module, data, workers)
    # 2 s of waiting, 5 s for others to tell, a second or two to look at it, and 1 s to end.
    assert time.time() - (tmp_path / "stalled").stat().st_mtime < 20
    report = str(raised.value)
    assert report.startswith(f"Rank 1 on {socket.gethostname()} does not come. It stands in\n")
    stands, waited = report.split("Rank 0 waited for it:")
    assert re.search(rf'File ".*test_stalled_rank\.py", line \d+ in stall_in_{where}', stands)
    assert "Timed out" in waited
    [file] = tmp_path.glob("run/version_0/flight_recorder/*")
    last = pickle.loads(file.read_bytes())["entries"][-1]
    assert file.name == "rank_0"
    # What rank 0 waits in: its gradients, or the word on what is next.
    assert (last["profiling_name"], last["timeout_ms"]) == ("gloo:all_reduce", 2000)


def recorded(folder):
    trainer = quiet_trainer(
        strategy=DDP(flight_recorder=7), accelerator="cpu", devices=2, max_epochs=1,
        default_root_dir=folder, name="run",
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(Data(), 2))
    named = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    path = trainer.strategy.flight_recorder.path
    trainer.strategy.flight_recorder.dump(trainer.global_rank, "gloo")
    return [os.environ[name] for name in named], path, os.environ["TORCH_FR_DUMP_TEMP_FILE"]


def test_the_flight_recorder_is_on_before_groups_are_made_and_says_where_it_writes(tmp_path):
    prefix = str(tmp_path / "run/version_0/flight_recorder/rank_")
    for found in on_ranks(2, recorded, tmp_path):
        assert found == (["7", "1"], prefix, prefix)
    for rank in (0, 1):
        assert len(pickle.loads(Path(f"{prefix}{rank}").read_bytes())["entries"]) == 7


def test_where_the_flight_recorder_writes_is_said(tmp_path, caplog, monkeypatch):
    for name in (SIZE, PATH, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "")  # what it was comes back
    caplog.set_level("INFO")
    trainer = quiet_trainer(
        strategy=DDP(flight_recorder=True), accelerator="cpu", devices=1, max_epochs=1,
        default_root_dir=tmp_path, name="run",
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(Data(), 200))
    assert f"is written to {tmp_path}/run/version_0/flight_recorder/rank_<rank>" in caplog.text


@pytest.mark.parametrize("entries", [0, -1, "all", 1.5])
def test_a_flight_recorder_without_entries_is_refused(entries):
    with pytest.raises(ConfigError, match=f"flight_recorder={entries!r} must be"):
        DDP(flight_recorder=entries)
