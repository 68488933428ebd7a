"""The same work done by other libraries, where they are installed."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable

import torch
from screen import terminal
from torch import nn
from workload import STEPS, Clock, loader, network


def lightning(values: int, **choices) -> float:
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss, self.clock = network(), nn.CrossEntropyLoss(), Clock()

        def training_step(self, batch, batch_idx):
            self.clock.tick()
            x, y = batch
            loss = self.loss(self.net(x), y)
            for i in range(values):
                self.log(f"train/value_{i}", loss, prog_bar=i == 0)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Lit()
    with tempfile.TemporaryDirectory() as folder, terminal():
        trainer = pl.Trainer(
            max_epochs=1,
            default_root_dir=folder,
            accelerator="cpu",
            enable_model_summary=False,
            **choices,
        )
        trainer.fit(module, loader(STEPS))
    return module.clock.per_step()


def fabric() -> float:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net, loss_of, clock = network(), nn.CrossEntropyLoss(), Clock()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for x, y in fabric.setup_dataloaders(loader(STEPS)):
        clock.tick()
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        fabric.backward(loss)
        optimizer.step()
    return clock.per_step()


def accelerate() -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, loss_of, clock = network(), nn.CrossEntropyLoss(), Clock()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, data = accelerator.prepare(net, optimizer, loader(STEPS))
    for x, y in data:
        clock.tick()
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
    return clock.per_step()


def installed() -> dict[str, Callable[[], float]]:
    """Return the rows of those libraries that are there."""
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    rows: dict[str, dict[str, Callable[[], float]]] = {
        "pytorch_lightning": {
            "pytorch-lightning, nothing attached": lambda: lightning(0, **off),
            "pytorch-lightning, defaults, 1 value": lambda: lightning(1),
        },
        "lightning_fabric": {"lightning-fabric": fabric},
        "accelerate": {"accelerate": accelerate},
    }
    found = {}
    for package, functions in rows.items():
        if importlib.util.find_spec(package) is not None:
            found |= functions
    return found
