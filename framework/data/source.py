"""Reading loaders: how many batches, in which order, and the next one on the device."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from .. import rng
from ..errors import ConfigError, DataError
from .combined import END, CombinedLoader, are_loaders

NO_BATCH = (
    "The loader gave no batch. Check its data set and sampler, and that it can be iterated more "
    "than once: a generator cannot."
)


@dataclass(slots=True)
class Wait:
    """Seconds this process has waited for training batches."""

    seconds: float = 0.0


@dataclass(slots=True)
class Source:
    """One loader as the loop reads it.

    Args:
        loader: Any iterable of batches; iterated anew for each pass.
        length: Batches in a pass after the limit, or None when only the end tells.
        prepare: Brings a batch to the device; None where it is used as it comes.
        wait: Where the time spent waiting is added up.
        limit: Batches read at most, for loaders without a length.
    """

    loader: Iterable[Any]
    length: int | None
    prepare: Callable[[Any], Any] | None
    wait: Wait = field(default_factory=Wait)
    limit: int | None = None

    def batches(self, start: int = 0) -> Generator[tuple[Any, bool]]:
        """Begin a pass and return its ``(batch, is_last)`` from batch ``start`` on.

        With a known length each batch is fetched when it is asked for, so that data which depends
        on training is fresh. Without one, reading one ahead tells which batch is the last. The
        length holds where the loader would give more.

        Raises:
            DataError: The pass gives no batch.
        """
        iterator = iter(self.loader)
        for _ in islice(iterator, start):
            pass
        if self.length is not None:
            return self._sized(iterator, start)
        ahead = islice(iterator, None if self.limit is None else max(0, self.limit - start))
        # Read now: a resumed pass repeats what was drawn for it before its own draws go on.
        first = next(ahead, END)
        if first is END and start == 0:
            raise DataError(NO_BATCH)
        return self._ahead(ahead, first)

    def _sized(self, iterator: Iterator[Any], start: int) -> Generator[tuple[Any, bool]]:
        assert self.length is not None, "batches() asks for this only where it is known"
        wait, prepare, last = self.wait, self.prepare, self.length - 1
        for index in range(start, self.length):
            asked = perf_counter()
            batch = next(iterator, END)
            if batch is END:
                if index == 0:
                    raise DataError(NO_BATCH)
                warnings.warn(
                    f"The loader's len() promised {self.length} batches and it gave {index}. The "
                    "epoch ends here; correct the loader's length.",
                    stacklevel=2,
                )
                return
            if prepare is not None:
                batch = prepare(batch)
            wait.seconds += perf_counter() - asked
            yield batch, index == last

    def _ahead(self, ahead: Iterator[Any], batch: Any) -> Generator[tuple[Any, bool]]:
        wait, prepare = self.wait, self.prepare
        while batch is not END:
            asked = perf_counter()
            following = next(ahead, END)
            current = batch if prepare is None else prepare(batch)
            wait.seconds += perf_counter() - asked
            yield current, following is END
            batch = following


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


def length_of(loader: Any) -> int | None:
    """Return how many batches ``loader`` says it has, or None."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def limited(
    loader: Any, limit: int | float, name: str, stage: str
) -> tuple[int | None, int | None]:
    """Return the batches of one pass, or None, and the limit for a loader without a length.

    Args:
        loader: The loader.
        limit: Batches at most as an int, or a share of all of them as a float.
        name: The Trainer's argument, for the message.
        stage: What the loader is for, for the message.

    Raises:
        ConfigError: A share of an unknown number is asked for, or of so few that none is left.
        DataError: The loader has no batch.
    """
    length = length_of(loader)
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


def seeded(loader: Any) -> Any:
    """Return ``loader``, its workers seeded if ``seed_everything(workers=True)`` asked for it."""
    if os.environ.get("LEYDEN_SEED_WORKERS") != "1":
        return loader
    if isinstance(loader, CombinedLoader):
        parts = copy.copy(loader)
        parts.loaders = [seeded(part) for part in loader.loaders]
        return parts
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn:
        return loader
    copied = copy.copy(loader)
    copied.worker_init_fn = rng.worker_init
    return copied


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
