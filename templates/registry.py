"""The project templates that come with leyden, by name."""

from pathlib import Path

from leyden.hookspecs import hookimpl


@hookimpl
def register_templates() -> dict[str, str]:
    """Return the built-in templates."""
    # A strict editable install links to the files one by one, and copier refuses to follow links.
    here = Path(__file__).resolve().parent
    return {name: str(here / name) for name in ("minimal", "plugin")}
