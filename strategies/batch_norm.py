"""Batch norms that see the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronize(module: nn.Module, group: Any, device: torch.device) -> None:
    """Replace every batch norm below ``module`` by one over the ranks of ``group``, in place.

    Parameters, buffers and their names stay.
    """
    for name, child in list(module.named_children()):
        if device.type == "cpu":
            if isinstance(child, _BatchNorm):
                setattr(module, name, _converted(child, group))
            else:
                synchronize(child, group, device)
        else:
            synced = nn.SyncBatchNorm.convert_sync_batchnorm(child, group)  # type: ignore[no-untyped-call]
            setattr(module, name, synced)


def _converted(norm: _BatchNorm, group: Any) -> SyncedBatchNorm:
    synced = SyncedBatchNorm(group)
    synced.__dict__.update(norm.__dict__)
    synced.group = group
    return synced


class SyncedBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm does on accelerators, on the CPU.

    Source: Ioffe and Szegedy, "Batch Normalization", arXiv:1502.03167, algorithm 1.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(1)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        uses_batch = self.training or self.running_mean is None
        if not uses_batch:
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        across = [0, *range(2, input.ndim)]
        count = input.new_tensor([input.numel() / input.shape[1]])
        sums = torch.cat([input.sum(across), input.square().sum(across), count])
        total: Tensor = _Summed.apply(sums, self.group)  # type: ignore[no-untyped-call]
        features = input.shape[1]
        mean = total[:features] / total[-1]
        variance = (total[features : 2 * features] / total[-1] - mean.square()).clamp(min=0)
        if self.training and self.running_mean is not None:
            self._keep(mean.detach(), variance.detach(), total[-1].detach())
        shape = (1, -1) + (1,) * (input.ndim - 2)
        normed = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is None:
            return normed
        return normed * self.weight.view(shape) + self.bias.view(shape)

    def _keep(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of this batch, the variance unbiased."""
        assert self.running_mean is not None and self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum or 0.0)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum or 0.0)


class _Summed(torch.autograd.Function):
    """The sum over ranks, of values and of their gradients."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any) -> Tensor:
        context.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None
