"""The loggers that come with leyden, by name."""

from leyden.hookspecs import hookimpl


@hookimpl
def register_loggers() -> dict[str, str]:
    """Return the built-in loggers."""
    return {
        "csv": "leyden.loggers.csv:CSVLogger",
        "jsonl": "leyden.loggers.jsonl:JSONLLogger",
        "tensorboard": "leyden.loggers.tensorboard:TensorBoardLogger",
    }
