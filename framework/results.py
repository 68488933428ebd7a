"""What a Trainer's methods return."""

from __future__ import annotations

from dataclasses import dataclass


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
