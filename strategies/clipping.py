"""The norm of gradients that lie whole or in parts on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from leyden.dtensors import local


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scale gradients, in place, so that their joint norm is at most ``max_norm``.

    Gradients may be whole, sharded, split by layers, or both, over any axes of one mesh. Every rank
    calls it with the same parameters, though not all need have gradients.

    Returns:
        The norm before, shape ``()``, the same on every rank.
    """
    held = [parameter for parameter in parameters if parameter.requires_grad]
    held_here: dict[tuple[int, ...], list[Tensor]] = {}
    axes: dict[tuple[int, ...], list[Any]] = {}
    every: list[Tensor] = []
    for parameter in held:
        # By parameters, not gradients: a rank that lacks one still takes part.
        value, groups = parameter.grad, _groups(parameter)
        key = tuple(id(group) for group in groups)
        axes.setdefault(key, groups)
        parts = held_here.setdefault(key, [])
        if value is not None:
            every.append(local(value))
            parts.append(local(_summed(value)))
    powers = [_power(parts, norm_type, device) for parts in held_here.values()]
    op = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
    for power, groups in zip(powers, axes.values(), strict=True):
        for group in groups:
            dist.all_reduce(power, op, group=group)
    if not powers:
        return torch.zeros((), device=device)
    joint = torch.stack(powers)
    norm = joint.max() if norm_type == torch.inf else joint.sum() ** (1.0 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in every:
        part.mul_(factor.to(part.device, part.dtype))
    return norm


def _groups(parameter: Tensor) -> list[Any]:
    """Return the groups of ranks that hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]


def _summed(gradient: Tensor) -> Tensor:
    """Return ``gradient`` with its parts summed where they are terms of a sum yet."""
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
        return gradient.redistribute(placements=placements)
    return gradient


def _power(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of the absolute values' powers, or the largest one for infinity."""
    filled = [part for part in parts if part.numel()]
    wide = torch.float64 if any(p.dtype is torch.float64 for p in filled) else torch.float32
    if device.type == "cpu" or not filled:
        wide = torch.float64 if device.type != "mps" else torch.float32
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch._foreach_norm(filled, norm_type, dtype=wide)
    joint = torch.stack([norm.to(device) for norm in norms])
    return joint.max() if norm_type == torch.inf else joint.pow(norm_type).sum()
