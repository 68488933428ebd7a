"""Strategies: how a module is placed, sharded and kept in step. Importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp import DDP as DDP
    from .fsdp import FSDP as FSDP
    from .mesh import Mesh as Mesh
    from .processes import Processes as Processes
    from .single_device import SingleDevice as SingleDevice

_HOMES = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    "Mesh": "mesh",
    "Processes": "processes",
    "SingleDevice": "single_device",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has: {__all__}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
