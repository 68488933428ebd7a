"""The strategies that come with leyden, by name."""

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
