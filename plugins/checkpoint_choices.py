"""The arguments of a ModelCheckpoint, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from leyden.errors import ConfigError, did_you_mean

INTERVALS = ("every_n_train_steps", "train_time_interval", "every_n_epochs")
TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "dirpath": ((str, Path, type(None)), "a path, a URL or None"),
    "filename": ((str, type(None)), "a template such as '{epoch}-{step}', or None"),
    "monitor": ((str, type(None)), "the name of a logged metric, or None"),
    "save_on_train_epoch_end": ((bool, type(None)), "True, False or None"),
    "train_time_interval": ((timedelta, type(None)), "a timedelta such as timedelta(minutes=30)"),
    "keep_for": ((timedelta, type(None)), "a timedelta such as timedelta(days=7)"),
    **dict.fromkeys(
        (
            "verbose",
            "save_weights_only",
            "auto_insert_metric_name",
            "enable_version_counter",
            "asynchronous",
            "save_on_exception",
        ),
        (bool, "True or False"),
    ),
}
LEAST = {
    "save_top_k": (-1, "-1 keeps all, 0 none"),
    "keep_newest": (0, "0 keeps none for being new"),
    "keep_every_n_train_steps": (1, "None keeps none for its step"),
    "every_n_train_steps": (1, "Leave it out for none"),
    "every_n_epochs": (1, "Leave it out for none"),
}
OPTIONAL = ("keep_every_n_train_steps", "every_n_train_steps", "every_n_epochs")
NAMED: dict[str, tuple[Any, ...]] = {
    "save_last": (None, True, False, "link"),
    "when_busy": ("wait", "skip"),
    "when_failed": ("raise", "warn"),
}


def check_choices(chosen: Mapping[str, Any]) -> None:
    """Check the arguments of a ModelCheckpoint, given by name.

    Raises:
        ConfigError: One is of the wrong type or out of its range, or two do not fit together.
    """
    for name, (types, wanted) in TYPES.items():
        if not isinstance(chosen[name], types):
            raise ConfigError(f"{name}={chosen[name]!r} is of the wrong type. Pass {wanted}.")
    for name, (least, meaning) in LEAST.items():
        value = chosen[name]
        if not (value is None and name in OPTIONAL) and (type(value) is not int or value < least):
            raise ConfigError(
                f"{name}={value!r} must be a whole number, at least {least}. {meaning}."
            )
    for name in ("train_time_interval", "keep_for"):
        if chosen[name] is not None and chosen[name] <= timedelta(0):
            raise ConfigError(f"{name}={chosen[name]!r} must be positive. Leave it out for none.")
    for name, allowed in NAMED.items():
        if not any(chosen[name] is one or chosen[name] == one != 1 for one in allowed):
            near = did_you_mean(str(chosen[name]), [one for one in allowed if type(one) is str])
            raise ConfigError(
                f"{name}={chosen[name]!r} is not a choice.{near} "
                f"Pass one of {', '.join(map(repr, allowed))}."
            )
    share = chosen["max_share"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
        raise ConfigError(f"max_share={share!r} must be a number above 0. 1.0 sets no limit.")
    _check_together(chosen)


def _check_together(chosen: Mapping[str, Any]) -> None:
    intervals = [name for name in INTERVALS if chosen[name] is not None]
    if len(intervals) > 1:
        raise ConfigError(
            f"ModelCheckpoint takes one interval, not {' and '.join(intervals)}. Use a "
            "ModelCheckpoint for each."
        )
    if chosen["monitor"] is None and chosen["save_top_k"] > 1:
        raise ConfigError(
            f"save_top_k={chosen['save_top_k']} needs a metric to rank by. Pass monitor='...', or "
            f"keep_newest={chosen['save_top_k']} for the newest, or save_top_k=-1 for all."
        )
    if chosen["when_busy"] == "skip" and not chosen["asynchronous"]:
        raise ConfigError(
            "when_busy='skip' is for saves in the background. Pass asynchronous=True too, or leave "
            "it out."
        )
