from __future__ import annotations

import io
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from leyden.errors import ConfigError
from leyden.rng import capture, isolated, restore, seed_everything, worker_init


@pytest.fixture(autouse=True)
def generators_and_environment_as_before(monkeypatch):
    for name in ("LEYDEN_SEED", "LEYDEN_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    with isolated():
        yield


def draws():
    """Draw from each generator, Gaussians too: two of them keep the second of a pair."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(99),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
    ]


def test_one_seed_gives_the_same_draws_of_every_generator():
    assert seed_everything(7) == 7
    first = draws()
    assert all(one != other for one, other in zip(first, draws(), strict=True))
    seed_everything(7)
    assert draws() == first


def test_the_seeds_are_those_each_library_takes_for_itself():
    seed_everything(2**32 - 1)
    ours = draws()
    random.seed(2**32 - 1)
    np.random.seed(2**32 - 1)
    torch.manual_seed(2**32 - 1)
    assert draws() == ours


def test_the_seed_is_left_for_processes_started_later(monkeypatch):
    seed_everything(7, workers=True)
    code = "import os; from leyden.rng import seed_everything as s; "
    code += "print(s(), os.environ['LEYDEN_SEED_WORKERS'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "7 0\n"
    assert child.stderr == "Seed set to 7\n"


def test_without_a_seed_it_is_the_environments_or_else_a_random_one(monkeypatch):
    random.seed(0)
    torch.manual_seed(0)
    first = seed_everything()
    assert seed_everything() == first
    monkeypatch.delenv("LEYDEN_SEED")
    random.seed(0)
    assert seed_everything() != first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True, float("nan")])
def test_a_seed_that_is_no_integer_in_range_is_refused(seed):
    with pytest.raises(ConfigError, match=r"seed is .*an integer from 0 to 4294967295, or None"):
        seed_everything(seed)


def test_a_wrong_seed_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("LEYDEN_SEED", "seven")
    with pytest.raises(ConfigError, match="seed is 'seven'"):
        seed_everything()


def test_numpy_integers_are_seeds():
    assert type(seed_everything(np.int64(3))) is int


def test_the_seed_is_announced_unless_told_not_to(caplog):
    with caplog.at_level(logging.INFO, "leyden"):
        seed_everything(1)
        seed_everything(2, verbose=False)
    assert caplog.messages == ["Seed set to 1"]


def test_draws_after_restoring_are_those_that_followed_the_capture():
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # so that halves of pairs are kept
    state = capture()
    expected = draws()
    restore(state)
    assert draws() == expected


def test_a_state_goes_through_a_safely_loaded_file():
    file = io.BytesIO()
    torch.save(capture(), file)
    expected = draws()
    file.seek(0)
    restore(torch.load(file, weights_only=True))
    assert draws() == expected


def test_another_bit_generator_of_numpy_is_kept_too():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        file = io.BytesIO()
        torch.save(capture(), file)
        expected = np.random.rand(3).tolist()
        file.seek(0)
        restore(torch.load(file, weights_only=True))
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_captured_state_does_not_follow_the_generators():
    state = capture()
    expected = draws()
    draws()
    restore(state)
    assert draws() == expected
    restore(state)
    assert draws() == expected


def test_what_is_drawn_inside_leaves_the_generators_as_they_were():
    seed_everything(3)
    expected = draws()
    seed_everything(3)
    with isolated():
        draws()
        seed_everything(99)
    assert draws() == expected


def test_an_exception_inside_leaves_the_generators_as_they_were():
    seed_everything(3)
    expected = draws()
    seed_everything(3)
    with pytest.raises(KeyError), isolated():
        draws()
        raise KeyError
    assert draws() == expected


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        values = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor(values, dtype=torch.float64)


def worker_draws():
    loader = DataLoader(Draws(), num_workers=2, worker_init_fn=worker_init)
    return torch.cat(list(loader))


def test_workers_of_one_seed_repeat_and_differ_between_workers_and_ranks(monkeypatch):
    seed_everything(5)
    first = worker_draws()
    seed_everything(5)
    assert torch.equal(worker_draws(), first)
    seed_everything(5)
    monkeypatch.setenv("RANK", "1")
    other_rank = worker_draws()
    assert len(torch.cat([first, other_rank]).flatten().unique()) == 24
