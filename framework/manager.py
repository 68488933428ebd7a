"""All use of pluggy: find plugins, check them, make the parts they name, resolve their hooks.

Built-ins are named by string, so the framework imports none of them, and they have no privilege
that an installed package lacks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from . import hookspecs
from .errors import ConfigError, PluginError, did_you_mean, unknown
from .hook_names import HOOK_NAMES, owner_of
from .implementations import Implementation, check_plugin, refuse_twice, registrations
from .installed import installed, load

BUILTIN = (
    "leyden.strategies.registry",
    "leyden.plugins.registry",
    "leyden.loggers.registry",
    "leyden.templates.registry",
)
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
GIVEN = "Trainer(plugins=[…])"
"""Where a plugin comes from that was passed to the Trainer."""


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
        self._listed: dict[str, dict[str, Listed]] = {}
        self.plugins: list[tuple[object, str]] = []
        for name in BUILTIN:
            self._add(importlib.import_module(name), "leyden")
        for point, package in installed():
            self._add(load(point, package), package)
        for plugin in plugins:
            check_plugin(plugin, GIVEN)
            self._add(plugin, GIVEN)
        refuse_twice(self.plugins)

    def _add(self, plugin: object, origin: str) -> None:
        self.plugins.append((plugin, origin))
        self._manager.register(_Registrations(plugin, origin))

    def check(self) -> None:
        """Ask for every name there is, so that a clash shows at once.

        Raises:
            PluginError: Two plugins register one name, or one registers what is no factory.
        """
        for kind in KINDS:
            self.listed(kind)

    def listed(self, kind: str) -> dict[str, Listed]:
        """Return everything of ``kind`` by name; each plugin is asked once.

        Raises:
            PluginError: Two plugins register one name, or one registers what is no factory.
        """
        if kind not in self._listed:
            self._listed[kind] = self._ask(kind)
        return self._listed[kind]

    def _ask(self, kind: str) -> dict[str, Listed]:
        hook = KINDS[kind]
        found: dict[str, Listed] = {}
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            plugin: _Registrations = impl.plugin
            for name, factory in _factories(f"{plugin.owner}.{hook}", impl.function()):
                if name in found:
                    raise PluginError(
                        f"The {kind} {name!r} is registered twice, by {found[name].origin} and by "
                        f"{plugin.origin}. Choose another name, or keep one of them out: installed "
                        f"packages with LEYDEN_DISABLE_PLUGINS={plugin.origin}."
                    )
                found[name] = Listed(kind, name, factory, plugin.origin)
        return found

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
        if isinstance(part, type):
            name = part.__name__
            raise ConfigError(f"{name} is a class, and a {kind} is an object. Pass {name}(…).")
        if protocol is not None and not isinstance(part, protocol):
            asked = {*vars(protocol), *protocol.__annotations__}
            lacking = sorted(n for n in asked if not n.startswith("_") and not hasattr(part, n))
            raise ConfigError(
                f"{part!r} cannot serve as a {kind}: it lacks {', '.join(lacking)}. See "
                f"leyden.protocols.{protocol.__name__}, or pass one of these names: "
                f"{', '.join(sorted(self.listed(kind)))}."
            )
        return part


class _Registrations:
    """The ``register_*`` functions of one plugin: all that the Registry's manager sees of it.

    pluggy tells plugins apart by equality, and a plugin may equal another, or refuse to compare.
    """

    def __init__(self, plugin: object, origin: str) -> None:
        self.owner, self.origin = owner_of(plugin), origin
        for number, (hook, function) in enumerate(registrations(plugin)):
            setattr(self, f"{hook}_{number}", _marked(function, hook))


def _marked(function: Callable[[], Any], hook: str) -> Callable[[], Any]:
    # A method that is bound already cannot be marked itself.
    return hookspecs.hookimpl(lambda: function(), specname=hook)


def _factories(source: str, given: Any) -> Iterable[tuple[str, Callable[..., Any] | str]]:
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and (callable(factory) or isinstance(factory, str))
        for name, factory in given.items()
    ):
        raise PluginError(
            f"{source} returned {given!r}. Return a dict of names, each with a factory or with the "
            "factory's 'package.module:attribute'."
        )
    return given.items()


def imported(path: str, what: str) -> Any:
    """Return the attribute that ``"package.module:attribute"`` names.

    Raises:
        PluginError: There is no such module or attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"Cannot import {path!r} for {what}: {error}.") from error


class Hooks:
    """One attribute per told hook: a tuple of functions in the published order.

    A hook nobody implements is the empty tuple, so that the loop's ``for`` over it is its whole
    cost. A hook with a wrapper is called through pluggy, in the same order.
    """

    def __init__(self, order: dict[str, list[Implementation]]) -> None:
        self.order = order
        for hook in HOOK_NAMES:
            setattr(self, hook, _functions(hook, order.get(hook, [])))

    def __getattr__(self, name: str) -> tuple[Callable[..., None], ...]:
        raise AttributeError(f"No hook is called {name!r}.{did_you_mean(name, HOOK_NAMES)}")


def _functions(hook: str, found: list[Implementation]) -> tuple[Callable[..., None], ...]:
    wrapped = tuple(impl.called_with_all() for impl in found if not impl.wrapper)
    wrappers = [impl.called_with_all() for impl in found if impl.wrapper]
    if not wrappers:
        return wrapped
    if hook not in ("on_exception", "teardown"):
        return (_through_pluggy(wrappers, lambda *given: _tell(wrapped, given)),)

    left: list[Callable[..., None]] = []

    def tell_the_rest(*given: Any) -> None:
        rest, left[:] = list(left), []
        tell_everyone(rest, *given)

    through_wrappers = _through_pluggy(wrappers, tell_the_rest)

    def begin(*given: Any) -> None:
        left[:] = wrapped
        through_wrappers(*given)

    # A wrapper that fails before its `yield` keeps nobody from being told.
    return begin, tell_the_rest


class _Told:
    # With one result at most, a wrapper's `yield` returns None and not a list of nothings.
    @hookspecs.hookspec(firstresult=True)
    def told(self, given: tuple[Any, ...]) -> None:
        """Any hook, with its arguments."""


def _through_pluggy(
    wrappers: list[Callable[..., Any]], wrapped: Callable[..., None]
) -> Callable[..., None]:
    """Return a call of ``wrapped`` inside ``wrappers``, the first of them outermost."""
    manager = pluggy.PluginManager("leyden")
    manager.add_hookspecs(_Told)

    def inside(given: tuple[Any, ...]) -> None:
        wrapped(*given)

    def around(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def told(given: tuple[Any, ...]) -> Any:
            return (yield from wrapper(*given))

        return hookspecs.hookimpl(told, wrapper=True)

    functions = [*map(around, wrappers), hookspecs.hookimpl(inside, specname="told")]
    for function in reversed(functions):
        # pluggy calls the last registered first.
        manager.register(type("Holder", (), {"told": staticmethod(function)})())
    return lambda *given: manager.hook.told(given=given)


def _tell(hooks: Iterable[Callable[..., None]], given: tuple[Any, ...]) -> None:
    for hook in hooks:
        hook(*given)


def tell_everyone(
    hooks: Iterable[Callable[..., None]], *given: Any, after: BaseException | None = None
) -> None:
    """Call every one of ``hooks``, and raise the first error of theirs last.

    Args:
        hooks: Who to tell.
        *given: What they are told.
        after: An error that is already on its way, which stays the first. Later errors are noted
            on the first.
    """
    first = after
    for hook in hooks:
        try:
            hook(*given)
        except BaseException as error:
            if first is None:
                first = error
            elif error is not first:
                first.add_note(f"While this was handled, a hook raised {error!r}.")
    if first is not None and first is not after:
        raise first
