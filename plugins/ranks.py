"""What the ranks of a run do together apart from training: each does its part, or none has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from leyden.rank_zero import told_of

T = TypeVar("T")


class Ranks:
    """The ranks of a run, on a process group of their own, so that a thread may speak with them."""

    def __init__(self) -> None:
        self.group: Any = None
        """The group, once joined; None in a process that is alone."""
        self.rank = 0

    def join(self) -> None:
        """Find the others; every rank calls it at the same place, and again without effect."""
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo")
            self.rank = dist.get_rank()

    def leave(self) -> None:
        """Let go of the group."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group, self.rank = None, 0

    def do(self, action: Callable[[], T]) -> list[T]:
        """Return what ``action`` returned on each rank, in order; what one raises, all raise."""
        value, error, told_error = None, None, None
        try:
            value = action()
        except Exception as raised:
            error, told_error = raised, told_of(raised)
        if self.group is None:
            told: list[Any] = [(value, told_error)]
        else:
            told = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(told, (value, told_error), group=self.group)
        if error is not None:
            raise error
        for _, other in told:
            if other is not None:
                raise other
        return [value for value, _ in told]
