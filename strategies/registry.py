"""The strategies and launchers that come with leyden, by name."""

from leyden.hookspecs import hookimpl


@hookimpl
def register_strategies() -> dict[str, str]:
    """Return the built-in strategies."""
    return {
        "single_device": "leyden.strategies.single_device:SingleDevice",
        "ddp": "leyden.strategies.ddp:DDP",
        "ddp_find_unused_parameters_true": "leyden.strategies.ddp:finding_unused_parameters",
        "fsdp": "leyden.strategies.fsdp:FSDP",
        "hsdp": "leyden.strategies.fsdp:hybrid",
    }


@hookimpl
def register_launchers() -> dict[str, str]:
    """Return the built-in launchers, in the order they are asked."""
    return {
        "slurm": "leyden.strategies.launchers.slurm:Slurm",
        "elastic": "leyden.strategies.launchers.elastic:Elastic",
    }
