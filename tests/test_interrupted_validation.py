"""A validation that a signal or an error has ended is held again on resume, before all else."""

import os
import signal

import pytest
import torch

from leyden import Callback, Module
from leyden.plugins import ModelCheckpoint
from leyden.testing import quiet_trainer

DATA = [torch.tensor([float(n)]) for n in range(1, 8)]


class Net(Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        loss = self.drop(self.w * batch).mean()
        self.log("train", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.w * batch.mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val"}]


class Events(Callback):
    def __init__(self, events, end_at=None, how=None):
        self.events, self.end_at, self.how = events, end_at, how

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.events.append((trainer.current_epoch, batch_idx, round(module.w.item(), 6)))

    def on_validation_batch_start(self, trainer, *_):
        if trainer.state.total_batches == self.end_at:
            self.end_at = None
            self.how()

    def on_validation_end(self, trainer, module):
        value = round(trainer.callback_metrics["val"].item(), 6)
        self.events.append((trainer.global_step, trainer.state.validations, value))

    def on_train_epoch_end(self, trainer, module):
        self.events.append(("epoch", round(trainer.callback_metrics["train_epoch"].item(), 6)))


def fitted(folder, events, ckpt_path=None, **ending):
    torch.manual_seed(3)
    saver = ModelCheckpoint(folder, monitor="val", save_top_k=-1, save_last=True)
    trainer = quiet_trainer(
        max_epochs=2,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=2,
        callbacks=[Events(events, **ending), saver],
        enable_checkpointing=True,
    )
    trainer.fit(Net(), DATA, DATA[:3], ckpt_path=ckpt_path)
    return saver


def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise RuntimeError("in the validation")


@pytest.mark.parametrize("at", [3, 6, 9, 12])  # inside a step, at its end, in the second epoch
@pytest.mark.parametrize(("how", "error"), [(interrupt, SystemExit), (fail, RuntimeError)])
def test_it_is_held_again_before_the_next_batch(tmp_path, at, how, error):
    unbroken, events = [], []
    whole = fitted(tmp_path / "a", unbroken)
    with pytest.raises(error):
        fitted(tmp_path / "b", events, end_at=at, how=how)
    resumed = fitted(tmp_path / "b", events, "auto")
    assert events == unbroken
    assert resumed.best_model_score == whole.best_model_score
    scored = [sorted(round(float(v), 6) for v in one.best_k_models.values())
              for one in (whole, resumed)]  # fmt: skip
    assert scored[0] == [value for value in scored[1] if value != float("inf")]


def test_the_last_validation_of_an_epoch_comes_before_its_end(tmp_path):
    events, unbroken = [], []
    fitted(tmp_path / "a", unbroken)
    with pytest.raises(SystemExit):
        fitted(tmp_path / "b", events, end_at=12, how=interrupt)
    assert ("epoch", unbroken[-1][1]) not in events
