"""Workers' randomness without seeds of the samples' places: torch's, or seed_everything's."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from leyden import seed_everything
from leyden.testing import Regression, quiet_trainer


class Noise(Dataset):
    """Draws each sample's target with NumPy."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        return torch.zeros(3), torch.tensor([numpy.random.rand()], dtype=torch.float32)


def drawn(workers: bool, own_init=None) -> list[float]:
    class Recording(Regression):
        def training_step(self, batch, batch_idx):
            targets.extend(batch[1].flatten().tolist())
            return super().training_step(batch, batch_idx)

    targets: list[float] = []
    seed_everything(3, workers=workers, verbose=False)
    loader = DataLoader(Noise(), batch_size=2, num_workers=2, worker_init_fn=own_init)
    quiet_trainer(seed_samples=False).fit(Recording(), loader)
    assert loader.worker_init_fn is own_init  # the user's loader is never changed
    return targets


@pytest.fixture(autouse=True)
def no_seed_left(monkeypatch):
    for name in ("LEYDEN_SEED", "LEYDEN_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # put back, or taken away, when the test ends


@pytest.mark.parametrize(("workers", "alike"), [(True, False), (False, True)])
def test_workers_of_two_ranks_draw_apart(monkeypatch, workers, alike):
    first = drawn(workers)
    assert len(set(first)) == 8
    assert drawn(workers) == first
    monkeypatch.setenv("RANK", "1")
    assert (drawn(workers) == first) == alike


def test_an_init_function_of_ones_own_is_kept():
    def own_init(worker_id):
        numpy.random.seed(7)

    assert len(set(drawn(workers=True, own_init=own_init))) == 4  # both workers draw the same
