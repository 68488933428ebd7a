"""Memory stays flat: nothing of a step outlives it, however long the run."""

import gc
import tracemalloc
import weakref

import pytest
import torch
from torch import nn

from leyden import Callback, Module
from leyden.testing import quiet_trainer

DATA = [torch.ones(2, 3)] * 200


class Watched(Module):
    """Counts, as each batch begins, the losses, graphs and outputs of earlier steps still alive."""

    class Graph(torch.autograd.Function):
        """Says by a weak reference to what it saves whether its graph is alive."""

        @staticmethod
        def forward(context, x):
            context.saved = saved = torch.zeros(())
            Watched.saved = weakref.ref(saved)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.made, self.alive = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.alive.append(sum(ref() is not None for ref in self.made))

    on_validation_batch_start = on_train_batch_start

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.made.append(weakref.ref(outputs["extra"]))

    def training_step(self, batch, batch_idx):
        loss = self.Graph.apply(self.layer(batch).mean())
        extra = torch.zeros(10_000)
        self.made += [weakref.ref(loss), self.saved, weakref.ref(extra)]
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("of one element", loss.reshape(1))
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "extra": extra}

    def validation_step(self, batch, batch_idx):
        extra = torch.zeros(10_000)
        self.made.append(weakref.ref(extra))
        self.log("extra", extra.mean())
        return extra

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_nothing_of_a_step_is_alive_when_the_next_begins(accumulate):
    """PL #4556."""
    module = Watched()
    gc.disable()  # freed by their last reference, not by chance
    try:
        quiet_trainer(accumulate_grad_batches=accumulate).fit(module, DATA)
    finally:
        gc.enable()
    assert len(module.made) == 800
    assert set(module.alive) == {0}


def test_nothing_of_a_validation_batch_is_alive_when_the_next_begins():
    module = Watched()
    quiet_trainer().validate(module, DATA, verbose=False)
    assert set(module.alive) == {0}


def test_outputs_reach_callbacks_without_their_graph():
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((outputs["loss"].grad_fn, outputs["extra"].shape))

    quiet_trainer(callbacks=[Looks()]).fit(Watched(), DATA[:1])
    assert seen == [(None, (10_000,))]


def test_traced_memory_does_not_grow_between_steps_100_and_200():
    traced = {}

    class Traces(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.made.clear()
            if batch_idx in (100, 199):
                gc.collect()
                traced[batch_idx] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        quiet_trainer(callbacks=[Traces()]).fit(Watched(), DATA)
    finally:
        tracemalloc.stop()
    # A reference to each loss for its finiteness is kept for at most 1024 steps.
    assert traced[199] - traced[100] < 99 * 300


def test_no_batch_is_kept_after_the_run():
    class Batches:
        def __iter__(self):
            for _ in range(3):
                batch = torch.ones(2, 3)
                kept.append(weakref.ref(batch))
                yield batch

    kept = []
    trainer, module = quiet_trainer(), Watched()
    trainer.fit(module, Batches(), Batches())
    trainer.validate(module, Batches(), verbose=False)
    assert [ref() for ref in kept if ref() is not None] == []
