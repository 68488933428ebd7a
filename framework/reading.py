"""What a run reads: its loaders with their limits, made anew where that is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .data.feed import evaluation_sources, loaders_for, overrides, pipeline, train_source
from .data.source import Source
from .module import Module
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .run import Run


def read_train(run: Run, given: Mapping[str, Any]) -> Source:
    """Return what training reads; a DataModule's or Module's method makes the loader anew."""
    trainer = run.trainer
    loaders = loaders_for("train", given.get("train"), run.datamodule, run.module)
    sequential, prepare = bool(trainer.overfit_batches), prepare_for(run)(0)
    return train_source(
        loaders, trainer.limit_train_batches, sequential, prepare, run.wait, trainer.seed_samples
    )


def reload(run: Run, given: Mapping[str, Any], first: int) -> None:
    """Make the loaders anew, at the epochs to do so; those of epoch ``first`` are still new."""
    state, every = run.state, run.trainer.reload_dataloaders_every_n_epochs
    if state.epoch % every == 0 and state.epoch != first:
        run.train.close()
        seed, run.train = run.train.seed, read_train(run, given)
        run.train.seed = seed
        if (validation := run.evaluations.get("validate")) is not None:
            for source in validation.sources:
                source.close()
            validation.sources = read_evaluation(run, given) or []


def read_evaluation(run: Run, given: Mapping[str, Any]) -> list[Source] | None:
    """Return what an evaluation reads, or None for a fit that does not validate."""
    trainer, module, in_fit = run.trainer, run.module, run.stage == "fit"
    kind = {"fit": "val", "validate": "val"}.get(run.stage, run.stage)
    loaders = loaders_for(kind, given.get(kind), run.datamodule, module, is_optional=in_fit)
    if in_fit:
        can_validate = overrides(module, "validation_step", Module)
        if loaders is None and trainer.overfit_batches and can_validate:
            loaders = run.train.loader
        if loaders is not None and not can_validate:
            rank_zero_warn(
                f"There is validation data, and {type(module).__name__} has no validation_step, so "
                "it is not validated. Define validation_step(batch, batch_idx)."
            )
        if loaders is None or not can_validate or trainer.limit_val_batches == 0:
            return None
    limit = getattr(trainer, f"limit_{kind}_batches")
    sequential = in_fit and bool(trainer.overfit_batches)
    return evaluation_sources(
        loaders, limit, kind, sequential, prepare_for(run), trainer.seed_samples
    )


def prepare_for(run: Run) -> Callable[[int], Callable[[Any], Any] | None]:
    """Return what makes the batch pipeline of the loader with a given index."""
    owners = [owner for owner in (run.datamodule, run.module) if owner is not None]
    device, convert = run.strategy.device, run.precision.convert_batch()
    return lambda index: pipeline(owners, device, convert, index)
