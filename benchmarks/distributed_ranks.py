"""What each of the ranks that `distributed.py` starts does. Rank 0 writes what it measured as JSON.

torchrun --nproc-per-node 2 benchmarks/distributed_ranks.py {ddp,fsdp,memory,shards} FILE …
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from leyden import Callback, Module, Trainer
from leyden.strategies import DDP, FSDP

BATCH, WARM_UP = 16, 100


class Block(nn.Module):
    """Normalises, widens, narrows and adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(4)))


def data(width: int, steps: int) -> TensorDataset:
    """Return as many samples as the ranks see in ``steps``: rows of one tensor, over and over."""
    return TensorDataset(torch.ones(1, width).expand(steps * BATCH * dist.get_world_size(), width))


def collectives() -> tuple[int, int]:
    """Return how many collectives this process has begun for training, and on control groups.

    Each group counts its own, those that DDP and FSDP begin in C++ too.
    """
    counts = {group: _begun(group) for group in dist.distributed_c10d._world.pg_map}
    control = sum(n for group, n in counts.items() if group in controls)
    return sum(counts.values()) - control, control


def _begun(group: Any) -> int:
    return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())


controls: set[Any] = set()
"""Control groups of the runs so far."""


class Net(Module):
    """What leyden trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = network(width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_start(self) -> None:
        controls.add(self.trainer.strategy.control)


def leyden(strategy: Any, width: int, steps: int, **choices: Any) -> None:
    """Train by leyden."""
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1,
    }  # fmt: skip
    resumed = choices.pop("ckpt_path", None)
    trainer = Trainer(strategy=strategy, devices=dist.get_world_size(), **{**quiet, **choices})
    trainer.fit(Net(width), DataLoader(data(width, steps), BATCH), ckpt_path=resumed)


def by_hand(wrap: Callable[[nn.Module], nn.Module], width: int, steps: int) -> Iterator[None]:
    """Train by the loop that one would write, a step each time that the next is asked for."""
    net = wrap(network(width))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    dataset = data(width, steps)
    for (x,) in DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False)):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        yield


def sharded(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh, reshard_after_forward=False)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], nn.Module]]] = {
    "ddp": (DDP, DistributedDataParallel),
    "fsdp": (FSDP, sharded),
}


class Alternating(Callback):
    """Lets the loop by hand do a step after each of leyden's, and notes what each took.

    What lies between two steps by hand is leyden's: data, hooks and exchanges are in it.
    """

    def __init__(self, by_hand: Iterator[None]) -> None:
        self.by_hand = by_hand
        self.marks: list[tuple[float, float, int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._mark()
        next(self.by_hand)
        self._mark()

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time(), *collectives()))


def time_steps(kind: str, width: int, steps: int) -> dict[str, Any]:
    """Return for each step of both ways: seconds, CPU seconds, collectives and exchanges."""
    strategy, wrap = KINDS[kind]
    alternating = Alternating(by_hand(wrap, width, steps))
    leyden(strategy(), width, steps, callbacks=[alternating])
    marks = torch.tensor(alternating.marks, dtype=torch.float64)
    took = marks.diff(dim=0)[2 * WARM_UP - 1 :]  # a step of leyden's comes first
    return {"leyden": took[0::2].tolist(), "by hand": took[1::2].tolist()}


def peak_memory(kind: str, width: int, steps: int) -> dict[str, float]:
    """Return how many MB of tensors there were at most while a model was made and trained."""
    strategy, wrap = KINDS[kind]
    ways: dict[str, Callable[[int], Any]] = {
        "leyden": lambda size: leyden(strategy(), size, steps),
        "by hand": lambda size: list(by_hand(wrap, size, steps)),
    }
    found = {}
    for name, run in ways.items():
        run(16)
        gc.collect()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            run(width)
        events = profile.profiler.kineto_results.events()
        sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        held = torch.tensor([size for _, size in sorted(sizes)]).cumsum(0)
        found[name] = held.max().item() / 1e6
    return found


class Saving(Callback):
    """Saves at the end of training, and notes when that began."""

    def __init__(self, path: str) -> None:
        self.path, self.took = path, 0.0

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self.took = seconds(lambda: trainer.save_checkpoint(self.path))


class Beginning(Callback):
    """Notes when training begins."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        dist.barrier()
        self.at = time.perf_counter()


def shards(rounds: int, width: int) -> dict[str, Any]:
    """Return GB, and seconds of saves and loads of a sharded state, both ways in turn."""
    holder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder)
    folder = Path(str(holder[0]))
    plain_state = _plain_state(width)
    state_bytes = 3 * 4 * sum(p.numel() for p in network(width).parameters())
    found: dict[str, list[float]] = {"save": [], "dcp save": [], "load": [], "dcp load": []}
    for round_ in range(rounds):
        ours, theirs = str(folder / f"{round_}.sharded"), str(folder / f"{round_}.dcp")
        saving = Saving(ours)
        leyden(FSDP(), width, 2, checkpointer="sharded", callbacks=[saving])
        found["save"].append(saving.took)
        state = plain_state()
        found["dcp save"].append(seconds(lambda s=state, p=theirs: dcp.save(s[0], checkpoint_id=p)))
        found["load"].append(_until_training(width, ours) - _until_training(width, None))
        found["dcp load"].append(seconds(lambda s=state, p=theirs: _dcp_load(s, p)))
    return {"gb": state_bytes / 1e9, "seconds": found}


def _until_training(width: int, path: str | None) -> float:
    """Return how long a fit takes until its training begins, from ``path`` or from the start."""
    beginning = Beginning()
    dist.barrier()
    began = time.perf_counter()
    leyden(
        FSDP(), width, 2, max_epochs=2, ckpt_path=path, checkpointer="sharded",
        callbacks=[beginning],
    )  # fmt: skip
    return beginning.at - began


def _plain_state(width: int) -> Callable[[], tuple[dict[str, Any], nn.Module, Any]]:
    net = sharded(network(width))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net(torch.ones(BATCH, width)).square().mean().backward()
    optimizer.step()

    def state() -> tuple[dict[str, Any], nn.Module, Any]:
        weights, moments = get_state_dict(net, optimizer)
        return {"model": weights, "optimizer": moments}, net, optimizer

    return state


def _dcp_load(state: tuple[dict[str, Any], nn.Module, Any], path: str) -> None:
    held, net, optimizer = state
    dcp.load(held, checkpoint_id=path)
    set_state_dict(
        net, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )


def seconds(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes until every rank is done."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def main(what: str, file: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("leyden").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    sizes = [int(number) for number in numbers]
    if what == "memory":
        found = peak_memory("fsdp", *sizes)
    elif what == "shards":
        found = shards(*sizes)
    else:
        found = time_steps(what, *sizes)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
