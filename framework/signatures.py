"""Whether a function can implement a hook, and the call that passes it what it wants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .errors import PluginError, did_you_mean


def check_kind(owner: str, hook: str, method: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse a function that is of another kind than its mark says.

    Raises:
        PluginError: It is async, or yields without being a wrapper, or the other way round.
    """
    if options.get("hookwrapper"):
        raise PluginError(
            f"{owner}.{hook} is an old-style wrapper. Use @hookimpl(wrapper=True), whose one "
            "`yield` returns or raises what the wrapped hooks did."
        )
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise PluginError(f"{owner}.{hook} is async, and nobody awaits a hook. Define it with def.")
    if options.get("wrapper") and not inspect.isgeneratorfunction(method):
        raise PluginError(
            f"{owner}.{hook} is marked as a wrapper and does not yield. Put one `yield` where the "
            "wrapped hooks are to run."
        )
    if inspect.isgeneratorfunction(method) and not options.get("wrapper"):
        raise PluginError(
            f"{owner}.{hook} yields, so calling it would run nothing. Mark it with "
            "@hookimpl(wrapper=True) if it is to wrap the others, or take the yield out."
        )


def by_name(owner: str, hook: str, method: Callable[..., Any], offered: tuple[str, ...]) -> str:
    """Return a call that passes what ``method`` names.

    An argument with a default that the hook does not offer keeps it, so that a plugin can be
    written for several versions of leyden.

    Raises:
        PluginError: It asks for something else.
    """
    passed, rest = [], False
    for parameter in inspect.signature(method).parameters.values():
        name, by_position = parameter.name, parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            rest = rest or parameter.kind is parameter.VAR_KEYWORD
        elif name in offered:
            passed.append(name if by_position else f"{name}={name}")
        elif parameter.default is parameter.empty or by_position or did_you_mean(name, offered):
            raise PluginError(
                f"{owner}.{hook} asks for {name!r}, which this hook does not offer."
                f"{did_you_mean(name, offered)} It offers: {', '.join(offered) or 'nothing'}."
            )
    if rest:
        named = {argument.split("=")[0] for argument in passed}
        passed += [f"{name}={name}" for name in offered if name not in named]
    return ", ".join(passed)


def by_position(owner: str, hook: str, method: Callable[..., Any], offered: tuple[str, ...]) -> str:
    """Return a call that passes as many leading arguments as ``method`` takes.

    Only ``dataloader_idx`` may be left out: Lightning too passes it only where loaders are several.

    Raises:
        PluginError: It takes fewer, or needs more.
    """
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    least = sum(p.default is p.empty for p in positional)
    most = len(offered) if takes_any else len(positional)
    needed = len(offered) - (offered[-1:] == ("dataloader_idx",))
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if most < needed or least > len(offered) or keyword_only:
        raise PluginError(
            f"{owner}.{hook}{signature} cannot take what this hook passes by position: "
            f"({', '.join(offered)}). Define it with these arguments, under any names."
        )
    return ", ".join(offered[:most])
