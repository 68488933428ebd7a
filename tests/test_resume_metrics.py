"""What an epoch has logged so far outlives a break in its middle."""

import pytest
import torch
import torchmetrics
from torch.nn import functional as F

from leyden import Callback, Module
from leyden.testing import quiet_trainer

DATA = [(torch.tensor([float(n)] * n), torch.tensor([n % 2] * n)) for n in range(1, 8)]


class Plain:
    """A metric object of nobody's library."""

    def __init__(self):
        self.reset()

    def update(self, value):
        self.values.append(value)

    def compute(self):
        return sum(self.values) / len(self.values)

    def reset(self):
        self.values = []


class Logs(Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.unlogged = torchmetrics.MeanMetric()
        self.listed = torchmetrics.CatMetric()
        self.plain = Plain()
        self.ends = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.w * x).mean()
        self.log("mean", loss, on_epoch=True, reduce_fx=torch.mean)
        for name in ("sum", "min", "max"):
            self.log(name, x.mean(), on_step=False, on_epoch=True, reduce_fx=name)
        self.log("number", float(batch_idx), on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", 7.0, on_step=False, on_epoch=True)
        self.accuracy(torch.sigmoid(x - 4), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.unlogged.update(x)
        self.listed.update(x)
        self.plain.update(batch_idx)
        return loss

    def on_train_epoch_end(self):
        self.log("unlogged", self.unlogged.compute())
        self.log("listed", self.listed.compute().sum())
        self.log("plain", self.plain.compute())
        for metric in (self.unlogged, self.listed, self.plain):
            metric.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SaveAt(Callback):
    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_save_point(self, trainer, module, at):
        if trainer.state.batch == self.batch and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fitted(module, path=None, epochs=2, **options):
    trainer = quiet_trainer(max_epochs=epochs, **options)
    trainer.fit(module, DATA, ckpt_path=path)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("batch", range(1, 8))
def test_epoch_reductions_of_a_resumed_epoch_are_those_of_an_unbroken_one(tmp_path, batch):
    path = tmp_path / "half.ckpt"
    unbroken = fitted(Logs(), epochs=1, callbacks=SaveAt(path, batch))
    assert unbroken["sum"] == 28 and unbroken["number"] == pytest.approx(112 / 28)
    assert fitted(Logs(), path, epochs=1) == unbroken


def test_a_finished_validation_is_still_known_after_resume(tmp_path):
    class Validates(Logs):
        def validation_step(self, batch, batch_idx):
            self.log("val", batch[0].mean())

    class Reads(Callback):
        seen = None

        def on_train_batch_start(self, trainer, *_):
            self.seen = self.seen or trainer.callback_metrics.get("val")

    path, reads = tmp_path / "half.ckpt", Reads()
    trainer = quiet_trainer(max_epochs=1, val_check_interval=2, callbacks=SaveAt(path, 3))
    trainer.fit(Validates(), DATA, DATA[:2])
    again = quiet_trainer(max_epochs=1, val_check_interval=2, callbacks=reads)
    again.fit(Validates(), DATA, DATA[:2], ckpt_path=path)
    assert reads.seen.item() == pytest.approx(5 / 3)


def test_a_metric_that_is_no_data_is_left_out_with_its_name(tmp_path):
    class Odd(Plain):
        def reset(self):
            self.values, self.function = [], F.relu

    class Keeps(Logs):
        def __init__(self):
            super().__init__()
            self.plain = Odd()

    with pytest.warns(UserWarning, match=r"metric 'plain' has seen .* not in the checkpoint"):
        quiet_trainer(callbacks=SaveAt(tmp_path / "x.ckpt", 2), max_epochs=1).fit(Keeps(), DATA)
