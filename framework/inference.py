"""Tensors made in inference mode: found where a module keeps them, and made normal again.

Autograd refuses them, so what an evaluation leaves behind could not be trained through.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from .data.transfer import mapped

NOT_THE_USERS = ("_parameters", "_modules", "_trainer", "_logged")


def without_inference(value: Any) -> Any:
    """Return ``value`` with normal tensors in place of the inference tensors in it."""
    return mapped(value, Tensor.clone, _is_inference)


def _is_inference(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def forget_inference(module: nn.Module) -> None:
    """Replace the inference tensors that ``module`` keeps by normal ones of the same value.

    Looks into parameters, buffers and attributes, and into the dicts, lists, deques and tuples
    among them. All but tuples stay the same objects.
    """
    for parameter in module.parameters():
        if parameter.is_inference():  # a lazy layer met its first batch
            parameter.data = parameter.data.clone()
    seen: set[int] = set()
    for part in module.modules():
        for name, value in list(part.__dict__.items()):
            if name not in NOT_THE_USERS:
                replaced = _normal(value, seen)
                if replaced is not value:
                    part.__dict__[name] = replaced


def _normal(value: Any, seen: set[int]) -> Any:
    """Return ``value``, or its normal counterpart where it is or holds an inference tensor."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if not isinstance(value, (dict, list, deque, tuple)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        items = [_normal(item, seen) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        replaced = _normal(item, seen)
        if replaced is not item:
            value[key] = replaced
    return value
