"""Under torchrun a rank that is killed brings all back, from the newest checkpoint."""

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from leyden import Callback, Module, Trainer
from leyden.plugins import ModelCheckpoint

class Line(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if self.global_rank == 0 and batch_idx == 0:
            print("attempt", attempt, "begins at step", self.global_step, flush=True)
        if (os.environ["KILL"], attempt, self.global_rank, batch_idx) == ("1", "0", 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return (self.layer(x) + 0.1 * torch.randn(()) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
module = Line()
trainer = Trainer(
    strategy="ddp", accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=sys.argv[1],
    callbacks=[ModelCheckpoint(every_n_train_steps=2)],
)
trainer.fit(module, data)
if trainer.is_global_zero:
    torch.save(module.state_dict(), sys.argv[1] + "/weights.pt")
"""


def started(folder, kill):
    """Run the script on two ranks, and return what torchrun left with and said."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    return subprocess.run(
        [sys.executable, *torchrun, "--max-restarts=1", "train.py", str(folder)],
        cwd=folder, env=kept | {"KILL": str(int(kill)), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_rank_changes_nothing_in_what_is_trained(tmp_path):
    done = started(tmp_path / "killed", kill=True)
    assert done.returncode == 0, done.stderr
    # Step 5 was under way, and step 4 was saved.
    assert "attempt 0 begins at step 0" in done.stdout
    assert "Taking up" in done.stderr
    assert "step=4.ckpt" in done.stderr
    weights = torch.load(tmp_path / "killed" / "weights.pt")
    assert started(tmp_path / "unbroken", kill=False).returncode == 0
    expected = torch.load(tmp_path / "unbroken" / "weights.pt")
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor)
