"""What a module is made of: its parts, parameters and bytes, and the work of a forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from leyden.callback import Callback

from .memory_report import begin_peak, expected_memory, layout, peak_memory, treatment

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.trainer import Trainer


@dataclass(frozen=True)
class Part:
    """One part of a module. A parameter that several parts share counts in the first alone."""

    name: str
    type: str
    parameters: int
    note: str = ""
    """``"frozen"``, ``"partly frozen"``, ``"shared"``, ``"uninitialized"``, or nothing."""
    input: str = ""
    """Shapes of its inputs; empty where no example was run."""
    output: str = ""
    """Shapes of its outputs; empty where no example was run."""


@dataclass(frozen=True)
class Summary:
    """What `summarize` found; ``str()`` makes a table of it."""

    parts: list[Part]
    trainable_parameters: int
    frozen_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    train_modules: int
    eval_modules: int
    uninitialized: int
    """Parameters and buffers whose shape the first forward will choose: not in any count."""
    flops: int | None
    """Floating point operations in a forward of the example; None where that is not known."""

    @property
    def total_parameters(self) -> int:
        """Parameters, trainable and frozen, each counted once."""
        return self.trainable_parameters + self.frozen_parameters

    def __str__(self) -> str:
        trainable, frozen = scaled(self.trainable_parameters), scaled(self.frozen_parameters)
        lines = [
            f"Parameters  {trainable} trainable, {frozen} frozen, {self.total_parameters:,} in all",
            f"Size        {scaled(self.parameter_bytes, 'B')}"
            f" and {scaled(self.buffer_bytes, 'B')} of buffers",
            f"Modules     {self.train_modules} in train mode, {self.eval_modules} in eval mode",
        ]
        if self.uninitialized:
            lines.append(f"Unknown     {self.uninitialized} tensors get their shape in a forward")
        if self.flops is not None:
            lines.append(f"Forward     {scaled(self.flops, 'FLOPs')} for the example input")
        return "\n".join([*_table(self.parts), *lines])


class ModelSummary(Callback):
    """Prints before a fit what the module is made of, and after it the memory it took.

    Args:
        max_depth: How deep parts within parts are listed; 0 lists none, -1 all.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        # On every rank, for the forward of a sharded module needs them all.
        summary = summarize(module, self.max_depth)
        if trainer.is_global_zero:
            lines = [str(summary), *treatment(trainer), *layout(trainer, module)]
            lines.append(expected_memory(module, trainer.optimizers))
            print("\n".join(lines), flush=True)
        begin_peak(trainer.strategy.device)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        if trainer.is_global_zero:
            print(f"Peak memory {peak_memory(trainer.strategy.device)}", flush=True)


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Return what ``module`` is made of.

    Where it has an ``example_input_array``, a forward of it is run as in evaluation, and neither
    modes nor random generators are changed by it. FLOPs are those of matrix products, convolutions
    and attention, a multiply-add being two.

    Args:
        module: Any module. Parts that are not initialized yet are shown as such.
        max_depth: How deep parts within parts are listed; 0 lists none, -1 all.
    """
    parts = {
        name: part
        for name, part in module.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    }
    tensors = [*module.parameters(), *module.buffers()]
    uninitialized = sum(map(is_lazy, tensors))
    shapes: dict[str, tuple[str, str]] = {}
    flops = None
    if getattr(module, "example_input_array", None) is not None and not uninitialized:
        flops = _run_example(module, parts, shapes)
    parameters = [p for p in module.parameters() if not is_lazy(p)]
    buffers = [b for b in module.buffers() if not is_lazy(b)]
    modes = [part.training for part in module.modules()]
    return Summary(
        parts=_parts(module, parts, shapes),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        frozen_parameters=sum(p.numel() for p in parameters if not p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
        train_modules=sum(modes),
        eval_modules=len(modes) - sum(modes),
        uninitialized=uninitialized,
        flops=flops,
    )


def _parts(
    module: nn.Module, parts: Mapping[str, nn.Module], shapes: Mapping[str, tuple[str, str]]
) -> list[Part]:
    counts = {name: 0 if is_lazy(p) else p.numel() for name, p in module.named_parameters()}
    rows = []
    own = [name for name in counts if "." not in name]
    if own and parts:
        rows.append(Part("(itself)", type(module).__name__, sum(counts[name] for name in own)))
    for name, part in parts.items():
        inside = [count for path, count in counts.items() if path.startswith(f"{name}.")]
        note = _note(part, shared=not inside)
        rows.append(Part(name, type(part).__name__, sum(inside), note, *shapes.get(name, ())))
    return rows


def _note(part: nn.Module, *, shared: bool) -> str:
    parameters = list(part.parameters())
    if any(map(is_lazy, (*parameters, *part.buffers()))):
        return "uninitialized"
    if parameters and shared:
        return "shared"
    frozen = [not p.requires_grad for p in parameters]
    return "frozen" if frozen and all(frozen) else "partly frozen" if any(frozen) else ""


def _run_example(
    module: Any, parts: Mapping[str, nn.Module], shapes: dict[str, tuple[str, str]]
) -> int | None:
    """Run the example through ``module``, note shapes, and return FLOPs; None if it fails."""
    from torch.utils.flop_counter import FlopCounterMode

    from .flops import missing_flops

    def noting(name: str) -> Any:
        def note(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes.setdefault(name, (_shapes((args, kwargs)), _shapes(output)))

        return note

    example = _placed(module.example_input_array, module)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    hooks = [part.register_forward_hook(noting(n), with_kwargs=True) for n, part in parts.items()]
    counter = FlopCounterMode(display=False, custom_mapping=missing_flops())
    try:
        with _evaluating(module), _plain_operations(module), counter:
            module(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
    except Exception as error:
        warnings.warn(
            "FLOPs are not known, for a forward of example_input_array failed: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops()


def _placed(example: Any, module: nn.Module) -> Any:
    """Return ``example`` on the device of ``module`` and, where it is floating, in its dtype."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)

    def place(value: Any) -> Any:
        if like is None or not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else None)

    return tree_map(place, example)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluate without gradients, and leave modes and random generators as they were."""
    modes = {part: part.training for part in module.modules()}
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            module.eval()
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode


@contextmanager
def _plain_operations(module: nn.Module) -> Iterator[None]:
    """Keep torch from fusing a layer into one operation whose FLOPs its counter does not know."""
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    backends: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn] if recurrent else []
    enabled = [backend.enabled for backend in backends]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for backend, was in zip(backends, enabled, strict=True):
            backend.enabled = was


def _shapes(value: Any) -> str:
    shapes = [str(list(leaf.shape)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return ", ".join(shapes[:1] + ["..."] * (len(shapes) > 1))


def scaled(count: float, unit: str = "") -> str:
    """Return ``count`` in three digits: ``"650"``, ``"4.81 K"``, ``"12.5 MFLOPs"``."""
    prefixes = "KMGTP" if unit else "KMBTP"
    for prefix in ("", *prefixes):
        if count < 999.5 or prefix == prefixes[-1]:
            break
        count /= 1000
    number = f"{count:.3g}" if prefix else f"{count:.0f}"
    return f"{number} {prefix}{unit}".rstrip()


def _table(parts: list[Part]) -> list[str]:
    """Return ``parts`` in columns, without those in which nobody has anything."""
    head = ("Name", "Type", "Parameters", "", "In", "Out")
    rows = [(p.name, p.type, scaled(p.parameters), p.note, p.input, p.output) for p in parts]
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    if not columns:
        return []
    for index, cells in enumerate(columns):
        width, side = max(map(len, cells)), ">" if cells[0] == "Parameters" else "<"
        columns[index] = tuple(f"{cell:{side}{width}}" for cell in cells)
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:], rule]
