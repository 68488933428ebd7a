"""What one process does for all: code, warnings and messages of rank 0 alone.

Messages go to the logger named ``leyden``. A script that configures no logging sees them on stderr,
from INFO up. As soon as ``leyden`` or the root logger has a handler of the user's own, only that
one shows them. ``logging.getLogger("leyden").setLevel(...)`` says how much is shown in both cases.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast, overload

from .errors import ConfigError, LeydenError

if TYPE_CHECKING:
    from .protocols import Strategy

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("leyden")


class _ToStderr(logging.Handler):
    """Shows messages on stderr while nobody else shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        # Asked per message: scripts configure logging before or after they import leyden.
        if all(handler is self for handler in (*_log.handlers, *logging.root.handlers)):
            print(self.format(record), file=sys.stderr)


if not _log.handlers:
    _log.addHandler(_ToStderr())
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)


def rank() -> int:
    """Return the number of this process among all of a run; 0 where it is alone.

    ``torch.distributed`` knows it once initialised. Before that it is what the launcher put in the
    environment: RANK, else LOCAL_RANK, else SLURM_PROCID.

    Raises:
        ConfigError: The environment holds something else than a number.
    """
    dist = sys.modules.get("torch.distributed")  # not imported, then not initialised either
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ConfigError(
                    f"The environment has {name}={value!r}; a rank is a number, 0 or more. "
                    f"Unset {name}, or start the run with torchrun or srun, which set it."
                )
            return int(value)
    return 0


class _RankZeroOnly:
    """Decorator: the function runs on rank 0 and returns ``default`` at once on the others."""

    @property
    def rank(self) -> int:
        """The rank of this process, as `rank` finds it."""
        return rank()

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, function: Callable[P, T], default: T) -> Callable[P, T]: ...
    def __call__(self, function: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
        @functools.wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if rank() == 0 else default

        return on_rank_zero


rank_zero_only = _RankZeroOnly()


def rank_zero_warn(
    message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1
) -> None:
    """Warn as ``warnings.warn`` does, on rank 0.

    Args:
        message: The text, or a warning that is ready.
        category: Its kind, by which filters tell it apart.
        stacklevel: The line it is shown at: 1 is the one that calls this, 2 its caller's.
    """
    if rank() == 0:
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def rank_zero_info(message: object, *args: object) -> None:
    """Log ``message % args`` at INFO to the logger ``leyden``, on rank 0."""
    if rank() == 0:
        _log.info(message, *args, stacklevel=2)


def rank_zero_debug(message: object, *args: object) -> None:
    """Log ``message % args`` at DEBUG to the logger ``leyden``, on rank 0."""
    if rank() == 0:
        _log.debug(message, *args, stacklevel=2)


def on_first(strategy: Strategy, call: Callable[[], T]) -> T:
    """Return on every rank what ``call`` returns on rank 0; what it raises is raised on all."""
    if strategy.world_size == 1:
        return call()
    value, error = None, None
    if strategy.rank == 0:
        try:
            value = call()
        except Exception as raised:
            error = raised
    value, told = strategy.broadcast((value, None if error is None else told_of(error)))
    if told is not None:
        raise told if error is None else error
    return cast(T, value)


def told_of(error: Exception) -> Exception:
    """Return ``error``, or one that says the same where it cannot travel to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # one with a lock, a file or arguments of its own
        return LeydenError(f"{type(error).__name__}: {error}")
    return error
