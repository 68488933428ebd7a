"""Randomness of data: seeded by its place in the data, apart from the randomness of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from .. import rng
from . import own_generators
from .combined import END

SeedSamples = Literal["batch", "sample", False]
PROBES = 8
"""Fetches at a reader's beginning that are watched for draws; later, the first of some passes."""


def key_of(*place: Any) -> bytes:
    """Return a key for ``place``, to seed from: the same in every process, apart for others."""
    return hashlib.blake2b(repr(place).encode(), digest_size=16).digest()


def data_seed() -> int:
    """Return the seed of all data in this run, made from the one torch was seeded with."""
    return int.from_bytes(key_of("data", torch.initial_seed())[:8])


def seed_of(key: bytes) -> int:
    """Return ``key`` as an integer that seeds one generator."""
    return int.from_bytes(key[:8])


class Draws:
    """Keeps what loading draws apart from what training draws, at no cost where nothing is drawn.

    The process's generators are seeded for each fetch and put back after it. Where none of the
    first fetches moved them, later ones go without, but for the first in epochs 0, 1, 2, 4, 8 …

    Args:
        own: The data set's own generators, which are seeded alike.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self.own = own
        self.probed = 0
        self.found = False
        self.is_first = True
        self._seeded: list[Any] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the next fetch is to be kept apart."""
        return self.found or self.is_first or self.probed < PROBES

    def begin(self, epoch: int) -> None:
        """Begin a pass; looking at each would cost short epochs much of their time."""
        self.is_first = epoch & (epoch - 1) == 0

    def fetch(self, iterator: Iterator[Any], key: bytes) -> Any:
        """Return the iterator's next, or END, made with every generator seeded from ``key``."""
        before = rng.snapshot()
        try:
            self._seeded = None
            self.seed(key)
            batch = next(iterator, END)
            if batch is not END:
                self._look()
                self.probed, self.is_first = self.probed + 1, False
            return batch
        finally:
            rng.put_back(before)

    def seed(self, key: bytes) -> None:
        """Seed every generator from ``key``, after a look at whether one has moved since before."""
        self._look()
        reseed(key, self.own)
        if not self.found:
            self._seeded = self._now()

    def _look(self) -> None:
        if not self.found and self._seeded is not None:
            self.found = not _alike(self._seeded, self._now())

    def _now(self) -> list[Any]:
        return [rng.snapshot(), *(own_generators.state_of(one) for one in self.own.values())]

    def state(self) -> list[int]:
        """Return what was found so far: a resumed run decides alike."""
        return [self.probed, int(self.found)]

    def restore(self, state: list[int]) -> None:
        """Take over what `state` returned."""
        self.probed, self.found = state[0], bool(state[1])


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and isinstance(one[0], int):  # Python's: hundreds of plain numbers
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


class Seeded:
    """The indices of a batch on their way to a worker, where they arrive as what they are.

    The worker unpickles them right before it loads them: that is when its generators are seeded,
    whatever the data set and the collate function then do with them.
    """

    def __init__(self, key: bytes, indices: Any, place: int | None) -> None:
        self.key, self.indices, self.place = key, indices, place

    def __reduce__(self) -> Any:
        return arrive, (self.key, self.indices, self.place)


def arrive(key: bytes, indices: Any, place: int | None) -> Any:
    """Seed this worker's generators from ``key`` and return the indices.

    Args:
        key: Of the batch; of its epoch where ``place`` is given.
        indices: As the data set gets them.
        place: Place of the batch's first sample in the epoch, to seed each sample by its own.
    """
    seed = partial(reseed, own=own_of_worker())
    if place is None:
        seed(key)
        return indices
    seed(key + place.to_bytes(8))  # for data sets that take all indices at once
    return SeededSamples(indices, key, place, seed) if isinstance(indices, list) else indices


def reseed(key: bytes, own: Mapping[str, Any]) -> None:
    """Seed the process's generators and ``own`` from ``key``."""
    rng.reseed(key)
    for name, generator in own.items():
        own_generators.reseed(generator, key + name.encode())


_of_worker: dict[int, dict[str, Any]] = {}


def own_of_worker() -> dict[str, Any]:
    """Return the own generators of the data set that this worker loads from."""
    info = get_worker_info()
    if info is None:
        return {}
    # Looked for once: a worker has one data set all its life.
    if id(info.dataset) not in _of_worker:
        _of_worker[id(info.dataset)] = own_generators.find("dataset", info.dataset, {})
    return _of_worker[id(info.dataset)]


class SeededSamples(list[Any]):
    """Indices of a batch; going through them seeds the generators for each sample.

    Args:
        indices: The samples'.
        key: Of the epoch.
        place: The first one's place in the epoch.
        seed: Seeds from a key.
    """

    def __init__(
        self, indices: list[Any], key: bytes, place: int, seed: Callable[[bytes], None]
    ) -> None:
        super().__init__(indices)
        self.key, self.place, self.seed = key, place, seed

    def __iter__(self) -> Iterator[Any]:
        for place, index in enumerate(super().__iter__(), self.place):
            self.seed(self.key + place.to_bytes(8))
            yield index
