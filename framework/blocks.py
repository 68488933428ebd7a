"""The blocks of a module: parts that are recomputed, compiled or sharded one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from .errors import ConfigError

UNCALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers that no forward runs through."""
CONTAINERS = (*UNCALLED, nn.Sequential)
Choice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


def blocks_of(
    module: nn.Module, choice: Choice | None = None, *, nested: bool = False
) -> dict[str, nn.Module]:
    """Return the blocks of ``module`` by name, in its order.

    Args:
        module: Any module; it is no block of itself.
        choice: Classes, or a function of name and part that says which parts are blocks. By
            default the repeated ones: at least two children of a ModuleList, Sequential or
            ModuleDict that are of one class and have parameters.
        nested: Whether a block inside of a block is one too, after the one around it.
    """
    chosen = _repeated(module) if choice is None else _chosen(choice)
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        inside = not nested and any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and chosen(name, part) and _has_parameters(part):
            found[name] = part
    return found


def require_blocks(
    module: nn.Module, choice: Choice | None, wanted_by: str
) -> dict[str, nn.Module]:
    """Return the blocks of ``module``.

    Args:
        module: Any module.
        choice: As in `blocks_of`.
        wanted_by: The argument that needs them, for the message.

    Raises:
        ConfigError: There are none.
    """
    found = blocks_of(module, choice)
    if not found:
        looked = "repeated parts" if choice is None else f"parts that blocks={choice!r} names"
        raise ConfigError(
            f"{wanted_by} works on blocks, and {type(module).__name__} has no {looked}. Pass "
            "Trainer(blocks=…): their class, several classes, or a function of name and part."
        )
    return found


def _chosen(choice: Choice) -> Callable[[str, nn.Module], Any]:
    if isinstance(choice, (type, tuple)):
        return lambda _, part: isinstance(part, choice)
    return choice


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _repeated(module: nn.Module) -> Callable[[str, nn.Module], bool]:
    repeated: set[int] = set()
    for container in module.modules():
        if isinstance(container, CONTAINERS):
            called = [c for c in container.children() if not isinstance(c, UNCALLED)]
            counts = Counter(type(child) for child in called if _has_parameters(child))
            repeated.update(id(child) for child in called if counts[type(child)] > 1)
    return lambda _, part: id(part) in repeated
