"""What is sharded by itself: blocks, called parts, and what ties them together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.blocks import UNCALLED, blocks_of
from leyden.errors import ConfigError

Chosen = type[nn.Module] | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool] | None
"""How blocks are chosen: classes, a function of name and layer, or by default by repetition."""


def units(module: nn.Module, chosen: Chosen = None) -> dict[str, nn.Module]:
    """Return the layers that are gathered each by itself, an outer one before those inside of it.

    Args:
        module: The model; it is no unit itself.
        chosen: Classes of layers, or a function of a layer's name and the layer. By default its
            blocks, as `leyden.blocks.blocks_of` finds them.

    Raises:
        ConfigError: No layer was chosen, or one shares a parameter with the rest of the model.
    """
    if chosen is None:
        found = blocks_of(module)
        shared = _shared_outside(module, found)
        return {name: block for name, block in found.items() if name not in shared}
    found = blocks_of(module, _choice(chosen), nested=True)
    if not found:
        kinds = sorted({type(m).__name__ for name, m in module.named_modules() if name})
        raise ConfigError(
            f"shard= chose no layer with parameters of {type(module).__name__}. It is made of: "
            f"{', '.join(kinds)}."
        )
    shared = _shared_outside(module, found)
    if shared:
        name, parameters = next(iter(shared.items()))
        raise ConfigError(
            f"shard= chose {name!r}, which shares {', '.join(parameters)}: tied weights must be in "
            "one shard, or they would part. Leave this layer out of shard=."
        )
    return found


def _choice(chosen: Any) -> Any:
    if isinstance(chosen, type) or callable(chosen):
        return chosen
    classes = tuple(chosen)
    if not all(isinstance(one, type) for one in classes):
        raise ConfigError(
            f"shard={chosen!r} must be classes of layers, such as (Block,), or a function of "
            "a layer's name and the layer."
        )
    return classes


def parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost layers with parameters that are called, for steps of several networks.

    The lists and dicts of layers that no forward runs through are looked into.
    """
    found: dict[str, nn.Module] = {}

    def look(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, UNCALLED):
                look(f"{prefix}{name}.", child)
            elif any(True for _ in child.parameters()):
                found.setdefault(f"{prefix}{name}", child)

    look("", module)
    shared = _shared_outside(module, found)
    return {name: part for name, part in found.items() if name not in shared}


def unshardable(
    module: nn.Module, chosen: Iterable[nn.Module], ignored: Collection[nn.Parameter]
) -> set[nn.Parameter]:
    """Return the parameters that ``fully_shard`` cannot take, which stay whole on every rank.

    They are single numbers without a dimension, those without an element, and in each unit those of
    another dtype than most of its elements are of.
    """
    norms = batch_norms(module)
    taken = set(ignored) | {p for p in module.parameters() if not (p.ndim and p.numel())}
    found = taken - set(ignored)
    for unit in (*norms, *reversed(list(chosen)), module):  # inner ones first
        own = [p for p in unit.parameters() if p not in taken]
        sizes: Counter[torch.dtype] = Counter()
        for parameter in own:
            sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            kept = sizes.most_common(1)[0][0]
            found |= {p for p in own if p.dtype is not kept}
        taken |= set(own)
    return found


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms with parameters, whose statistics stay in float32."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.weight is not None]


def tied(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [several for several in names.values() if len(several) > 1]


def _shared_outside(module: nn.Module, found: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Return the blocks that share a parameter with what is outside of them, and its names."""
    shared: dict[str, list[str]] = {}
    for names in tied(module):
        for block in found:
            inside = [name.startswith(f"{block}.") for name in names]
            if any(inside) and not all(inside):
                shared.setdefault(block, names)
    return shared


def named_parameters(module: nn.Module, ignored: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that ``ignored``, names or a function of name and parameter, means.

    Raises:
        ConfigError: A name means none.
    """
    own = dict(module.named_parameters())
    if callable(ignored):
        return {name: p for name, p in own.items() if ignored(name, p)}
    found: dict[str, nn.Parameter] = {}
    for wanted in [ignored] if isinstance(ignored, str) else ignored:
        meant = {n: p for n, p in own.items() if n == wanted or n.startswith(f"{wanted}.")}
        if not meant:
            raise ConfigError(
                f"ignored={wanted!r} names no parameter or layer of {type(module).__name__}. Pass "
                "names such as 'head' or 'head.weight', or a function of name and parameter."
            )
        found |= meant
    return found
