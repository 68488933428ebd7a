"""What a Trainer's methods return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data.transfer import mapped
from .errors import DataError
from .inference import without_inference
from .metrics import to_floats

if TYPE_CHECKING:
    from .run import Run
    from .run_view import RunView

_NONE = object()
"""Stands where a rank has no batch in the last turn."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a fit ended."""

    reason: str
    """Why it ended: which limit was reached, or who stopped it."""
    steps: int
    """Iterations that updated weights, since training began."""
    epochs: int
    """Passes over the data that are complete."""
    metrics: dict[str, float]
    """The latest value of everything logged."""
    best_model_path: str | None
    """The best checkpoint by the monitored metric, or None."""


def of_fit(trainer: RunView, run: Run) -> FitResult:
    """Return how the fit of ``run`` ended."""
    state = trainer.state
    return FitResult(
        reason=state.stop or "",
        steps=state.step,
        epochs=state.epoch,
        metrics=to_floats(run.metrics.read().callback),
        best_model_path=getattr(trainer.checkpoint_callback, "best_model_path", None) or None,
    )


def streamed(predictions: Generator[tuple[int, Any]]) -> Iterator[Any]:
    """Yield each prediction as it is made; to close this ends the run that makes them."""
    with closing(predictions):
        for _, output in predictions:
            yield without_inference(output)
            del output


def by_batch(predictions: Iterable[tuple[int, Any]], keep: bool) -> dict[int, list[Any]]:
    """Return the predictions of each loader, if they are to be kept, once all are made."""
    kept: dict[int, list[Any]] = defaultdict(list)
    for dataloader_idx, output in predictions:
        if keep:
            kept[dataloader_idx].append(without_inference(output))
        del output
    return kept


def refuse_to_gather(run: Run) -> None:
    """Refuse to put together what ranks have not divided among themselves.

    Raises:
        DataError: A loader gives each rank all it has, or a part that it chooses itself.
    """
    if run.strategy.data_world_size == 1:
        return
    for index, source in enumerate(run.evaluations["predict"].sources):
        if not source.is_divided:
            raise DataError(
                f"predict(gather=True): loader {index}, a {type(source.loader).__name__}, is not "
                "dealt out to the ranks by the Trainer, so the order of its samples and which of "
                "them were read twice are not known. Pass a DataLoader of a data set with indices, "
                "without a sampler that knows ranks, and leave use_distributed_sampler=True."
            )


def gathered(kept: dict[int, list[Any]], run: Run) -> dict[int, list[Any]]:
    """Return every rank's predictions of each loader, in the order of the data, on every rank.

    Ranks have taken turns at the batches, so the first of each come before the second of any.
    """
    strategy, count = run.strategy, len(run.evaluations["predict"].sources)
    if strategy.data_world_size == 1:
        return kept
    packed = BytesIO()
    own = [mapped(kept[index], Tensor.cpu, _is_tensor) for index in range(count)]
    torch.save(own, packed)  # plain pickle fails for some dtypes
    told = dict(strategy.gather((strategy.data_rank, packed.getvalue())))
    parts = [
        torch.load(BytesIO(told[rank]), weights_only=False)
        for rank in range(strategy.data_world_size)
    ]
    return {index: _alternating([part[index] for part in parts]) for index in range(count)}


def _alternating(parts: list[list[Any]]) -> list[Any]:
    turns = zip_longest(*parts, fillvalue=_NONE)
    return [one for turn in turns for one in turn if one is not _NONE]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def shaped(kept: dict[int, list[Any]], loaders: Sized) -> list[Any]:
    """Return the predictions as a list, or a list of lists where there are several loaders."""
    count = len(loaders)
    return [kept[index] for index in range(count)] if count > 1 else kept[0]


def by_loader(values: dict[str, float], count: int) -> list[dict[str, float]]:
    """Return metrics apart for each loader, by the ending of their names."""
    if count == 1:
        return [values]
    marker = "/dataloader_idx_"
    return [
        {
            name: v
            for name, v in values.items()
            if marker not in name or name.endswith(f"{marker}{i}")
        }
        for i in range(count)
    ]


def table(stage: str, results: list[dict[str, float]]) -> str:
    """Return the results of an evaluation as lines for a person."""
    lines = []
    for values in results:
        width = max((len(name) for name in values), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join([f"{stage}:", *(lines or ["  nothing was logged"])])
