"""What the memory of a training goes into, as far as that is known before it, and its peak."""

from __future__ import annotations

import copy
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from leyden.dtensors import local

if TYPE_CHECKING:
    from leyden.trainer import Trainer

MIB = 2**20


def treatment(trainer: Trainer) -> list[str]:
    """Return a line on what is done to blocks and steps, or none where nothing is."""
    done: list[str] = []
    blocks = trainer.blocks
    recompute = trainer.activation_checkpointing
    if recompute is not None:
        how = recompute if isinstance(recompute, str) else "by a policy"
        done.append(f"recomputed in backward ({how})")
    if trainer.compiles == "blocks":
        done.append("compiled")
    lines = []
    if blocks:
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in blocks.values()))
        lines.append(f"Blocks      {len(blocks)} of {kinds}: {', '.join(done)}")
    steps = {
        "compiled": trainer.compiles == "step",
        "activations kept on the CPU": trainer.activation_offload,
        "optimizer stepped in backward": trainer.optimizer_in_backward,
    }
    if any(steps.values()):
        lines.append(f"Steps       {', '.join(what for what, is_so in steps.items() if is_so)}")
    return lines


def layout(trainer: Trainer, module: nn.Module) -> list[str]:
    """Return lines on the mesh of ranks and what lies in parts on it, or none without one."""
    mesh = getattr(trainer.strategy, "mesh", None)
    if mesh is None:
        return []
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    axes = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    parts = [module.get_submodule(name) for name in getattr(trainer.strategy, "blocks", ())]
    kinds = Counter(type(part).__name__ for part in parts)
    units = [*(f"{count} of {kind}" for kind, count in kinds.items()), "the rest"]
    parameters = [p for p in module.parameters() if not is_lazy(p)]
    held, size = sum(local(p).numel() for p in parameters), sum(p.numel() for p in parameters)
    return [
        f"Mesh        {' x '.join(axes) or 'one rank'}",
        f"Shards      {' and '.join(units)}: {held:,} of {size:,} parameters are on this rank",
    ]


def expected_memory(module: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return a line on the bytes of parameters, gradients and optimizer states on this rank.

    Activations and what torch itself takes come on top. Gradients are counted as if all were there
    at once.
    """
    parameters = [local(p) for p in module.parameters() if not is_lazy(p)]
    trained = [local(p) for p in module.parameters() if p.requires_grad and not is_lazy(p)]
    parts = {"parameters": _bytes(parameters), "gradients": _bytes(trained)}
    try:
        parts["optimizer states"] = sum(map(state_bytes, optimizers))
        unknown = ""
    except Exception:  # an optimizer that is not torch's may ask a tensor for its values
        unknown = ", optimizer states are not known"
    shown = " + ".join(f"{what} {size / MIB:.1f}" for what, size in parts.items())
    return f"Memory      {sum(parts.values()) / MIB:.1f} MiB = {shown}{unknown}"


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of ``optimizer``'s states after a step.

    A copy of it steps parameters on the meta device, which have shapes and no memory.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        shadows = [_shadow(p) for p in group["params"] if p.requires_grad]
        # Kernels that take many parameters at once are for devices that have memory.
        options: dict[str, Any] = {name: False for name in ("foreach", "fused") if name in group}
        twin.param_groups.append({**group, **options, "params": shadows})
    twin.step()
    values = [value for state in twin.state.values() for value in state.values()]
    return _bytes([value for value in values if isinstance(value, Tensor)])


def _shadow(parameter: Tensor) -> nn.Parameter:
    shadow = nn.Parameter(torch.empty_like(local(parameter), device="meta"))
    shadow.grad = torch.empty_like(shadow)
    return shadow


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def begin_peak(device: torch.device) -> None:
    """Forget the peak so far, where that can be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> str:
    """Return the most memory that was in use: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / MIB:.0f} MiB of tensors on {device}"
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB and macOS in bytes.
    size *= 1 if sys.platform == "darwin" else 1024
    return f"{size / MIB:.0f} MiB resident, since this process began"
