"""Which names are hooks, and what to say of a name that only looks like one."""

from __future__ import annotations

import difflib
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from . import hookspecs
from .errors import PluginError, did_you_mean

HOOK_NAMES: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in vars(hookspecs.RunHooks).items()
    if inspect.isfunction(spec)
}
"""Every told hook and its arguments, in the order of a run."""

REGISTRATIONS = tuple(name for name in vars(hookspecs) if name.startswith("register_"))

LIGHTNING = {
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
    "configure_sharded_model": "configure_model",
    "on_before_accelerator_backend_setup": "setup",
    "on_validation_model_zero_grad": "on_validation_start",
}
"""Hooks that Lightning has or once had and leyden has not, and what to write instead."""


def owner_of(plugin: object) -> str:
    """Return what messages call ``plugin``: a module's name, or an object's class."""
    return plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__name__


def held(plugin: object, name: str) -> Any:
    """Return what ``plugin`` or its class holds under ``name``, without running its code.

    A property may compute or raise, and ``__getattr__`` may answer to anything.
    """
    static = inspect.getattr_static(plugin, name, None)
    # What stands in a slot is the object's own.
    return getattr(plugin, name, None) if isinstance(static, types.MemberDescriptorType) else static


def marks(held: Any) -> dict[str, Any] | None:
    """Return the options of ``@hookimpl`` on what `held` returned; None where it is unmarked."""
    for holder in (held, getattr(held, "__func__", None)):
        found = getattr(holder, "__dict__", {}).get("leyden_impl")
        if isinstance(found, dict):
            return found
    return None


def suggestion(name: str) -> str:
    """Return what to write instead of ``name``, as a sentence after a space, or nothing."""
    if name in LIGHTNING:
        return f" It is a hook of Lightning's; here use {LIGHTNING[name]}."
    return did_you_mean(name, (*HOOK_NAMES, *REGISTRATIONS))


def refuse_unmarked(plugin: object, names: Iterable[str]) -> None:
    """Refuse a method called as one of ``names`` without ``@hookimpl``: it would not be called.

    Raises:
        PluginError: There is one.
    """
    for name in sorted({*names} & {*dir(plugin)}):
        method = held(plugin, name)
        if _is_method(method) and marks(method) is None:
            raise PluginError(
                f"{owner_of(plugin)}.{name} is named like a hook but would never be called. "
                "Decorate it with @leyden.hookimpl, or rename it."
            )


def refuse_unknown(callback: object) -> None:
    """Refuse a Callback's method that is named ``on_…`` and is no hook.

    Raises:
        PluginError: There is one.
    """
    for name in _unknown(callback, ()):
        raise PluginError(
            f"{owner_of(callback)}.{name} is not a hook and would never be called."
            f"{suggestion(name)} Rename it, with a leading underscore if it is your own."
        )


def check_module(module: object, overrides: Iterable[str]) -> None:
    """Check the names of a Module's or DataModule's methods that look like hooks.

    Args:
        module: The user's object.
        overrides: Names that it may define besides the told hooks.

    Raises:
        PluginError: One is close to a hook, or is one of Lightning's that leyden has not.
    """
    for name in _unknown(module, overrides):
        message = f"{owner_of(module)}.{name} is not a hook and would never be called."
        if name in LIGHTNING or difflib.get_close_matches(name, HOOK_NAMES, 1, cutoff=0.8):
            raise PluginError(f"{message}{suggestion(name)} Rename it.")
        warnings.warn(f"{message} leyden.hookspecs lists those there are.", stacklevel=2)


def _unknown(plugin: object, known: Iterable[str]) -> Iterator[str]:
    kind, known = type(plugin), {*known, *HOOK_NAMES}
    for name in dir(kind):
        if name in known or not (name.startswith("on_") or name in LIGHTNING):
            continue
        if _is_method(inspect.getattr_static(kind, name)):
            yield name


def _is_method(held: Any) -> bool:
    # A property and its kin are no more callable than the value they stand for.
    methods = (staticmethod, classmethod)
    return isinstance(held, methods) or (callable(held) and not isinstance(held, type))
