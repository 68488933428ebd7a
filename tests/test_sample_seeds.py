"""Randomness of samples follows from their place in the data, whoever loads them and when."""

import os
import random
import signal
import time
from multiprocessing import get_context

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from leyden.data.feed import evaluation_sources, train_source
from leyden.data.share import Share
from leyden.data.source import Wait
from leyden.data.workers import end_with_parent

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4")
MODES = ["batch", "sample", False]
ALL = Share()


class Noise(Dataset):
    """A draw of each generator and of one of its own, for each of twelve samples."""

    def __init__(self):
        self.own = random.Random(1)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, *draws(), self.own.random()], dtype=torch.float64)


class AtOnce(Noise):
    def __getitems__(self, indices):
        noise = numpy.random.rand(len(indices)).tolist()
        return [
            torch.tensor(pair, dtype=torch.float64) for pair in zip(indices, noise, strict=True)
        ]


class ByTensor(Noise):
    def __getitem__(self, indices):
        return torch.as_tensor(indices) + torch.rand(1)


class Rare(Noise):
    """Draws from its tenth fetch on."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item() if index > 9 else 0.0])


class Steady(Noise):
    def __getitem__(self, index):
        return torch.tensor([float(index)])


def draws():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def noisy_collate(samples):
    return default_collate(samples) + torch.rand(1)


def source(data, mode="batch", share=ALL, **options):
    loader = DataLoader(data, **{"batch_size": 3, "shuffle": True, **options})
    return train_source(loader, 1.0, False, None, Wait(), mode, share)


def samples(reading, epochs=1):
    found = [batch for epoch in range(epochs) for batch, _ in reading.batches(epoch)]
    reading.close()
    return torch.cat(found).tolist()


KINDS = {
    "one by one": {"data": Noise},
    "at once": {"data": AtOnce},
    "by tensor": {"data": ByTensor},
    "collated": {"data": Steady, "collate_fn": noisy_collate},
}


@pytest.mark.parametrize("mode", ["batch", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_same_samples(kind, mode):
    make = dict(KINDS[kind])
    data = make.pop("data")
    torch.manual_seed(7)
    alone = samples(source(data(), mode, **make), epochs=2)
    assert len({str(sample) for sample in alone}) == 24
    for workers in (1, 2, 4):
        draws()  # what else is drawn changes nothing
        assert samples(source(data(), mode, num_workers=workers, **make), epochs=2) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_seeded_one_by_one_are_the_same_for_another_batch_size(workers):
    torch.manual_seed(7)
    threes = samples(source(Noise(), "sample"))
    assert samples(source(Noise(), "sample", batch_size=4, num_workers=workers)) == threes
    assert samples(source(Noise(), "batch", batch_size=4)) != samples(source(Noise(), "batch"))


def test_one_seed_gives_the_same_samples_and_another_gives_others():
    def drawn(seed):
        torch.manual_seed(seed)
        return samples(source(Noise()))

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_and_batches_differ(mode, workers):
    noise = [sample[1:] for sample in samples(source(Noise(), mode, num_workers=workers), 3)]
    assert len({tuple(one) for one in noise}) == 36


@pytest.mark.parametrize("mode", ["batch", "sample"])
def test_ranks_draw_apart_and_divide_one_order(mode):
    torch.manual_seed(7)
    whole = [sample[0] for sample in samples(source(Noise(), mode))]
    first, second = (
        samples(source(Noise(), mode, share=Share(rank, 2), batch_size=2)) for rank in (0, 1)
    )
    ordered = [
        sample[0]
        for step in range(3)
        for part in (first, second)
        for sample in part[2 * step : 2 * step + 2]
    ]
    assert ordered == whole
    assert len({sample[2] for sample in first + second}) == 12


def test_ranks_that_read_the_same_samples_draw_apart():
    torch.manual_seed(7)
    first, second = (
        samples(source(Noise(), share=Share(rank, 2, is_dealt=False))) for rank in (0, 1)
    )
    assert [sample[0] for sample in first] == [sample[0] for sample in second]
    assert len({sample[2] for sample in first + second}) == 24


def test_training_and_validation_draw_apart():
    torch.manual_seed(7)
    loader = DataLoader(Noise(), batch_size=3)
    (validation,) = evaluation_sources(loader, 1.0, "val", False, lambda index: None)
    drawn = samples(train_source(loader, 1.0, False, None, Wait())) + samples(validation)
    assert len({sample[2] for sample in drawn}) == 24


@pytest.mark.parametrize("mode", ["batch", "sample"])
def test_what_training_draws_between_batches_is_not_moved_by_the_data(mode):
    def between(reading):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        numpy.random.randn(), random.gauss(0, 1)  # the second of each pair is kept
        return [(*draws(), numpy.random.randn(), random.gauss(0, 1)) for _ in reading.batches(0)]

    assert between(source(Noise(), mode)) == between(source(Steady(), mode))


def test_unseeded_samples_are_drawn_from_the_process_itself():
    reading = source(Noise(), False, shuffle=False, batch_size=1)
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(12)]
    torch.manual_seed(1)
    assert [sample[3] for sample in samples(reading)] == expected


# Draws are looked for


def fetches(reading, epoch=0):
    """Return the state of what was found after a pass."""
    list(reading.batches(epoch))
    return reading.position()["parts"][0]["draws"]


def test_after_eight_fetches_without_a_draw_the_first_of_some_epochs_is_kept_apart():
    reading = source(Steady(), batch_size=1)
    assert fetches(reading) == [8, 0]
    looked_at = [fetches(reading, epoch)[0] - 8 for epoch in range(1, 10)]
    assert looked_at == [1, 2, 2, 3, 3, 3, 3, 4, 4]  # in epochs 1, 2, 4 and 8


@pytest.mark.parametrize("mode", ["batch", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_wherever_it_is_made_is_found_and_every_fetch_kept_apart(kind, mode):
    make = dict(KINDS[kind])
    reading = source(make.pop("data")(), mode, batch_size=1, **make)
    assert fetches(reading) == [12, 1]


def test_a_draw_of_some_samples_only_is_found_in_a_batch_of_them():
    assert fetches(source(Rare(), "sample", batch_size=12)) == [1, 1]


def test_what_was_found_goes_with_the_position():
    first, second = source(Steady(), batch_size=1), source(Steady(), batch_size=1)
    fetches(first)
    second.restore(first.position())
    assert second.position()["parts"][0]["draws"] == [8, 0]
    assert fetches(second) == [9, 0]


# Workers


class Pid(Noise):
    def __getitem__(self, index):
        return os.getpid()


class Stuck(Noise):
    """Never gives its last batch."""

    def __getitem__(self, index):
        while index > 8:
            time.sleep(60)
        return os.getpid()


def pids(reading, count):
    batches = reading.batches(0)
    found = {pid for _ in range(count) for pid in next(batches)[0].tolist()}
    return batches, found


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [Pid, Stuck])
def test_no_worker_is_left_when_a_source_is_closed(data, persistent):
    options = {"shuffle": False, "num_workers": 2, "persistent_workers": persistent}
    reading = source(data(), **options)
    _, found = pids(reading, 2)
    assert len(alive(found)) == 2
    began = time.perf_counter()
    reading.close()
    assert alive(found) == []
    assert time.perf_counter() - began < 4  # torch alone waits ten seconds for each


def test_a_source_reads_on_after_it_was_closed():
    reading = source(Pid(), num_workers=1, persistent_workers=True)
    first = set(samples(reading))
    assert len(samples(reading)) == 12
    assert first != set(samples(reading))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_leaves_signals_to_its_parent(number):
    reading = source(Pid(), num_workers=2, prefetch_factor=1)
    batches, found = pids(reading, 2)
    for pid in found:
        os.kill(pid, number)
    rest = {pid for batch, _ in batches for pid in batch.tolist()}
    reading.close()
    assert rest == found


def orphan(path):
    reading = source(Pid(), num_workers=1, persistent_workers=True)
    _, (pid,) = pids(reading, 1)
    path.write_text(str(pid))
    os._exit(0)  # as if it had been killed


def test_a_worker_whose_parent_is_gone_ends(tmp_path):
    path = tmp_path / "pid"
    child = os.fork()
    if child == 0:
        orphan(path)
    os.waitpid(child, 0)
    pid = int(path.read_text())
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def late(path, parent):
    while os.getppid() == parent:
        time.sleep(0.005)
    path.write_text(str(os.getpid()))
    end_with_parent()
    path.with_name("lives").touch()


def test_a_worker_that_begins_when_its_parent_is_gone_ends(tmp_path):
    path = tmp_path / "pid"
    child = os.fork()
    if child == 0:
        get_context("fork").Process(target=late, args=(path, os.getpid())).start()
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    while is_running(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not is_running(int(path.read_text()))
    assert not path.with_name("lives").exists()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def own_init(worker_id):
    torch.utils.data.get_worker_info().dataset.made_by = worker_id


def test_a_workers_own_init_function_is_called():
    class Asks(Noise):
        def __getitem__(self, index):
            return self.made_by

    loader = DataLoader(Asks(), num_workers=2, worker_init_fn=own_init)
    reading = train_source(loader, 1.0, False, None, Wait())
    assert samples(reading) == [0, 1] * 6
    assert loader.worker_init_fn is own_init
