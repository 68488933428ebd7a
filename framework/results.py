"""What a Trainer's methods return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .inference import without_inference
from .metrics import to_floats

if TYPE_CHECKING:
    from .run import Run
    from .run_view import RunView


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
