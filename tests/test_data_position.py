"""The place in the data: a new reader put there gives what the old one had yet to give."""

import io
import random
import time
import warnings
from collections.abc import Sequence
from itertools import islice

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from leyden import DataError, Module
from leyden.data import CombinedLoader
from leyden.data.feed import train_source
from leyden.data.source import Wait
from leyden.testing import quiet_trainer

FAST_FORWARD = "batches are loaded to be left out"
pytestmark = pytest.mark.filterwarnings(
    f"ignore:.*{FAST_FORWARD}", "ignore:.*set_vital", "ignore:This DataLoader will create 4"
)


class Noisy(Dataset):
    """Sample i is i and a draw of each generator; it notes what it loads."""

    def __init__(self, size=11):
        self.size, self.loaded = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor([index, *draws()], dtype=torch.float64)


class OwnNoise(Noisy):
    """Draws from generators of its own too."""

    def __init__(self, size=11):
        super().__init__(size)
        self.parts = [random.Random(1), numpy.random.default_rng(2)]
        self.torch = torch.Generator().manual_seed(3)

    def __getitem__(self, index):
        own = [self.parts[0].random(), self.parts[1].random()]
        own.append(torch.rand((), generator=self.torch).item())
        return torch.cat([super().__getitem__(index), torch.tensor(own, dtype=torch.float64)])


class Stream(IterableDataset):
    """Eleven samples in order, each with a draw."""

    def __iter__(self):
        for index in range(11):
            yield torch.tensor([index, *draws()], dtype=torch.float64)


class SavedStream(Stream):
    """Says where it is, in torchdata's way: a state counts for the next pass."""

    size = 11

    def __init__(self):
        self.at, self.next, self.loaded = 0, None, []

    def __iter__(self):
        self.at, self.next = self.next or 0, None
        return self.samples()

    def samples(self):
        while self.at < self.size:
            self.at += 1
            self.loaded.append(self.at - 1)
            yield torch.tensor([self.at - 1, *draws()], dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.next = state["at"]


class LateStream(SavedStream):
    """Looks where it is to begin only when it is asked for its first sample."""

    def __iter__(self):
        self.at, self.next = self.next or 0, None
        yield from self.samples()


class Shuffles(Sampler):
    """An order of its own each time, with a draw for each sample too."""

    def __init__(self, size=11):
        self.size, self.own = size, random.Random(5)

    def __len__(self):
        return self.size

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        self.own.shuffle(order)
        for index in order:
            yield (index + random.randrange(self.size)) % self.size


class Counts(Sampler):
    """In order; it has a state, and notes how often it is asked."""

    def __init__(self):
        self.at, self.asked = 0, []

    def __len__(self):
        return 11

    def __iter__(self):
        while self.at < 11:
            self.at += 1
            self.asked.append(self.at - 1)
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Batches(Shuffles):
    """Batches of one, two or three samples."""

    def __len__(self):
        return 6

    def __iter__(self):
        order = iter(numpy.random.permutation(self.size).tolist())
        for size in (1, 2, 3, 1, 2, 2):
            yield [next(order) for _ in range(size)]


class Loader:
    """A loader of one's own, with a generator of its own."""

    def __init__(self):
        self.own = numpy.random.RandomState(3)

    def __iter__(self):
        for index in range(6):
            yield torch.tensor([index, self.own.rand(), *draws()], dtype=torch.float64)


class SavedLoader(Loader):
    """Says where it is, and goes on from there by itself."""

    at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.at, self.own.rand(), *draws()], dtype=torch.float64)
        self.at = 0

    def __len__(self):
        return 6

    def state_dict(self):
        return {"at": self.at, "kind": (1, "a")}

    def load_state_dict(self, state):
        assert state["kind"] == (1, "a")
        self.at = state["at"]


class Own(DataLoader):
    """Goes its own way over its data."""

    def __iter__(self):
        yield from super().__iter__()


class Items(Sequence):
    def __init__(self):
        self.asked = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.asked.append(index)
        if index >= 6:
            raise IndexError
        return torch.tensor([float(index)])


def draws():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def plain(**choices):
    return lambda **w: DataLoader(Noisy(), **{"batch_size": 2, **choices}, **w)


def saved_sampler(**w):
    sampler = StatefulDistributedSampler(range(11), num_replicas=1, rank=0)
    return DataLoader(Noisy(), batch_size=2, sampler=sampler, **w)


def batch_sampler(**w):
    inner = BatchSampler(RandomSampler(range(11)), 2, True)
    return DataLoader(Noisy(), batch_sampler=inner, **w)


INDEXED = {
    "in order": plain(),
    "shuffled": plain(shuffle=True),
    "short batches dropped": plain(shuffle=True, drop_last=True),
    "single samples": lambda **w: DataLoader(Noisy(), batch_size=None, shuffle=True, **w),
    "with replacement": lambda **w: DataLoader(
        Noisy(), 2, sampler=RandomSampler(range(11), True, 13), **w
    ),
    "more than there are": lambda **w: DataLoader(
        Noisy(), 2, sampler=RandomSampler(range(11), num_samples=30), **w
    ),
    "batch sampler of torch": batch_sampler,
    "own generators": lambda **w: DataLoader(OwnNoise(), 2, shuffle=True, **w),
    "a generator given": lambda **w: DataLoader(
        Noisy(), 2, shuffle=True, generator=torch.Generator().manual_seed(4), **w
    ),
    "sampler": lambda **w: DataLoader(Noisy(), 2, sampler=Shuffles(), **w),
    "weighted sampler": lambda **w: DataLoader(
        Noisy(), 2, sampler=WeightedRandomSampler([1.0] * 11, 11), **w
    ),
    "sampler of single samples": lambda **w: DataLoader(
        Noisy(), batch_size=None, sampler=Shuffles(), **w
    ),
    "batch sampler": lambda **w: DataLoader(Noisy(), batch_sampler=Batches(), **w),
    "sampler with state": saved_sampler,
    "torchdata": lambda **w: StatefulDataLoader(Noisy(), 2, shuffle=True, **w),
    "torchdata's sampler with state": lambda **w: StatefulDataLoader(
        Noisy(), 2, sampler=StatefulDistributedSampler(range(11), 1, 0), **w
    ),
}
STREAMS = {
    "stream": lambda **w: DataLoader(Stream(), 2, **w),
    "stream of single samples": lambda **w: DataLoader(Stream(), batch_size=None, **w),
    "torchdata's stream": lambda **w: StatefulDataLoader(SavedStream(), 2, **w),
    "own way": lambda **w: Own(Noisy(), 2, shuffle=True, **w),
}
OTHERS = {
    "stream with state": lambda: DataLoader(SavedStream(), 2),
    "late stream with state": lambda: DataLoader(LateStream(), 2),
    "torchdata's late stream": lambda: StatefulDataLoader(LateStream(), 2),
    "loader": Loader,
    "loader with state": SavedLoader,
    "list": lambda: [torch.full((2,), float(n)) for n in range(6)],
    "tuple": lambda: tuple(torch.full((2,), float(n)) for n in range(6)),
    "tensor": lambda: torch.arange(12.0).reshape(6, 2),
    "sequence": Items,
    "side by side": lambda: CombinedLoader(
        {
            "short": INDEXED["shuffled"](),
            "long": INDEXED["more than there are"](),
            "saved": SavedLoader(),
        }
    ),
    "side by side up to the longest": lambda: CombinedLoader(
        [INDEXED["shuffled"](), INDEXED["more than there are"](), SavedLoader()], "max_size"
    ),
    "side by side, streams": lambda: CombinedLoader(
        [Loader(), SavedLoader(), STREAMS["stream"](), DataLoader(SavedStream(), 1)]
    ),
}


def source(loader, limit=1.0, **choices):
    return train_source(loader, limit, False, None, Wait(), **choices)


def values(batch):
    if isinstance(batch, dict):
        return {name: values(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [values(part) for part in batch]
    return batch if batch is None else batch.tolist()


def rest(reading, epoch):
    """Return the batches of the pass that is due, each with whether it is the last."""
    return [(values(batch), is_last) for batch, is_last in reading.batches(epoch)]


def through_file(position):
    file = io.BytesIO()
    torch.save(position, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def left_at(reading, epoch, count):
    """Return the position after ``count`` batches of the pass that is due."""
    batches = reading.batches(epoch)
    for _ in range(count):
        next(batches)
    return through_file(reading.position())


def check(make, breaks, **choices):
    """Check that at each of ``breaks`` (epoch, batch) a reader with another seed goes on alike."""
    torch.manual_seed(3)
    whole = source(make(), **choices)
    unbroken = [rest(whole, epoch) for epoch in range(3)]
    assert len(unbroken[0]) > 2
    whole.close()
    for epoch, batch in breaks:
        torch.manual_seed(3)
        first = source(make(), **choices)
        for before in range(epoch):
            rest(first, before)
        position = left_at(first, epoch, batch)
        torch.manual_seed(4)  # the position has the seed
        second = source(make(), **choices)
        second.restore(position)
        assert second.start == batch
        assert second.position() == position or batch == 0
        assert rest(second, epoch) == unbroken[epoch][batch:]
        assert rest(second, epoch + 1) == unbroken[epoch + 1]
        first.close(), second.close()


def lengths(make):
    return len(list(make()))


@pytest.mark.parametrize("name", INDEXED | STREAMS | OTHERS)
def test_a_pass_goes_on_at_every_batch_and_so_does_the_next(name):
    make = (INDEXED | STREAMS | OTHERS)[name]
    check(make, [(epoch, batch) for epoch in (0, 1) for batch in range(1, lengths(make) + 1)])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("name", INDEXED | STREAMS)
def test_workers_change_nothing(name, workers, persistent):
    if name == "own way" and persistent:
        return  # its workers go on drawing from where the pass before has left them
    make = (INDEXED | STREAMS)[name]
    options = {"num_workers": workers, "persistent_workers": persistent}
    check(lambda: make(**options), [(0, 2), (1, 3)])


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_loaded_that_is_not_used(name, workers):
    make = INDEXED[name]
    first = source(make())
    position = left_at(first, 0, 3)
    loader = make(num_workers=workers)
    second = source(loader)
    second.restore(position)
    used = [batch for batch, _ in rest(second, 0)]
    second.close()
    ids = [row[0] for batch in used for row in (batch if isinstance(batch[0], list) else [batch])]
    assert len(used) == lengths(make) - 3
    assert loader.dataset.loaded == ([] if workers else ids)


@pytest.mark.parametrize("name", ["shuffled", "sampler", "torchdata", "stream with state"])
def test_a_pass_is_broken_twice(name):
    make = (INDEXED | OTHERS)[name]
    torch.manual_seed(3)
    unbroken = rest(source(make()), 0)
    position, seen = None, []
    for seed, count in ((3, 2), (4, 1), (5, 99)):
        torch.manual_seed(seed)
        reading = source(make())
        if position is not None:
            reading.restore(position)
        batches = reading.batches(0)
        seen += [(values(batch), is_last) for batch, is_last in islice(batches, count)]
        position = through_file(reading.position())
    assert seen == unbroken


@pytest.mark.parametrize("name", ["shuffled", "stream with state", "loader with state", "list"])
def test_a_pass_that_is_over_is_not_gone_on_with(name):
    make = (INDEXED | OTHERS)[name]
    whole, first, second = (source(make()) for _ in range(3))
    unbroken = [rest(whole, epoch) for epoch in range(2)]
    rest(first, 0)
    second.restore(through_file(first.position()))
    assert second.start == 0
    assert rest(second, 1) == unbroken[1]


@pytest.mark.parametrize("name", ["shuffled", "sampler with state", "stream with state"])
def test_a_place_told_again_before_any_batch_is_the_same(name):
    make = (INDEXED | OTHERS)[name]
    position = left_at(source(make()), 0, 3)
    second = source(make())
    second.restore(position)
    second.batches(0)
    (part,), (again,) = position["parts"], second.position()["parts"]
    assert (again["batches"], again["state"]) == (3, part["state"])


def test_a_pass_left_for_another_epoch_is_not_gone_on_with():
    make = INDEXED["shuffled"]
    first, second = source(make()), source(make())
    second.restore(left_at(first, 0, 2))
    assert rest(second, 1) == rest(source(make()), 1)


@pytest.mark.parametrize("name", ["shuffled", "sampler with state", "torchdata's stream", "list"])
def test_a_limit_cuts_each_pass_alike(name):
    check((INDEXED | STREAMS | OTHERS)[name], [(0, 2), (1, 3)], limit=3)


# Exhausted states: torchdata #1437


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("at", [4, 10])
def test_every_epoch_after_a_resumed_one_is_whole(kind, workers, persistent, at):
    def make():
        data = Noisy(10) if kind == "map" else SavedTen()
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        return StatefulDataLoader(data, shuffle=True if kind == "map" else None, **options)

    total = 10 * (1 if kind == "map" else max(1, workers))
    first, second = source(make()), source(make())
    position = left_at(first, 0, at)
    second.restore(position)
    assert second.position() == position
    assert len(rest(second, 0)) == total - at
    assert [len(rest(second, epoch)) for epoch in (1, 2)] == [total, total]
    first.close(), second.close()


class SavedTen(SavedStream):
    size = 10


def test_a_loader_whose_state_is_of_its_end_begins_again():
    class Ends(SavedLoader):
        """Is at its end until it was gone through once more."""

        def __iter__(self):
            while self.at < 6:
                self.at += 1
                yield torch.tensor([self.at])
            self.at = 0

    first, second = source(Ends()), source(Ends())
    second.restore(left_at(first, 0, 6))
    assert rest(second, 0) == []
    assert [batch for batch, _ in rest(second, 1)] == [[n] for n in range(1, 7)]


# Changed settings


def test_another_batch_size_goes_on_at_the_sample_and_says_so():
    torch.manual_seed(1)
    first, second = source(INDEXED["shuffled"]()), source(plain(batch_size=3, shuffle=True)())
    whole = [row[0] for batch, _ in rest(source(INDEXED["shuffled"]()), 0) for row in batch]
    position = left_at(first, 0, 2)
    with pytest.warns(UserWarning, match=r"batch_size=3 \(2 until then\).*first 4 samples\."):
        second.restore(position)
    assert second.start == 1  # 3 of its 4 batches are left
    batches = second.batches(0)
    seen = [row[0] for row in values(next(batches)[0])]
    again = source(plain(batch_size=3, shuffle=True)())
    again.restore(through_file(second.position()))
    assert again.start == 2
    seen += [row[0] for batch, _ in rest(again, 0) for row in batch]
    assert seen == whole[4:]


def test_short_batches_dropped_from_now_on_end_the_epoch_earlier():
    second = source(plain(shuffle=True, drop_last=True)())
    position = left_at(source(INDEXED["shuffled"]()), 0, 2)
    with pytest.warns(UserWarning, match=r"drop_last=True \(False until then\)"):
        second.restore(position)
    assert len(rest(second, 0)) == 3


def test_a_data_set_of_another_length_is_said():
    second = source(DataLoader(Noisy(13), 2, shuffle=True))
    position = left_at(source(INDEXED["shuffled"]()), 0, 2)
    with pytest.warns(UserWarning, match=r"samples=13 \(11 until then\).*in another order after"):
        second.restore(position)
    assert len(rest(second, 0)) == 5


def test_another_number_of_loaders_is_refused():
    position = source(OTHERS["side by side"]()).position()
    with pytest.raises(DataError, match="one in 3 loaders, and now there are 1"):
        source(INDEXED["shuffled"]()).restore(position)


def test_batches_in_no_order_cannot_be_gone_on_with_and_it_is_said():
    loader = DataLoader(Noisy(), 2, num_workers=1, in_order=False)
    second = source(loader)
    position = left_at(source(INDEXED["in order"]()), 0, 2)
    with pytest.warns(UserWarning, match="in_order=False.*Leave it True"):
        second.restore(position)


def test_a_state_that_no_checkpoint_can_hold_is_refused():
    class Odd(SavedLoader):
        def state_dict(self):
            return {"lock": open}

    reading = source(Odd())
    next(reading.batches(0))
    with pytest.raises(DataError, match=r"state_dict\(\) of Odd cannot be saved: lock is of type"):
        reading.position()


# What is loaded to be left out


@pytest.mark.parametrize(
    ("name", "advice"), [("stream", "give its data set state_dict"), ("loader", "give it state_")]
)
def test_loading_what_is_left_out_is_said_once_with_its_cost(name, advice):
    make = (STREAMS | OTHERS)[name]
    second = source(make())
    second.restore(left_at(source(make()), 0, 3))
    with pytest.warns(UserWarning, match=FAST_FORWARD) as said:
        rest(second, 0), rest(second, 1)
    (message,) = [str(one.message) for one in said]
    assert message.startswith("The epoch goes on in its middle: 3 batches are loaded")
    assert advice in message


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_with_state_is_not_gone_through_again(workers):
    def make():
        return DataLoader(Noisy(), 2, sampler=Counts(), num_workers=workers)

    first, loader = source(make()), make()
    second = source(loader)
    second.restore(left_at(first, 0, 3))
    batches = second.batches(0)
    if not workers:
        assert loader.sampler.asked == []
        assert second.position()["parts"] == first.position()["parts"]  # before any batch
    assert [int(batch[0][0]) for batch in map(values, next(zip(*batches, strict=True)))] == [
        6,
        8,
        10,
    ]
    assert loader.sampler.asked == list(range(6, 11))
    first.close(), second.close()


def test_a_stream_with_state_loads_nothing_twice():
    loader = DataLoader(SavedStream(), 2)
    second = source(loader)
    second.restore(left_at(source(DataLoader(SavedStream(), 2)), 0, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest(second, 0)
    assert loader.dataset.loaded == list(range(6, 11))


def test_a_sequence_is_asked_only_for_what_is_used():
    items = Items()
    second = source(items)
    second.restore(left_at(source(Items()), 0, 4))
    rest(second, 0)
    assert items.asked == [4, 5]


def test_a_batch_count_from_elsewhere_is_enough_to_go_on():
    for make in (INDEXED["in order"], OTHERS["list"], Loader, OTHERS["side by side"]):
        reading = source(make())
        whole = rest(reading, 0)
        reading = source(make())
        reading.start = 2
        assert [is_last for _, is_last in rest(reading, 0)] == [last for _, last in whole[2:]]


# What must stay as it is


@pytest.mark.parametrize("name", INDEXED | STREAMS | OTHERS)
def test_training_draws_as_if_no_data_were_read(name):
    make = (INDEXED | STREAMS | OTHERS)[name]
    loader = make()
    state = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    list(source(loader).batches(0))
    assert random.getstate() == state[0]
    assert numpy.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])


def test_the_users_loader_is_left_as_it_is():
    loader = INDEXED["shuffled"](num_workers=1, persistent_workers=True)
    before = dict(vars(loader))
    reading = source(loader)
    rest(reading, 0)
    reading.close()
    assert vars(loader) == before
    assert reading.loader is loader


def test_workers_that_the_user_has_started_are_the_users():
    loader = INDEXED["in order"](num_workers=1, persistent_workers=True)
    own = iter(loader)
    first = next(own).tolist()
    reading = source(loader)
    rest(reading, 0)
    reading.close()
    assert loader._iterator is own
    assert [batch.tolist()[0][0] for batch in (torch.tensor(first), *own)] == [0, 2, 4, 6, 8, 10]


def test_persistent_workers_live_from_pass_to_pass():
    class Pids(Noisy):
        def __getitem__(self, index):
            return torch.utils.data.get_worker_info().seed

    loader = DataLoader(Pids(), num_workers=1, persistent_workers=True)
    reading = source(loader)
    seeds = {value for epoch in (0, 1) for batch, _ in rest(reading, epoch) for value in batch}
    reading.close()
    assert len(seeds) == 1


def test_orders_are_permutations_and_differ_between_epochs():
    reading = source(INDEXED["shuffled"]())
    orders = [[row[0] for batch, _ in rest(reading, e) for row in batch] for e in range(3)]
    assert [sorted(order) for order in orders] == [list(range(11))] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_a_sampler_draws_apart_for_each_sample_and_epoch():
    class Draws(Sampler):
        def __len__(self):
            return 20

        def __iter__(self):
            for _ in range(20):
                yield random.randrange(10**9)

    reading = source(DataLoader(range(10**9), sampler=Draws()))
    drawn = [batch[0] for epoch in (0, 1) for batch, _ in rest(reading, epoch)]
    assert len(set(drawn)) == 40


def test_a_shorter_loader_is_shuffled_anew_when_it_begins_again():
    loaders = [DataLoader(torch.arange(9), 9, shuffle=True), [torch.zeros(1)] * 4]
    orders = [batch[0] for batch, _ in rest(source(loaders), 0)]
    assert [sorted(order) for order in orders] == [list(range(9))] * 4
    assert len({tuple(order) for order in orders}) == 4


def test_the_seed_of_a_generator_given_decides_the_order_and_no_other():
    def order(seed, given):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(given)
        loader = DataLoader(torch.arange(50), shuffle=True, generator=generator)
        return [batch for batch, _ in rest(source(loader), 0)]

    assert order(1, 7) == order(2, 7) != order(1, 8)


def test_an_adaptive_sampler_is_asked_for_each_batch_when_it_is_due():
    class Adaptive(Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            for _ in range(4):
                yield wanted[-1]

    wanted = [0]
    reading = source(DataLoader(torch.arange(9), sampler=Adaptive()))
    seen = []
    for batch, _ in reading.batches(0):
        seen += batch.tolist()
        wanted.append(batch.item() + 2)
    assert seen == [0, 2, 4, 6]


def test_the_middle_of_ten_million_samples_is_reached_at_once():
    reading = source(DataLoader(range(10_000_000), batch_size=100, shuffle=True))
    reading.start = 50_000
    began = time.perf_counter()
    batch, _ = next(reading.batches(0))
    assert time.perf_counter() - began < 1
    assert len(batch) == 100


# In a run


class Sees(Module):
    """Keeps the batches it trains on; weights follow from dropout."""

    def __init__(self, reads_total=False):
        super().__init__()
        self.layer, self.reads_total, self.seen = torch.nn.Linear(1, 1), reads_total, []
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        self.seen.append(values(batch))
        column = batch.reshape(len(batch), -1)[:, :1].float()
        return self.layer(self.drop(column)).mean()

    def configure_optimizers(self):
        if self.reads_total:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted(seed, loader, path=None, reads_total=False, **choices):
    torch.manual_seed(seed)
    module = Sees(reads_total)
    trainer = quiet_trainer(**choices)
    trainer.fit(module, loader, ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize("reads_total", [False, True])
def test_reading_how_many_steps_there_will_be_moves_no_loader(tmp_path, reads_total):  # PL #20550
    class Six(SavedLoader):
        def __iter__(self):
            while self.at < 6:
                self.at += 1
                yield torch.tensor([float(self.at)])
            self.at = 0

    _, trainer = fitted(1, Six(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    module, _ = fitted(2, Six(), tmp_path / "three.ckpt", reads_total)
    assert module.seen == [[4.0], [5.0], [6.0]]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("step", [4, 6, 9])
def test_a_run_goes_on_with_other_workers_as_if_it_were_unbroken(
    tmp_path, workers, persistent, step
):
    def loader(workers, persistent=False):
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        return DataLoader(OwnNoise(), 2, shuffle=True, **options)

    whole, _ = fitted(1, loader(0), max_epochs=2)
    first, trainer = fitted(1, loader(2), max_steps=step, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    second, _ = fitted(5, loader(workers, persistent), tmp_path / "saved.ckpt", max_epochs=2)
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.layer.weight, whole.layer.weight)
