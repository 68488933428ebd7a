"""What a run reads: its loaders with their limits, made anew where that is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from .data.feed import evaluation_sources, loaders_for, overrides, pipeline, train_source
from .data.share import Share
from .data.source import Source
from .module import Module
from .pace import too_few
from .rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from .protocols import Strategy
    from .run import Run


def read_train(run: Run, given: Mapping[str, Any]) -> Source:
    """Return what training reads; a DataModule's or Module's method makes the loader anew."""
    trainer = run.trainer
    loaders = loaders_for("train", given.get("train"), run.datamodule, run.module)
    sequential, prepare = bool(trainer.overfit_batches), prepare_for(run)(0)
    limit, seeded = trainer.limit_train_batches, trainer.seed_samples
    source = train_source(loaders, limit, sequential, prepare, run.wait, seeded, share_of(run))
    if run.strategy.world_size > 1:
        agree_on_training(source, run.strategy)
    return source


def share_of(run: Run) -> Share:
    """Return the part of the data that this rank reads."""
    strategy = run.strategy
    return Share(strategy.data_rank, strategy.data_world_size, run.trainer.use_distributed_sampler)


def agree_on_training(source: Source, strategy: Strategy) -> None:
    """Let every rank go over as many training batches: as many as the one with the fewest has."""
    source.seed = strategy.broadcast(source.seed)
    told = strategy.gather((source.length, source.is_dealt))
    lengths = [length for length, _ in told]
    if source.share.is_dealt and not all(is_dealt for _, is_dealt in told):
        tell_not_dealt(source.loader)
    if any(length is None for length in lengths):
        source.limit = source.length if source.limit is None else source.limit
        source.length = None

        def have_all(is_there: bool) -> bool:
            return not strategy.exchange(torch.tensor([not is_there], dtype=torch.float64)).item()

        source.have_all = have_all
    elif len(set(lengths)) > 1:
        source.length = min(lengths)
        shown = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        rank_zero_warn(
            f"Ranks have different numbers of training batches ({shown}). Each epoch ends after "
            f"{source.length}, so that all take part in every step."
        )


def tell_not_dealt(loader: Any) -> None:
    """Say that a stream is not dealt out, which its data set has to see to."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        rank_zero_warn(
            f"{type(loader.dataset).__name__} is an IterableDataset: each rank reads all that it "
            "gives. Let it give a part, by torch.distributed.get_rank() and get_world_size()."
        )


def agree_on_evaluation(sources: list[Source], strategy: Strategy, kind: str) -> None:
    """Let every rank know how many batches others have, of each loader of ``kind``.

    Raises:
        DataError: Each must have one, and some has none.
    """
    told = strategy.gather([source.length for source in sources])
    seeds = strategy.broadcast([source.seed for source in sources])
    for source, seed, lengths in zip(sources, seeds, zip(*told, strict=True), strict=True):
        source.seed = seed
        if None not in lengths:
            source.rounds, source.common = max(lengths), min(lengths)
            if strategy.is_lockstep and source.rounds > source.common == 0:
                raise too_few(kind)


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
    sources = evaluation_sources(
        loaders, limit, kind, sequential, prepare_for(run), trainer.seed_samples, share_of(run)
    )
    if run.strategy.world_size > 1:
        agree_on_evaluation(sources, run.strategy, kind)
    return sources


def prepare_for(run: Run) -> Callable[[int], Callable[[Any], Any] | None]:
    """Return what makes the batch pipeline of the loader with a given index."""
    owners = [owner for owner in (run.datamodule, run.module) if owner is not None]
    device, convert = run.strategy.device, run.precision.convert_batch()
    return lambda index: pipeline(owners, device, convert, index)
