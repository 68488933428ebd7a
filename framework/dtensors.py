"""Tensors that lie in parts on several ranks: torch's DTensors, without importing them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_split(value: Any) -> bool:
    """Return whether ``value`` is a tensor that lies in parts on several ranks, a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of ``tensor``, in the same memory; all of it where it is whole."""
    part: Tensor = tensor.to_local() if is_split(tensor) else tensor
    return part.detach()
