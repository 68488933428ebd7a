"""All use of pluggy: find plugins, check them, make the parts they name, resolve their hooks.

Built-ins are named by string, so the framework imports none of them, and they have no privilege
that an installed package lacks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .errors import ConfigError, PluginError, unknown
from .implementations import HOOK_NAMES, Implementation, check_plugin, implementations

if TYPE_CHECKING:
    from types import ModuleType

BUILTIN = ("leyden.strategies.registry", "leyden.plugins.registry", "leyden.loggers.registry")
KINDS = {
    "strategy": "register_strategies",
    "precision": "register_precisions",
    "checkpointer": "register_checkpointers",
    "logger": "register_loggers",
    "callback": "register_callbacks",
    "launcher": "register_launchers",
    "profiler": "register_profilers",
    "template": "register_templates",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """One name that can be asked for."""

    kind: str
    name: str
    factory: Callable[..., Any] | str
    origin: str


class Registry:
    """What a Trainer can ask for by name, and the plugins that hook into its runs."""

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        """Find the built-in and installed plugins and add ``plugins``, each one checked.

        Raises:
            PluginError: A plugin cannot be imported or breaks the contract.
        """
        self._manager = pluggy.PluginManager("leyden")
        self._manager.add_hookspecs(hookspecs)
        self.plugins: list[tuple[object, str]] = []
        for name in BUILTIN:
            self._add(importlib.import_module(name), "leyden")
        for point, package in installed():
            self._add(load(point, package), package)
        for plugin in plugins:
            self._add(plugin, "Trainer(plugins=...)")

    def _add(self, plugin: object, origin: str) -> None:
        check_plugin(plugin, origin)
        if any(plugin is known for known, _ in self.plugins):
            raise PluginError(f"{plugin!r} is listed twice among the plugins. List it once.")
        self.plugins.append((plugin, origin))
        # A string of its own tells equal but different plugins apart.
        holder = _Registrations(plugin)
        self._manager.register(holder, f"{len(self.plugins)} {origin}")

    def listed(self, kind: str) -> dict[str, Listed]:
        """Return everything of ``kind`` by name.

        Raises:
            PluginError: Two plugins register one name.
        """
        found: dict[str, Listed] = {}
        caller = getattr(self._manager.hook, KINDS[kind])
        for impl in caller.get_hookimpls():
            origin = impl.plugin_name.split(" ", 1)[1]
            for name, factory in (impl.function() or {}).items():
                if name in found:
                    raise PluginError(
                        f"The {kind} {name!r} is registered twice, by {found[name].origin} and by "
                        f"{origin}. Uninstall one of them, or keep it out with "
                        f"LEYDEN_DISABLE_PLUGINS={origin}."
                    )
                found[name] = Listed(kind, name, factory, origin)
        return found

    def describe(self) -> list[tuple[str, str, str]]:
        """Return ``(kind, name, origin)`` of everything that can be asked for."""
        return [(kind, n, entry.origin) for kind in KINDS for n, entry in self.listed(kind).items()]

    def make(self, kind: str, name: str, **options: Any) -> Any:
        """Return the part called ``name``, made by its factory with ``options``.

        Raises:
            ConfigError: Nothing of this kind has the name; the message lists what has.
        """
        known = self.listed(kind)
        if name not in known:
            raise unknown(kind, name, known)
        factory = known[name].factory
        if isinstance(factory, str):
            factory = imported(factory, f"the {kind} {name!r} of {known[name].origin}")
        return factory(**options)

    def resolved(self, kind: str, choice: Any, protocol: type | None = None) -> Any:
        """Return ``choice`` made if it is a name, checked against ``protocol`` if it is an object.

        Raises:
            ConfigError: The name is not known, or the object lacks what the loop will ask for.
        """
        part = self.make(kind, choice) if isinstance(choice, str) else choice
        if protocol is not None and not isinstance(part, protocol):
            wanted = sorted(n for n in protocol.__protocol_attrs__ if not hasattr(part, n))  # type: ignore[attr-defined]
            raise ConfigError(
                f"{part!r} cannot serve as a {kind}: it lacks {', '.join(wanted)}. See "
                f"leyden.protocols.{protocol.__name__}, or pass one of these names: "
                f"{', '.join(sorted(self.listed(kind)))}."
            )
        return part


class _Registrations:
    """The ``register_*`` functions of one plugin, all that a Registry's manager needs to see."""

    def __init__(self, plugin: object) -> None:
        for impl in implementations(plugin, registrations=True):
            setattr(self, impl.hook, hookspecs.hookimpl(impl.function))


def disabled() -> frozenset[str]:
    """Return the names in ``LEYDEN_DISABLE_PLUGINS``; ``"all"`` among them keeps everyone out."""
    return frozenset(filter(None, os.environ.get("LEYDEN_DISABLE_PLUGINS", "").split(",")))


def installed() -> Iterator[tuple[metadata.EntryPoint, str]]:
    """Yield the entry points of group ``leyden`` that are not disabled, and their package."""
    out = disabled()
    for point in sorted(metadata.entry_points(group="leyden"), key=lambda point: point.name):
        package = point.dist.name if point.dist is not None else point.value
        if "all" not in out and not out & {point.name, package}:
            yield point, package


def load(point: metadata.EntryPoint, package: str) -> object:
    """Return the plugin ``point`` names; a class is made without arguments.

    Raises:
        PluginError: It cannot be imported; the message names the package.
    """
    try:
        plugin = point.load()
        return plugin() if isinstance(plugin, type) else plugin
    except Exception as error:
        raise PluginError(
            f"The installed plugin {point.name!r} of package {package!r} cannot be loaded from "
            f"{point.value!r}: {type(error).__name__}: {error}. Repair or uninstall {package}, or "
            f"keep it out with LEYDEN_DISABLE_PLUGINS={point.name}."
        ) from error


def imported(path: str, what: str) -> Any:
    """Return the attribute that ``"package.module:attribute"`` names.

    Raises:
        PluginError: There is no such module or attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module: ModuleType = importlib.import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"Cannot import {path!r} for {what}: {error}.") from error


class Hooks:
    """One attribute per told hook: a tuple of functions in the published order.

    A hook nobody implements is the empty tuple, so that the loop's ``for`` over it is its whole
    cost. A hook with a wrapper is pluggy's own caller alone, which keeps the same order.
    """

    def __init__(self, order: dict[str, list[Implementation]]) -> None:
        self.order = order
        for hook in HOOK_NAMES:
            setattr(self, hook, self._functions(hook, order.get(hook, [])))

    def __getattr__(self, name: str) -> tuple[Callable[..., None], ...]:
        raise AttributeError(f"There is no hook called {name!r}.")

    def _functions(self, hook: str, found: list[Implementation]) -> tuple[Callable[..., None], ...]:
        if any(impl.wrapper for impl in found):
            return (_pluggy_caller(hook, found),)
        return tuple(impl.called_with_all() for impl in found)


def _pluggy_caller(hook: str, found: list[Implementation]) -> Callable[..., None]:
    """Return a positional call of ``hook`` through pluggy, which runs ``found`` in their order."""
    manager = pluggy.PluginManager("leyden")
    manager.add_hookspecs(hookspecs.RunHooks)
    # pluggy calls the last registered first.
    for impl in reversed(found):
        marked = hookspecs.hookimpl(impl.called_with_all(), wrapper=impl.wrapper)
        manager.register(type("Holder", (), {hook: staticmethod(marked)})())
    caller = getattr(manager.hook, hook)
    names = HOOK_NAMES[hook]

    def call(*given: Any) -> None:
        caller(**dict(zip(names, given, strict=True)))

    return call
