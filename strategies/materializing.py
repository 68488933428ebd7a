"""Memory and first values for what was made without: parameters on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from leyden.dtensors import local
from leyden.errors import ModuleError

from .sharding import tied


def materialize(module: nn.Module, device: torch.device, broadcast: Callable[[Any], Any]) -> None:
    """Give everything of ``module`` that is on the meta device memory and its first value.

    Each rank takes memory for its part. Values come from the module's ``init_weights()``, or else
    from the ``reset_parameters()`` of each layer; what is there already stays. Ranks draw what one
    process would: the parts of the same random tensors.

    Args:
        module: Sharded already.
        device: Where the memory is taken.
        broadcast: Returns rank 0's value on every rank.

    Raises:
        ModuleError: Something is left without a value.
    """
    described = {name: tensor for name, tensor in _tensors(module).items() if tensor.is_meta}
    if not described:
        return
    layers = _layers_to_fill(module, described)
    ties = tied(module)
    module._apply(lambda tensor: _filled(tensor, device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    for first, *others in ties:
        holder, _, attribute = first.rpartition(".")
        parameter = getattr(module.get_submodule(holder), attribute)
        for name in others:
            holder, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(holder), attribute, parameter)
    filled = {id(tensor) for name, tensor in _tensors(module).items() if name in described}
    states = broadcast(_generators(device))
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device).set_rng_state(states[1])
    with torch.no_grad(), _DrawsWhole():  # type: ignore[no-untyped-call]
        for layer, method in layers:
            there = [] if layer is module else _own(layer, without=filled)
            getattr(layer, method)()
            for tensor, value in there:
                tensor.copy_(value)
    left = [n for n, tensor in _tensors(module).items() if n in described and _is_unset(tensor)]
    if left:
        raise _nothing_fills(module, left)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }


def _own(layer: nn.Module, without: Collection[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the layer's tensors that had values before, each with a copy of its part."""
    held = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    own = [local(tensor) for tensor in held if id(tensor) not in without]
    return [(tensor, tensor.clone()) for tensor in own]


def _layers_to_fill(module: nn.Module, described: dict[str, Tensor]) -> list[tuple[nn.Module, str]]:
    """Return what is to be called, on which layer."""
    if callable(getattr(module, "init_weights", None)):
        return [(module, "init_weights")]
    holders = list(dict.fromkeys(name.rpartition(".")[0] for name in described))
    without = []
    layers = []
    for holder in holders:
        layer = module.get_submodule(holder)
        method = next(
            (m for m in ("reset_parameters", "_reset_parameters") if hasattr(layer, m)), None
        )
        if method is None:
            without += [name for name in described if name.rpartition(".")[0] == holder]
        else:
            layers.append((layer, method))
    if without:
        raise _nothing_fills(module, without)
    return layers


def _nothing_fills(module: nn.Module, names: list[str]) -> ModuleError:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ModuleError(
        f"Nothing gives {shown} a value: what configure_model makes has no memory until it is "
        f"sharded. Define {type(module).__name__}.init_weights() so that it fills everything, or "
        "reset_parameters() in the layer that holds it, or make the layer in __init__."
    )


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for ``tensor`` that shows whether anything has been written there since."""
    empty = torch.empty_like(tensor, device=device)
    part = local(empty)
    part.fill_(_unset(part.dtype))
    return empty


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    part = local(tensor)
    if not part.numel() or part.dtype is torch.bool:
        return False
    if part.dtype.is_floating_point or part.dtype.is_complex:
        return bool(part.isnan().any())
    return bool((part == _unset(part.dtype)).any())


def _generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    own = None
    if device.type != "cpu":
        own = torch.get_device_module(device).get_rng_state()
    return torch.get_rng_state(), own


class _DrawsWhole(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets random values for a part of a tensor be that part of the whole tensor's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if isinstance(target, DTensor) and torch.Tag.nondeterministic_seeded in func.tags:
            laid: Any = target
            own = local(target)
            whole = torch.empty(target.shape, dtype=target.dtype, device=own.device)
            func(whole, *args[1:], **kwargs)
            (chunk,) = laid.__create_chunk_list__()
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            part = whole[tuple(slice(start, start + size) for start, size in pairs)]
            if own.numel():
                own.copy_(part)
            return target
        return func(*args, **kwargs)
