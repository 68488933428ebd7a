"""Autocast: parameters and updates in float32, most of the forward in a shorter dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState

from leyden.dtensors import is_split, local
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
        self.dtype = dtype
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scales_by_default = dtype is torch.float16 and scaler is None
        self.name = NAMES[dtype]
        self._device_type = "cpu"
        self._steps_taken = False

    def connect(self, device: torch.device) -> None:
        self._device_type = device.type
        if self.scaler is None and self._scales_by_default:
            self.scaler = GradScaler(device.type)

    def convert_module(self, module: nn.Module) -> None:
        """Parameters stay as they are written."""

    def convert_batch(self) -> Callable[[Tensor], Tensor] | None:
        return None

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.autocast(self._device_type, self.dtype)(function)  # type: ignore[no-any-return]

    def scale(self, loss: Tensor) -> Tensor:
        if self.scaler is None:
            return loss
        self._update_scale()
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.scale(loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        # unscale_ raises when called twice in a step: by the loop, and by a user who clips.
        if self.scaler is not None and self._of(optimizer)["stage"] is OptState.READY:
            if any(is_split(p) for p in _parameters(optimizer)):
                self._unscale_parts(optimizer, self.scaler)
            else:
                self.scaler.unscale_(optimizer)

    def _unscale_parts(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Unscale gradients that lie in parts on several ranks, and agree on an overflow in any."""
        parts: list[Tensor] = []
        for gradient in (parameter.grad for parameter in _parameters(optimizer)):
            if gradient is not None:
                part = local(gradient)
                part.grad = local(gradient)
                parts.append(part)
        # All that a scaler looks at. It cannot take tensors of several meshes at once.
        as_optimizer: Any = SimpleNamespace(param_groups=[{"params": parts}])
        scaler.unscale_(as_optimizer)
        state = scaler._per_optimizer_states.pop(id(as_optimizer))
        scale = scaler._scale
        assert scale is not None, "unscale_ refuses it"
        overflow = torch.zeros_like(scale)
        for found in state["found_inf_per_device"].values():
            overflow = torch.maximum(overflow, found.to(scale.device).reshape(()))
        torch.distributed.all_reduce(overflow, torch.distributed.ReduceOp.MAX)
        state["found_inf_per_device"] = {scale.device: overflow.reshape(1)}
        scaler._per_optimizer_states[id(optimizer)] = state

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        updated = True
        if self.scaler is not None:
            updated = self._scaled_step(optimizer, self.scaler, closure)
        elif closure is None:
            optimizer.step()
        else:
            optimizer.step(self._with_fresh_weights(closure))
        # A step inside of training_step changes weights whose short copies autocast has kept.
        torch.clear_autocast_cache()
        return updated

    def _scaled_step(
        self, optimizer: Optimizer, scaler: GradScaler, closure: Callable[[], Any] | None
    ) -> bool:
        if closure is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss inside its step, which the "
                f"gradient scaler of precision={self.name!r} cannot follow. Use 'bf16-mixed'."
            )
        scaler.step(optimizer)
        self._steps_taken = True
        overflows = self._of(optimizer)["found_inf_per_device"].values()
        return not any(overflow.item() for overflow in overflows)

    def _with_fresh_weights(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def fresh() -> Any:
            torch.clear_autocast_cache()
            return closure()

        return fresh

    def _update_scale(self) -> None:
        """Adapt the scale after a step, though not before another optimizer's on the same loss."""
        if self.scaler is not None and self._steps_taken:
            self.scaler.update()
            self._steps_taken = False

    def _of(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.scaler is not None, "only asked where gradients are scaled"
        return self.scaler._per_optimizer_states[id(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        self._update_scale()
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


float16 = partial(MixedPrecision, torch.float16)
bfloat16 = partial(MixedPrecision, torch.bfloat16)
