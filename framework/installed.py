"""Plugins that packages on this machine install, by entry points of group ``leyden``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata

from .errors import PluginError
from .implementations import check_plugin


def disabled() -> frozenset[str]:
    """Return the names in ``LEYDEN_DISABLE_PLUGINS``; ``"all"`` among them keeps everyone out."""
    names = os.environ.get("LEYDEN_DISABLE_PLUGINS", "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def installed() -> Iterator[tuple[metadata.EntryPoint, str]]:
    """Yield the entry points of group ``leyden`` that are not disabled, and their package."""
    out = {_plain(name) for name in disabled()}
    for point in sorted(metadata.entry_points(group="leyden"), key=lambda point: point.name):
        package = point.dist.name if point.dist is not None else point.value
        if "all" not in out and not out & {_plain(point.name), _plain(package)}:
            yield point, package


def _plain(name: str) -> str:
    """Return a package's name as all its spellings come to."""
    return re.sub(r"[-_.]+", "-", name).lower()


def load(point: metadata.EntryPoint, package: str) -> object:
    """Return the plugin ``point`` names, checked; a class is made without arguments.

    Raises:
        PluginError: It cannot be imported or breaks the contract; the message names the package.
    """
    try:
        plugin = point.load()
        plugin = plugin() if isinstance(plugin, type) else plugin
        check_plugin(plugin, package)
    except Exception as error:
        reason = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
        raise PluginError(
            f"The installed plugin {point.name!r} of package {package!r} cannot be loaded from "
            f"{point.value!r}: {reason}{error} Repair or uninstall {package}, or keep it out with "
            f"LEYDEN_DISABLE_PLUGINS={point.name}."
        ) from error
    return plugin
