"""One loader as it is read: pass after pass, and from its middle where a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from .. import rng
from ..rank_zero import rank_zero_warn
from . import own_generators, workers
from .combined import END
from .kinds import Stateful, kind_of
from .order import EpochOrder, Place, ReplayedOrder
from .seeds import SeedSamples
from .share import Share

ALL = Share()
PARTS = ("dataset", "sampler", "batch_sampler")


class Reader:
    """Reads one loader, and knows where in it it is.

    Args:
        loader: Any iterable of batches.
        name: Tells this reader's randomness from that of others.
        seed_samples: Seed each batch, each sample, or nothing.
        share: The part of the data that this process reads.
    """

    def __init__(
        self, loader: Any, name: str, seed_samples: SeedSamples, share: Share = ALL
    ) -> None:
        self.loader, self.name, self.share = loader, name, share
        self.kind = kind_of(loader, seed_samples, share)
        self.place = Place(0, name, 0, 0, share.rank)
        self.batches = 0
        self._is_finished = False
        self._is_begun = False
        self._restored: Mapping[str, Any] | None = None
        self._state: Any = None
        self._generators = generators_of(loader)
        self._at_start: dict[str, Any] = {}

    @property
    def is_restored(self) -> bool:
        """Whether the next pass may go on from a position."""
        return self._restored is not None

    def begin(self, seed: int, epoch: int, goes_on: bool) -> Iterator[Any]:
        """Begin a pass and return its batches.

        Args:
            seed: The data's.
            epoch: The pass's.
            goes_on: Whether it is the rest of the pass that was restored.
        """
        restored, self._restored = self._restored, None
        cycle = self.place.cycle if goes_on else 0
        self.place = Place(seed, self.name, epoch, cycle, self.share.rank)
        if not goes_on:
            self._use_up(restored or {})
            return self._begin(0)
        if self._is_finished:
            self._use_up(restored or {})
            return iter(())
        now = {} if restored is None else restored.get("generators", {})
        if now:
            own_generators.restore(self._generators, now["start"])
        batches = self._begin(self.batches)
        if now:
            own_generators.restore(self._generators_left(), now["now"])
        return batches

    def _use_up(self, restored: Mapping[str, Any]) -> None:
        with rng.forked(self.place.key("begin"), all_of_them=not self.kind.begins_plainly):
            self.kind.use_up()
        own_generators.restore(self._generators, restored.get("generators", {}).get("now", {}))

    def _generators_left(self) -> dict[str, Any]:
        """Return the generators that beginning in the middle has not led to where they were."""
        if isinstance(self.kind, Stateful):
            return self._generators
        # A sampler was gone through; a data set was not asked for what was skipped.
        return {name: one for name, one in self._generators.items() if name.startswith("dataset")}

    def begin_again(self) -> Iterator[Any]:
        """Begin the loader again within one epoch, and return its batches."""
        place = self.place
        self.place = replace(place, cycle=place.cycle + 1)
        return self._begin(0)

    def _begin(self, batch: int) -> Iterator[Any]:
        self._is_finished = False
        self._at_start = own_generators.encoded(self._generators)
        if self.kind.draws is not None:
            self.kind.draws.begin(self.place.epoch)
        self.kind.iterator = None  # an earlier pass's workers end first
        with rng.forked(self.place.key("begin"), all_of_them=not self.kind.begins_plainly):
            iterator, self.batches = self.kind.begin(self.place, batch)
        self._is_begun = True
        workers.watch(self.kind)
        batches = self._read(iterator)
        if left := batch - self.batches:
            whose = "its data set" if isinstance(self.loader, DataLoader) else "it"
            rank_zero_warn(
                f"The epoch goes on in its middle: {left} batches are loaded to be left out, "
                f"because nothing tells where the {type(self.loader).__name__} is. To go on at "
                f"once, give {whose} state_dict() and load_state_dict(), or use torchdata's "
                "StatefulDataLoader."
            )
            for _ in islice(batches, left):
                pass
        return batches

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        draws = self.kind.draws
        if draws is not None:
            key = self.place.key_of_samples()
            while draws.is_watched:
                batch = draws.fetch(iterator, key + self.batches.to_bytes(8))
                if batch is END:
                    self._is_finished = True
                    return
                self.batches += 1
                yield batch
        for batch in iterator:
            self.batches += 1
            yield batch
        self._is_finished = True

    @property
    def order(self) -> EpochOrder | ReplayedOrder | None:
        """What deals the loader's indices out; None where it is read as it is."""
        order = getattr(self.kind, "order", None)
        return order if isinstance(order, EpochOrder | ReplayedOrder) else None

    def __len__(self) -> int:
        """Return the batches of a pass; a TypeError where that is not known."""
        is_shared = self.order is not None and self.order.share.size > 1
        return len(self.order if is_shared else self.loader)  # type: ignore[arg-type]

    @property
    def factor(self) -> float:
        """How much larger this rank's part of the last batch is than an average one."""
        return 1.0 if self.order is None else self.order.factor(self.batches - 1)

    @property
    def leads_back(self) -> bool:
        """Whether a place can be told that is not the present one."""
        return not isinstance(self.kind, Stateful) and self.batches > 0

    def position(self, back: int = 0) -> dict[str, Any]:
        """Return as plain data where this reader is: ``back`` before the last batch it gave."""
        if self._restored is not None:
            return dict(self._restored)
        found: dict[str, Any] = {
            "cycle": self.place.cycle,
            "batches": self.batches - back,
            "finished": self._is_finished and not back,
        }
        if self._is_begun:
            found["state"] = self.kind.state(self.batches - back)
        elif self._state is not None:
            found["state"] = self._state
        if self.kind.draws is not None:
            found["draws"] = self.kind.draws.state()
        if self._generators:
            now = own_generators.encoded(self._generators)
            found["generators"] = {"start": self._at_start or now, "now": now}
        return found

    def restore(self, position: Mapping[str, Any], goes_on: bool) -> None:
        """Take over a position that the next `begin` is to go on from.

        Args:
            position: What `position` returned.
            goes_on: Whether it is in the middle of a pass.
        """
        self._restored, self._state = position, position.get("state")
        batches = position["batches"] if goes_on else 0
        cycle = position["cycle"] if goes_on else 0
        self.place = Place(0, self.name, 0, cycle, self.share.rank)
        self._is_finished = goes_on and position["finished"]
        self.batches = self.kind.load(position.get("state", {}), batches)
        if self.kind.draws is not None and "draws" in position:
            self.kind.draws.restore(position["draws"])

    def skip(self, batches: int) -> None:
        """Let the next pass, which goes on, begin at a batch of which nothing else is known."""
        self.batches = batches

    def close(self) -> None:
        """End the loader's workers."""
        iterator, self.kind.iterator = self.kind.iterator, None
        workers.end(iterator)
        loaders: list[Any] = [self.loader, getattr(self.kind, "loader", None)]
        for loader in loaders:
            if iterator is not None and getattr(loader, "_iterator", None) is iterator:
                loader._iterator = None  # a loader's next pass makes new ones


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the random generators that ``loader`` and its parts keep for themselves."""
    seen: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for name in PARTS if isinstance(loader, DataLoader) else ():
        found |= own_generators.find(name, getattr(loader, name, None), seen)
    if isinstance(loader, (list, tuple)):
        return found
    return found | own_generators.find("loader", loader, seen)
