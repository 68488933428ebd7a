"""From loaders to the sources a run reads: limits, and the way of a batch to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, ModuleError
from ..overrides import DataHooks
from .reader import ALL
from .seeds import SeedSamples
from .share import Share
from .source import Source, Wait, evaluation_loaders, in_order, limited, training_loader
from .transfer import mapped, move

Prepare = Callable[[Any], Any]


def overrides(owner: Any, name: str, plain: type = DataHooks) -> bool:
    """Return whether ``owner`` defines the method ``name`` that ``plain`` only declares."""
    method = getattr(owner, name, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(plain, name)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _asked(hook: Callable[..., Any], arguments: tuple[Any, ...], batch: Any) -> Any:
    return hook(batch, *arguments)


def pipeline(
    owners: list[Any], device: torch.device, convert: Callable[[Tensor], Tensor] | None, index: int
) -> Prepare | None:
    """Return what brings a batch to ``device``, or None where it is used as it comes.

    Args:
        owners: The DataModule, if there is one, and the Module: the first to override a hook wins.
        device: Where to.
        convert: The precision's change to each tensor.
        index: Index of the loader, for the hooks.
    """
    steps: list[Prepare] = []
    if convert is not None:
        steps.append(partial(mapped, change=convert, wanted=_is_tensor))
    for name, arguments in (
        ("on_before_batch_transfer", (index,)),
        ("transfer_batch_to_device", (device, index)),
        ("on_after_batch_transfer", (index,)),
    ):
        owner = next((owner for owner in owners if overrides(owner, name)), None)
        if owner is not None:
            steps.append(partial(_asked, getattr(owner, name), arguments))
        elif name == "transfer_batch_to_device" and device.type != "cpu":
            steps.append(partial(move, device=device))
    if len(steps) < 2:
        return steps[0] if steps else None

    def prepare(batch: Any) -> Any:
        for step in steps:
            batch = step(batch)
        return batch

    return prepare


def loaders_for(
    stage: str, given: Any, datamodule: Any, module: Any, is_optional: bool = False
) -> Any:
    """Return the loaders for ``stage``: those given, or the DataModule's, or the Module's.

    Args:
        stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        given: What the Trainer's method was passed, or None.
        datamodule: The run's DataModule, or None.
        module: The run's Module.
        is_optional: Whether to return None where there are none.

    Raises:
        DataError: There is none, or both loaders and a DataModule were passed.
    """
    if given is not None and datamodule is not None:
        raise DataError(
            f"Both {stage}_dataloaders and datamodule were passed. Pass one of them, so that it is "
            "clear which data is used."
        )
    owner, name = datamodule if datamodule is not None else module, f"{stage}_dataloader"
    found = given
    if given is None and overrides(owner, name):
        found = getattr(owner, name)()
    if found is not None and not (isinstance(found, (list, tuple, Mapping)) and not found):
        return found
    if is_optional:
        return None
    method = {"train": "fit", "val": "validate"}.get(stage, stage)
    raise DataError(
        f"There is no data to {method} with. Pass loaders to trainer.{method}(…), pass a "
        f"datamodule, or define {name}() on {type(owner).__name__} and let it return a loader."
    )


def train_source(
    loaders: Any,
    limit: int | float,
    sequential: bool,
    prepare: Prepare | None,
    wait: Wait,
    seed_samples: SeedSamples = "batch",
    share: Share = ALL,
) -> Source:
    """Return the source of training batches, its length known where the loader's is."""
    loader = training_loader(loaders)
    if sequential:
        loader = in_order(loader)
    source = Source(loader, None, prepare, wait, None, seed_samples, share=share)
    if source.is_passed_over:
        raise DataError(
            f"The training data has fewer samples than the {share.size} ranks that share it. Use "
            "more data, or fewer ranks."
        )
    source.length, source.limit = limited(source.size(), limit, "limit_train_batches", "training")
    return source


def evaluation_sources(
    loaders: Any,
    limit: int | float,
    stage: str,
    sequential: bool,
    prepare_for: Callable[[int], Prepare | None],
    seed_samples: SeedSamples = "batch",
    share: Share = ALL,
) -> list[Source]:
    """Return a source for each of an evaluation's loaders."""
    found = []
    share = replace(share, counts_all=True)
    for index, loader in enumerate(evaluation_loaders(loaders, stage)):
        if sequential:
            loader = in_order(loader)
        prepare, name = prepare_for(index), f"{stage} {index}"
        source = Source(loader, None, prepare, Wait(), None, seed_samples, name, share)
        source.length, source.limit = 0, None
        if not source.is_passed_over:  # others have the batches
            size = source.size()
            source.length, source.limit = limited(size, limit, f"limit_{stage}_batches", stage)
        found.append(source)
    return found


def require_step(module: Any, name: str, plain: type) -> None:
    """Refuse a Module that does not define the step a run needs.

    Raises:
        ModuleError: It does not.
    """
    if not overrides(module, name, plain):
        arguments = "" if name == "configure_optimizers" else "batch, batch_idx"
        raise ModuleError(
            f"{type(module).__name__} has no {name}({arguments}), which this run needs. Define it: "
            "see help(leyden.Module)."
        )
