"""Random generators that a loader, its sampler or its data set keep for themselves."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import encoding

MAX_DEPTH = 5
MAX_PARTS = 100  # of one list or dict; a data set's own samples can be millions
MAX_OBJECTS = 2000
OPAQUE = (str, bytes, int, float, complex, Tensor, type, FunctionType, ModuleType)
SKIPPED = "_iterator"  # a loader's: made anew for each pass


def find(name: str, owner: object, seen: dict[int, Any]) -> dict[str, Any]:
    """Return the generators among ``owner``'s attributes, and those of its attributes in turn.

    Args:
        name: What ``owner`` is called in the names of those found.
        owner: Where to look.
        seen: What was looked at already, which is not looked at again; added to.
    """
    return dict(_walk(name, owner, seen, 0))


def _walk(path: str, value: Any, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, OPAQUE) or id(value) in seen or len(seen) >= MAX_OBJECTS:
        return
    seen[id(value)] = value  # kept, so that its id stays its own
    if is_generator(value):
        if value is not torch.default_generator:
            yield path, value
        return
    if depth == MAX_DEPTH:
        return
    if isinstance(value, (list, tuple)):
        parts = [(f"{path}.{index}", part) for index, part in enumerate(value[:MAX_PARTS])]
    elif isinstance(value, Mapping):
        items = value.items() if len(value) <= MAX_PARTS else ()
        parts = [(f"{path}.{key}", part) for key, part in items if isinstance(key, str)]
    else:
        attributes = getattr(value, "__dict__", {})
        parts = [(f"{path}.{key}", part) for key, part in attributes.items() if key != SKIPPED]
    for name, part in parts:
        yield from _walk(name, part, seen, depth + 1)


def is_generator(value: object) -> bool:
    """Return whether ``value`` is a random generator of Python, NumPy or torch."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def state_of(generator: Any) -> Any:
    """Return the state of one generator, unchanged by later draws."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set one generator to what `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def reseed(generator: Any, key: bytes) -> None:
    """Seed one generator from ``key``."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed([seed >> 32, seed & 0xFFFFFFFF])


def encoded(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of ``generators`` as plain data."""
    return {name: encoding.encode(state_of(one)) for name, one in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set those of ``generators`` whose state is in ``states``; new ones stay as they are."""
    for name, state in states.items():
        if name in generators:
            set_state(generators[name], encoding.decode(state))
