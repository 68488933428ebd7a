"""Activations recomputed or kept on the CPU, and blocks compiled: in place, for one run.

Names of parameters and buffers stay: only the ``forward`` of a block is replaced, on the object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .blocks import require_blocks

if TYPE_CHECKING:
    from .run import Run

SAVED = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operations of aten whose results ``"selective"`` keeps: the costly ones to compute again."""


class BlockForward:
    """Runs in place of a block's ``forward``: recomputed in backward, compiled, or both.

    A copy of the block, by deepcopy or pickle, has the block's own ``forward``.
    """

    def __init__(
        self,
        block: nn.Module,
        recompute: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        """Make what runs.

        Args:
            block: Whose ``forward`` it stands for.
            recompute: ``"full"``, ``"selective"``, a policy as torch takes it, or None for not.
            options: Those of torch.compile; None does not compile.
        """
        self.original = self.run = block.forward
        if recompute is not None:
            policies = {"full": None, "selective": keeps_costly}
            policy = policies[recompute] if isinstance(recompute, str) else recompute
            self.run = recomputed(self.original, policy)
        if options is not None:
            self.run = torch.compile(self.run, **options)
        update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def _itself(value: Any) -> Any:
    return value


def recomputed(function: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Return ``function`` so that backward computes again what it does not keep.

    Args:
        function: What is run.
        policy: What is kept of it, as torch's ``create_selective_checkpoint_contexts`` takes it;
            None keeps the arguments alone.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def in_part(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # Made here, for a compiler that traces this reads nothing it was closed over.
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return whole if policy is None else in_part


def keeps_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products, convolutions and attention return, and compute the rest again."""
    is_aten = isinstance(operation, torch._ops.OpOverload) and operation.namespace == "aten"
    if is_aten and operation._opname in SAVED:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def treat_blocks(run: Run) -> None:
    """Let the blocks of the Module recompute and be compiled, as the Trainer's choices ask.

    Raises:
        ConfigError: They ask for blocks, and the Module has none.
    """
    trainer = run.trainer
    # Without gradients there is nothing to keep.
    recompute = trainer.activation_checkpointing if run.stage == "fit" else None
    options = trainer.compile_options if trainer.compiles == "blocks" else None
    if recompute is None and options is None:
        return
    by = "compile='blocks'" if recompute is None else f"activation_checkpointing={recompute!r}"
    run.blocks = require_blocks(run.module, trainer.block_choice, by)
    for block in run.blocks.values():
        own = block.__dict__.get("forward")
        block.__dict__["forward"] = BlockForward(block, recompute, options)
        run.undo.append(partial(_restore, block, own))


def _restore(block: nn.Module, own: Any) -> None:
    block.__dict__.pop("forward", None)
    if own is not None:
        block.__dict__["forward"] = own


def step_compiler(run: Run) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return what compiles the steps of a run, where the Trainer's ``compile`` asks for it."""
    if run.trainer.compiles != "step":
        return None
    return partial(torch.compile, **run.trainer.compile_options)


def offloaded(step: Callable[..., Any], pin_memory: bool) -> Callable[..., Any]:
    """Return ``step`` so that what its graph keeps for backward waits on the CPU.

    Parameters and views of them stay where they are. With ``pin_memory`` the copies are not waited
    for. On a CPU nothing is copied.
    """
    to_cpu = save_on_cpu(pin_memory=pin_memory)

    def pack(tensor: Tensor) -> Any:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter) or tensor.device.type == "cpu":
            return tensor
        return to_cpu.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor = packed if isinstance(packed, Tensor) else to_cpu.unpack_hook(packed)
        return tensor

    @wraps(step)
    def run(*args: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return step(*args)

    return run
