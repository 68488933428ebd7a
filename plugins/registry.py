"""The precisions, checkpointers, callbacks and profilers that come with leyden, by name."""

from leyden.hookspecs import hookimpl


@hookimpl
def register_precisions() -> dict[str, str]:
    """Return the built-in precisions."""
    true, mixed = "leyden.plugins.precision.true", "leyden.plugins.precision.mixed"
    return {
        "64-true": f"{true}:float64",
        "32-true": f"{true}:float32",
        "16-true": f"{true}:float16",
        "bf16-true": f"{true}:bfloat16",
        "16-mixed": f"{mixed}:float16",
        "bf16-mixed": f"{mixed}:bfloat16",
    }


@hookimpl
def register_checkpointers() -> dict[str, str]:
    """Return the built-in checkpointers."""
    return {
        "file": "leyden.plugins.checkpointing:FileCheckpointer",
        "sharded": "leyden.plugins.sharded_checkpointing:ShardedCheckpointer",
    }


@hookimpl
def register_callbacks() -> dict[str, str]:
    """Return the built-in callbacks."""
    return {
        "early_stopping": "leyden.plugins.early_stopping:EarlyStopping",
        "lr_monitor": "leyden.plugins.lr_monitor:LearningRateMonitor",
        "model_checkpoint": "leyden.plugins.model_checkpoint:ModelCheckpoint",
        "model_summary": "leyden.plugins.summary:ModelSummary",
        "plain_progress": "leyden.plugins.plain_progress:PlainProgress",
        "rich_progress": "leyden.plugins.rich_progress:RichProgress",
        "throughput": "leyden.plugins.throughput:Throughput",
        "timer": "leyden.plugins.timer:Timer",
    }


@hookimpl
def register_profilers() -> dict[str, str]:
    """Return the built-in profilers."""
    return {
        "pytorch": "leyden.plugins.profilers:PyTorchProfiler",
        "simple": "leyden.plugins.profilers:SimpleProfiler",
    }
