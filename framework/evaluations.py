"""The evaluations of a run: a fit's validation, or the test, validation or prediction it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .data.source import Source
from .prepared import prepared, takes_index
from .reading import read_evaluation
from .run import Evaluation
from .schedule import make_schedule

if TYPE_CHECKING:
    from .run import Run


def wire_evaluations(run: Run, loaders: Mapping[str, Any]) -> None:
    """Connect the validation of a fit, or the evaluation that the run is."""
    trainer = run.trainer
    phase = "validate" if run.stage == "fit" else run.stage
    sources = read_evaluation(run, loaders)
    if sources is None:
        return
    run.evaluations[phase] = evaluation(run, phase, sources)
    if run.stage == "fit":
        run.validate_at = trainer.validate_at
        run.validation_due = make_schedule(
            trainer.val_check_interval, trainer.check_val_every_n_epoch, run.train.length
        )
    else:
        run.phase = phase


def evaluation(run: Run, phase: Any, sources: list[Source]) -> Evaluation:
    """Return an evaluation in ``phase`` with the hooks that belong to it."""
    name = {"validate": "validation"}.get(phase, phase)
    moments = (
        "start",
        "model_eval",
        "epoch_start",
        "batch_start",
        "batch_end",
        "epoch_end",
        "end",
        "model_train",
    )
    hooks = {f"on_{m}": getattr(run.hooks, f"on_{name}_{m}") for m in moments}
    # Where a forward gathers parameters, their memory would be no use to training any more.
    infers = run.trainer.inference_mode and not run.strategy.is_lockstep
    mode: Callable[[], AbstractContextManager[Any]] = (
        torch.inference_mode if infers else torch.no_grad
    )
    return Evaluation(
        phase=phase,
        step=prepared(run, f"{name}_step"),
        sources=sources,
        no_grad=mode,
        takes_index=takes_index(getattr(run.module, f"{name}_step"), len(sources) > 1),
        **hooks,
    )
