"""When a validation is due."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .state import State

    Due = Callable[[State, bool, bool], bool]

UNITS = {
    **dict.fromkeys(("step", "steps"), (1, "steps")),
    **dict.fromkeys(("epoch", "epochs"), (1, "epochs")),
    **dict.fromkeys(("batch", "batches"), (1, "batches")),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), (1, "seconds")),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), (60, "seconds")),
    **dict.fromkeys(("h", "hour", "hours"), (3600, "seconds")),
    **dict.fromkeys(("d", "day", "days"), (86400, "seconds")),
}
"""What a unit is, in how many of what is counted."""
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
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if found and found[2] in UNITS:
        factor, unit = UNITS[found[2]]
        number = float(found[1])
        if number > 0 if unit == "seconds" else number >= 1 and number.is_integer():
            return number * factor, unit
    raise ConfigError(f"val_check_interval={text!r} is no interval. Pass {ALLOWED}.")


def check_interval(interval: Any, every_n_epoch: int | None) -> None:
    """Refuse a ``val_check_interval`` that is none, or that ``check_val_every_n_epoch`` excludes.

    Raises:
        ConfigError: It is so.
    """
    _, unit = parse_interval(interval)
    if unit == "share" and every_n_epoch is None:
        raise ConfigError(
            f"val_check_interval={interval} is a share of an epoch, and "
            f"check_val_every_n_epoch=None counts across epochs. Pass {ALLOWED}."
        )
    if unit not in ("share", "batches") and every_n_epoch not in (1, None):
        raise ConfigError(
            f"val_check_interval={interval!r} counts {unit}, whatever the epoch, and "
            f"check_val_every_n_epoch={every_n_epoch} leaves epochs out. Leave one of them away."
        )


def make_schedule(interval: Any, every_n_epoch: int | None, length: int | None) -> Due:
    """Return the function that says, after a batch, whether a validation is due.

    It takes the state, whether the batch was the epoch's last, and whether it stepped.

    Args:
        interval: The Trainer's ``val_check_interval``.
        every_n_epoch: Epochs between those that are validated in; None counts batches across
            epochs.
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
    if unit == "batches":
        return _by_batches(int(number), every_n_epoch, length)
    assert every_n_epoch is not None, "a share of an epoch is refused without (check_interval)"
    if number == 1.0:
        return lambda state, is_last, stepped: is_last and (state.epoch + 1) % every_n_epoch == 0
    if length is None:
        raise ConfigError(
            f"val_check_interval={number} is a share of an epoch, and this loader has no length. "
            f"Pass {ALLOWED}."
        )
    return _by_batches(max(1, int(length * number)), every_n_epoch, length)


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
