"""Which part of the data is this process's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One part of data that is dealt to several ranks.

    ``Share()`` is all of it.
    """

    rank: int = 0
    """Of this part; ranks that see the same data have one."""
    size: int = 1
    """Parts."""
    is_dealt: bool = True
    """Whether loaders are dealt out here; False where each rank reads all that its loaders give."""
    counts_all: bool = False
    """Whether every sample counts, as in an evaluation, though ranks get different numbers of
    batches; in training a slice with fewer samples than ranks is left out."""

    def cut(self, count: int) -> tuple[int, int]:
        """Return where this part of ``count`` samples begins and ends: as even as can be."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)

    def factor(self, count: int) -> float:
        """Return how much larger this part of ``count`` samples is than an average one."""
        start, stop = self.cut(count)
        return (stop - start) * self.size / count

    def is_given(self, count: int) -> bool:
        """Return whether this part of a slice of ``count`` samples is a batch."""
        start, stop = self.cut(count)
        return stop > start and (self.counts_all or count >= self.size)


def is_rank_aware(loader: object) -> bool:
    """Return whether the loader's sampler deals data out by itself, as DistributedSampler does."""
    batched = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, "sampler", None), batched, getattr(batched, "sampler", None)]
    return any(hasattr(part, "num_replicas") and hasattr(part, "rank") for part in parts)
