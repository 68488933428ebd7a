"""Callback: a plugin's comfortable base."""

from __future__ import annotations

from typing import Any

from .hookspecs import RunHooks


class Callback(RunHooks):
    """A plugin whose methods count by name, called with the arguments of `RunHooks`.

    A hook that is not overridden is never called, so it costs nothing. A Callback with state
    defines ``state_dict`` and ``load_state_dict``, and every checkpoint carries it.
    """

    is_saver: bool = False
    """True for one that saves what the others leave: its hooks run after all others."""

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint: unique among the callbacks of a run.

        Two of one class must differ in it: include the settings that tell them apart.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned when the checkpoint was saved."""
