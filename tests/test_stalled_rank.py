"""A rank that does not come: the others end in time, and show it and where it stands."""

import re
import signal
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
from leyden.strategies.launchers.elastic import Elastic
from leyden.testing import quiet_trainer


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


def fitted(module, data, workers=0, **options):
    trainer = quiet_trainer(
        strategy=DDP(timeout=2, first_timeout=60, **options), launcher=Elastic(grace=1),
        accelerator="cpu", devices=2, max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 2, num_workers=workers))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for loader workers")
@pytest.mark.parametrize(("where", "workers"), [("step", 0), ("data", 0), ("data", 1)])
def test_a_rank_that_stalls_is_shown_first_with_where_it_stands(tmp_path, where, workers):
    module = Line(tmp_path if where == "step" else None)
    data = Data(tmp_path if where == "data" else None)
    with pytest.raises(RankError) as raised:
        fitted(module, data, workers)
    # 2 s of waiting, 5 s for others to tell, a second or two to look at it, and 1 s to end.
    assert time.time() - (tmp_path / "stalled").stat().st_mtime < 20
    report = str(raised.value)
    assert report.startswith(f"Rank 1 on {socket.gethostname()} does not come. It stands in\n")
    stands, waited = report.split("Rank 0 waited for it:")
    assert re.search(rf'File ".*test_stalled_rank\.py", line \d+ in stall_in_{where}', stands)
    assert "Timed out" in waited
