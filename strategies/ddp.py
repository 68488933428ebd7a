"""Data parallelism: a copy of the module in each process, their gradients averaged in backward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leyden.errors import ConfigError, ModuleError, unknown

from .processes import Processes

if TYPE_CHECKING:
    from leyden.protocols import Precision

_BUFFERS = next(  # renamed in torch 2.13
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
COMM_HOOKS = ("bf16", "fp16", "powersgd")
"""What gradients may be compressed to as they travel, by name."""


class DDP(Processes):
    """Torch's DistributedDataParallel around the training step; evaluations run the bare methods.

    Each optimizer step exchanges gradients once, while backward runs. In manual optimization
    each ``manual_backward`` averages the gradients of its own loss.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    arXiv:2006.15704.

    Args:
        find_unused_parameters: Look in each backward for parameters that take no part, which is an
            error otherwise; always done in manual optimization.
        static_graph: Promise that every step uses the same parameters in the same way.
        bucket_cap_mb: Size of the pieces that gradients are exchanged in, in MiB.
        gradient_as_bucket_view: Let gradients be views of these pieces, which saves their memory.
        broadcast_buffers: Give every rank the buffers of rank 0 before each step.
        comm_hook: How gradients travel: ``"bf16"`` or ``"fp16"`` halves them, ``"powersgd"`` sends
            low-rank approximations; or a function as DDP's ``register_comm_hook`` takes it.
        comm_state: What is passed to ``comm_hook`` first; None for what suits a named one.
        **processes: Options of `Processes`, such as ``timeout``.
    """

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        comm_hook: str | Callable[[Any, Any], Any] | None = None,
        comm_state: Any = None,
        **processes: Any,
    ) -> None:
        super().__init__(**processes)
        if isinstance(comm_hook, str) and comm_hook not in COMM_HOOKS:
            raise unknown("comm_hook", comm_hook, COMM_HOOKS)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.options = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        if not broadcast_buffers:
            self.options[_BUFFERS] = False
        self.comm_hook, self.comm_state = comm_hook, comm_state
        self._wrapped: DistributedDataParallel | None = None
        self._is_manual = False
        self._syncs = True
        self._has_begun = False

    def place(self, module: nn.Module, precision: Precision) -> None:
        module.to(self.device)

    def prepare(self, module: nn.Module, step: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(module, step)
        if step != "training_step" or not any(p.requires_grad for p in module.parameters()):
            return method
        self._is_manual = not getattr(module, "automatic_optimization", True)
        if self._is_manual and self.static_graph:
            raise ConfigError(
                "DDP(static_graph=True) counts on one backward for each step, and this Module "
                "runs its backwards itself (automatic_optimization = False). Leave static_graph "
                "out."
            )
        self._syncs, self._has_begun = True, False
        wrapped = self._wrapped = DistributedDataParallel(
            _Step(module, step),
            device_ids=None if self.device.type == "cpu" else [self.device.index],
            process_group=self.group,
            find_unused_parameters=self.find_unused_parameters or self._is_manual,
            static_graph=self.static_graph,
            **self.options,  # type: ignore[arg-type]
        )
        self._register_hook(wrapped)
        # A backward inside of the step is prepared by itself, or ranks would stay different.
        wrapped.require_backward_grad_sync = not self._is_manual

        def run(*arguments: Any) -> Any:
            try:
                if self.static_graph and not self._has_begun:
                    return self._first(wrapped, arguments)
                return wrapped(*arguments)
            except RuntimeError as error:
                if "finished reduction in the prior iteration" not in str(error):
                    raise
                raise self._unused(str(error)) from error

        return run

    def _first(self, wrapped: DistributedDataParallel, arguments: tuple[Any, ...]) -> Any:
        """Run the step whose backward a static graph is learnt from: only an exchange shows it.

        Where it begins a window of several batches this exchange is one more than the window
        needs. What is averaged now stays as it is when the sum is averaged.
        """
        self._has_begun = wrapped.require_backward_grad_sync = True
        outputs = wrapped(*arguments)
        wrapped.require_backward_grad_sync = self._syncs
        return outputs

    def _unused(self, message: str) -> ModuleError:
        """Return the error that names the parameters which took no part in the step before."""
        assert self._wrapped is not None, "only a wrapped step can miss parameters"
        names = _trainable(self._wrapped.module)
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        indices = [int(index) for index in found[1].split()] if found else []
        missed = ", ".join(names[index] for index in indices if index < len(names))
        return ModuleError(
            f"The loss of the step before did not depend on {missed or 'all parameters'} on rank "
            f"{self.rank}, and DDP waits for the gradients of every parameter. Use them in each "
            "step, freeze them with requires_grad_(False), or pass "
            "strategy='ddp_find_unused_parameters_true', which looks for such parameters."
        )

    def _register_hook(self, wrapped: DistributedDataParallel) -> None:
        hook, state = self.comm_hook, self.comm_state
        if hook is None:
            return
        if isinstance(hook, str):
            hook, state = _named_hook(hook, state, self.group)
        wrapped.register_comm_hook(state, hook)

    def sync_gradients(self, enabled: bool) -> None:
        self._syncs = enabled
        if self._wrapped is not None and not self._is_manual:
            self._wrapped.require_backward_grad_sync = enabled

    def prepare_backward(self, loss: Tensor) -> None:
        if self._wrapped is not None and self._is_manual and self._syncs:
            self._wrapped.require_forward_param_sync = True
            self._wrapped.reducer.prepare_for_backward([loss])

    def close(self) -> None:
        self._wrapped = None
        super().close()


class _Step(nn.Module):
    """A module whose forward is a step of another, so that DDP can wrap it."""

    def __init__(self, module: nn.Module, step: str) -> None:
        super().__init__()
        self.module, self.step = module, step

    def forward(self, *arguments: Any) -> Any:
        return getattr(self.module, self.step)(*arguments)


def _trainable(step: nn.Module) -> list[str]:
    """Return the names of the parameters that DDP counts, in its order."""
    found: dict[int, str] = {}
    for prefix, part in step.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                full = f"{prefix}.{name}".removeprefix("module.")
                found.setdefault(id(parameter), full)
    return list(found.values())


def _named_hook(name: str, state: Any, group: Any) -> tuple[Callable[..., Any], Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = state or powerSGD_hook.PowerSGDState(process_group=group)
        return powerSGD_hook.powerSGD_hook, state
    compress = {
        "bf16": default_hooks.bf16_compress_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }[name]
    # DDP refuses the first by its name where there is no CUDA, though gloo can do it.
    return lambda group, bucket: compress(group, bucket), state or group


finding_unused_parameters = partial(DDP, find_unused_parameters=True)
