"""Evaluations on several ranks, some of which have a batch less than others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import DataError
from .metric_state import metric_objects
from .metrics import Logged

if TYPE_CHECKING:
    from .data.source import Source
    from .run import Evaluation, Run


def keep_listening(run: Run, source: Source, batch_idx: int) -> None:
    """Hear between batches whether to stop, as long as every rank has a batch yet."""
    if source.common is not None and batch_idx < source.common:
        run.agreement.listen()


def keep_pace(run: Run, evaluation: Evaluation, index: int, limit: int | None = None) -> None:
    """Run the step as often as other ranks do, where a forward takes all of them.

    What the additional steps log, count and return is left out.

    Args:
        run: The run.
        evaluation: Its evaluation.
        index: Of the loader that has come to its end.
        limit: Batches of it that were asked for.

    Raises:
        DataError: This rank has no batch at all to take part with.
    """
    source = evaluation.sources[index]
    if not run.strategy.is_lockstep or source.rounds is None or source.length is None:
        return
    own, rounds = source.length, source.rounds
    if limit is not None:
        own, rounds = min(own, limit), min(rounds, limit)
    if own == rounds:
        return
    batch = next((batch for batch, _ in source.batches(run.state.epoch)), None)
    if batch is None:
        raise DataError(
            f"The {evaluation.phase} data has fewer samples than ranks, and parameters are sharded "
            "over them, so each has to take part. Use more data, or fewer ranks."
        )
    with unnoticed(run), evaluation.no_grad():
        for batch_idx in range(own, rounds):
            place = (batch_idx, index) if evaluation.takes_index else (batch_idx,)
            evaluation.step(batch, *place)


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
