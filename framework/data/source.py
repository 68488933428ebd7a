"""Reading loaders: how many batches, in which order, and the next one on the device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ..errors import ConfigError, DataError
from .combined import END, CombinedLoader, are_loaders
from .reader import ALL, Reader
from .seeds import SeedSamples, data_seed
from .share import Share

NO_BATCH = (
    "The loader gave no batch. Check its data set and sampler, and that it can be iterated more "
    "than once: a generator cannot."
)


@dataclass(slots=True)
class Wait:
    """Seconds this process has waited for training batches."""

    seconds: float = 0.0


class Source:
    """One loader as the loop reads it, or several side by side.

    What is drawn for the data, its order and its samples, is drawn apart from the process's
    generators, which stay as they were.

    Args:
        loader: Any iterable of batches; iterated anew for each pass.
        length: Batches in a pass after the limit, or None when only the end tells.
        prepare: Brings a batch to the device; None where it is used as it comes.
        wait: Where the time spent waiting is added up.
        limit: Batches read at most, for loaders without a length.
        seed_samples: ``"batch"`` seeds the generators for each batch by its place in the data, so
            that the same samples come from any number of workers, and after a resume; ``"sample"``
            for each sample, so that they do with another batch size too. With False workers draw
            as torch seeds them, and loading in this process from the process's generators: a
            resumed run repeats only what it goes through again.
        name: Tells the randomness of this source from that of others.
        share: The part of the data that this process reads.
    """

    def __init__(
        self,
        loader: Any,
        length: int | None,
        prepare: Callable[[Any], Any] | None,
        wait: Wait | None = None,
        limit: int | None = None,
        seed_samples: SeedSamples = "batch",
        name: str = "train",
        share: Share = ALL,
    ) -> None:
        self.loader, self.length, self.prepare, self.limit = loader, length, prepare, limit
        self.wait = wait or Wait()
        self.seed_samples, self.share = seed_samples, share
        self.seed = data_seed()
        self.share_factor = 1.0
        """How much larger this rank's part of the batch in hand is than an average one."""
        self.rounds: int | None = None
        """The most batches of a pass that a rank has, where that is known."""
        self.common: int | None = None
        """How many all ranks have, where that is known."""
        self.have_all: Callable[[bool], bool] | None = None
        """Says if all ranks have a next batch, where that is only known from batch to batch."""
        self.start = 0
        """The batch at which the next pass begins, where it is the rest of one."""
        loaders = loader.loaders if isinstance(loader, CombinedLoader) else [loader]
        self._readers = [
            Reader(one, f"{name} {index}", seed_samples, share) for index, one in enumerate(loaders)
        ]
        self._is_shared = share.size > 1 and share.is_dealt and len(loaders) == 1
        self._epoch: int | None = None
        self._batches = 0
        self._parts: list[dict[str, Any]] | None = None
        """Of the batch in hand, where the next is read ahead of it."""
        self._parts_before: list[dict[str, Any]] = []

    def batches(self, epoch: int | None = None) -> Generator[tuple[Any, bool]]:
        """Begin a pass and return its ``(batch, is_last)``; the rest of it where one goes on.

        With a known length each batch is fetched when it is asked for, so that data which depends
        on training is fresh. Without one, reading one ahead tells which batch is the last. The
        length holds where the loader would give more.

        Args:
            epoch: The pass's, told to every part of the loader that wants it; None tells nobody.

        Raises:
            DataError: The pass gives no batch.
        """
        goes_on = self.start > 0 and self._epoch in (None, epoch)
        start, self.start = self.start if goes_on else 0, 0
        self._epoch, self._batches, self._parts = epoch, start, None
        if epoch is not None:
            tell_epoch(self.loader, epoch)
        most = self.limit if self.length is None else self.length
        is_over = most is not None and start >= most
        iterator = iter(()) if is_over else self._begin(epoch or 0, start)
        if self.length is not None:
            return self._sized(iterator, start)
        return self._ahead(islice(iterator, None if most is None else most - start))

    def _begin(self, epoch: int, start: int) -> Iterator[Any]:
        readers = self._readers
        is_known = any(reader.is_restored for reader in readers)
        if not isinstance(self.loader, CombinedLoader):
            if start and not is_known:
                readers[0].skip(start)
            return readers[0].begin(self.seed, epoch, start > 0)

        def begin(index: int) -> Iterator[Any]:
            return readers[index].begin(self.seed, epoch, start > 0 and is_known)

        def begin_again(index: int) -> Iterator[Any]:
            return readers[index].begin_again()

        ended = [start > 0 and reader.place.cycle > 0 for reader in readers]
        batches = self.loader.read(begin, begin_again, ended)
        return batches if is_known else islice(batches, start, None)

    def _sized(self, iterator: Iterator[Any], start: int) -> Generator[tuple[Any, bool]]:
        assert self.length is not None, "batches() asks for this only where it is known"
        wait, prepare, last = self.wait, self.prepare, self.length - 1
        for index in range(start, self.length):
            asked = perf_counter()
            batch = next(iterator, END)
            if batch is END:
                if index == 0:
                    raise DataError(NO_BATCH)
                if self.share.size > 1:
                    raise self._is_short(index)
                warnings.warn(
                    f"The loader's len() promised {self.length} batches and it gave {index}. The "
                    "epoch ends here; correct the loader's length.",
                    stacklevel=2,
                )
                break
            if prepare is not None:
                batch = prepare(batch)
            wait.seconds += perf_counter() - asked
            self._batches = index + 1
            if self._is_shared:
                self.share_factor = self._readers[0].factor
            yield batch, index == last
        self._batches = 0

    def _is_short(self, given: int) -> DataError:
        return DataError(
            f"The loader's len() promised {self.length} batches and it gave {given} on rank "
            f"{self.share.rank} of the {self.share.size} that read, which wait for each other at "
            "every batch. Correct the loader's length, or leave it out: then all end with the "
            "first that has no more."
        )

    def _ahead(self, ahead: Iterator[Any]) -> Generator[tuple[Any, bool]]:
        wait, prepare, asked = self.wait, self.prepare, perf_counter()
        before = [reader.position() for reader in self._readers]
        batch = next(ahead, END)
        if batch is END and self._batches == 0:
            raise DataError(NO_BATCH)
        while batch is not END:
            self._parts_before, before = before, [reader.position() for reader in self._readers]
            self._parts = before
            following = next(ahead, END)
            current = batch if prepare is None else prepare(batch)
            if self.have_all is not None and not self.have_all(following is not END):
                following = END
            wait.seconds += perf_counter() - asked
            self._batches += 1
            yield current, following is END
            asked, batch = perf_counter(), following
        self._batches, self._parts = 0, None

    def position(self, is_used: bool = True) -> dict[str, Any]:
        """Return as plain data where in the data this source is: after the last batch it gave.

        Args:
            is_used: False asks for the place before that batch. Where nothing leads back to it,
                as with a loader that has a state of its own, it is the place after it too.
        """
        batches = self.start or self._batches
        parts, back = self._parts, 0 if is_used or batches == 0 else 1
        if back and parts:
            batches, parts = batches - 1, self._parts_before
        elif back and not isinstance(self.loader, CombinedLoader) and self._readers[0].leads_back:
            batches, parts = batches - 1, [self._readers[0].position(back=1)]
        parts = parts or [reader.position() for reader in self._readers]
        return {"seed": self.seed, "epoch": self._epoch, "batches": batches, "parts": parts}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Take over what `position` returned: the next pass goes on from there.

        Raises:
            DataError: It is of another number of loaders.
        """
        parts, readers = position["parts"], self._readers
        if len(parts) != len(readers):
            raise DataError(
                f"The place in the data is one in {len(parts)} loaders, and now there are "
                f"{len(readers)}. Pass the same loaders, or leave 'data' out of what is restored."
            )
        self.seed, self._epoch, self.start = (
            position["seed"],
            position["epoch"],
            position["batches"],
        )
        for reader, part in zip(readers, parts, strict=True):
            reader.restore(part, self.start > 0)
        if self.start and not isinstance(self.loader, CombinedLoader):
            self.start = readers[0].batches  # another one where the batch size is

    def size(self) -> int | None:
        """Return how many batches this rank's loader says it has, or None."""
        try:
            if isinstance(self.loader, CombinedLoader):
                return self.loader.length_of(self._readers)
            return len(self._readers[0])
        except (TypeError, NotImplementedError):
            return None

    @property
    def is_passed_over(self) -> bool:
        """Whether the loader has batches, and this rank's part of them is none."""
        several = self.share.size > 1 and not isinstance(self.loader, CombinedLoader)
        return several and self.size() == 0 and len(self.loader) > 0

    @property
    def is_dealt(self) -> bool:
        """Whether what this rank reads is its part of what all read together."""
        return all(reader.order is not None for reader in self._readers)

    @property
    def is_divided(self) -> bool:
        """Whether ranks take turns at the batches of a pass, so that its order is known."""
        orders = [reader.order for reader in self._readers]
        return all(order is not None and order.share.size > 1 for order in orders)

    def close(self) -> None:
        """End the workers of every loader."""
        for reader in self._readers:
            reader.close()


def training_loader(loaders: Any) -> Any:
    """Return ``loaders`` as one iterable; a dict or list of loaders is read side by side."""
    if isinstance(loaders, Mapping) or are_loaders(loaders):
        return CombinedLoader(loaders)
    if not isinstance(loaders, Iterable):
        raise DataError(_no_loader(loaders, "training"))
    return loaders


def evaluation_loaders(loaders: Any, stage: str) -> list[Any]:
    """Return the loaders of an evaluation as a list, to be read one after the other."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    elif not are_loaders(loaders):
        loaders = [loaders]
    for loader in loaders:
        if not isinstance(loader, Iterable) or isinstance(loader, (str, Mapping)):
            raise DataError(_no_loader(loader, stage))
    return list(loaders)


def _no_loader(given: object, stage: str) -> str:
    return (
        f"{given!r:.80} is no loader of {stage} batches. Pass a DataLoader, or anything else that "
        "yields batches each time it is iterated."
    )


def limited(
    length: int | None, limit: int | float, name: str, stage: str
) -> tuple[int | None, int | None]:
    """Return the batches of one pass, or None, and the limit for a loader without a length.

    Args:
        length: How many batches the loader says it has, or None.
        limit: Batches at most as an int, or a share of all of them as a float.
        name: The Trainer's argument, for the message.
        stage: What the loader is for, for the message.

    Raises:
        ConfigError: A share of an unknown number is asked for, or of so few that none is left.
        DataError: The loader has no batch.
    """
    if length is None:
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise ConfigError(
                f"{name}={limit} is a share of the {stage} batches, and this loader has no "
                "length. Pass a whole number of batches."
            )
        return (0 if limit == 0 else None), (None if isinstance(limit, float) else limit)
    if length == 0 and limit:
        raise DataError(
            f"The {stage} loader has no batch: len() is 0. Check its data set, or its batch_size "
            "with drop_last."
        )
    if isinstance(limit, int):
        return min(length, limit), None
    batches = int(length * limit)
    if limit > 0 and batches == 0:
        raise ConfigError(
            f"{name}={limit} of {length} batches is less than one. Pass at least {1 / length:.4g}, "
            "or a whole number of batches."
        )
    return batches, None


def in_order(loader: Any) -> Any:
    """Return ``loader`` reading its data in order, for overfitting on the first batches."""
    if isinstance(loader, CombinedLoader):
        combined = copy.copy(loader)
        combined.loaders = [in_order(one) for one in loader.loaders]
        return combined
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None or isinstance(loader.sampler, SequentialSampler):
        return loader
    # The user's loader is never rebuilt: a shallow copy gets another batch sampler.
    ordered = copy.copy(loader)
    sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    batch_size = loader.batch_size or 1
    object.__setattr__(ordered, "sampler", sampler)
    object.__setattr__(
        ordered, "batch_sampler", BatchSampler(sampler, batch_size, loader.drop_last)
    )
    return ordered


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on every part of ``loader`` that has it, before it is iterated."""
    loaders = loader.loaders if isinstance(loader, CombinedLoader) else [loader]
    for one in loaders:
        batch_sampler = getattr(one, "batch_sampler", None)
        parts = [one, getattr(one, "dataset", None), getattr(one, "sampler", None), batch_sampler]
        parts.append(getattr(batch_sampler, "sampler", None))
        told: list[Any] = []
        for part in parts:
            if hasattr(part, "set_epoch") and not any(part is other for other in told):
                told.append(part)
                part.set_epoch(epoch)
