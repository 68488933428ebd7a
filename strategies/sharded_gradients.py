"""Gradients that ``fully_shard`` keeps whole on each rank until the last backward of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def share_unfinished(root: Any) -> None:
    """Reduce what backwards without an exchange have left, and add it to the parts' ``grad``.

    Every rank calls it, between two backwards, while ``root`` is to exchange gradients.
    """
    # What torch calls at the end of a backward; it has no public name.
    root._get_fsdp_state()._root_post_backward_final_callback()


def drop_unfinished(root: nn.Module) -> None:
    """Forget what a step that is not gone on with has left: its gradients, a broken-off forward."""
    sharded: Any = root
    sharded.reset_iter_state()
    for parameter in _parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _parameters(root: nn.Module) -> Iterator[Any]:
    for layer in root.modules():
        if isinstance(layer, FSDPModule):
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params
