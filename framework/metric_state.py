"""What was logged so far in an epoch, as a checkpoint holds it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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


def restore_metrics(run: Run, saved: dict[str, Any]) -> None:
    """Take over what `metric_state` returned, before anything is logged."""
    objects = dict(metric_objects(run.module))
    for path, state in saved["objects"].items():
        if path in objects:
            _restore_object(objects[path], state)
    run.metrics.finished = Readings(*(dict(values) for values in saved["finished"]))
    for state in saved["entries"]:
        entry = _restored_entry(run.metrics.train, state)
        entry.metric = objects.get(state["metric"])
        run.metrics.train.shared[entry.name] = entry


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


def _restore_object(metric: Any, saved: dict[str, Any]) -> None:
    if "own" not in saved:
        for name, value in encoding.decode(saved).items():
            setattr(metric, name, _on_device(value, getattr(metric, "device", None)))
        metric._computed = None
        return
    state = encoding.decode(saved["state"])
    if saved["own"]:
        metric.load_state_dict(state)
    else:
        vars(metric).update(state)


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
