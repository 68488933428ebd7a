"""What a checkpoint holds, to be looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch import Tensor

from . import encoding
from .weights import weights_in


class Checkpoint(Mapping[str, Any]):
    """A checkpoint in memory, to be read; ``checkpoint["state"]`` is any entry as the file has it.

    Attributes:
        path: Where it was read.
        manifest: What the file says of itself: versions, step, time, host, checksum and more.
    """

    def __init__(self, path: str, manifest: dict[str, Any], content: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._content = content

    def __getitem__(self, name: str) -> Any:
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    @property
    def kind(self) -> str:
        """``"training"`` where a fit can go on from it, else ``"weights"``."""
        return "training" if "optimizer_states" in self else "weights"

    @property
    def step(self) -> int | None:
        """Iterations that had updated the weights."""
        return self.manifest.get("global_step", self.get("global_step"))

    @property
    def epoch(self) -> int | None:
        """Passes over the training data that were complete: the index of the one it was in."""
        return self.manifest.get("epoch", self.get("epoch"))

    @property
    def state_dict(self) -> dict[str, Any]:
        """The weights by name, on the CPU."""
        return weights_in(self) or {}

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """What the Module was made with; a dataclass is its dict, an enum its member's name."""
        return _readable(self.get("hyper_parameters", {}))  # type: ignore[no-any-return]

    @property
    def optimizer_states(self) -> list[dict[str, Any]]:
        """The state of each optimizer."""
        return [*self.get("optimizer_states", ())]

    @property
    def lr_schedulers(self) -> list[dict[str, Any]]:
        """The state of each schedule."""
        return [*self.get("lr_schedulers", ())]

    @property
    def callbacks(self) -> dict[str, Any]:
        """The state of each callback that keeps one, by its key."""
        return {key: _readable(state) for key, state in self.get("callbacks", {}).items()}

    def __repr__(self) -> str:
        place = "" if self.step is None else f"step {self.step}, epoch {self.epoch}, "
        return f"Checkpoint({self.path!r}: {self.kind}, {place}{len(self.state_dict)} weights)"


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a checkpoint and what can be done with it; print it."""

    path: str
    size: int
    """Bytes of the file."""
    kind: str
    """``"training"`` where a fit can go on from it, else ``"weights"``."""
    manifest: dict[str, Any]
    parameters: int
    """Numbers in all weights and buffers."""
    dtypes: dict[str, int]
    """How many of them are of each dtype."""
    hyper_parameters: dict[str, Any]
    optimizers: list[str]
    """The kind of each optimizer, and the options of its first group."""
    callbacks: list[str]
    """The keys of the callbacks whose state is kept."""
    uses: list[str]
    """What can be done with it, as calls."""

    def __str__(self) -> str:
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in self.dtypes.items())
        facts = dict(self.manifest)
        if "time" in facts:
            facts["time"] = f"{datetime.fromtimestamp(facts['time']):%Y-%m-%d %H:%M:%S}"
        lines = [
            f"{self.path}: {self.kind}, {self.size:,} bytes",
            f"weights: {self.parameters:,} numbers ({dtypes or 'none'})",
            *(f"hyperparameter {name}: {value!r}" for name, value in self.hyper_parameters.items()),
            *(f"optimizer: {text}" for text in self.optimizers),
            *(f"callback: {key}" for key in self.callbacks),
            *(f"{name}: {value}" for name, value in facts.items() if name not in ("kind", "size")),
            *(f"use: {use}" for use in self.uses),
        ]
        return "\n  ".join(lines)


def summary(checkpoint: Checkpoint, size: int) -> Summary:
    """Return the summary of ``checkpoint``, whose file has ``size`` bytes."""
    dtypes: Counter[str] = Counter()
    for value in checkpoint.state_dict.values():
        if isinstance(value, Tensor):
            dtypes[str(value.dtype).removeprefix("torch.")] += value.numel()
    return Summary(
        path=checkpoint.path,
        size=size,
        kind=checkpoint.kind,
        manifest=checkpoint.manifest,
        parameters=sum(dtypes.values()),
        dtypes=dict(dtypes.most_common()),
        hyper_parameters=checkpoint.hyper_parameters,
        optimizers=[_described(state) for state in checkpoint.optimizer_states],
        callbacks=list(checkpoint.callbacks),
        uses=_uses(checkpoint),
    )


def _described(optimizer: Mapping[str, Any]) -> str:
    groups = optimizer.get("param_groups", [])
    kind = optimizer.get("leyden", {}).get("kind", "optimizer")
    first = groups[0] if groups else {}
    chosen = {n: v for n, v in first.items() if n != "params" and v is not None and v is not False}
    options = [f"{n}={v:g}" if type(v) is float else f"{n}={v}" for n, v in chosen.items()]
    more = f" and {len(groups) - 1} more groups" if len(groups) > 1 else ""
    return f"{kind}({', '.join(options)}){more}"


def _uses(checkpoint: Checkpoint) -> list[str]:
    uses = []
    if checkpoint.kind == "training":
        uses.append("trainer.fit(module, data, ckpt_path=path) goes on from it")
    if "state_dict" in checkpoint:
        arguments = "" if "hyper_parameters" in checkpoint else ", its arguments"
        uses.append(f"YourModule.load_from_checkpoint(path{arguments}) makes the Module again")
    if checkpoint.state_dict:
        uses.append("module.load_weights(path) starts from its weights")
    return uses


def _readable(data: Any) -> Any:
    """Return ``data`` decoded, with plain values where a class of the user's would be needed."""
    try:
        return encoding.decode(_without_classes(data))
    except encoding.NotData:
        return data


def _without_classes(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_classes(part) for part in data]
    if not isinstance(data, dict):
        return data
    parts = {key: _without_classes(part) for key, part in data.items()}
    return parts["value"] if encoding.TAG in parts and "class" in parts else parts
