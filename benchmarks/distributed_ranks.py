"""What each of the ranks that `distributed.py` starts does. Rank 0 writes what it measured as JSON.

torchrun --nproc-per-node 2 benchmarks/distributed_ranks.py {ddp,fsdp,memory,shards} FILE …
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
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

BATCH, WARM_UP = 16, 10


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


class Clock:
    """Notes time, CPU time and collectives when a step is entered, from the warm-up's end on."""

    def __init__(self, steps: int, warm_up: int = WARM_UP) -> None:
        self.count, self.steps, self.warm_up = 0, steps, warm_up
        self.marks: list[tuple[float, float, int, int]] = []

    def tick(self) -> None:
        self.count += 1
        if self.count in (self.warm_up, self.steps):
            training, control = collectives()
            self.marks.append((time.perf_counter(), time.process_time(), training, control))

    def measured(self) -> dict[str, float]:
        first, last = self.marks
        wall, cpu, training, control = (b - a for a, b in zip(first, last, strict=True))
        steps = self.steps - self.warm_up
        return {
            "step_us": wall / steps * 1e6,
            "cpu_us": cpu / steps * 1e6,
            "collectives": training / steps,
            "exchanges_per_s": control / wall,
        }


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
    """What leyden's rows train."""

    def __init__(self, width: int, steps: int, warm_up: int = WARM_UP) -> None:
        super().__init__()
        self.net, self.clock = network(width), Clock(steps, warm_up)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.tick()
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_start(self) -> None:
        controls.add(self.trainer.strategy.control)


def leyden_trainer(strategy: Any, **choices: Any) -> Trainer:
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1,
    }  # fmt: skip
    return Trainer(strategy=strategy, devices=dist.get_world_size(), **{**quiet, **choices})


def leyden(strategy: Callable[[], Any], width: int, steps: int, warm_up: int = WARM_UP) -> Clock:
    module = Net(width, steps, warm_up)
    leyden_trainer(strategy()).fit(module, DataLoader(data(width, steps), BATCH))
    return module.clock


def by_hand(
    wrap: Callable[[nn.Module], nn.Module], width: int, steps: int, warm_up: int = WARM_UP
) -> Clock:
    """The loop that one would write: a sampler for ranks, a wrapped network, three lines a step."""
    net, clock = wrap(network(width)), Clock(steps, warm_up)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    dataset = data(width, steps)
    for (x,) in DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False)):
        clock.tick()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return clock


def sharded(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh, reshard_after_forward=False)


ROWS: dict[str, dict[str, Callable[..., Clock]]] = {
    "ddp": {"leyden": partial(leyden, DDP), "by hand": partial(by_hand, DistributedDataParallel)},
    "fsdp": {"leyden": partial(leyden, FSDP), "by hand": partial(by_hand, sharded)},
}


def time_steps(kind: str, rounds: int, width: int, steps: int) -> dict[str, Any]:
    """Return each round's numbers, both ways in turn, and those of one longer run each."""
    order = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS[kind]}
    for round_ in range(rounds + 1):
        for name in order.sample(list(ROWS[kind]), 2):
            gc.collect()
            dist.barrier()
            clock = ROWS[kind][name](width, steps)
            if round_:  # the first round warms up
                found[name].append(clock.measured())
    longer = {}
    for name, run in ROWS[kind].items():
        # Exchanges begin a batch apart and are a second apart when the warm-up ends.
        longer[name] = run(width, 8 * steps, 4 * steps).measured()
    return {"rounds": found, "longer": longer}


def peak_memory(kind: str, name: str, width: int, steps: int) -> dict[str, float]:
    """Return by how many MB resident memory grew at most while a model was made and trained."""
    ROWS[kind][name](16, steps)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    ROWS[kind][name](width, steps)
    return {"growth_mb": (_resident("VmHWM") - before) / 1000}


def _resident(field: str) -> int:
    """Return a field of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 // 1000
    )


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


def shards(rounds: int, width: int, steps: int) -> dict[str, Any]:
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
        leyden_trainer(FSDP(), checkpointer="sharded", callbacks=[saving]).fit(
            Net(width, 2), DataLoader(data(width, 2), BATCH)
        )
        found["save"].append(saving.took)
        state = plain_state()
        found["dcp save"].append(seconds(lambda s=state, p=theirs: dcp.save(s[0], checkpoint_id=p)))
        found["load"].append(_until_training(width, ours) - _until_training(width, None))
        found["dcp load"].append(seconds(lambda s=state, p=theirs: _dcp_load(s, p)))
    return {"gb": state_bytes / 1e9, "seconds": found}


def _until_training(width: int, path: str | None) -> float:
    """Return how long a fit takes until its training begins, from ``path`` or from the start."""
    beginning = Beginning()
    trainer = leyden_trainer(FSDP(), checkpointer="sharded", callbacks=[beginning], max_epochs=2)
    module = Net(width, 2)
    dist.barrier()
    began = time.perf_counter()
    trainer.fit(module, DataLoader(data(width, 2), BATCH), ckpt_path=path)
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
    if what == "memory":
        kind, name, width, steps = numbers
        found = peak_memory(kind, name, int(width), int(steps))
    elif what == "shards":
        found = shards(*(int(number) for number in numbers))
    else:
        found = time_steps(what, *(int(number) for number in numbers))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
