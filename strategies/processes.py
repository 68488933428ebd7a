"""Several processes: how they find each other, and what they tell each other."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous
from torch.nn.utils import clip_grad_norm_

from leyden.errors import ConfigError
from leyden.failure import is_consequence
from leyden.hookspecs import hookimpl
from leyden.rank_zero import rank_zero_info

from .batch_norm import synchronize
from .flight_recorder import FlightRecorder
from .roll_call import RollCall, roll_call

if TYPE_CHECKING:
    from leyden.trainer import Trainer

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
HEAD_START = 30.0
"""Seconds that a rank has to tell who is missing before NCCL's watchdog aborts it."""
OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Processes:
    """Joins the processes of a run. What they share of values, decisions and files goes here.

    Gradients and metrics travel on ``group``, the training group; plain values and decisions on
    ``control``, a gloo group of their own that waits for no device.

    Args:
        timeout: Seconds that a rank waits for the others in a step, before it is an error.
        first_timeout: The same until the first steps are done: compiling and first batches take
            long.
        backend: ``torch.distributed``'s backend; by default ``"nccl"`` on CUDA, else ``"gloo"``.
        flight_recorder: Write the last collectives of each rank into the run's folder when ranks
            wait in vain: True for 2000 of them, or how many.
    """

    spans_processes = True
    is_lockstep = False

    def __init__(
        self,
        timeout: float = 300.0,
        first_timeout: float = 1800.0,
        backend: str | None = None,
        flight_recorder: bool | int = False,
    ) -> None:
        for name, value in (("timeout", timeout), ("first_timeout", first_timeout)):
            if not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"{name}={value!r} must be seconds, more than 0.")
        self.timeout, self.first_timeout = float(timeout), max(float(timeout), float(first_timeout))
        self.backend = backend
        self.device = torch.device("cpu")
        self.rank = self.local_rank = self.data_rank = 0
        self.world_size = self.data_world_size = 1
        self.group: Any = None
        self.control: Any = None
        self.flight_recorder = None
        if flight_recorder is not False:
            self.flight_recorder = FlightRecorder(flight_recorder)
        self._roll_call: RollCall | None = None
        self._exchanges = 0
        self._is_short = False
        self._is_by_itself = False

    def connect(self, accelerator: str, devices: int | list[int], num_nodes: int) -> None:
        if accelerator not in BACKENDS:
            raise ConfigError(
                f"{type(self).__name__} runs on 'cpu' and 'cuda', not on {accelerator!r}. Pass "
                "accelerator='cpu', or strategy='single_device'."
            )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu")
        if accelerator == "cuda":
            self.device = torch.device("cuda", self._device_index(devices))
            torch.cuda.set_device(self.device)
        if self.flight_recorder is not None:
            self.flight_recorder.begin()
        if not dist.is_initialized():
            self._join(self.backend or BACKENDS[accelerator])
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._check_number(devices, num_nodes)
        self.data_rank, self.data_world_size = self.rank, self.world_size
        self.group = dist.group.WORLD
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.first_timeout))
        self._exchanges, self._is_short = 0, False
        if self.world_size > 1:
            store = distributed_c10d._get_default_store()
            name = self.control.group_name
            self._roll_call = roll_call(store, name, self.rank, self.world_size)

    @hookimpl
    def setup(self, trainer: Trainer) -> None:
        """Say where the flight recorder's files go."""
        if self.flight_recorder is not None:
            folder = self.broadcast(str(trainer.run_dir) if self.rank == 0 else None)
            path = self.flight_recorder.write_to(folder)
            rank_zero_info("The flight recorder of each rank is written to %s<rank>", path)

    @hookimpl(tryfirst=True)
    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Find out whose fault it is."""
        if self._roll_call is None or not isinstance(exception, Exception):
            return
        if self.flight_recorder is not None and is_consequence(exception):
            self.flight_recorder.dump(self.rank, dist.get_backend(self.group))
        self._roll_call.report(exception, lambda: trainer.interrupted)

    def _device_index(self, devices: int | list[int]) -> int:
        indices = list(range(devices)) if isinstance(devices, int) else devices
        if self.local_rank >= len(indices):
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank} finds no device among devices={devices!r}. Start as "
                "many processes on a machine as it has devices to train on."
            )
        return indices[self.local_rank]

    def _join(self, backend: str) -> None:
        timeout = timedelta(seconds=self.first_timeout)
        device_id = self.device if self.device.type == "cuda" else None
        if "RANK" in os.environ:
            dist.init_process_group(
                backend, timeout=timeout, device_id=device_id, **_place_of_restart(timeout)
            )
            # It lasts as long as the process: a launcher's store knows a first group's keys only.
            atexit.register(leave)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
            self._is_by_itself = True

    def _check_number(self, devices: int | list[int], num_nodes: int) -> None:
        each = devices if isinstance(devices, int) else len(devices)
        if each * num_nodes != self.world_size:
            raise ConfigError(
                f"devices={devices!r} on num_nodes={num_nodes} are {each * num_nodes} processes, "
                f"and {self.world_size} have been started. Make them agree, or leave both out: the "
                "launcher's numbers are taken then."
            )

    def creating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def parallelize(self, module: nn.Module) -> None:
        """Every rank has every layer."""

    def sync_batchnorm(self, module: nn.Module) -> None:
        synchronize(module, self.group, self.device)

    def share_gradients(self) -> None:
        """They are in ``grad``."""

    def prepare_backward(self, loss: Tensor) -> None:
        """Every backward is alike."""

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def reduce(self, value: Tensor, op: str) -> Tensor:
        is_mean = op == "mean"
        reduced = value.detach().to(self.device, copy=True)
        if is_mean and not reduced.is_floating_point():
            reduced = reduced.to(torch.get_default_dtype())
        dist.all_reduce(reduced, OPS["sum" if is_mean else op], group=self.group)
        return reduced / self.data_world_size if is_mean else reduced

    def all_gather(self, value: Tensor, sync_grads: bool = False) -> Tensor:
        value = value.to(self.device).contiguous()
        if sync_grads:
            return _Gathered.apply(value, self.group)  # type: ignore[no-any-return, no-untyped-call]
        return _gathered(value.detach(), self.group)

    def broadcast(self, value: Any) -> Any:
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self.control)
        return holder[0]

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def exchange(self, numbers: Tensor) -> Tensor:
        numbers = numbers.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        if self._is_short:
            options.timeout = timedelta(seconds=self.timeout)
        self.control.allreduce([numbers], options).wait()
        self._exchanges += 1
        if self._exchanges == 6:  # so the first steps are done
            self._shorten()
        return numbers

    def _shorten(self) -> None:
        """Wait for others no longer than a step may take."""
        if self.timeout < self.first_timeout:
            self._is_short = True
            is_nccl = "nccl" in dist.get_backend(self.group)
            self._set_timeout(self.timeout + HEAD_START * is_nccl)

    def _set_timeout(self, seconds: float) -> None:
        """Let the collectives of a step wait ``seconds`` at most."""
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self.group)

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def close(self) -> None:
        control, self.control, self.group = self.control, None, None
        if self._roll_call is not None:
            self._roll_call.close()
            self._roll_call = None
        if self._is_by_itself:
            self._is_by_itself = False
            leave()
        elif sys.exc_info()[0] is not None:
            # Others may be gone, and to take leave of them could wait for ever.
            atexit.unregister(leave)
        elif control is not None and dist.is_initialized():
            dist.destroy_process_group(control)


def _gathered(value: Tensor, group: Any) -> Tensor:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value, group=group)
    return torch.stack(gathered)


class _Gathered(torch.autograd.Function):
    """A gather whose gradients flow back: each rank gets the sum of what all made of its value."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any) -> Tensor:
        context.group = group
        return _gathered(value, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # others may hold it
        dist.all_reduce(total, group=context.group)
        return total[dist.get_rank(context.group)], None


def _place_of_restart(timeout: timedelta) -> dict[str, Any]:
    """Return where ranks that torchrun has started again on one machine find each other.

    Its store is the one of the attempt before, and may still name ranks that are gone. On several
    machines the count of restarts is not the same for all.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    return {
        "store": dist.PrefixStore(f"attempt_{attempt}", store),  # type: ignore[attr-defined]
        "rank": rank,
        "world_size": world_size,
    }


def leave() -> None:
    """End the process group at the end of the process, which torch asks for."""
    if dist.is_initialized():
        dist.destroy_process_group()
