"""Sharded data parallelism: each process keeps a part of every parameter."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from leyden.dtensors import local
from leyden.errors import ConfigError
from leyden.rank_zero import rank_zero_info

from .clipping import clip_grad_norm
from .materializing import materialize
from .processes import Processes, leave
from .sharded_gradients import drop_unfinished, share_unfinished
from .sharding import Chosen, batch_norms, named_parameters, parts, units, unshardable

if TYPE_CHECKING:
    from leyden.protocols import Precision

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FSDP(Processes):
    """Torch's ``fully_shard`` on each block and on the Module, whose steps are its forwards.

    Layers made in ``configure_model`` get memory only once they are sharded, each rank for its
    part, and are then filled by the Module's ``init_weights()``, or else by each layer's
    ``reset_parameters()``. Layers made in ``__init__`` begin as they are on rank 0.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    arXiv:2304.11277; the API is FSDP2's.

    Args:
        shard: What is gathered at once: classes of layers, as ``(Block,)``, or a function of a
            layer's name and the layer. By default the repeated layers of a ModuleList or
            Sequential.
        replicate: How many copies of the model there are, each sharded over the ranks that are
            left; None for one on each machine.
        reshard_after_forward: Free the whole parameters of a block between its forward and
            backward, which gathers them twice.
        cpu_offload: Keep parameters, gradients and optimizer state on the CPU.
        ignored: Parameters that stay whole on every rank: names of theirs or of layers, or a
            function of a parameter's name and the parameter. Their gradients are averaged too.
        find_unused_parameters: Let ranks use different parameters of a block in a step; without
            it they would wait for one another in vain. What no rank has used then has a gradient
            of zeros. The blocks themselves must be run by all ranks alike.
        **processes: Options of `Processes`, such as ``timeout``.
    """

    is_lockstep = True

    def __init__(
        self,
        *,
        shard: Chosen = None,
        replicate: int | None = 1,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        ignored: str | Iterable[str] | Callable[[str, nn.Parameter], bool] = (),
        find_unused_parameters: bool = False,
        **processes: Any,
    ) -> None:
        super().__init__(**processes)
        if not (replicate is None or (type(replicate) is int and replicate > 0)):
            raise ConfigError(
                f"replicate={replicate!r} must be a number of copies, or None for one on each "
                "machine."
            )
        switches = {
            "reshard_after_forward": reshard_after_forward,
            "cpu_offload": cpu_offload,
            "find_unused_parameters": find_unused_parameters,
        }
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False.")
        self.find_unused_parameters = find_unused_parameters
        self.shard, self.replicate = shard, replicate
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload
        self.ignored = ignored if callable(ignored) or isinstance(ignored, str) else [*ignored]
        self.mesh: DeviceMesh | None = None
        self.blocks: list[str] = []
        """Names of the layers that are gathered each by itself."""
        self._root: Any = None
        self._syncs = True
        self._is_manual = False
        self._hooks: list[Any] = []

    def connect(self, accelerator: str, devices: int | list[int], num_nodes: int) -> None:
        if self.cpu_offload and accelerator == "cuda" and self.backend is None:
            self.backend = "cpu:gloo,cuda:nccl"  # parts on the CPU are brought together as well
        super().connect(accelerator, devices, num_nodes)
        sizes = self._axes(num_nodes)
        self.mesh = mesh = init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        data = mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.group = data.get_group()
        self.data_rank, self.data_world_size = data.get_local_rank(), data.size()
        self._set_timeout(self.first_timeout)

    def _axes(self, num_nodes: int) -> dict[str, int]:
        """Return the mesh's axes by name and size; the product is the number of ranks."""
        copies = num_nodes if self.replicate is None else self.replicate
        if copies < 1 or self.world_size % copies:
            raise ConfigError(
                f"replicate={copies!r} copies of the model cannot be dealt to {self.world_size} "
                "processes evenly. Pass a number that divides them."
            )
        return {"dp_replicate": copies, "dp_shard": self.world_size // copies}

    def _set_timeout(self, seconds: float) -> None:
        assert self.mesh is not None, "connect makes it"
        for group in {self.group, *self.mesh.get_all_groups()}:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def creating(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def parallelize(self, module: nn.Module) -> None:
        """Begin as rank 0 does."""
        if isinstance(module, FSDPModule):
            return
        for tensor in [*module.parameters(), *module.buffers()]:
            if not tensor.is_meta:
                self._take_over(tensor.detach())

    def _take_over(self, tensor: Tensor) -> None:
        there = tensor.to(self.device).contiguous()
        dist.broadcast(there, 0)
        if there is not tensor:
            tensor.copy_(there)

    def place(self, module: nn.Module, precision: Precision) -> None:
        self._root, self._is_manual = module, not getattr(module, "automatic_optimization", True)
        self._syncs = True
        if isinstance(module, FSDPModule):
            self._check_same(module)
            drop_unfinished(module)
        else:
            self._shard(module, precision)
            materialize(module, self._home, self.broadcast)
        own = [p for p in module.parameters() if not self._is_reduced(p)]
        for parameter in own:
            if parameter.requires_grad:
                leaf: Any = parameter
                self._hooks.append(leaf.register_post_accumulate_grad_hook(self._average))

    @property
    def _home(self) -> torch.device:
        """Where the parts of parameters are kept."""
        return torch.device("cpu") if self.cpu_offload else self.device

    def _data_mesh(self) -> DeviceMesh:
        assert self.mesh is not None, "connect makes it"
        if self.mesh["dp_replicate"].size() == 1:
            return self.mesh["dp_shard"]
        return self.mesh["dp_replicate", "dp_shard"]

    def _shard(self, module: nn.Module, precision: Precision) -> None:
        whole = set(named_parameters(module, self.ignored).values())
        chosen = units(module, self.shard)
        if self._is_manual:
            # Each network is gathered by itself whenever it runs, between one update and the next.
            chosen = parts(module) | chosen
            whole |= set(module._parameters.values()) - {None}  # type: ignore[arg-type]
        self.blocks = list(chosen)
        whole |= unshardable(module, chosen.values(), whole)
        for parameter in whole:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.device)
        dtype = MIXED.get(precision.name)
        is_offloaded = self.cpu_offload and self.device.type != "cpu"
        shard = partial(
            _fully_shard,
            mesh=self._data_mesh(),
            offload_policy=CPUOffloadPolicy() if is_offloaded else OffloadPolicy(),
            ignored_params=whole,
        )
        # Under autocast each operation casts what it is given, and a float target stays float.
        mixed = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if dtype is None else torch.float32,
            cast_forward_inputs=False,
        )
        if dtype is not None:
            for norm in batch_norms(module):
                shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        for block in reversed(chosen.values()):
            if not isinstance(block, FSDPModule):
                shard(block, mp_policy=mixed, reshard_after_forward=self.reshard_after_forward)
        # The Module's own forward may run within a step, which goes on using what it gathered.
        shard(module, mp_policy=mixed, reshard_after_forward=False)
        if self.find_unused_parameters:
            root: Any = module
            root.set_reduce_scatter_unused_params(True)
        rank_zero_info(
            "%s is sharded in %d blocks and the rest, over %s",
            type(module).__name__, len(self.blocks), self.mesh,
        )  # fmt: skip

    def _check_same(self, module: nn.Module) -> None:
        """Refuse a Module that an earlier run has laid out otherwise."""
        wanted = self._data_mesh()
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor) and self._is_reduced(parameter):
                mesh = parameter.device_mesh
                names = mesh.mesh_dim_names or ()
                sizes = {n: mesh.size(axis) for axis, n in enumerate(names)}
                if any(sizes.get(n) != wanted[n].size() for n in wanted.mesh_dim_names or ()):
                    raise ConfigError(
                        f"{name} was sharded over {mesh} by an earlier run, and this one has "
                        f"{self.mesh}. Use the same strategy, or load a checkpoint into a new "
                        f"{type(module).__name__}."
                    )

    @staticmethod
    def _is_reduced(parameter: Tensor) -> bool:
        """Return whether the gradient of ``parameter`` is averaged by ``fully_shard``."""
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        return "dp_shard" in (names or ())

    def _average(self, parameter: Tensor) -> None:
        if self._syncs and parameter.grad is not None:
            gradient = local(parameter.grad)
            dist.all_reduce(gradient, group=self.group)
            gradient /= self.data_world_size

    def prepare(self, module: nn.Module, step: str) -> Callable[..., Any]:
        register_fsdp_forward_method(module, step)
        method: Callable[..., Any] = vars(module).pop(step)
        sharded: Any = module
        if step == "training_step":

            def run(*arguments: Any) -> Any:
                sharded.reshard()  # where the step before had no backward
                return method(*arguments)
        else:

            def run(*arguments: Any) -> Any:
                try:
                    return method(*arguments)
                finally:
                    sharded.reshard()  # no backward does

        return run

    def sync_gradients(self, enabled: bool) -> None:
        self._syncs = enabled
        if self._root is not None:
            self._root.set_requires_gradient_sync(enabled)
            self._root.set_is_last_backward(enabled)

    def share_gradients(self) -> None:
        """Reduce what the batches of an open step came to, which later ones are added to."""
        syncs = self._syncs
        self.sync_gradients(True)
        share_unfinished(self._root)
        for parameter in self._root.parameters():
            if parameter.requires_grad and not self._is_reduced(parameter):
                self._average(parameter)
        self.sync_gradients(syncs)

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        return clip_grad_norm(parameters, max_norm, norm_type, self.device)

    def close(self) -> None:
        if self._root is not None and isinstance(self._root, FSDPModule):
            self._root.reshard()
        for hook in self._hooks:
            hook.remove()
        self._root, self._hooks = None, []
        if self._is_by_itself:
            # The Module's parameters go on being parts of a whole.
            self._is_by_itself = False
            atexit.register(leave)
        super().close()


def _fully_shard(layer: nn.Module, **options: Any) -> None:
    """Shard ``layer``, which torch gives another class for, under the name of its own."""
    kind = type(layer)
    fully_shard(layer, **options)
    type(layer).__name__, type(layer).__qualname__ = kind.__name__, kind.__qualname__


hybrid = partial(FSDP, replicate=None)
