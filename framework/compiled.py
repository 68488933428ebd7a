"""What a run does for a Module of which torch.compile compiles a part, or the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .module import Module
    from .run import Run


@contextmanager
def compiled_once(run: Run) -> Iterator[None]:
    """Keep what changes from step to step from compiling a step again, inside the block."""
    module = run.module
    is_compiled = run.compile_step is not None or (run.blocks and run.trainer.compiles)
    if not (is_compiled or has_compiled_parts(module)):
        yield
        return
    module.__dict__["log"] = torch.compiler.disable(module.log)  # type: ignore[no-untyped-call]
    # Counts reached through an nn.Module, such as self.global_step, are constants otherwise.
    try:
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            yield
    finally:
        module.__dict__.pop("log", None)


def has_compiled_parts(module: Module) -> bool:
    """Return whether torch.compile was applied to a part of ``module``, or to its step."""
    steps = (getattr(module, f"{name}_step") for name in ("training", "validation", "test"))
    return any(hasattr(step, "_torchdynamo_orig_callable") for step in steps) or any(
        hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        for part in module.modules()
    )
