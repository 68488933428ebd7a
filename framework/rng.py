"""Randomness: seed every generator, keep what they would draw next, and go on from there."""

from __future__ import annotations

import hashlib
import operator
import os
import random
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import ConfigError
from .rank_zero import rank, rank_zero_info

_MAX_SEED = 2**32 - 1  # NumPy takes no larger one


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators, on every device.

    Args:
        seed: From 0 to 4294967295. None takes the environment's ``LEYDEN_SEED``, and where there is
            none, a random one.
        workers: Whether loader workers are to be seeded by `worker_init` too.
        verbose: Whether rank 0 says which seed it is.

    Returns:
        The seed. It is in the environment as ``LEYDEN_SEED`` too, for processes started later.

    Raises:
        ConfigError: The seed is no integer, or out of range.
    """
    seed = _checked(_seed_of_environment() if seed is None else seed)
    os.environ["LEYDEN_SEED"] = str(seed)
    os.environ["LEYDEN_SEED_WORKERS"] = str(int(workers))
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    if verbose:
        rank_zero_info("Seed set to %d", seed)
    return seed


def _seed_of_environment() -> object:
    text = os.environ.get("LEYDEN_SEED")
    if text is None:
        return secrets.randbits(32)
    return int(text) if text.isdecimal() else text


def _checked(seed: object) -> int:
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= _MAX_SEED:
        raise ConfigError(
            f"The seed is {seed!r}; it must be an integer from 0 to {_MAX_SEED}, "
            "or None for the one in the environment's LEYDEN_SEED or a random one."
        )
    return number


def worker_init(worker_id: int) -> None:
    """Seed a loader worker's generators from its loader's seed, its number and the rank.

    For ``DataLoader(worker_init_fn=...)``. torch alone gives the workers of all ranks the same
    seeds when the ranks themselves were seeded alike.
    """
    base_seed = torch.initial_seed() - worker_id
    mixed = hashlib.blake2b(f"{base_seed} {worker_id} {rank()}".encode(), digest_size=20).digest()
    torch.manual_seed(int.from_bytes(mixed[:8]))
    random.seed(int.from_bytes(mixed[8:16]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(mixed[16:]))


def capture() -> dict[str, Any]:
    """Return the state of every generator of this process, as plain values and tensors.

    Python's, NumPy's global one if NumPy is loaded, torch's, and those of each CUDA device and of
    MPS where in use. Generators that the user made are not among them.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _numpy_state(numpy)
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _numpy_state(numpy: Any) -> dict[str, Any]:
    state = numpy.random.get_state(legacy=False)
    return {
        **state,
        "state": {
            name: torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value
            for name, value in state["state"].items()
        },
    }


def restore(state: dict[str, Any]) -> None:
    """Set every generator to what `capture` returned, so that it draws what it would have drawn.

    A generator that ``state`` lacks, or whose device this process lacks, stays as it is.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    if "cuda" in state:
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def derived(state: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a state like ``state``, itself for index 0, that draws otherwise for each index."""
    if index == 0:
        return state
    with isolated():
        restore(state)
        reseed(state["torch"].numpy().tobytes() + str(index).encode())
        if "cuda" in state:
            torch.cuda.manual_seed_all(torch.initial_seed())
        return capture()


def _restore_numpy(state: dict[str, Any]) -> None:
    import numpy  # the run that saved this state used it, so this one will

    inner = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in state["state"].items()
    }
    numpy.random.set_state({**state, "state": inner})


@contextmanager
def isolated() -> Iterator[None]:
    """Leave every generator as it was, whatever is drawn or seeded inside."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
        if "cuda" not in state and _cuda_in_use():  # first used inside: back to its beginning
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


Snapshot = tuple[Any, torch.Tensor, dict[str, Any] | None]


def snapshot() -> Snapshot:
    """Return the state of Python's, NumPy's and torch's generators of the CPU, for `put_back`.

    Takes a third of the time of `capture`, whose values a file can hold.
    """
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy else None
    return random.getstate(), torch.default_generator.get_state(), state


def put_back(state: Snapshot) -> None:
    """Set the CPU's generators to what `snapshot` returned."""
    python, cpu, numpy = state
    random.setstate(python)
    torch.default_generator.set_state(cpu)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def reseed(key: bytes, all_of_them: bool = True) -> None:
    """Seed the CPU's generators, or torch's alone, from ``key``, of any length."""
    mixed = hashlib.blake2b(key, digest_size=32).digest()
    torch.default_generator.manual_seed(int.from_bytes(mixed[8:16]))
    if not all_of_them:
        return
    random.seed(int.from_bytes(mixed[:8]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(numpy.frombuffer(mixed[16:], numpy.uint32))


@contextmanager
def forked(key: bytes, all_of_them: bool = True) -> Iterator[None]:
    """Draw from the CPU's generators seeded from ``key`` inside, and leave them as they were.

    Args:
        key: Of any length.
        all_of_them: False for torch's alone, where nobody else draws; it takes a tenth of the time.
    """
    state = snapshot() if all_of_them else torch.default_generator.get_state()
    try:
        reseed(key, all_of_them)
        yield
    finally:
        if isinstance(state, torch.Tensor):
            torch.default_generator.set_state(state)
        else:
            put_back(state)
