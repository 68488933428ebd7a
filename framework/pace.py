"""Evaluations on several ranks, some of which have a batch less than others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from .data.combined import END
from .errors import DataError
from .metric_state import metric_objects
from .metrics import Logged

if TYPE_CHECKING:
    from .data.source import Source
    from .run import Evaluation, Run


def in_pace(
    run: Run, evaluation: Evaluation, index: int, limit: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield each batch of a loader with its number, in step with the other ranks.

    Between batches they hear whether to stop, as long as all have one yet. Where a forward takes
    every rank, one that has fewer batches runs the step as often as the others do. What these
    additional steps log, count and return is left out.

    Args:
        run: The run.
        evaluation: Its evaluation.
        index: Of the loader.
        limit: Batches of it at most.

    Raises:
        DataError: The forward takes every rank, and this one has no batch at all.
    """
    source, lockstep = evaluation.sources[index], run.strategy.is_lockstep
    asks = lockstep and source.rounds is None and run.strategy.world_size > 1
    batch_idx, batch = -1, END
    for batch_idx, (batch, _) in enumerate(islice(source.batches(run.state.epoch), limit)):
        if asks and run.interrupted_by is None:
            has_any(run, own=True)
        yield batch_idx, batch
        if asks or (source.common is not None and batch_idx < source.common):
            run.agreement.listen()
    for additional in rounds_of_others(run, source, batch_idx + 1, limit) if lockstep else ():
        if batch is END:
            raise too_few(evaluation.phase)
        place = (additional, index) if evaluation.takes_index else (additional,)
        with unnoticed(run), evaluation.no_grad():
            evaluation.step(batch, *place)


def too_few(name: str) -> DataError:
    """Return the error of an evaluation in which some rank has no batch, where each must have."""
    return DataError(
        f"The {name} data has fewer samples than ranks, and parameters are sharded over them, so "
        "each has to take part. Use more data, or fewer ranks."
    )


def rounds_of_others(run: Run, source: Source, own: int, limit: int | None) -> Iterator[int]:
    """Yield the number of each batch that some other rank has, and this one has not.

    Args:
        run: The run.
        source: What both read.
        own: Batches that this rank has had.
        limit: Batches of it at most.
    """
    if source.rounds is not None:
        yield from range(own, source.rounds if limit is None else min(source.rounds, limit))
        return
    while run.strategy.world_size > 1 and run.interrupted_by is None and has_any(run, own=False):
        yield own
        own += 1
        run.agreement.listen()


def has_any(run: Run, own: bool) -> bool:
    """Return whether any rank has a next batch, where that is only known from batch to batch."""
    told = run.strategy.exchange(torch.tensor([own], dtype=torch.float64))
    return bool(told.item())


@contextmanager
def unnoticed(run: Run) -> Iterator[None]:
    """Let nothing that is logged or counted inside count."""
    module = run.module
    logged, objects = module.__dict__["_logged"], dict(metric_objects(module))
    before = {path: copy.deepcopy(vars(metric)) for path, metric in objects.items()}
    if logged is not None:
        scratch = Logged(False, run.metrics.sizer)
        scratch.in_batch, scratch.batch, scratch.strategy = True, logged.batch, logged.strategy
        module.__dict__["_logged"] = scratch
    try:
        yield
    finally:
        module.__dict__["_logged"] = logged
        for path, metric in objects.items():
            vars(metric).clear()
            vars(metric).update(before[path])
