"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from leyden.errors import ConfigError

if TYPE_CHECKING:
    from leyden.protocols import Precision


class SingleDevice:
    """Runs the module's own methods where the module is."""

    rank, local_rank, world_size = 0, 0, 1
    data_rank, data_world_size = 0, 1
    spans_processes = is_lockstep = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def connect(self, accelerator: str, devices: int | list[int], num_nodes: int) -> None:
        indices = list(range(devices)) if isinstance(devices, int) else devices
        if len(indices) != 1 or num_nodes != 1:
            raise ConfigError(
                f"devices={devices!r} on num_nodes={num_nodes} are several processes, and the "
                "strategy 'single_device' is one. Pass devices=1, or strategy='ddp' or 'fsdp'."
            )
        index = None if accelerator == "cpu" else indices[0]
        self.device = torch.device(accelerator, index) if index is not None else torch.device("cpu")

    def creating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def parallelize(self, module: nn.Module) -> None:
        """There is nobody to split layers with."""

    def sync_batchnorm(self, module: nn.Module) -> None:
        """They see all batches there are."""

    def place(self, module: nn.Module, precision: Precision) -> None:
        module.to(self.device)

    def prepare(self, module: nn.Module, step: str) -> Callable[..., Any]:
        return getattr(module, step)  # type: ignore[no-any-return]

    def sync_gradients(self, enabled: bool) -> None:
        """There is nobody to be in step with."""

    def share_gradients(self) -> None:
        """There is nobody to be in step with."""

    def prepare_backward(self, loss: Tensor) -> None:
        """There is nobody to be in step with."""

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def reduce(self, value: Tensor, op: str) -> Tensor:
        return value

    def all_gather(self, value: Tensor, sync_grads: bool = False) -> Tensor:
        return value.unsqueeze(0)

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def exchange(self, numbers: Tensor) -> Tensor:
        return numbers

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Nothing was taken."""
