"""How many processes a run has, and who starts them.

A launcher that stands outside, such as torchrun, srun or a Ray worker, has started this process
already, and its numbers count. Otherwise the first call that needs several processes starts them:
the script once more for each, or, where there is none to start, the call alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch

from . import choices, failure, outcome
from .errors import ConfigError
from .protocols import Launcher, Strategy

if TYPE_CHECKING:
    from .manager import Registry
    from .trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")


class World(NamedTuple):
    """Processes of a run."""

    devices: int | list[int]
    """How many of this machine, or which of its devices they have."""
    num_nodes: int
    launcher: Any
    """What starts them; None where they run already, or where this process is all."""

    @property
    def size(self) -> int:
        """How many there are in all."""
        return _number(self.devices) * self.num_nodes


def world(
    registry: Registry, launcher: Any, devices: Any, num_nodes: int | None, accelerator: str
) -> World:
    """Return the processes that a Trainer's choices and the environment agree on.

    Args:
        registry: Where launchers are looked up.
        launcher: ``"auto"``, a registered name, or a launcher.
        devices: How many on each machine, or which; ``"auto"`` for what was started, or one, and
            -1 for all there are.
        num_nodes: Machines; None for what was started, or one.
        accelerator: The type of device.

    Raises:
        ConfigError: They contradict one another.
    """
    failure.end_with_launcher()
    if launcher == "auto":
        known = [registry.make("launcher", name) for name in registry.listed("launcher")]
    else:
        known = [registry.resolved("launcher", launcher, Launcher)]
    given = None if devices in ("auto", None) else choices.device_count(_all(devices, accelerator))
    if (is_started() or any(one.joins() for one in known)) and (size := _started()) is not None:
        return _of_launcher(given, num_nodes, *size)
    here, nodes = 1 if given is None else given, num_nodes or 1
    if _number(here) * nodes == 1:
        return World(here, nodes, None)
    starters = [one for one in known if one.max_nodes >= nodes]
    if not starters:
        raise ConfigError(
            f"num_nodes={num_nodes} asks for several machines, and no launcher has started this "
            f"process. On each of them run: torchrun --nnodes={nodes} --nproc-per-node="
            f"{_number(here)} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 {_script()}, or start "
            "it with srun, one task for each device."
        )
    return World(here, nodes, starters[0])


def is_started() -> bool:
    """Return whether a launcher has started this process, or joined it with others."""
    return ("WORLD_SIZE" in os.environ and "RANK" in os.environ) or _is_initialised()


def _is_initialised() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _started() -> tuple[int, int]:
    """Return how many processes there are on this machine, and in all."""
    if _is_initialised():
        size = torch.distributed.get_world_size()
    else:
        size = int(os.environ["WORLD_SIZE"])
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)), size


def _of_launcher(
    given: int | list[int] | None, num_nodes: int | None, here: int, size: int
) -> World:
    nodes = num_nodes or max(1, size // here)
    devices = size // nodes if given is None else given
    if _number(devices) * nodes != size:
        asked = f"devices={given!r} on num_nodes={nodes}"
        if given is None:
            asked = f"num_nodes={nodes}"
        raise ConfigError(
            f"{asked} contradicts the launcher, which has started {size} processes, {here} of them "
            f"on this machine (WORLD_SIZE={size}, LOCAL_WORLD_SIZE={here}). Make them agree, or "
            "leave devices and num_nodes out: the launcher's numbers are taken then."
        )
    return World(devices, nodes, None)


def _all(devices: Any, accelerator: str) -> Any:
    if devices not in (-1, "-1"):
        return devices
    return torch.cuda.device_count() if accelerator == "cuda" else 1


def _number(devices: int | list[int]) -> int:
    return devices if isinstance(devices, int) else len(devices)


def _script() -> str:
    return " ".join(sys.orig_argv[1:]) or "train.py"


def on_every_rank(
    method: Callable[Concatenate[Trainer, P], T],
) -> Callable[Concatenate[Trainer, P], T]:
    """Decorate a Trainer's method: it runs on every rank, which are started if need be."""

    @functools.wraps(method)
    def run(trainer: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if trainer.launcher is not None and not is_started() and _spans_processes(trainer):
            return cast(T, _launched(trainer, method, args, kwargs))
        try:
            return method(trainer, *args, **kwargs)
        except Exception as error:
            failure.tell(error)
            raise

    return run


def _spans_processes(trainer: Trainer) -> bool:
    strategy = trainer.registry.resolved("strategy", trainer.strategy_choice, Strategy)
    return bool(strategy.spans_processes)


def _launched(trainer: Trainer, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Start the ranks; a script is left with their exit code, anything else gets the outcome."""
    if trainer.is_running:
        return method(trainer, *args, **kwargs)  # which says that runs do not nest
    count = _number(trainer.devices)
    if is_script():
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(trainer.launcher.launch(None, count))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "CUDA has been used in this process, and processes forked from it could not use it. "
            "Restart the kernel and let fit be the first to touch a device, or run a script."
        )
    packed = trainer.launcher.launch(
        functools.partial(outcome.of_call, trainer, method, args, kwargs), count
    )
    return outcome.taken_over(packed, trainer, args, kwargs)


def is_script() -> bool:
    """Return whether this process runs a file from its first line, so that others can too."""
    main = sys.modules.get("__main__")
    multiprocessing = sys.modules.get("multiprocessing")
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return (
        getattr(main, "__file__", None) is not None
        and not is_child
        and not hasattr(sys, "ps1")
        and "ipykernel" not in sys.modules
        and "PYTEST_CURRENT_TEST" not in os.environ
        and "-c" not in sys.orig_argv[1:2]
    )
