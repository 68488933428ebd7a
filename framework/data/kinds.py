"""The kinds of loader, by how a pass over one is entered in its middle."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from .. import encoding, rng
from ..errors import DataError
from ..rank_zero import rank_zero_warn
from . import own_generators
from .order import (
    TORCHDATA,
    Delivery,
    EpochOrder,
    Order,
    Place,
    ReplayedOrder,
    StreamOrder,
    has_state,
    order_of,
)
from .seeds import Draws, SeedSamples
from .share import Share
from .workers import WorkerInit


class Kind(Protocol):
    """How a reader goes over one loader."""

    draws: Draws | None
    """What keeps apart what loading draws in this process; None where that is not wanted."""
    begins_plainly: bool
    """Whether no code of the user's runs when a pass begins, and so only torch draws then."""
    iterator: Any
    """The loader's own iterator, which may have workers."""

    def begin(self, place: Place, batch: int) -> tuple[Iterator[Any], int]:
        """Begin a pass at ``batch`` or before it; return its batches and where they begin."""

    def state(self, batch: int) -> dict[str, Any]:
        """Return as plain data what going on from ``batch`` of this pass takes."""

    def load(self, state: Mapping[str, Any], batch: int) -> int:
        """Take over what `state` returned; return the batch it is the place of."""

    def use_up(self) -> None:
        """Let what was loaded be of a pass that is over, so that the next one is whole."""


class Listed:
    """A sequence of batches: entered at an index."""

    begins_plainly = True

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.draws: Draws | None = None
        self.iterator: Any = None

    def begin(self, place: Place, batch: int) -> tuple[Iterator[Any], int]:
        """Begin at the index."""
        if batch == 0 or isinstance(self.batches, (list, tuple)):
            return islice(self.batches, batch, None), batch
        return map(self.batches.__getitem__, range(batch, len(self.batches))), batch

    def state(self, batch: int) -> dict[str, Any]:
        """Return nothing: the index is all."""
        return {}

    def load(self, state: Mapping[str, Any], batch: int) -> int:
        """Take over nothing."""
        return batch

    def use_up(self) -> None:
        """Leave it: a pass begins where it is told to."""


class Streamed(Listed):
    """Any other iterable: entered by reading all that comes before."""

    begins_plainly = False

    def __init__(
        self, loader: Any, draws: Draws | None = None, order: StreamOrder | None = None
    ) -> None:
        self.loader, self.draws, self.order = loader, draws, order
        self.iterator: Any = None

    def begin(self, place: Place, batch: int) -> tuple[Iterator[Any], int]:
        """Begin at the beginning."""
        if self.order is not None:
            self.order.begin(place, 0)
        self.iterator = iter(self.loader)
        return self.iterator, 0


class Indexed:
    """A DataLoader over a data set with indices: entered in the order of its indices.

    Args:
        loader: A copy of the user's, which has ``order`` for its batch sampler.
        order: Gives each batch's indices.
        draws: What keeps apart what is drawn in this process.
    """

    def __init__(
        self, loader: DataLoader[Any], order: EpochOrder | ReplayedOrder, draws: Draws | None
    ) -> None:
        self.loader, self.order, self.draws = loader, order, draws
        self.iterator: Any = None
        self.begins_plainly = isinstance(order, EpochOrder)
        # With workers it is their copies of the data set that count.
        keeps = has_state(loader.dataset) and not loader.num_workers
        self._holder: Any = loader.dataset if keeps else None

    def begin(self, place: Place, batch: int) -> tuple[Iterator[Any], int]:
        """Begin at the index, loading nothing that comes before."""
        self.order.begin(place, batch)
        self.iterator = iter(self.loader)
        return self.iterator, batch

    def state(self, batch: int) -> dict[str, Any]:
        """Return the place in the order, and the data set's state if it keeps one here."""
        own = {} if self._holder is None else {"own": plain(self._holder)}
        return {**own, "order": self.order.state_at(batch)}

    def load(self, state: Mapping[str, Any], batch: int) -> int:
        """Go on at the same sample, whatever the batch size is now."""
        if self._holder is not None and "own" in state:
            self._holder.load_state_dict(encoding.decode(state["own"]))
        if batch and self.loader.num_workers and not self.loader.in_order:
            rank_zero_warn(
                "The loader has in_order=False, so which batches were used is not known: some are "
                "read twice and others are not in the rest of this epoch. Leave it True."
            )
        return self.order.load(state.get("order", {}), batch)

    def use_up(self) -> None:
        """Let a sampler's state be of a pass that is over."""
        if isinstance(self.order, ReplayedOrder):
            self.order.use_up()


class Stateful:
    """A loader, or a loader's data set, that says where it is: entered by its own state.

    Args:
        loader: Gives the batches.
        holder: Has the state: the loader, or its data set.
        draws: What keeps apart what is drawn in this process.
        order: What was put in the batch sampler's stead, to seed samples.
    """

    begins_plainly = False

    def __init__(
        self,
        loader: Any,
        holder: Any,
        draws: Draws | None,
        order: Order | None = None,
    ) -> None:
        self.loader, self.holder, self.draws, self.order = loader, holder, draws, order
        self._is_loaded = False
        self.iterator: Any = None

    def begin(self, place: Place, batch: int) -> tuple[Iterator[Any], int]:
        """Begin where a state that was loaded says, or at the beginning."""
        if self.order is not None:
            self.order.begin(place, 0)  # torchdata itself goes through it up to its place
        self.iterator = iter(self.loader)
        if self._is_loaded and batch:
            self._is_loaded = False
            return self.iterator, batch
        return self._unless_spent(self.iterator, place), 0

    def use_up(self) -> None:
        """Let a state that was loaded be that of a pass which is over, and the next one whole.

        Torchdata's loader, its data sets and samplers go on from a loaded state once, even where
        nothing is left; what a loader of the user's own does is its own matter.
        """
        if self._is_loaded and (self.holder is not self.loader or is_torchdatas(self.loader)):
            next(iter(self.loader), None)
        self._is_loaded = False

    def _unless_spent(self, iterator: Iterator[Any], place: Place) -> Iterator[Any]:
        """Yield what there is; a new pass where the loader is still at the end of the last."""
        is_spent = True
        for batch in iterator:
            is_spent = False
            yield batch
        if is_spent:
            with rng.forked(place.key("begin")):
                self.iterator = iter(self.loader)
            yield from self.iterator

    def state(self, batch: int) -> dict[str, Any]:
        """Return its own state."""
        return {"own": plain(self.holder)}

    def load(self, state: Mapping[str, Any], batch: int) -> int:
        """Give it its own state back."""
        if "own" in state:
            self.holder.load_state_dict(encoding.decode(state["own"]))
            self._is_loaded = True
        return batch


def plain(holder: Any) -> Any:
    """Return the ``state_dict`` of ``holder`` as plain data, unchanged by what follows.

    Raises:
        DataError: It holds what a checkpoint cannot.
    """
    try:
        return copy.deepcopy(encoding.encode(holder.state_dict()))
    except encoding.NotData as error:
        raise DataError(
            f"The state_dict() of {type(holder).__name__} cannot be saved: {error}"
        ) from error


def is_torchdatas(loader: object) -> bool:
    """Return whether ``loader`` is exactly torchdata's StatefulDataLoader."""
    kind = type(loader)
    return kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith(TORCHDATA)


def kind_of(loader: Any, seed_samples: SeedSamples, share: Share) -> Kind:
    """Return how ``loader`` is gone over."""
    if isinstance(loader, (Sequence, Tensor)):
        return Listed(loader)
    if isinstance(loader, DataLoader):
        kind = type(loader)
        is_torchs = kind.__iter__ is DataLoader.__iter__
        if is_torchdatas(loader) or (
            is_torchs and kind._get_iterator is DataLoader._get_iterator and not has_state(loader)
        ):
            return _kind_of_torchs(loader, seed_samples, share)
    draws = Draws({}) if seed_samples else None
    return Stateful(loader, loader, draws) if has_state(loader) else Streamed(loader, draws)


def _kind_of_torchs(loader: DataLoader[Any], seed_samples: SeedSamples, share: Share) -> Kind:
    """Return the kind of a loader that torch's own code, or torchdata's, goes over."""
    is_stateful = is_torchdatas(loader)
    draws = None
    if seed_samples and not loader.num_workers:
        draws = Draws(own_generators.find("dataset", loader.dataset, {}))
    delivery = Delivery(seed_samples, draws)
    if not isinstance(loader.dataset, IterableDataset):
        order = order_of(loader, delivery, share)
        if not (is_stateful and has_state(loader.dataset)):
            return Indexed(copied(loader, order, seed_samples), order, draws)
        if isinstance(order, ReplayedOrder) and order.holder is not None:
            twin = copied(loader, None, seed_samples)  # torchdata keeps the sampler's state itself
            return Stateful(twin, twin, draws)
        twin = copied(loader, order, seed_samples)
        return Stateful(twin, twin, draws, order)
    size = getattr(loader.batch_sampler, "batch_size", None)
    stream = StreamOrder(size, delivery) if loader.num_workers else None
    twin = copied(loader, stream, seed_samples)
    if is_stateful:
        return Stateful(twin, twin, draws, stream)
    if has_state(loader.dataset) and not loader.num_workers:
        return Stateful(twin, loader.dataset, draws)
    return Streamed(twin, draws, stream)


def copied(loader: DataLoader[Any], order: Any, seed_samples: SeedSamples) -> DataLoader[Any]:
    """Return a shallow copy of a loader, the user's own left as it is, that reads in ``order``."""
    twin = copy.copy(loader)
    object.__setattr__(twin, "_iterator", None)  # of workers that are the user's
    if order is not None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        object.__setattr__(twin, name, order)
    if loader.num_workers:
        apart = not seed_samples and os.environ.get("LEYDEN_SEED_WORKERS") == "1"
        twin.worker_init_fn = WorkerInit(loader.worker_init_fn, apart)
    return twin
