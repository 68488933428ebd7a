"""The order of batches as indices: what a DataLoader's copy has in its batch sampler's stead."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from .. import encoding, rng
from ..rank_zero import rank_zero_warn
from .combined import END
from .seeds import Draws, Seeded, SeededSamples, SeedSamples, key_of, seed_of
from .share import Share, is_rank_aware

TORCHDATA = "torchdata.stateful_dataloader"


@dataclass(frozen=True, slots=True)
class Place:
    """A pass over one loader: what its order and its samples' randomness follow from."""

    seed: int
    reader: str
    epoch: int
    cycle: int
    rank: int = 0

    def key(self, purpose: str) -> bytes:
        """Return the key to seed ``purpose`` of this pass from; the same on every rank."""
        return key_of(self.seed, self.reader, self.epoch, self.cycle, purpose)

    def key_of_samples(self) -> bytes:
        """Return the key of the samples' randomness, in which ranks differ."""
        return self.key(f"samples of rank {self.rank}")

    def key_of_dealt(self, seed_samples: SeedSamples) -> bytes:
        """Return the same where data is dealt out: a sample's place in the epoch tells it."""
        return replace(self, rank=0 if seed_samples == "sample" else self.rank).key_of_samples()


class Delivery:
    """Hands a batch's indices on to whoever loads it, and the seed of its randomness with them.

    Args:
        seed_samples: Seed each batch, each sample, or nothing.
        draws: Loading in this process; None where workers load.
    """

    def __init__(self, seed_samples: SeedSamples, draws: Draws | None) -> None:
        self.seed_samples, self.draws = seed_samples, draws
        self.key = b""

    def hand(self, batch: int, indices: Any, place: int | None) -> Any:
        """Return what the loader is to get.

        Args:
            batch: Index of the batch.
            indices: Its samples', or one sample's.
            place: Place of the first of them in the epoch; None where that is unknown.
        """
        by_sample = self.seed_samples == "sample" and place is not None
        if self.draws is None:
            if not self.seed_samples:
                return indices
            key = self.key if by_sample else self.key + batch.to_bytes(8)
            return Seeded(key, indices, place if by_sample else None)
        if by_sample and place is not None and self.draws.is_watched:
            self.draws.seed(self.key + place.to_bytes(8))
            if isinstance(indices, list):
                return SeededSamples(indices, self.key, place, self.draws.seed)
        return indices


class EpochOrder:
    """Torch's own orders, each epoch's made at once and entered at any sample without the others.

    Ranks share a slice of as many batches as there are of them; each takes its part of it.

    Args:
        sampler: A RandomSampler or SequentialSampler.
        batch_size: Samples of a batch; None where a batch is one sample.
        drop_last: Whether a last batch of fewer samples is left out; in training, a slice.
        generator: The user's, whose seed counts instead of the run's.
        delivery: What each batch is given to.
        share: The part of this process.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int | None,
        drop_last: bool,
        generator: torch.Generator | None,
        delivery: Delivery,
        share: Share,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.delivery, self.share = delivery, share
        self.slice = (batch_size or 1) * share.size
        self.own_seed = None if generator is None else generator.initial_seed()
        self._key, self._first, self._sample = b"", 0, 0
        self._loaded: int | None = None

    def begin(self, place: Place, batch: int) -> None:
        """Let the next pass be that of ``place``, from ``batch`` on."""
        seed = place.seed if self.own_seed is None else self.own_seed
        order = Place(seed, place.reader, place.epoch, place.cycle)
        self._key = order.key("order")
        self.delivery.key = place.key_of_dealt(self.delivery.seed_samples)
        regular = batch * self.slice
        self._sample = regular if self._loaded is None or batch == 0 else self._loaded
        self._first, self._loaded = batch, None

    def state_at(self, batch: int) -> dict[str, Any]:
        """Return the place in samples where ``batch`` begins, and what it depends on."""
        return {"sample": self.samples_at(batch), "seed": self.own_seed, **self._settings()}

    def _settings(self) -> dict[str, int]:
        samples = len(self.sampler)
        return {"samples": samples, "batch_size": self.slice, "drop_last": self.drop_last}

    def load(self, saved: Mapping[str, Any], batch: int) -> int:
        """Go on at the sample that ``batch`` began at, and return which batch begins there now."""
        if saved.get("seed") is not None:
            self.own_seed = saved["seed"]
        if not batch or "sample" not in saved:
            return batch
        now, sample = self._settings(), saved["sample"]
        changed = [f"{name}={now[name]} ({saved[name]} until then)" for name in now
                   if now[name] != saved[name]]  # fmt: skip
        if changed:
            order = " in another order" if now["samples"] != saved["samples"] else ""
            rank_zero_warn(
                f"The training loader now has {', '.join(changed)}. This epoch goes on{order} "
                f"after its first {sample} samples."
            )
        self._loaded = sample
        return max(0, len(self) - self.batches_from(sample))

    def samples_at(self, batch: int) -> int:
        """Return the place of the first sample of ``batch`` in this pass."""
        done = self._sample + (batch - self._first) * self.slice
        return min(done, len(self.sampler))

    def factor(self, batch: int) -> float:
        """Return how much larger this rank's part of ``batch`` is than an average one."""
        return self.share.factor(self._in_slice(self.samples_at(batch)))

    def _in_slice(self, sample: int) -> int:
        """Return how many samples the slice that begins at ``sample`` has."""
        return max(0, min(self.slice, self._counted() - sample))

    def _counted(self) -> int:
        """Return how many samples a pass has."""
        if not self.drop_last:
            return len(self.sampler)
        # What one process would read counts in an evaluation, on any number of them.
        unit = (self.batch_size or 1) if self.share.counts_all else self.slice
        return len(self.sampler) // unit * unit

    def batches_from(self, sample: int) -> int:
        """Return how many batches this rank has from ``sample`` on."""
        slices, left = divmod(max(0, self._counted() - sample), self.slice)
        return slices + self.share.is_given(left)

    @property
    def rounds(self) -> int:
        """The most batches of a pass that a rank has."""
        whole, left = divmod(self._counted(), self.slice)
        return whole + Share(0, self.share.size, counts_all=self.share.counts_all).is_given(left)

    def __len__(self) -> int:
        return self.batches_from(0)

    def __iter__(self) -> Iterator[Any]:
        indices = self._indices()
        batches = range(self._first, self._first + self.batches_from(self._sample))
        for batch, place in zip(batches, count(self._sample, self.slice), strict=False):
            start, stop = self.share.cut(self._in_slice(place))
            some = indices[place + start : place + stop]
            found = list(some) if isinstance(some, range) else some.tolist()
            yield self.delivery.hand(batch, found if self.batch_size else found[0], place + start)

    def _indices(self) -> range | torch.Tensor:
        there, wanted = len(self.sampler.data_source), len(self.sampler)
        if not hasattr(self.sampler, "replacement"):
            return range(there)
        generator = torch.Generator().manual_seed(seed_of(self._key))
        if self.sampler.replacement:
            return torch.randint(there, (wanted,), generator=generator)
        if wanted <= there:
            return torch.randperm(there, generator=generator)[:wanted]
        rounds = [torch.randperm(there, generator=generator) for _ in range(-(-wanted // there))]
        return torch.cat(rounds)[:wanted]


class ReplayedOrder:
    """The order of a sampler of the user's: gone through from its beginning, loading nothing.

    What it draws is drawn from generators seeded by its place. One with a ``state_dict`` goes on
    from its state instead. Ranks take its batches in turn, each whole; of fewer batches than ranks
    at the end, which are one slice, each takes its part.

    Args:
        sampler: Gives a batch's indices, or one sample's, at each step.
        delivery: What each batch is given to.
        ahead: Batches that a loader may ask for before they are used.
        share: The part of this process.
    """

    def __init__(self, sampler: Any, delivery: Delivery, ahead: int, share: Share) -> None:
        self.sampler, self.delivery, self.share = sampler, delivery, share
        self._last_slice: tuple[int, float] | None = None
        self.draws = Draws({})
        self.holder = next(filter(has_state, (sampler, getattr(sampler, "sampler", None))), None)
        self._states: deque[tuple[int, int, Any]] = deque(maxlen=ahead + 3)
        self._iterator: Iterator[Any] = iter(())
        self._key, self._batch, self._sample = b"", 0, 0
        self._loaded: Any = None

    def begin(self, place: Place, batch: int) -> None:
        """Let the next pass be that of ``place``, from ``batch`` on."""
        self._key = place.key("order")
        self.delivery.key = place.key_of_dealt(self.delivery.seed_samples)
        self._last_slice = None
        self.draws.is_first = True
        loaded, self._loaded = self._loaded, None
        with rng.forked(self._key):
            self._iterator = iter(self.sampler)
            if loaded is None:
                self._batch = self._sample = 0
                for _ in range(batch):
                    self._advance()
        self._batch = batch
        self._states.clear()
        self._keep_state(loaded)

    def use_up(self) -> None:
        """Let the state that was loaded be of a pass that is over: it counts for one pass."""
        if self._loaded is not None:
            next(iter(self.sampler), None)
            self._loaded = None

    def _advance(self) -> tuple[Any, int]:
        """Return this rank's indices of the next slice, or `END`, and the place of the first."""
        share, first = self.share, self._sample
        found: list[Any] = []
        while len(found) < share.size and (indices := self._next(self._batch)) is not END:
            found.append(indices)
        self._batch += 1
        sizes = [len(one) if isinstance(one, list) else 1 for one in found]
        self._sample += sum(sizes)
        if len(found) == share.size:
            return found[share.rank], first + sum(sizes[: share.rank])
        return self._part(found, sum(sizes), first)

    def _part(self, found: list[Any], samples: int, first: int) -> tuple[Any, int]:
        """Return this rank's part of a last slice, of fewer batches than there are ranks."""
        share = self.share
        drops = getattr(self.sampler, "drop_last", False) and not share.counts_all
        if not samples or drops or not share.is_given(samples):
            return END, first
        start, stop = share.cut(samples)
        self._last_slice = self._batch - 1, share.factor(samples)
        if not isinstance(found[0], list):
            return found[start], first + start
        return [index for one in found for index in one][start:stop], first + start

    def factor(self, batch: int) -> float:
        """Return how much larger this rank's part of ``batch`` is than an average one."""
        last = self._last_slice
        return last[1] if last is not None and last[0] == batch else 1.0

    def _next(self, batch: int) -> Any:
        if self.draws.is_watched:
            return self.draws.fetch(self._iterator, self._key + batch.to_bytes(8))
        return next(self._iterator, END)

    def _keep_state(self, state: Any = None) -> None:
        if self.holder is not None:
            state = copy.deepcopy(self.holder.state_dict()) if state is None else state
            self._states.append((self._batch, self._sample, state))

    def state_at(self, batch: int) -> dict[str, Any]:
        """Return the sampler's state before it gave ``batch``; nothing if it keeps none."""
        for at, sample, state in self._states:
            if at == batch:
                kept = {"sample": sample, "sampler": encoding.encode(state)}
                return {**kept, "ranks": self.share.size}
        return {"ranks": self.share.size}

    def load(self, saved: Mapping[str, Any], batch: int) -> int:
        """Take over what `state_at` returned, for the next pass."""
        if self.holder is not None and "sampler" in saved:
            self._sample, self._loaded = saved["sample"], encoding.decode(saved["sampler"])
            self.holder.load_state_dict(copy.deepcopy(self._loaded))
        used, left = divmod(batch * saved.get("ranks", self.share.size), self.share.size)
        if left:
            rank_zero_warn(
                f"The sampler's batches were dealt to {saved['ranks']} ranks, and now there are "
                f"{self.share.size}: {left} of those used in this epoch are read again."
            )
        return int(used)

    @property
    def rounds(self) -> int:
        """The most batches of a pass that a rank has."""
        whole, left = divmod(len(self.sampler), self.share.size)
        drops = getattr(self.sampler, "drop_last", False) and not self.share.counts_all
        return whole + (left > 0 and not drops)

    def __len__(self) -> int:
        return self.rounds

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = self._batch
            indices, place = self._advance()
            if indices is END:
                return
            self._keep_state()
            yield self.delivery.hand(batch, indices, place)


class StreamOrder:
    """What a loader of an iterable data set asks for: the next samples, whichever they are.

    Args:
        batch_size: Samples of a batch; None where a batch is one sample.
        delivery: What each batch is given to.
    """

    def __init__(self, batch_size: int | None, delivery: Delivery) -> None:
        self.batch_size, self.delivery = batch_size, delivery

    def begin(self, place: Place, batch: int) -> None:
        """Let the next pass be that of ``place``, from its beginning on."""
        self.delivery.key = place.key_of_samples()

    def __iter__(self) -> Iterator[Any]:
        asked = None if self.batch_size is None else [None] * self.batch_size
        batch = 0
        while True:
            yield self.delivery.hand(batch, asked, None)
            batch += 1


Order = EpochOrder | ReplayedOrder | StreamOrder


def has_state(owner: object) -> bool:
    """Return whether ``owner`` says where it is, and can be put there again."""
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def order_of(
    loader: DataLoader[Any], delivery: Delivery, share: Share
) -> EpochOrder | ReplayedOrder:
    """Return the order of a loader of a data set with indices."""
    if not share.is_dealt or is_rank_aware(loader):
        share = Share(counts_all=share.counts_all)
    batched: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batched is None else getattr(batched, "sampler", None)
    if is_torchs(sampler, RandomSampler, SequentialSampler) and (
        batched is None or is_torchs(batched, BatchSampler)
    ):
        generator = getattr(sampler, "generator", None)
        size, drop_last = (
            (None, False) if batched is None else (batched.batch_size, batched.drop_last)
        )
        own = generator or loader.generator
        return EpochOrder(sampler, size, drop_last, own, delivery, share)
    ahead = (loader.prefetch_factor or 0) * loader.num_workers
    return ReplayedOrder(loader.sampler if batched is None else batched, delivery, ahead, share)


def is_torchs(sampler: object, *kinds: type) -> bool:
    """Return whether ``sampler`` is exactly one of torch's ``kinds``, or torchdata's copy of it."""
    kind = type(sampler)
    is_copy = kind.__module__.startswith(TORCHDATA)
    return kind in kinds or (is_copy and kind.__name__ in {one.__name__ for one in kinds})
