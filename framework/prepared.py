"""The steps of a Module as strategy and precision run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ModuleError

if TYPE_CHECKING:
    from .run import Run


def prepared(run: Run, name: str) -> Callable[..., Any]:
    """Return the Module's method ``name`` as strategy and precision run it.

    A step that takes fewer of ``(batch, batch_idx, dataloader_idx)`` is passed fewer.
    """
    method = getattr(run.module, name)
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise ModuleError(
            f"{type(run.module).__name__}.{name} is async or has a yield, so calling it runs "
            "nothing of it. Define it with def, and return its result."
        )
    step = run.precision.wrap(run.strategy.prepare(run.module, name))
    if run.compile_step is not None:
        step = run.compile_step(step)
    parameters = list(inspect.signature(getattr(run.module, name)).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(positional) >= 2:
        return step
    if len(positional) == 1:
        return lambda batch, *_: step(batch)
    raise ModuleError(
        f"{type(run.module).__name__}.{name}{inspect.signature(getattr(run.module, name))} takes "
        "no batch. Define it with (self, batch, batch_idx)."
    )


def takes_index(step: Callable[..., Any], several: bool) -> bool:
    """Say if an evaluation's step is passed its loader's index: needed, or there are several."""
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return several
    third = [p for p in parameters if p.kind is not p.KEYWORD_ONLY][2:3]
    return any(several or p.default is p.empty for p in third if p.kind is not p.VAR_KEYWORD)
