"""Make a project from a template: a folder with a ``copier.yml`` and files ending in ``.jinja``."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import metadata
from pathlib import Path

from .errors import ConfigError


def package_name(name: str) -> str:
    """Return the import name of the project called ``name``.

    Raises:
        ConfigError: No package can be called so.
    """
    package = re.sub("[-.]", "_", name.lower())
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ConfigError(
            f"{name!r} cannot be a project's name: use letters, digits, '-' and '_', beginning "
            "with a letter and ending with a letter or digit."
        )
    taken = sys.stdlib_module_names | {"leyden", "test", "torch"}
    if package in taken or keyword.iskeyword(package):
        raise ConfigError(
            f"A project called {name!r} would hide Python's, torch's or leyden's own {package!r}. "
            f"Choose another name, for example 'my-{name}'."
        )
    return package


def render(template: Path, name: str, destination: Path, *, ask: bool) -> None:
    """Make the project ``name`` at ``destination``.

    Args:
        template: The folder to render.
        name: As `package_name` accepts it.
        destination: A folder that is empty or does not exist.
        ask: Whether to ask the template's questions; otherwise their defaults are taken.

    Raises:
        ConfigError: ``copier`` is missing, the destination is taken, or no one can be asked.
    """
    try:
        import copier
        from copier.errors import InteractiveSessionError
    except ImportError as error:
        raise ConfigError(
            "Templates are rendered by copier, which is not installed. Run: "
            "pip install 'leyden[cli]'"
        ) from error

    if destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise ConfigError(
            f"{str(destination)!r} exists and is not an empty folder. Remove it, or pass another "
            "with --dest."
        )
    data = {
        "name": name,
        "package": package_name(name),
        "leyden_version": metadata.version("leyden"),
    }
    try:
        copier.run_copy(str(template), destination, data=data, defaults=not ask, quiet=True)
    except InteractiveSessionError as error:
        raise ConfigError(
            "The template's questions cannot be asked: standard input is no terminal. Pass --yes "
            "to take the defaults."
        ) from error
