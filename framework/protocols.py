"""What the loop asks of the parts a plugin may supply. Structural: nothing need be inherited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer


@runtime_checkable
class Strategy(Protocol):
    """Places a module on devices and keeps its copies or shards in step."""

    rank: int
    local_rank: int
    world_size: int
    data_rank: int
    """Index of this process among those that see different data."""
    data_world_size: int
    """How many parts the data is dealt in; less than all where several ranks share one."""
    spans_processes: bool
    """Whether it takes a process for each device, which a launcher starts."""
    is_lockstep: bool
    """Whether a forward takes every rank, so that all must run equally many."""
    device: torch.device

    def connect(self, accelerator: str, devices: int | list[int], num_nodes: int) -> None:
        """Choose the device of this process and join the others; before anything is placed.

        Args:
            accelerator: ``"cpu"``, ``"cuda"`` or ``"mps"``.
            devices: How many devices of this node, or which ones by index.
            num_nodes: Machines that take part.

        Raises:
            ConfigError: The strategy cannot honour what was asked for.
        """

    def creating(self) -> AbstractContextManager[Any]:
        """Return the context that ``configure_model`` runs in: the meta device where sharded."""

    def parallelize(self, module: nn.Module) -> None:
        """Split layers of ``module`` over ranks, in place, before anything wraps them."""

    def sync_batchnorm(self, module: nn.Module) -> None:
        """Let the batch norms of ``module`` see the batches of all ranks, in place.

        Raises:
            ConfigError: They cannot on this device.
        """

    def place(self, module: nn.Module, precision: Precision) -> None:
        """Move, shard or wrap ``module`` in place, its dtypes already chosen by ``precision``."""

    def prepare(self, module: nn.Module, step: str) -> Callable[..., Any]:
        """Return the callable the loop runs for ``module``'s method named ``step``."""

    def sync_gradients(self, enabled: bool) -> None:
        """Say, before a forward, whether its backward is to average gradients over ranks."""

    def share_gradients(self) -> None:
        """Bring gradients of an open step that lie elsewhere into ``grad``; every rank does."""

    def prepare_backward(self, loss: Tensor) -> None:
        """Learn, in manual optimization, which ``loss`` is differentiated next."""

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients so that their joint norm is at most ``max_norm``.

        Returns:
            The norm before, shape ``()``, the same on every rank.
        """

    def reduce(self, value: Tensor, op: Literal["sum", "mean", "min", "max"]) -> Tensor:
        """Return ``value`` combined elementwise over the data's ranks, the same on every rank."""

    def all_gather(self, value: Tensor, sync_grads: bool = False) -> Tensor:
        """Return the data ranks' values stacked: shape ``(data_world_size, *value.shape)``."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's plain ``value`` on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain ``value``, in the order of ranks, on every rank."""

    def exchange(self, numbers: Tensor) -> Tensor:
        """Return the elementwise maximum of the ranks' ``numbers``, float64 on the CPU.

        It travels apart from the gradients and waits for no device.
        """

    def barrier(self) -> None:
        """Return when every rank has arrived here."""

    def close(self) -> None:
        """Leave the other processes and free what ``connect`` took."""


@runtime_checkable
class Launcher(Protocol):
    """Starts the processes of a run, or says that they are started."""

    max_nodes: int
    """Machines that it can start processes on; 0 where it starts none."""

    def joins(self) -> bool:
        """Return whether it has started this process with others.

        Then the environment has, when it returns, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT, as torchrun sets them.
        """

    def launch(self, call: Callable[[], Any] | None, count: int) -> Any:
        """Start ``count`` processes on each machine and wait for their end.

        Args:
            call: What they run, or None for the script of this process.
            count: Processes.

        Returns:
            What ``call`` returned on each rank, in their order; for a script its exit code.

        Raises:
            RankError: A rank failed in ``call``.
        """


@runtime_checkable
class Precision(Protocol):
    """Chooses the dtypes of forward, backward and update."""

    name: str

    def connect(self, device: torch.device) -> None:
        """Learn the device before anything is converted.

        Raises:
            ConfigError: The device cannot compute in this precision.
        """

    def convert_module(self, module: nn.Module) -> None:
        """Give ``module``'s parameters and buffers their dtype, in place."""

    def convert_batch(self) -> Callable[[Any], Any] | None:
        """Return what gives a batch's tensors their dtype; None where they stay as they are."""

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as it runs in this precision; itself where nothing changes."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` as it is to be differentiated; itself where nothing is scaled."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of ``loss``, shape ``()``; extra arguments go to autograd."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients ``optimizer`` holds their true size; once or more per step."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters and return whether they were updated."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; empty where there is nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned when the checkpoint was saved."""


@runtime_checkable
class Checkpointer(Protocol):
    """Writes a checkpoint so that it is whole or absent, and reads it back.

    Every path is a local one or a URL, such as ``s3://bucket/runs/last.ckpt``, as a string.
    """

    extension: str

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write ``checkpoint`` at ``path``, replacing what was there only when complete.

        ``checkpoint["leyden"]``, a flat dict of plain values, is what `manifest` gives back.

        Raises:
            CheckpointError: It cannot be written; what was at ``path`` before is unchanged.
        """

    def load(self, path: str, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at ``path`` without running any code from it.

        Raises:
            CheckpointError: There is none, it was cut short or altered, or it holds code.
        """

    def manifest(self, path: str) -> dict[str, Any]:
        """Return what the checkpoint says of itself, without reading the rest of it.

        Raises:
            CheckpointError: There is none.
        """

    def verify(self, path: str) -> None:
        """Read all of the checkpoint at ``path``.

        Raises:
            CheckpointError: There is none, or it is not as it was written.
        """

    def exists(self, path: str) -> bool:
        """Return whether a complete checkpoint is at ``path``; looks at its ends only."""

    def find(self, folder: str) -> list[str]:
        """Return the complete checkpoints in ``folder`` and below it, the newest first."""

    def copy(self, existing: str, path: str, symbolic: bool = False) -> None:
        """Make ``path`` stand for the complete checkpoint ``existing``, as cheaply as can be.

        Args:
            existing: A checkpoint.
            path: Its other name; what was there is replaced at once.
            symbolic: Whether ``path`` is to end when ``existing`` does, where links are known.

        Raises:
            CheckpointError: It cannot be made; what was at ``path`` before is unchanged.
        """

    def remove(self, path: str) -> None:
        """Delete the checkpoint at ``path``; nothing happens if there is none."""

    def prepare(self, folder: str) -> None:
        """Make ``folder`` if need be, and clear away what killed saves have left in it.

        Raises:
            ConfigError: It cannot be made, or not be written in.
        """


@runtime_checkable
class Logger(Protocol):
    """Takes metrics and hyperparameters somewhere. Called on rank 0 only.

    ``save_dir``, ``name`` and ``version`` are what its maker asked for; None means the run's own.
    """

    save_dir: str | None
    name: str | None
    version: int | str | None

    @property
    def log_dir(self) -> str | None:
        """The folder it writes in; None before ``open``, or where there is none."""

    def open(self, folder: Path, resumed_at: int | None = None) -> None:
        """Begin to write in ``folder``, the run's own, which exists.

        Args:
            folder: Shared by all loggers of the run.
            resumed_at: The step a resumed run goes on from: what stands there for later steps is
                cut or superseded. None for a new run.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` at optimizer step ``step``."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the hyperparameters of the run: plain values, possibly nested."""

    def log_graph(self, module: nn.Module) -> None:
        """Record the structure of ``module`` where its ``example_input_array`` allows it."""

    def flush(self) -> None:
        """Make everything recorded so far readable by others."""

    def close(self, status: Literal["success", "failed", "interrupted"]) -> None:
        """Flush and let go of everything; ``open`` may follow again."""

    def state_dict(self) -> dict[str, Any]:
        """Return what finds this logger's run again on resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned; called before ``open``."""
