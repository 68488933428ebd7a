"""When a validation is due."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .state import State

    Due = Callable[[State, bool, bool], bool]

SECONDS = {"sec": 1, "min": 60, "hour": 3600, "day": 86400}
ALLOWED = (
    "a whole number of batches (100), a share of the epoch (0.25), or a string with a unit: "
    "'500 steps', '2 epochs', '100 batches', '30 min'"
)


def parse_interval(value: Any) -> tuple[float, str]:
    """Return the number and the unit in ``val_check_interval``.

    The unit is one of ``"batches"``, ``"share"``, ``"steps"``, ``"epochs"`` and ``"seconds"``.

    Raises:
        ConfigError: It is none of the forms allowed, or out of range.
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"val_check_interval={value!r} is no interval. Pass {ALLOWED}.")
    if isinstance(value, float) and not 0.0 < value <= 1.0:
        raise ConfigError(
            f"val_check_interval={value} is a share of an epoch and must be above 0.0 and at most "
            f"1.0. Pass {ALLOWED}."
        )
    if value < 1 and isinstance(value, int):
        raise ConfigError(f"val_check_interval={value} must be at least 1. Pass {ALLOWED}.")
    return float(value), "share" if isinstance(value, float) else "batches"


def _parse_text(text: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)(?:s|es|utes|onds)?\s*", text.lower())
    number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    unit = {"h": "hour", "m": "min", "s": "sec", "d": "day"}.get(unit, unit)
    if number > 0 and unit in SECONDS:
        return number * SECONDS[unit], "seconds"
    units = {"step": "steps", "epoch": "epochs", "batch": "batches"}
    if number >= 1 and number.is_integer() and unit in units:
        return number, units[unit]
    raise ConfigError(f"val_check_interval={text!r} is no interval. Pass {ALLOWED}.")


def make_schedule(interval: Any, every_n_epoch: int | None, length: int | None) -> Due:
    """Return the function that says, after a batch, whether a validation is due.

    It takes the state, whether the batch was the epoch's last, and whether it stepped.

    Args:
        interval: The Trainer's ``val_check_interval``.
        every_n_epoch: Epochs between those that are validated in; None counts batches, or steps,
            across epochs.
        length: Batches in an epoch, where it is known.

    Raises:
        ConfigError: The interval does not fit the epoch.
    """
    number, unit = parse_interval(interval)
    if unit == "seconds":
        return lambda state, is_last, stepped: (
            stepped and state.elapsed - state.validated_at >= number
        )
    if unit == "steps":
        return lambda state, is_last, stepped: stepped and state.step % number == 0
    if unit == "epochs":
        return lambda state, is_last, stepped: is_last and (state.epoch + 1) % number == 0
    if unit == "share":
        return _by_share(number, every_n_epoch, length)
    return _by_batches(int(number), every_n_epoch, length)


def _by_share(share: float, every_n_epoch: int | None, length: int | None) -> Due:
    if every_n_epoch is None:
        raise ConfigError(
            f"val_check_interval={share} is a share of an epoch, and check_val_every_n_epoch=None "
            f"counts across epochs. Pass {ALLOWED}."
        )
    if share == 1.0:
        return lambda state, is_last, stepped: is_last and (state.epoch + 1) % every_n_epoch == 0
    if length is None:
        raise ConfigError(
            f"val_check_interval={share} is a share of an epoch, and this loader has no length. "
            f"Pass {ALLOWED}."
        )
    return _by_batches(max(1, int(length * share)), every_n_epoch, length)


def _by_batches(batches: int, every_n_epoch: int | None, length: int | None) -> Due:
    if every_n_epoch is None:
        return lambda state, is_last, stepped: state.total_batches % batches == 0
    if length is not None and batches > length:
        raise ConfigError(
            f"val_check_interval={batches} batches is more than the {length} of an epoch, so "
            "nothing would be validated. Pass check_val_every_n_epoch=None to count across epochs, "
            f"or '{batches} steps' to count optimizer steps."
        )
    return lambda state, is_last, stepped: (
        state.batch % batches == 0 and (state.epoch + 1) % every_n_epoch == 0
    )
