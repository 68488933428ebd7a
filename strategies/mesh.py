"""Meshes of named axes: copies, shards and split layers, together."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module

from leyden.errors import ConfigError, ModuleError

from .fsdp import FSDP
from .sharding import tied


class Mesh(FSDP):
    """Ranks in a grid: ``dp_replicate`` x ``dp_shard`` x ``tp``.

    Ranks of the first two axes see different data. Those along ``tp`` see the same and share each
    layer that the Module's ``parallelize(mesh)`` splits.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3, for split layers.

    Args:
        dp_replicate: Copies of the model.
        dp_shard: Ranks that each copy is sharded over; -1 for all that the others leave.
        tp: Ranks that layers are split over.
        pp: For pipeline parallelism, later.
        cp: For context parallelism, later.
        **options: Those of `FSDP` but ``replicate``.
    """

    def __init__(
        self,
        dp_replicate: int = 1,
        dp_shard: int = 1,
        tp: int = 1,
        *,
        pp: int = 1,
        cp: int = 1,
        **options: Any,
    ) -> None:
        if "replicate" in options:
            raise ConfigError("A Mesh has replicate as its axis dp_replicate. Pass that.")
        super().__init__(**options)
        for name, size in (("pp", pp), ("cp", cp)):
            if size != 1:
                kind = "pipeline" if name == "pp" else "context"
                raise ConfigError(
                    f"Mesh({name}={size!r}): {kind} parallelism comes with a later release. Use "
                    "dp_replicate, dp_shard and tp for now."
                )
        self.sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
        for name, size in self.sizes.items():
            is_rest = name == "dp_shard" and size == -1
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and not is_rest):
                more = ", or -1 for all that the others leave" if name == "dp_shard" else ""
                raise ConfigError(f"Mesh({name}={size!r}) must be a number of ranks{more}.")

    def _axes(self, num_nodes: int) -> dict[str, int]:
        sizes = dict(self.sizes)
        if sizes["dp_shard"] == -1:
            sizes["dp_shard"] = max(1, self.world_size // (sizes["dp_replicate"] * sizes["tp"]))
        if prod(sizes.values()) != self.world_size:
            shown = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
            raise ConfigError(
                f"Mesh({shown}) does not make up the {self.world_size} processes that were "
                f"started: {' x '.join(map(str, sizes.values()))} = {prod(sizes.values())}. "
                "Change its sizes, or start as many processes; dp_shard=-1 takes all that are left."
            )
        return sizes

    def parallelize(self, module: nn.Module) -> None:
        super().parallelize(module)
        if self.sizes["tp"] == 1 or isinstance(module, FSDPModule):
            return
        assert self.mesh is not None, "connect makes it"
        ties = tied(module)
        plan = module.parallelize(self.mesh)  # type: ignore[operator]
        if plan is not None:
            names = [name for name, _ in module.named_modules()]
            unmet = [key for key in plan if not any(fnmatchcase(n, key) for n in names)]
            if unmet:
                raise ModuleError(
                    f"{type(module).__name__}.parallelize() has a plan for {', '.join(unmet)}, and "
                    "there is no such layer. Name layers as named_modules() does, with * for any "
                    "one of a list."
                )
            parallelize_module(module, self.mesh["tp"], plan)
        kept = tied(module)
        parted = [names for names in ties if names not in kept]
        if parted:
            raise ConfigError(
                f"{' and '.join(parted[0])} are one parameter, and splitting layers over tp="
                f"{self.sizes['tp']} has made it two. Leave both out of the plan, so that they "
                "stay whole and tied, or have parallelize(mesh) tie them again."
            )
