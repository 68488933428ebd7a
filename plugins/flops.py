"""Floating point operations: what a step takes of them, and what a device can do."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

PEAKS = {
    # Dense operations a second in bfloat16 with float32 sums, from the makers' data sheets.
    "B200": 2250e12,
    "GB200": 2500e12,
    "MI300X": 1307.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_of(device: torch.device) -> float | None:
    """Return the bfloat16 operations a second that ``device`` can do, or None if not known."""
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """Return the peak of the device that calls itself ``name``, or None if not known."""
    words = name.replace("-", " ").split()
    for known in sorted(PEAKS, key=len, reverse=True):
        wanted = known.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return PEAKS[known]
    return None


def missing_flops() -> dict[Any, Any]:
    """Return the FLOPs of attention on the CPU, which torch's counter leaves out."""
    forward: Any = sdpa_flop_count
    backward: Any = sdpa_backward_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(forward(query, key, value))

    def gradient(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(backward(grad, query, key, value))

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: gradient,
    }


class _Undivided(nullcontext[None]):
    """Says of every operation that it is the whole's."""

    parents = ("Global",)


class StepFlops(FlopCounterMode):
    """Counts the FLOPs of a step's forward and backward, a multiply-add being two.

    What backward computes again, where activations are recomputed, is left out: these are the
    model's operations. What is compiled runs uncompiled, for its kernels are not seen.
    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=missing_flops())
        self._around = ExitStack()
        # torch's tracker of parts keeps their inputs alive, which recomputing is to save.
        self.mod_tracker: Any = _Undivided()

    def __enter__(self) -> StepFlops:
        if "torch._dynamo" in sys.modules:
            self._around.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # Only a forward that is run again has gradients enabled while a backward is under way.
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
