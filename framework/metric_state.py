"""What was logged so far in an epoch, as a checkpoint holds it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import encoding
from .entry import Entry, Options, is_metric
from .metrics import Logged, Readings

if TYPE_CHECKING:
    from .run import Run

REDUCED = ("total", "number", "block", "weights", "weight", "value", "is_unsent", "is_newest")
"""What an `Entry` has gathered."""


def metric_state(run: Run) -> dict[str, Any]:
    """Return the reductions of the open epoch, the latest finished ones, and metric objects."""
    objects = dict(metric_objects(run.module))
    names = {id(metric): path for path, metric in objects.items()}
    states = {path: state for path, o in objects.items() if (state := _object_state(path, o))}
    entries = run.metrics.train.shared.values()
    return {
        "entries": [_entry_state(entry, names.get(id(entry.metric))) for entry in entries],
        "finished": [_plain(values) for values in run.metrics.finished],
        "objects": states,
    }


def restore_metrics(run: Run, saved: Sequence[dict[str, Any]]) -> None:
    """Take over what `metric_state` returned, on one rank or on several, before anything is logged.

    What several had seen is added up here.
    """
    objects = dict(metric_objects(run.module))
    for path, metric in objects.items():
        if states := [state["objects"][path] for state in saved if path in state["objects"]]:
            _restore_object(path, metric, states)
    run.metrics.finished = Readings(*(dict(values) for values in saved[0]["finished"]))
    for state in saved:
        for kept in state["entries"]:
            entry = _restored_entry(run.metrics.train, kept)
            entry.metric = objects.get(kept["metric"])
            known = run.metrics.train.shared.setdefault(entry.name, entry)
            if known is not entry and not known.options.rank_zero_only:
                _add(known, entry)


def _add(entry: Entry, other: Entry) -> None:
    """Take what ``other`` has gathered into ``entry``."""
    for one in (entry, other):
        if one.block:
            one.total, one.block, one.weights = one._with_block(), [], []
    pick = {"min": min, "max": max}.get(entry.reduction, operator.add)
    for name in ("total", "number"):
        own, more = getattr(entry, name), getattr(other, name)
        if own is not None and more is not None:
            setattr(entry, name, pick(own, more))
        elif own is None:
            setattr(entry, name, more)
    entry.weight += other.weight


def metric_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each object of ``module`` that reduces by itself, with the path it is found at."""
    for path, part in module.named_modules():
        if is_metric(part):
            yield path, part
        for name, value in vars(part).items():
            if not name.startswith("_") and not isinstance(value, type) and is_metric(value):
                yield f"{path}.{name}" if path else name, value


def _object_state(path: str, metric: Any) -> dict[str, Any] | None:
    """Return what ``metric`` has seen, or None for one that is as good as new."""
    if hasattr(metric, "_defaults") and hasattr(metric, "_update_count"):  # one of torchmetrics
        if not metric._update_count:
            return None
        values = {name: getattr(metric, name) for name in metric._defaults}
        return encoding.encode({"_update_count": metric._update_count, **values})  # type: ignore[no-any-return]
    has_own = hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict")
    state = metric.state_dict() if has_own else vars(metric)
    try:
        return {"own": has_own, "state": encoding.encode(dict(state))}
    except encoding.NotData as error:
        warnings.warn(
            f"What the metric {path!r} has seen in this epoch is not in the checkpoint: {error} "
            "Give it state_dict() and load_state_dict().",
            stacklevel=2,
        )
        return None


def _restore_object(path: str, metric: Any, states: Sequence[dict[str, Any]]) -> None:
    first, *others = states
    if "own" not in first:
        for name, value in encoding.decode(first).items():
            setattr(metric, name, _on_device(value, getattr(metric, "device", None)))
        metric._computed = None
    elif first["own"]:
        metric.load_state_dict(encoding.decode(first["state"]))
    else:
        vars(metric).update(encoding.decode(first["state"]))
    try:
        for other in others:
            _merge(metric, other)
    except Exception as error:
        warnings.warn(
            f"The run goes on with another number of ranks, and what the metric {path!r} had seen "
            f"in this epoch on some of them cannot be added up: {error} This epoch's value lacks "
            "it. Resume with as many ranks to keep it.",
            stacklevel=2,
        )


def _merge(metric: Any, other: dict[str, Any]) -> None:
    """Add what a metric of torchmetrics has seen on another rank."""
    if "own" in other:
        raise TypeError(f"{type(metric).__name__} is none of torchmetrics.")
    state = encoding.decode(other)
    count = state.pop("_update_count")
    device = getattr(metric, "device", None)
    metric.merge_state({name: _on_device(value, device) for name, value in state.items()})
    metric._update_count += count


def _on_device(value: Any, device: Any) -> Any:
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on_device(part, device) for part in value] if isinstance(value, list) else value


def _entry_state(entry: Entry, metric: str | None) -> dict[str, Any]:
    options = entry.options._asdict() | {"reduce_fx": entry.reduction}
    reduced = {name: getattr(entry, name) for name in REDUCED}
    known = {"name": entry.name, "in_batch": entry.in_batch, "metric": metric, "options": options}
    return known | reduced


def _restored_entry(logged: Logged, state: dict[str, Any]) -> Entry:
    options = Options(**state["options"])
    entry = Entry(state["name"], options, state["in_batch"], logged.in_training, "")
    for name in REDUCED:
        setattr(entry, name, state[name])
    entry.is_restored = True
    return entry


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: v if isinstance(v, Tensor) else float(v) for name, v in values.items()}
