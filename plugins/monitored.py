"""The value of a metric that a callback was told to watch."""

from __future__ import annotations

from collections.abc import Iterable

from leyden.errors import ConfigError, did_you_mean, unknown

MODES = ("min", "max")


def checked_mode(mode: str) -> str:
    """Return ``mode``, known to be ``"min"`` or ``"max"``."""
    if mode not in MODES:
        hint = "Pass 'min' if lower values of the metric are better, 'max' if higher ones are."
        raise unknown("mode", mode, MODES, hint)
    return mode


def missing(asked_by: str, monitor: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a metric nobody has logged.

    Args:
        asked_by: The argument that names it, as the user wrote it.
        monitor: The name.
        known: Names of the metrics there are.
    """
    names = sorted(known)
    return ConfigError(
        f"{asked_by}: no metric {monitor!r} has been logged.{did_you_mean(monitor, names)} "
        f"Logged so far: {', '.join(names) or 'none'}. "
        f"Log it with self.log({monitor!r}, value), or pass one of these names."
    )
