"""What a Module may take over of the optimizer step, and that its way is used."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

from leyden import Module, Trainer
from leyden.plugins import MixedPrecision


class Scalar(Module):
    """One weight from 0 whose gradient is the batch; SGD at rate 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.told = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fitted(module, batches=4, **options):
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, [torch.ones(1)] * batches)
    return trainer


class WarmsUp(Scalar):
    """The warm-up that is written into many a LightningModule."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 2) / 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_warm_up_in_optimizer_step_works_as_it_is(precision):
    module = WarmsUp()
    trainer = fitted(module, 5, precision=precision)
    assert module.w.item() == -(0.25 + 0.5 + 0.75 + 1 + 1)
    assert (trainer.global_step, trainer.state.optimizer_steps) == (5, [5])


def test_optimizer_step_is_told_where_training_is():
    class Told(Scalar):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            assert isinstance(optimizer, torch.optim.SGD)
            self.told.append((epoch, batch_idx))
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    module = Told()
    fitted(module, 3, max_epochs=2, accumulate_grad_batches=2)
    assert module.told == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert module.w.item() == -4.0


def test_an_optimizer_step_that_does_not_step_is_no_step():
    class EverySecond(Scalar):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
            return [optimizer], [schedule]

    module = EverySecond()
    trainer = fitted(module, 5)
    state = trainer.state
    assert (state.step, state.skipped, state.optimizer_steps) == (2, 3, [2])
    assert module.w.item() == -1.5
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.filterwarnings("ignore:The loss became NaN or infinite")
def test_a_step_that_the_scaler_skips_is_no_step_through_an_override_either():
    class Overflows(WarmsUp):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 0 else 1)

    module = Overflows()
    trainer = fitted(module, 3, precision="16-mixed")
    assert (trainer.global_step, trainer.state.skipped) == (2, 1)
    assert module.w.item() == -(0.5 + 0.5)


def test_backward_may_be_overridden():
    class Doubled(Scalar):
        def backward(self, loss, *args, **kwargs):
            self.told.append(loss.item())
            (2 * loss).backward(*args, **kwargs)

    module = Doubled()
    nn.init.ones_(module.w)
    scaler = GradScaler("cpu", init_scale=4.0)
    fitted(module, 1, precision=MixedPrecision(torch.float16, scaler))
    assert (module.told, module.w.item()) == ([4.0], -1.0)  # scaled, and then doubled


def test_an_overridden_backward_is_used_by_hand_too():
    class Doubled(Scalar):
        automatic_optimization = False

        def backward(self, loss):
            (2 * loss).backward()

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    module = Doubled()
    fitted(module, 1)
    assert module.w.item() == -2.0


def test_optimizer_zero_grad_may_be_overridden():
    class Keeps(Scalar):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.told.append((epoch, batch_idx, self.w.grad))
            optimizer.zero_grad(set_to_none=False)

    module = Keeps()
    fitted(module, 3)
    assert [told[:2] for told in module.told] == [(0, 0), (0, 1), (0, 2)]
    assert module.told[0][2] is None
    assert module.told[2][2] is module.w.grad
    assert module.w.item() == -3.0


def test_the_optimizers_own_zero_grad_is_used():
    class Own(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none=True):
            self.zeroed += 1
            super().zero_grad(set_to_none)

    class Net(Scalar):
        def configure_optimizers(self):
            return Own(self.parameters(), lr=1.0)

    module = Net()
    assert fitted(module, 3).optimizers[0].zeroed == 3
    assert module.w.item() == -3.0
