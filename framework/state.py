"""Where training is: the one mutable record the loop keeps, and the whole of it is checkpointed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class State:
    """Progress of one run, in plain values, so that ``asdict`` is the checkpoint's format.

    A *step* is a training iteration that updated weights. Iterations whose update was
    due and did not take place count in ``skipped``, not in ``step``.
    """

    epoch: int = 0
    """Passes over the training data that are complete; the index of the current one."""
    batch: int = 0
    """Batches consumed in the current epoch, on this rank."""
    total_batches: int = 0
    """Batches consumed since training began, on this rank."""
    step: int = 0
    """Iterations that updated weights."""
    skipped: int = 0
    """Updates that were due and did not take place: gradients overflowed, every batch of the step
    was left out, or the Module's ``optimizer_step`` did not step."""
    nonfinite: int = 0
    """Losses seen that were NaN or infinite."""
    optimizer_steps: list[int] = field(default_factory=list)
    """Updates by each optimizer, in the order ``configure_optimizers`` returned them."""
    elapsed: float = 0.0
    """Seconds spent in ``fit`` since training began."""
    validations: int = 0
    """Validations finished during training, the sanity check not counted."""
    validated_batch: int = -1
    """``total_batches`` at the last validation; -1 before the first."""
    validated_at: float = 0.0
    """``elapsed`` at the last validation."""
    pending_validation: bool = False
    """Whether a validation was due and did not come to its end: it comes first on resume."""
    stop: str | None = None
    """Why to stop after this step; None means go on. Recorded for reports, never restored."""

    def as_dict(self) -> dict[str, Any]:
        """Return the checkpoint's form of this record."""
        return asdict(self)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over the values of ``saved``; names this version does not know are left out."""
        for name in (f.name for f in fields(self)):
            if name in saved and name != "stop":
                setattr(self, name, saved[name])
