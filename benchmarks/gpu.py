"""What leyden costs on one GPU: a GPT of 350 M parameters in bf16, compiled, against a bare script.

    python benchmarks/gpu.py              on one GPU; stops by itself before four minutes are over
    python benchmarks/gpu.py --dry-run    a tiny one on the CPU, uncompiled: does it run?

Where leyden is not installed: ``pip install --no-deps --no-build-isolation .`` in the repository,
with torch 2.11 or newer, pluggy, rich, fsspec and tensorboard there.

Rows run in turn in one process, round after round and each in a fresh order; a ratio is the median
over rounds of a row's tokens a second by the bare script's of the same round. A first round
compiles and counts, with torch's sync debug mode, how often a step makes the host wait for the
device. Results are written to ``results/``, those of a dry run nowhere.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from leyden import Module, Trainer
from leyden.plugins.flops import peak_of

RESULTS = Path(__file__).parent / "results" / "gpu.md"
VOCABULARY, SECONDS = 50304, 200.0


class Sizes(NamedTuple):
    """What is trained, and for how long."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    steps: int
    warm_up: int
    rounds: int
    device: torch.device

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch * self.context


class Block(nn.Module):
    """Attention and a network of two layers, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Returns the loss of the next tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        blocks = (Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, batch: Tensor) -> Tensor:  # (B, T + 1) -> ()
        tokens, following = batch[:, :-1], batch[:, 1:]
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def network(sizes: Sizes) -> GPT:
    """Return the same network for every row, made on the device."""
    torch.manual_seed(0)
    with sizes.device:
        return GPT(sizes)


def adam(net: nn.Module, sizes: Sizes) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=sizes.device.type == "cuda")


class Batches(Dataset):
    """Four batches over and over, pinned where there is a GPU: data costs next to nothing."""

    def __init__(self, sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.batch, sizes.context + 1)
        made = [torch.randint(sizes.vocabulary, shape, generator=generator) for _ in range(4)]
        self.batches = [one.pin_memory() if sizes.device.type == "cuda" else one for one in made]
        self.length = sizes.steps

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index % 4]


class Clock:
    """Times the steps between the warm-up's last and the run's last, and counts what waits."""

    def __init__(self, sizes: Sizes, counts: bool) -> None:
        self.sizes, self.count, self.began, self.took = sizes, 0, 0.0, 0.0
        self.counts = counts and sizes.device.type == "cuda"

    def tick(self) -> None:
        """Mark that a step is entered."""
        self.count += 1
        if self.count == self.sizes.warm_up:
            self._wait()
            self.began = time.perf_counter()
            if self.counts:
                torch.cuda.set_sync_debug_mode("warn")
        elif self.count == self.sizes.steps:
            if self.counts:
                torch.cuda.set_sync_debug_mode("default")
            self._wait()
            self.took = time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.sizes.device.type == "cuda":
            torch.cuda.synchronize()


def bare(sizes: Sizes, clock: Clock) -> Tensor:
    """Train by a loop of six lines."""
    net = network(sizes)
    if sizes.device.type == "cuda":
        for block in net.blocks:
            block.compile()
    optimizer = adam(net, sizes)
    for batch in DataLoader(Batches(sizes), batch_size=None):
        clock.tick()
        batch = batch.to(sizes.device, non_blocking=True)
        with torch.autocast(sizes.device.type, torch.bfloat16):
            loss = net(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


class Net(Module):
    """What leyden trains."""

    def __init__(self, sizes: Sizes, clock: Clock) -> None:
        super().__init__()
        self.sizes, self.clock, self.net = sizes, clock, network(sizes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.tick()
        self.last = self.net(batch)
        self.log("train/loss", self.last)
        return self.last

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self, self.sizes)


def quiet(sizes: Sizes) -> dict[str, Any]:
    """Return what leyden's Trainer and Lightning's are told alike."""
    return {
        "max_epochs": 1, "precision": "bf16-mixed", "devices": 1,
        "accelerator": "gpu" if sizes.device.type == "cuda" else "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip


def leyden(sizes: Sizes, clock: Clock) -> Tensor:
    compiled = {"compile": "blocks"} if sizes.device.type == "cuda" else {}
    module = Net(sizes, clock)
    Trainer(**quiet(sizes), **compiled).fit(module, DataLoader(Batches(sizes), batch_size=None))
    return module.last


def lightning(sizes: Sizes, clock: Clock) -> Tensor:
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(sizes)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            clock.tick()
            self.last = self.net(batch)
            self.log("train/loss", self.last)
            return self.last

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self, sizes)

    module = Lit()
    if sizes.device.type == "cuda":
        for block in module.net.blocks:
            block.compile()
    pl.Trainer(**quiet(sizes)).fit(module, DataLoader(Batches(sizes), batch_size=None))
    return module.last


def rows() -> dict[str, Callable[[Sizes, Clock], Tensor]]:
    """Return what is compared, Lightning where it can be imported."""
    found: dict[str, Callable[[Sizes, Clock], Tensor]] = {"bare script": bare, "leyden": leyden}
    if importlib.util.find_spec("pytorch_lightning") is not None:
        found["pytorch-lightning"] = lightning
    return found


class Found(NamedTuple):
    """Of one run of a row."""

    tokens_per_s: float
    peak_gib: float
    syncs: float
    """Times a step that the host waited for the device; counted in the first round alone."""
    loss: float


def once(run: Callable[[Sizes, Clock], Tensor], sizes: Sizes, counts: bool) -> Found:
    """Train once from the beginning."""
    gc.collect()
    is_gpu = sizes.device.type == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(sizes, counts)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss = run(sizes, clock).item()
    waits = [one for one in told if "synchronizing" in str(one.message)]
    steps = sizes.steps - sizes.warm_up
    return Found(
        steps * sizes.tokens / clock.took,
        torch.cuda.max_memory_allocated() / 2**30 if is_gpu else 0.0,
        len(waits) / steps,
        loss,
    )


def measure(sizes: Sizes, deadline: float) -> dict[str, list[Found]]:
    """Return what each round found, the first one's syncs among it; a late round is left out."""
    ways = rows()
    found: dict[str, list[Found]] = {name: [] for name in ways}
    took = 0.0
    for round_ in range(sizes.rounds + 1):
        began = time.monotonic()
        if round_ > 1 and began + 1.2 * took > deadline:
            print(f"no time for round {round_} of {sizes.rounds}", flush=True)
            break
        for name in random.sample(list(ways), len(ways)):
            found[name].append(once(ways[name], sizes, counts=round_ == 0))
        took = time.monotonic() - began
        print(f"round {round_} of {sizes.rounds} took {took:.0f} s", flush=True)
    return found


def flops_per_token(sizes: Sizes) -> float:
    """Return the model's operations for a token, forward and backward.

    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B. Positions are left out, which
    are only looked up; tokens are the last layer's weights too.
    """
    with torch.device("meta"):
        net = GPT(sizes)
    parameters = sum(p.numel() for p in net.parameters()) - net.position.weight.numel()
    return 6 * parameters + 12 * sizes.layers * sizes.width * sizes.context


def table(found: dict[str, list[Found]], sizes: Sizes) -> str:
    """Return a line for each row; the first round is there for its syncs alone."""
    peak, each = peak_of(sizes.device), flops_per_token(sizes)
    lines = [
        "| row | tokens/s | ratio to the bare script | least to most | MFU | peak memory, GiB | "
        "host syncs a step | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        pairs = zip(runs[1:], found["bare script"][1:], strict=True)
        ratios = sorted(mine.tokens_per_s / other.tokens_per_s for mine, other in pairs)
        speed = statistics.median(run.tokens_per_s for run in runs[1:])
        mfu = f"{speed * each / peak:.3f}" if peak else "peak unknown"
        is_gpu = sizes.device.type == "cuda"
        lines.append(
            f"| {name} | {speed:.0f} | {statistics.median(ratios):.3f} | {ratios[0]:.3f} to "
            f"{ratios[-1]:.3f} | {mfu} | "
            f"{f'{runs[-1].peak_gib:.2f}' if is_gpu else 'not counted'} | "
            f"{f'{runs[0].syncs:g}' if is_gpu else 'not counted'} | {runs[-1].loss:.4f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, list[Found]]:
    """Measure, print the table, and return what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 1024 tokens")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + SECONDS
    if options.dry_run:
        sizes = Sizes(2, 16, 2, 8, 11, 2, 6, 2, 2, torch.device("cpu"))
    elif torch.cuda.is_available():
        device = torch.device("cuda", 0)
        sizes = Sizes(24, 1024, 16, 1024, VOCABULARY, options.batch, 40, 10, 5, device)
    else:
        raise SystemExit("There is no CUDA device here. Pass --dry-run for a tiny run on the CPU.")
    logging.getLogger("leyden").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    found = measure(sizes, deadline)
    name = "CPU" if options.dry_run else torch.cuda.get_device_name()
    millions = sum(p.numel() for p in network(sizes).parameters()) / 1e6
    text = (
        f"{name}, Python {platform.python_version()}, torch {torch.__version__}: {millions:.3g} M "
        f"parameters, {sizes.tokens} tokens a batch, bf16-mixed\n\n{table(found, sizes)}\n"
    )
    print(f"\n{text}")
    if not options.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(f"# One GPU\n\n{text}")
    return found


if __name__ == "__main__":
    main()
