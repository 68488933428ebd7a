"""File names made from a template such as ``{epoch}-{step}-{val/loss:.2f}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter

from leyden.errors import ConfigError

COUNTS = ("epoch", "step")


def checked_template(template: str) -> str:
    """Return ``template``, known to be one that numbers can be written into.

    Raises:
        ConfigError: A brace is left open, or a format does not suit its number.
    """
    try:
        fill(template, {name: 1 if name in COUNTS else 1.0 for name in names_in(template)})
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"filename={template!r} is not a template: {error}. Write names in braces, as in "
            "'{epoch}-{val/loss:.2f}'; metrics are decimal numbers, epoch and step whole ones."
        ) from error
    return template


def names_in(template: str) -> list[str]:
    """Return the names of the numbers that ``template`` shows."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def fill(template: str, values: Mapping[str, float], label: str | None = None) -> str:
    """Return ``template`` with ``values`` written in.

    Args:
        template: Text with names in braces, each with an optional format.
        values: A number for each of the names.
        label: What to write between a value and its name before it; None leaves the name out. A
            slash in the name becomes ``_``, since there it would begin a folder.
    """
    parts: list[str] = []
    for text, name, spec, _ in Formatter().parse(template):
        parts.append(text)
        if name is not None:
            if label is not None:
                parts.append(name.replace("/", "_") + label)
            parts.append(format(values[name], spec or ""))
    return "".join(parts)


def free(path_of: Callable[[int | None], str], is_taken: Callable[[str], bool], first: int) -> str:
    """Return the first path that is not taken.

    Args:
        path_of: Returns the path of a version; None is the plain one.
        is_taken: Returns whether a path is.
        first: The version after the plain one.
    """
    path, version = path_of(None), first
    while is_taken(path):
        path, version = path_of(version), version + 1
    return path
