"""How an object implements hooks: with which functions, called how, in which order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .callback import Callback
from .errors import PluginError
from .hook_names import (
    HOOK_NAMES,
    REGISTRATIONS,
    held,
    marks,
    owner_of,
    refuse_unknown,
    refuse_unmarked,
    suggestion,
)
from .signatures import by_name, by_position, check_kind

RETURNS = {
    "on_train_batch_start": "To end the epoch early, call trainer.skip_epoch().",
    "on_train_epoch_start": "To end the run, set trainer.should_stop.",
    "on_save_checkpoint": "Put entries of your own into `checkpoint`, or define state_dict().",
}
"""What to do instead of returning something."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One function that implements one hook."""

    hook: str
    function: Callable[..., Any]
    arguments: str
    """What stands between the brackets of a call of ``function``, in the hook's own names."""
    owner: str
    origin: str
    wrapper: bool = False
    rank: int = 1
    """0 for ``tryfirst``, 2 for ``trylast``."""
    is_module: bool = False
    is_saver: bool = False

    def called_with_all(self) -> Callable[..., Any]:
        """Return a function of all the hook's arguments that passes on those wanted.

        It refuses a returned value: a told hook steers through ``trainer``.
        """
        call = f"yield from call({self.arguments})" if self.wrapper else f"call({self.arguments})"
        source = (
            f"def told({', '.join(HOOK_NAMES[self.hook])}):\n"
            f" result = {call}\n"
            " if result is not None: refuse(result)"
        )
        namespace: dict[str, Any] = {"call": self._traced(), "refuse": self._refuse}
        exec(compile(source, f"<{self.owner}.{self.hook}>", "exec"), namespace)
        return namespace["told"]  # type: ignore[no-any-return]

    def _refuse(self, result: object) -> None:
        raise PluginError(
            f"{self.owner}.{self.hook} returned {result!r}; a hook that is told returns nothing. "
            + RETURNS.get(self.hook, "Steer the run through `trainer` instead.")
        )

    def _traced(self) -> Callable[..., Any]:
        """Return ``function``, which says when it was called if ``LEYDEN_TRACE`` asks for it."""
        if os.environ.get("LEYDEN_TRACE") != "1":
            return self.function

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._told():
                return self.function(*args, **kwargs)

        def wrap(*args: Any, **kwargs: Any) -> Any:
            with self._told():
                return (yield from self.function(*args, **kwargs))

        return wrap if self.wrapper else call

    @contextmanager
    def _told(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            took = (time.perf_counter() - started) * 1e3
            print(f"leyden: {self.hook} {self.owner} {took:.3f} ms", file=sys.stderr)


def implementations(plugin: object, origin: str) -> list[Implementation]:
    """Return the told hooks of a Callback, or of any object that marks its methods.

    Args:
        plugin: The object.
        origin: Where it comes from, for ``trainer.explain()``.

    Raises:
        PluginError: A hook is unknown, unmarked, or asks for an argument it is not offered.
    """
    if isinstance(plugin, Callback):
        refuse_unknown(plugin)
        refuse_unmarked(plugin, REGISTRATIONS)
    else:
        # `setup` and `teardown` are common words; an unmarked one is not taken for a mistake.
        refuse_unmarked(plugin, {*HOOK_NAMES, *REGISTRATIONS} - {"setup", "teardown"})
    found = [method for method in _methods(plugin, _plain(plugin)) if method[0] in HOOK_NAMES]
    return [_implementation(plugin, *method, origin) for method in found]


def _plain(plugin: object) -> type | None:
    return Callback if isinstance(plugin, Callback) else None


def registrations(plugin: object) -> list[tuple[str, Callable[[], Any]]]:
    """Return the ``register_*`` functions of ``plugin`` with the hook of each.

    Raises:
        PluginError: One of them asks for an argument, or is no plain function.
    """
    found = []
    for hook, method, options in _methods(plugin, _plain(plugin)):
        if hook in REGISTRATIONS:
            check_kind(owner_of(plugin), hook, method, options)
            if options.get("wrapper"):
                raise PluginError(
                    f"{owner_of(plugin)}.{hook} is a wrapper, and only hooks that a run tells can "
                    "be wrapped. Return your own names from it."
                )
            by_name(owner_of(plugin), hook, method, ())
            found.append((hook, method))
    return found


def of_module(module: object, plain: type, origin: str = "Module") -> list[Implementation]:
    """Return the told hooks that a Module or DataModule overrides.

    Args:
        module: The user's object.
        plain: The class whose own methods do nothing.
        origin: What to call it in ``trainer.explain()``.

    Raises:
        PluginError: One takes other arguments than the hook has, or it registers names.
    """
    refuse_registrations(module)
    methods = _methods(module, plain)
    return [_implementation(module, *method, origin, is_module=True) for method in methods]


def check_callback(callback: object, where: str) -> None:
    """Check an object that stands where only a Callback may.

    Raises:
        PluginError: It is none, or breaks the contract.
    """
    _refuse_class(callback)
    if not isinstance(callback, Callback):
        raise PluginError(
            f"{callback!r} in {where} is no Callback. Derive it from leyden.Callback, or pass an "
            "object with @leyden.hookimpl methods as plugins=[…]."
        )
    implementations(callback, where)
    refuse_registrations(callback)


def check_plugin(plugin: object, origin: str) -> None:
    """Check an object that may hook into runs and register names.

    Raises:
        PluginError: It is a class, breaks the contract, or does neither.
    """
    _refuse_class(plugin)
    found = [*implementations(plugin, origin), *registrations(plugin)]
    if not found and not isinstance(plugin, Callback):
        raise PluginError(
            f"{plugin!r} from {origin} hooks into nothing: none of its methods is marked with "
            "@leyden.hookimpl. Mark them, or derive from leyden.Callback. A strategy, precision, "
            "logger or checkpointer is passed under its own argument, as in Trainer(strategy=…)."
        )


def refuse_registrations(plugin: object) -> None:
    """Refuse names registered by an object that is met after all names are known.

    Raises:
        PluginError: It registers some.
    """
    for hook, _ in registrations(plugin):
        raise PluginError(
            f"{owner_of(plugin)}.{hook} would never be asked: names are registered by what is in "
            "Trainer(plugins=[…]) and by installed packages. Move it to such a plugin."
        )


def refuse_twice(listed: Iterable[tuple[object, str]]) -> None:
    """Refuse an object that stands twice in ``listed``, whatever it equals.

    Raises:
        PluginError: One does.
    """
    seen: dict[int, str] = {}
    for plugin, origin in listed:
        if id(plugin) in seen:
            raise PluginError(
                f"One and the same {owner_of(plugin)} is listed twice, once from "
                f"{seen[id(plugin)]} and once from {origin}, and each of its hooks would be called "
                "twice. List it once."
            )
        seen[id(plugin)] = origin


def _refuse_class(plugin: object) -> None:
    if isinstance(plugin, type):
        raise PluginError(f"{plugin.__name__} is a class. Pass an object: {plugin.__name__}(…).")


def _methods(
    plugin: object, plain: type | None
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield each hook that ``plugin`` implements, the method, and the options of its mark.

    Args:
        plugin: The object.
        plain: The class whose own methods do nothing, where methods count by name.
    """
    for hook in HOOK_NAMES if plain is not None else ():
        method = getattr(plugin, hook, None)
        if callable(method) and getattr(method, "__func__", method) is not getattr(
            plain, hook, None
        ):
            yield hook, method, marks(held(plugin, hook)) or {}
    for name in dir(plugin):
        options = marks(held(plugin, name))
        hook = (options or {}).get("specname") or name
        if options is None or (plain is not None and name in HOOK_NAMES):
            continue
        if hook in HOOK_NAMES or hook in REGISTRATIONS:
            yield hook, getattr(plugin, name), options
        elif not options.get("optionalhook"):
            raise PluginError(
                f"{owner_of(plugin)}.{name} is marked with @hookimpl, but leyden has no hook "
                f"{hook!r}.{suggestion(hook)} leyden.hookspecs lists those there are."
            )


def _implementation(
    plugin: object,
    hook: str,
    method: Callable[..., Any],
    options: dict[str, Any],
    origin: str,
    *,
    is_module: bool = False,
) -> Implementation:
    owner, offered = owner_of(plugin), HOOK_NAMES[hook]
    check_kind(owner, hook, method, options)
    if is_module:
        arguments = by_position(owner, hook, method, offered[2:])
    elif isinstance(plugin, Callback):
        arguments = by_position(owner, hook, method, offered)
    else:
        arguments = by_name(owner, hook, method, offered)
    return Implementation(
        hook=hook,
        function=method,
        arguments=arguments,
        owner=owner,
        origin=origin,
        wrapper=bool(options.get("wrapper")),
        rank=0 if options.get("tryfirst") else 2 if options.get("trylast") else 1,
        is_module=is_module,
        # An object may answer to any name.
        is_saver=getattr(plugin, "is_saver", False) is True,
    )


def in_order(found: Iterable[Implementation]) -> dict[str, list[Implementation]]:
    """Return the implementations of each hook in the order they are called.

    ``tryfirst`` ones come first and ``trylast`` ones last. Between them plugins come as listed, and
    the user's Module after them, but before them where the hook ends something, so that they see
    what it logged. Savers come after all. ``teardown`` runs backwards.
    """
    order: dict[str, list[Implementation]] = {hook: [] for hook in HOOK_NAMES}
    for impl in found:
        order[impl.hook].append(impl)
    for hook, impls in order.items():
        module_slot = 0 if hook.endswith("_end") else 2

        def position(impl: Implementation, slot: int = module_slot) -> tuple[bool, int, int]:
            return impl.is_saver, impl.rank, slot if impl.is_module else 1

        impls.sort(key=position)
        if hook == "teardown":
            impls.reverse()
    return order
