"""The project templates that come with leyden, by name."""

from pathlib import Path

from leyden.hookspecs import hookimpl


@hookimpl
def register_templates() -> dict[str, str]:
    """Return the built-in templates."""
    here = Path(__file__).parent
    return {name: str(here / name) for name in ("minimal", "plugin")}
