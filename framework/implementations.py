"""How an object implements hooks: by which names, with which arguments, in which order."""

from __future__ import annotations

import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import hookspecs
from .callback import Callback
from .errors import PluginError, did_you_mean

HOOK_NAMES: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in vars(hookspecs.RunHooks).items()
    if inspect.isfunction(spec)
}
"""Every told hook and its arguments, in the order of a run."""

REGISTRATIONS = tuple(name for name in vars(hookspecs) if name.startswith("register_"))

REMOVED = {
    "training_epoch_end": "on_train_epoch_end, keeping the outputs yourself",
    "validation_epoch_end": "on_validation_epoch_end, keeping the outputs yourself",
    "test_epoch_end": "on_test_epoch_end, keeping the outputs yourself",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_configure_sharded_model": "configure_model",
    "on_before_accelerator_backend_setup": "setup",
}
"""Hooks that Lightning once had, and what to write instead."""

RETURNS = {
    "on_train_batch_start": "To end the epoch early, call trainer.skip_epoch().",
    "on_train_epoch_start": "To end the run, set trainer.should_stop.",
}

Style = Literal["callback", "module", "named"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One function that implements one hook."""

    hook: str
    function: Callable[..., Any]
    passed: tuple[str, ...]
    """The hook's arguments it is given, in its own order."""
    by_name: bool
    owner: str
    origin: str
    wrapper: bool = False
    rank: int = 1
    """0 for ``tryfirst``, 2 for ``trylast``."""
    is_module: bool = False
    is_saver: bool = False

    def called_with_all(self) -> Callable[..., None]:
        """Return a function of all the hook's arguments that passes on those wanted.

        It has the hook's own argument names, which pluggy reads, and refuses a returned value: a
        told hook steers through ``trainer``.
        """
        names = ", ".join(HOOK_NAMES.get(self.hook, ()))
        passed = ", ".join(f"{n}={n}" if self.by_name else n for n in self.passed)
        if self.wrapper:
            source = f"def told({names}): return (yield from call({passed}))"
        else:
            source = (
                f"def told({names}):\n result = call({passed})\n"
                " if result is not None: refuse(result)"
            )
        call = self._traced() if os.environ.get("LEYDEN_TRACE") == "1" else self.function
        namespace: dict[str, Any] = {"call": call, "refuse": self._refuse}
        exec(source, namespace)
        return namespace["told"]  # type: ignore[no-any-return]

    def _refuse(self, result: object) -> None:
        raise PluginError(
            f"{self.owner}.{self.hook} returned {result!r}; a hook that is told returns nothing. "
            + RETURNS.get(self.hook, "Steer the run through `trainer` instead.")
        )

    def _traced(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return self.function(*args, **kwargs)
            finally:
                took = (time.perf_counter() - started) * 1e3
                print(f"leyden: {self.hook} {self.owner} {took:.3f} ms", file=sys.stderr)

        return call


def check_plugin(plugin: object, origin: str) -> None:
    """Check every hook that ``plugin`` defines or seems to define.

    Raises:
        PluginError: A hook is unknown, unmarked, or asks for an argument it is not offered.
    """
    if isinstance(plugin, type):
        raise PluginError(f"{plugin.__name__} is a class. Pass an object: {plugin.__name__}(...).")
    if not isinstance(plugin, Callback):
        _refuse_unmarked(plugin)
    else:
        _refuse_unknown(plugin)
    found = [*implementations(plugin, origin), *implementations(plugin, registrations=True)]
    if not found and not isinstance(plugin, Callback) and not _is_part(plugin):
        raise PluginError(
            f"{plugin!r} from {origin} hooks into nothing: none of its methods is marked with "
            "@leyden.hookimpl. Mark them, or derive from leyden.Callback."
        )


def _is_part(plugin: object) -> bool:
    """Say if ``plugin`` is a strategy, precision, logger or checkpointer, which need no hook."""
    return any(hasattr(plugin, name) for name in ("connect", "log_metrics", "extension"))


def implementations(
    plugin: object, origin: str = "", *, registrations: bool = False
) -> list[Implementation]:
    """Return the told hooks, or the ``register_*`` functions, that ``plugin`` implements."""
    style: Style = "callback" if isinstance(plugin, Callback) else "named"
    return [
        _implementation(plugin, hook, method, origin, style)
        for hook, method in _methods(plugin, style)
        if (hook in REGISTRATIONS) == registrations
    ]


def of_module(module: object, plain: type, origin: str = "Module") -> list[Implementation]:
    """Return the told hooks that a Module or DataModule overrides.

    Args:
        module: The user's object.
        plain: The class whose own methods do nothing.
        origin: What to call it in ``trainer.explain()``.
    """
    return [
        _implementation(module, hook, method, origin, "module")
        for hook in HOOK_NAMES
        if (method := _overridden(module, hook, plain)) is not None
    ]


def _overridden(plugin: object, name: str, plain: type) -> Callable[..., Any] | None:
    """Return ``plugin``'s method of this name unless it is the one that does nothing."""
    method = getattr(plugin, name, None)
    if not callable(method):
        return None
    function = getattr(method, "__func__", method)
    return None if function is getattr(plain, name, None) else method


def _methods(plugin: object, style: Style) -> Iterator[tuple[str, Callable[..., Any]]]:
    if style == "callback":
        for hook in HOOK_NAMES:
            if (method := _overridden(plugin, hook, Callback)) is not None:
                yield hook, method
    for name, method in _marked(plugin):
        opts = method.leyden_impl
        hook = opts.get("specname") or name
        told_by_name = style == "callback" and hook == name and hook in HOOK_NAMES
        if not told_by_name:
            if hook not in HOOK_NAMES and hook not in REGISTRATIONS:
                if opts.get("optionalhook"):
                    continue
                raise PluginError(
                    f"{_owner(plugin)}.{name} is marked with @hookimpl, but leyden has no hook "
                    f"{hook!r}.{_suggestion(hook)}"
                )
            yield hook, method


def _marked(plugin: object) -> Iterator[tuple[str, Any]]:
    for name in dir(plugin):
        # A property may compute, or raise: only what the class or the object holds is looked at.
        static = inspect.getattr_static(plugin, name, None)
        if isinstance(static, property):
            continue
        method = getattr(plugin, name, None)
        if inspect.isroutine(method) and isinstance(getattr(method, "leyden_impl", None), dict):
            yield name, method


def _implementation(
    plugin: object, hook: str, method: Callable[..., Any], origin: str, style: Style
) -> Implementation:
    opts = getattr(method, "leyden_impl", None) or {}
    owner = _owner(plugin)
    if opts.get("hookwrapper"):
        raise PluginError(
            f"{owner}.{hook} is an old-style wrapper. Use @hookimpl(wrapper=True), whose one "
            "`yield` returns or raises what the wrapped hooks did."
        )
    offered = HOOK_NAMES.get(hook, ())
    if style == "named":
        passed = _by_name(owner, hook, method, offered)
    else:
        passed = _by_position(owner, hook, method, offered[2:] if style == "module" else offered)
    return Implementation(
        hook=hook,
        function=method,
        passed=passed,
        by_name=style == "named",
        owner=owner,
        origin=origin,
        wrapper=bool(opts.get("wrapper")),
        rank=0 if opts.get("tryfirst") else 2 if opts.get("trylast") else 1,
        is_module=style == "module",
        is_saver=bool(getattr(plugin, "is_saver", False)),
    )


def _by_name(
    owner: str, hook: str, method: Callable[..., Any], offered: tuple[str, ...]
) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    wanted = tuple(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)
    for name in wanted:
        if name not in offered:
            raise PluginError(
                f"{owner}.{hook} asks for {name!r}, which this hook does not offer."
                f"{did_you_mean(name, offered)} It offers: {', '.join(offered) or 'nothing'}."
            )
    return wanted


def _by_position(
    owner: str, hook: str, method: Callable[..., Any], offered: tuple[str, ...]
) -> tuple[str, ...]:
    """Return as many leading arguments as ``method`` takes.

    Only ``dataloader_idx`` may be left out: Lightning too passes it only where loaders are several.
    """
    parameters = list(inspect.signature(method).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    least = sum(p.default is p.empty for p in positional)
    most = len(offered) if takes_any else len(positional)
    needed = len(offered) - (offered[-1:] == ("dataloader_idx",))
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if most < needed or least > len(offered) or keyword_only:
        raise PluginError(
            f"{owner}.{hook}{inspect.signature(method)} cannot be called: this hook passes "
            f"{len(offered)} arguments by position: {', '.join(offered) or 'none'}."
        )
    return offered[:most]


def _refuse_unmarked(plugin: object) -> None:
    for name in {*HOOK_NAMES, *REGISTRATIONS} & set(dir(plugin)):
        method = getattr(plugin, name)
        # `setup` and `teardown` are common words; an unmarked one is not taken for a mistake.
        ordinary = name in ("setup", "teardown")
        if inspect.isroutine(method) and not hasattr(method, "leyden_impl") and not ordinary:
            raise PluginError(
                f"{_owner(plugin)}.{name} is named like a hook but would never be called. "
                "Decorate it with @leyden.hookimpl, or rename it."
            )


def _refuse_unknown(plugin: Callback) -> None:
    for name in _unknown_hooks(plugin):
        raise PluginError(
            f"{_owner(plugin)}.{name} is not a hook and would never be called.{_suggestion(name)} "
            "Rename it, with a leading underscore if it is a method of your own."
        )


def check_module(module: object, overrides: Iterable[str]) -> None:
    """Check the names of a Module's or DataModule's methods that look like hooks.

    Args:
        module: The user's object.
        overrides: Names that it may define besides the told hooks.

    Raises:
        PluginError: One is close to a hook, or was a hook in Lightning.
    """
    known = set(overrides)
    for name in _unknown_hooks(module):
        if name in known:
            continue
        message = f"{_owner(module)}.{name} is not a hook and would never be called."
        suggestion = _suggestion(name)
        if suggestion:
            raise PluginError(f"{message}{suggestion} Rename it.")
        warnings.warn(f"{message} See `trainer.explain(module)` for those there are.", stacklevel=2)


def _unknown_hooks(plugin: object) -> Iterator[str]:
    for name in dir(type(plugin)):
        if name in HOOK_NAMES or not (name.startswith("on_") or name in REMOVED):
            continue
        if inspect.isroutine(inspect.getattr_static(type(plugin), name)):
            yield name


def _suggestion(name: str) -> str:
    if name in REMOVED:
        return f" Lightning removed it; use {REMOVED[name]}."
    return did_you_mean(name, (*HOOK_NAMES, *REGISTRATIONS))


def _owner(plugin: object) -> str:
    return plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__name__


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
