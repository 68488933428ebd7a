"""Hyperparameters: collected from ``__init__``, kept in checkpoints, handed to loggers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

from . import encoding
from .errors import CheckpointError, ConfigError, did_you_mean


class HyperParameters(dict[str, Any]):
    """The arguments something was made with: ``hparams.lr`` and ``hparams["lr"]`` are the same.

    An entry called like a method of dict is reached as an item alone: ``hparams["items"]``.
    """

    # By name, the arguments that are in here entry by entry: those of save_hyperparameters(config).
    _given: Mapping[str, Any] = types.MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"There is no hyperparameter {name!r}.{did_you_mean(name, map(str, self))} "
                f"Known: {', '.join(map(str, self)) or 'none'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_given":
            super().__setattr__(name, value)
        elif hasattr(dict, name):
            raise AttributeError(f"{name!r} is a method of dict: set hparams[{name!r}] instead.")
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)  # raises where there is none
        del self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self)]

    def __repr__(self) -> str:
        return f"HyperParameters({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def copy(self) -> HyperParameters:
        return copy.copy(self)

    def update(self, *others: Any, **entries: Any) -> None:
        super().update(*others, **entries)
        for other in others:
            self._given = {**self._given, **getattr(other, "_given", {})}


def collect(
    frame: types.FrameType,
    owner: object,
    names: tuple[Any, ...] = (),
    ignore: str | Iterable[str] | None = None,
) -> HyperParameters:
    """Return the arguments ``owner`` is being made with, as copies.

    Every ``__init__`` of ``owner`` that is running counts, the subclass's arguments over those it
    passes on to its bases. ``**kwargs`` count one by one; ``*args`` do not.

    Args:
        frame: Where to start: the frame of an ``__init__`` of ``owner``, or one called by it.
        owner: The Module or DataModule.
        names: The arguments to take; all if empty. Or in place of names one dict, Namespace or
            dataclass instance, whose entries are taken.
        ignore: Names to leave out.

    Raises:
        ConfigError: A name is not an argument, or what stands in place of names has no entries.
    """
    arguments = _arguments(frame, owner)
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    if any(not isinstance(name, str) for name in names):
        return _from_object(names, arguments, ignored)
    for name in names:
        if name not in arguments:
            raise ConfigError(
                f"save_hyperparameters({name!r}): {type(owner).__name__}.__init__ has no such "
                f"argument.{did_you_mean(name, arguments)} Known: {', '.join(arguments) or 'none'}."
            )
    chosen = (name for name in names or arguments if name not in ignored)
    return HyperParameters({name: _snapshot(arguments[name]) for name in chosen})


def _arguments(frame: types.FrameType, owner: object) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    current: types.FrameType | None = frame
    while current is not None:  # outwards: a base's __init__, then the subclass's that called it
        if current.f_code.co_name == "__init__":
            names, _, keywords, values = inspect.getargvalues(current)
            if names and values.get(names[0]) is owner:
                arguments |= {name: values[name] for name in names[1:] if name in values}
                arguments |= values.get(keywords, {}) if keywords else {}
        current = current.f_back
    if dataclasses.is_dataclass(owner):  # its frame holds a marker for what a factory makes
        for field in dataclasses.fields(owner):
            if field.default_factory is not dataclasses.MISSING and field.name in arguments:
                arguments[field.name] = getattr(owner, field.name)
    return arguments


def _from_object(
    objects: tuple[Any, ...], arguments: dict[str, Any], ignored: set[str]
) -> HyperParameters:
    if len(objects) > 1 or _entries(objects[0]) is None:
        raise ConfigError(
            "save_hyperparameters takes names of arguments, or one dict, Namespace or dataclass "
            f"instance. It got: {', '.join(type(item).__name__ for item in objects)}."
        )
    config = _snapshot(objects[0])
    entries = _entries(config) or {}
    params = HyperParameters({key: part for key, part in entries.items() if key not in ignored})
    if len(params) == len(entries):  # else the argument cannot be made again
        same = (name for name, value in arguments.items() if value is objects[0])
        params._given = {name: config for name in same}
    return params


def _entries(config: object) -> dict[Any, Any] | None:
    if encoding.is_omegaconf(config):
        config = encoding.to_container(config)
    if isinstance(config, dict):
        return dict(config)
    if isinstance(config, (Namespace, types.SimpleNamespace)):
        return dict(vars(config))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return None


def _snapshot(value: Any) -> Any:
    try:
        encoding.encode(value)
    except encoding.NotData:
        return value  # a network, say: too big to copy, and refused if it comes to a checkpoint
    return copy.deepcopy(value)


def matching(init: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``params`` that ``init`` takes by name: all where it takes ``**kwargs``.

    What came from one object, as in ``save_hyperparameters(config)``, is that object again.
    """
    kinds = {p.name: p.kind for p in inspect.signature(init).parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    values = {**params, **_given(params)}
    return {k: v for k, v in values.items() if takes_all or kinds.get(k) in by_name}


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are in ``params`` entry by entry, with their present values."""
    arguments = {}
    for name, config in getattr(params, "_given", {}).items():
        arguments[name] = config = copy.copy(config)
        present = {key: params[key] for key in _entries(config) or {} if key in params}
        if isinstance(config, MutableMapping):
            config.update(present)
        else:
            for key, value in present.items():
                object.__setattr__(config, key, value)  # frozen dataclasses too
    return arguments


encoding.add("HyperParameters", HyperParameters, dict)


def encode(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``params`` as data that ``torch.load(weights_only=True)`` reads.

    Args:
        params: Hyperparameters by name.
        where: Whose they are, for the message of an error.

    Raises:
        ConfigError: A value, however deep, is not data: a function, a network, an optimizer.
    """
    given = _given(params)
    try:
        data: dict[str, Any] = encoding.encode(dict(params))
        if given:
            data = {encoding.TAG: "HyperParameters", "value": data, "given": encoding.encode(given)}
    except encoding.NotData as error:
        names = [name for name in {**params, **given} if not _is_data({**params, **given}[name])]
        raise ConfigError(
            f"{where}: hyperparameter {_dotted(error.path)!r} {error.reason} Leave it out with "
            f"save_hyperparameters(ignore={names or [error.path[0]]}), and keep what you need of "
            "it in attributes of your own."
        ) from error.__cause__
    return data


def _is_data(value: Any) -> bool:
    try:
        encoding.encode(value)
    except encoding.NotData:
        return False
    return True


def decode(data: Mapping[str, Any], types: Iterable[type] = ()) -> HyperParameters:
    """Return the hyperparameters that `encode` made ``data`` of.

    Args:
        data: As a checkpoint holds it.
        types: The dataclasses and enums that may be made again; no others are.

    Raises:
        CheckpointError: A value is of a class that is not among ``types``, or is damaged.
    """
    given = data.get("given", {}) if isinstance(data, dict) and encoding.TAG in data else {}
    try:
        entries, given = encoding.decode(data, types), encoding.decode(given, types)
    except encoding.NotData as error:
        raise CheckpointError(
            f"Hyperparameter {_dotted(error.path)!r} of the checkpoint {error.reason}"
        ) from error.__cause__
    if not isinstance(entries, dict) or not isinstance(given, dict):
        raise CheckpointError("The hyperparameters of the checkpoint are no dict: it is damaged.")
    params = HyperParameters(entries)
    params._given = given
    return params


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def types_in_annotations(cls: type) -> tuple[type, ...]:
    """Return the dataclasses and enums that annotate ``__init__`` of ``cls`` and of its bases.

    Those inside unions and containers count, and those in fields of the dataclasses. Annotations
    that cannot be resolved are passed over.
    """
    found: dict[type, None] = {}
    for base in cls.__mro__:
        init = inspect.unwrap(vars(base).get("__init__", object.__init__))
        _look_in(init, getattr(init, "__globals__", {}), found)
    return tuple(found)


def _look_in(annotated: Any, names: dict[str, Any], found: dict[type, None]) -> None:
    for annotation in getattr(annotated, "__annotations__", {}).values():
        holder = types.FunctionType((lambda: None).__code__, names)
        holder.__annotations__ = {"it": annotation}
        try:
            hint = typing.get_type_hints(holder)["it"]
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue  # imported for type checkers alone, or local to a function
        _look_at(hint, found)


def _look_at(hint: Any, found: dict[type, None]) -> None:
    for part in (typing.get_origin(hint), *typing.get_args(hint)):
        if part is not None:
            _look_at(part, found)
    if not isinstance(hint, type) or hint in found:
        return
    if issubclass(hint, Enum):
        found[hint] = None
    elif dataclasses.is_dataclass(hint):
        found[hint] = None
        for base in hint.__mro__:
            _look_in(base, getattr(sys.modules.get(base.__module__), "__dict__", {}), found)


def for_logging(params: Mapping[str, Any]) -> dict[str, float | int | str | bool]:
    """Return ``params`` as loggers take them: flat, as in ``{"model/width": 64}``, else as text."""
    flat: dict[str, float | int | str | bool] = {}
    for name, value in params.items():
        entries = _entries(value)
        if entries is None:
            flat[str(name)] = _loggable(value)
        else:
            flat |= {f"{name}/{key}": part for key, part in for_logging(entries).items()}
    return flat


def _loggable(value: Any) -> float | int | str | bool:
    if isinstance(value, Enum):
        return value.name or str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy scalar, or a tensor of one number
    if isinstance(value, (bool, int, float)):
        return value
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


class KeepsHyperparameters:
    """An object that keeps what it was made with: a Module or a DataModule."""

    _hparams: HyperParameters | None = None
    _log_hyperparams: bool = True

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: Any = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` in ``self.hparams`` and in every checkpoint.

        Args:
            *args: Names of those to keep; by default all. Or one dict, namespace or dataclass that
                holds them.
            ignore: Names of those to leave out.
            frame: Where the arguments are; by default the caller's.
            logger: Whether the loggers record them.
        """
        current = inspect.currentframe()
        frame = frame or (current.f_back if current else None)
        found = collect(frame, self, args, ignore)
        self.hparams.update(found)
        self._log_hyperparams = logger

    @property
    def hparams(self) -> HyperParameters:
        """The hyperparameters that `save_hyperparameters` kept."""
        if self._hparams is None:
            self._hparams = HyperParameters()
        return self._hparams
