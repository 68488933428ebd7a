"""Every error a user can meet. A message says what was wrong, what is allowed, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeydenError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(LeydenError, ValueError):
    """A choice passed to a Trainer or to one of its parts cannot be honoured."""


class PluginError(LeydenError, TypeError):
    """A plugin breaks the contract in ``hookspecs.py``."""


class ModuleError(LeydenError, TypeError):
    """A Module or DataModule lacks a method, or one of its methods returned a wrong thing."""


class DataError(LeydenError, ValueError):
    """The data cannot be read, is empty, or is not what the run was told to expect."""


class CheckpointError(LeydenError, RuntimeError):
    """A checkpoint cannot be written, read, or fitted to this run."""


class RankError(LeydenError, RuntimeError):
    """A rank of a run failed; the message is its own traceback."""


class NonFiniteLossError(LeydenError, ArithmeticError):
    """The loss became NaN or infinite and the Trainer was told to stop there."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``known``, or the empty string."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigError:
    """Return the error for a name that nothing registers, with the closest one that is."""
    names = sorted(known)
    return ConfigError(
        f"No {kind} is called {name!r}.{did_you_mean(str(name), names)} "
        f"Known: {', '.join(names) or 'none'}. "
        + (hint or "Install the plugin that provides it; `leyden plugins` lists what is installed.")
    )
