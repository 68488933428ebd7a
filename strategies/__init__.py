"""Strategies: how a module is placed, sharded and kept in step. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .single_device import SingleDevice as SingleDevice

__all__ = ["SingleDevice"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has: {__all__}.")
    from .single_device import SingleDevice

    return SingleDevice
