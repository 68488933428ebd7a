"""One dtype for everything: parameters, inputs, gradients and updates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

NAMES = {
    torch.float64: "64-true",
    torch.float32: "32-true",
    torch.float16: "16-true",
    torch.bfloat16: "bf16-true",
}


class TruePrecision:
    """Computes and keeps everything floating-point in ``dtype``.

    float32 leaves the module as it was written: a layer of another dtype keeps it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = NAMES[dtype]

    def connect(self, device: torch.device) -> None:
        if self.dtype is torch.float64 and device.type == "mps":
            raise ConfigError("precision='64-true' does not exist on MPS. Use '32-true' there.")

    def convert_module(self, module: nn.Module) -> None:
        if self.dtype is not torch.float32:
            module.to(self.dtype)

    def convert_batch(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.dtype is torch.float32 else self._converted

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.dtype is torch.float32:
            return function

        @functools.wraps(function)
        def with_default_dtype(*args: Any, **kwargs: Any) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)

        return with_default_dtype

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Gradients have their true size."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to take over."""


float64 = partial(TruePrecision, torch.float64)
float32 = partial(TruePrecision, torch.float32)
float16 = partial(TruePrecision, torch.float16)
bfloat16 = partial(TruePrecision, torch.bfloat16)
