"""Autocast: parameters and updates in float32, most of the forward in a shorter dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState

from leyden.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

NAMES = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


class MixedPrecision:
    """Runs the forward under autocast to ``dtype``; float16 gradients are scaled.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        scaler: Scales the loss so that small gradients survive float16. By default a
            ``torch.amp.GradScaler`` for float16 and none for bfloat16.
    """

    def __init__(self, dtype: torch.dtype, scaler: GradScaler | None = None) -> None:
        if dtype not in NAMES:
            raise ConfigError(f"{dtype} cannot be mixed. Use torch.float16 or torch.bfloat16.")
        self.dtype, self.scaler = dtype, scaler
        self.name = NAMES[dtype]
        self._device_type = "cpu"
        self._updated: bool = False
        self._watched: list[Optimizer] = []

    def connect(self, device: torch.device) -> None:
        self._device_type = device.type
        if self.scaler is None and self.dtype is torch.float16:
            self.scaler = GradScaler(device.type)

    def convert_module(self, module: nn.Module) -> None:
        """Parameters stay as they are written."""

    def convert_batch(self) -> Callable[[Tensor], Tensor] | None:
        return None

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.autocast(self._device_type, self.dtype)(function)  # type: ignore[no-any-return]

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.scale(loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        # unscale_ raises when called twice in a step: by the loop, and by a user who clips.
        if self.scaler is not None and self._stage(optimizer) is OptState.READY:
            self.scaler.unscale_(optimizer)

    def _stage(self, optimizer: Optimizer) -> Any:
        assert self.scaler is not None, "only asked where gradients are scaled"
        return self.scaler._per_optimizer_states[id(optimizer)]["stage"]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if self.scaler is None:
            if closure is None:
                optimizer.step()
            else:
                optimizer.step(closure)
            return True
        if closure is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss inside its step, which the "
                f"gradient scaler of precision={self.name!r} cannot follow. Use 'bf16-mixed'."
            )
        return self._scaled_step(optimizer, self.scaler)

    def _scaled_step(self, optimizer: Optimizer, scaler: GradScaler) -> bool:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimizer skips on the device, so only the scale tells, at one read a step.
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale() >= before
        if not any(optimizer is watched for watched in self._watched):
            optimizer.register_step_post_hook(self._note_update)
            self._watched.append(optimizer)
        self._updated = False
        scaler.step(optimizer)
        scaler.update()
        return self._updated

    def _note_update(self, *_: Any) -> None:
        self._updated = True

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


float16 = partial(MixedPrecision, torch.float16)
bfloat16 = partial(MixedPrecision, torch.bfloat16)
