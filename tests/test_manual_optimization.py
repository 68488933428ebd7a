"""Manual optimization: the Module steps its optimizers itself, and the run counts what it did."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from leyden import Callback, ConfigError, Module, ModuleError, NonFiniteLossError, Trainer
from leyden.plugins import MixedPrecision
from leyden.strategies.single_device import SingleDevice

pytestmark = pytest.mark.filterwarnings("ignore:The loss became NaN or infinite")


class Two(Module):
    """Two scalars with an optimizer each; ``steps`` says what a batch does with them."""

    automatic_optimization = False

    def __init__(self, steps=None):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.steps = steps

    def training_step(self, batch, batch_idx):
        return self.steps(self, batch, batch_idx)

    def configure_optimizers(self):
        return SGD([self.a], lr=0.1), SGD([self.b], lr=0.1)


class One(Two):
    """One scalar w with SGD at rate 1."""

    def __init__(self, steps=None):
        super().__init__(steps)
        self.a = self.b = None
        self.w = nn.Parameter(torch.ones(()))

    def configure_optimizers(self):
        return SGD([self.w], lr=1.0)


def fitted(module, batches=1, data=None, ckpt_path=None, **options):
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data or [torch.ones(1)] * batches, ckpt_path=ckpt_path)
    return trainer


class Adversarial(Module):
    """Generator and discriminator with an optimizer and a schedule each."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with first.toggle_model():
            loss = -self.discriminator(self.generator(batch)).mean()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.5)
            first.step()
            first.zero_grad()
        self.toggle_optimizer(second)
        fake = self.discriminator(self.generator(batch).detach())
        loss = F.softplus(fake).mean() + F.softplus(-self.discriminator(batch)).mean()
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        optimizers = [
            Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)
        ]
        return optimizers, [StepLR(optimizer, 1, 0.9) for optimizer in optimizers]


def adversarial_by_hand(module, data, epochs, dtype=None):
    """Write out what ``fit`` does with an Adversarial; ``dtype`` is that of autocast."""
    (first, second), schedules = module.configure_optimizers()

    def cast():
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    for _ in range(epochs):
        for batch in data:
            with cast():
                loss = -module.discriminator(module.generator(batch)).mean()
            module.discriminator.requires_grad_(False)
            loss.backward()
            module.discriminator.requires_grad_(True)
            clip_grad_norm_(module.generator.parameters(), 0.5)
            first.step()
            first.zero_grad(), second.zero_grad()
            with cast():
                fake = module.discriminator(module.generator(batch).detach())
                loss = F.softplus(fake).mean() + F.softplus(-module.discriminator(batch)).mean()
            loss.backward()
            second.step()
            second.zero_grad()
            for schedule in schedules:
                schedule.step()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", None), ("bf16-mixed", torch.bfloat16)]
)
def test_two_networks_in_turn_equal_a_loop_written_by_hand(precision, dtype):
    torch.manual_seed(3)
    data = [torch.randn(6, 4) for _ in range(5)]
    module = Adversarial()
    expected = copy.deepcopy(module)
    torch.manual_seed(4)
    adversarial_by_hand(expected, data, 2, dtype)
    torch.manual_seed(4)
    trainer = fitted(module, data=data, max_epochs=2, precision=precision)
    for mine, yours in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, yours)
    assert (trainer.global_step, trainer.state.optimizer_steps) == (10, [10, 10])


def test_optimizers_and_schedules_are_given_alone_or_as_lists():
    seen = []

    def steps(module, batch, batch_idx):
        seen.append((module.optimizers(), module.lr_schedulers()))
        seen.append(module.optimizers(use_pl_optimizer=False))

    trainer = fitted(One(steps))
    assert isinstance(seen[0][0], SGD)
    assert seen[0][1] is None
    assert seen[1] is trainer.optimizers[0]
    trainer = fitted(Two(steps))
    assert [type(one) for one in seen[3]] == [SGD, SGD]
    assert [one.optimizer for one in seen[2][0]] == seen[3] == trainer.optimizers
    module = Adversarial()
    fitted(module, data=[torch.ones(1, 4)])
    assert [type(one) for one in module.lr_schedulers()] == [StepLR, StepLR]


def test_several_optimizers_are_one_step_and_each_keeps_its_own_count():
    def steps(module, batch, batch_idx):
        one, two = module.optimizers()
        for optimizer, every in ((one, 1), (two, 3)):
            if batch_idx % every == 0:
                optimizer.zero_grad()
                module.manual_backward(module.a * module.b)
                optimizer.step()

    trainer = fitted(Two(steps), 6)
    assert (trainer.global_step, trainer.state.optimizer_steps) == (6, [6, 2])


def test_an_iteration_that_steps_nothing_is_no_step():
    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * batch.sum())
        if batch_idx % 2:
            module.optimizers().step()
            module.optimizers().zero_grad()

    module = One(steps)
    trainer = fitted(module, 20, max_steps=3, max_epochs=None)
    assert (trainer.global_step, trainer.state.total_batches) == (3, 6)
    assert (module.w.item(), trainer.state.skipped) == (1 - 6.0, 0)


def test_each_optimizers_count_goes_on_after_a_resume(tmp_path):
    def steps(module, batch, batch_idx):
        for optimizer in module.optimizers()[: 1 + batch_idx % 2]:
            module.manual_backward(module.a * module.b)
            optimizer.step()

    trainer = fitted(Two(steps), 5)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = fitted(Two(steps), 5, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert (trainer.global_step, trainer.state.optimizer_steps) == (10, [10, 4])


def test_manual_backward_passes_its_arguments_on():
    def steps(module, batch, batch_idx):
        loss = module.w * batch
        module.manual_backward(loss, torch.full((1,), 2.0), retain_graph=True)
        module.manual_backward(loss, gradient=torch.full((1,), 3.0))
        module.optimizers().step()

    module = One(steps)
    fitted(module)
    assert module.w.item() == 1 - 5.0


def test_toggling_leaves_gradients_to_one_optimizer_and_restores_what_was():
    seen = []

    def steps(module, batch, batch_idx):
        one, two = module.optimizers()
        module.toggle_optimizer(one)
        seen.append((module.a.requires_grad, module.b.requires_grad))
        module.toggle_optimizer(two)
        seen.append((module.a.requires_grad, module.b.requires_grad))
        module.untoggle_optimizer(two)
        with pytest.raises(KeyError), one.toggle_model(sync_grad=False):
            raise KeyError
        seen.append((module.a.requires_grad, module.b.requires_grad))
        module.b.requires_grad_(False)
        with two.toggle_model(), one.toggle_model():
            pass
        seen.append((module.a.requires_grad, module.b.requires_grad))

    fitted(Two(steps))
    assert seen == [(True, False), (False, True), (True, True), (True, False)]


def test_parameters_that_two_optimizers_share_stay_toggled_on():
    seen = []

    class Sharing(Two):
        def configure_optimizers(self):
            return SGD([self.a], lr=0.1), SGD([self.a, self.b], lr=0.1)

    def steps(module, batch, batch_idx):
        for optimizer in module.optimizers():
            with optimizer.toggle_model():
                seen.append((module.a.requires_grad, module.b.requires_grad))

    fitted(Sharing(steps))
    assert seen == [(True, False), (True, True)]


def test_no_sync_and_toggling_tell_the_strategy_what_to_exchange():
    told = []

    class Told(SingleDevice):
        def sync_gradients(self, enabled):
            told.append(enabled)

    def steps(module, batch, batch_idx):
        told.clear()
        with module.no_sync():
            told.append("no_sync")
        with module.optimizers().toggle_model(sync_grad=False):
            told.append("toggled")

    fitted(One(steps), strategy=Told())
    assert told == [False, "no_sync", True, False, "toggled", True]


def test_gradients_are_clipped_at_their_true_size_in_16_mixed():
    norms = []

    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * 3.0)
        scaled = module.w.grad.item()
        module.clip_gradients(module.optimizers(), 0.5)
        norms.extend((scaled, module.w.grad.item()))
        module.optimizers().step()

    module = One(steps)
    precision = MixedPrecision(torch.float16, GradScaler("cpu", init_scale=4.0))
    fitted(module, precision=precision)
    assert norms == [12.0, pytest.approx(0.5)]
    assert module.w.item() == pytest.approx(0.5)


def test_a_step_that_the_scaler_skips_is_counted_as_skipped():
    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * (math.inf if batch_idx == 1 else 0.25))
        module.optimizers().step()
        module.optimizers().zero_grad()

    module = One(steps)
    state = fitted(module, 3, precision="16-mixed").state
    assert (state.step, state.skipped, state.optimizer_steps) == (2, 1, [2])
    assert module.w.item() == 0.5


def test_hooks_are_told_of_each_backward_and_step():
    told = []

    class Watch(Callback):
        def on_before_backward(self, trainer, module, loss):
            told.append(f"loss {loss.item():g}")

        def on_after_backward(self, trainer, module):
            told.append(f"gradient {module.w.grad.item():g}")

        def on_before_optimizer_step(self, trainer, module, optimizer):
            assert optimizer is trainer.optimizers[0]
            told.append("step")

        def on_before_zero_grad(self, trainer, module, optimizer):
            told.append("never: the loop zeroes nothing here")

    def steps(module, batch, batch_idx):
        for factor in (2.0, 3.0):
            module.manual_backward(module.w * factor)
        module.optimizers().step()

    fitted(One(steps), callbacks=Watch())
    assert told == ["loss 2", "gradient 2", "loss 3", "gradient 5", "step"]


def test_hooks_see_gradients_of_a_step_by_hand_at_their_true_size():
    seen = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(module.w.grad.item())

    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * 3.0)
        module.optimizers().step()

    precision = MixedPrecision(torch.float16, GradScaler("cpu", init_scale=4.0))
    fitted(One(steps), callbacks=Watch(), precision=precision)
    assert seen == [3.0]


def test_the_optimizer_of_the_loop_is_one_in_every_other_way():
    def steps(module, batch, batch_idx):
        optimizer = module.optimizers()
        inner = optimizer.optimizer
        assert isinstance(optimizer, SGD) and isinstance(optimizer, Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state_dict() == inner.state_dict()
        assert repr(optimizer) == repr(inner)
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.note = "mine"
        assert inner.note == "mine"
        module.manual_backward(module.w * 2.0)
        optimizer.step()

    module = One(steps)
    fitted(module)
    assert module.w.item() == 0.5


def test_a_closure_computes_the_gradients_and_step_returns_its_loss():
    returned = []

    def steps(module, batch, batch_idx):
        optimizer = module.optimizers()

        def closure():
            optimizer.zero_grad()
            module.manual_backward(loss := module.w * 2.0)
            return loss

        with torch.no_grad():
            returned.append(optimizer.step(closure).item())
        returned.append(optimizer.step())

    module = One(steps)
    trainer = fitted(module)
    assert returned == [2.0, None]
    assert (module.w.item(), trainer.state.optimizer_steps) == (1 - 4.0, [2])


def test_a_schedule_may_be_made_over_the_optimizer_of_the_loop():
    def steps(module, batch, batch_idx):
        if batch_idx == 0:
            module.schedule = StepLR(module.optimizers(), 1, 0.5)
        module.manual_backward(module.w * 1.0)
        module.optimizers().step()
        module.optimizers().zero_grad()
        module.schedule.step()

    module = One(steps)
    trainer = fitted(module, 3)
    assert (module.w.item(), trainer.global_step) == (1 - 1.75, 3)


class Bowl(Module):
    """Least squares for LBFGS, by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def closure(self, batch, optimizer, backward):
        def closure():
            optimizer.zero_grad()
            loss = (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()
            backward(loss)
            return loss

        return closure

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        return optimizer.step(self.closure(batch, optimizer, self.manual_backward))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")


@pytest.mark.parametrize("mixed", [False, True])
def test_lbfgs_by_hand_equals_torchs_own_loop(mixed):
    torch.manual_seed(1)
    data = [torch.randn(8, 3) for _ in range(3)]
    module, seen = Bowl(), []
    expected = copy.deepcopy(module)

    def backward(loss):
        loss.backward()

    optimizer, losses = expected.configure_optimizers(), []
    for batch in data:
        closure = expected.closure(batch, optimizer, backward)
        cast = torch.autocast("cpu", torch.bfloat16, enabled=mixed)
        losses.append(optimizer.step(cast(closure)))

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs)

    precision = "bf16-mixed" if mixed else "32-true"
    trainer = fitted(module, data=data, precision=precision, callbacks=Watch())
    assert torch.equal(module.layer.weight, expected.layer.weight)
    assert [loss.item() for loss in seen] == [loss.item() for loss in losses]
    assert (trainer.global_step, trainer.state.optimizer_steps) == (3, [3])


def test_losses_that_are_not_finite_are_counted():
    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * (math.nan if batch_idx == 1 else 1.0))

    assert fitted(One(steps), 3).state.nonfinite == 1


def test_a_loss_that_is_not_finite_may_stop_the_run():
    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * math.inf)

    with pytest.raises(NonFiniteLossError, match="The loss is inf at batch 0 of epoch 0"):
        fitted(One(steps), nonfinite_loss="stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 is for automatic .*less often"),
        ({"gradient_clip_val": 0.5}, r"gradient_clip_val=0\.5 is for automatic .*clip_gradients"),
        ({"nonfinite_loss": "skip"}, "nonfinite_loss='skip' is for automatic .*leave nonfinite_lo"),
    ],
)
def test_choices_for_automatic_optimization_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        fitted(One(), **options)


def test_manual_backward_is_refused_in_automatic_optimization():
    class Automatic(One):
        automatic_optimization = True

    def steps(module, batch, batch_idx):
        module.manual_backward(module.w * 1.0)

    with pytest.raises(ModuleError, match=r"manual_backward\(\) belongs to manual optimization"):
        fitted(Automatic(steps))


def test_whatever_the_step_returns_reaches_the_hook_without_its_graph():
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs)

    fitted(One(lambda module, batch, batch_idx: {"w": module.w * 2, "n": 1}), callbacks=Watch())
    assert seen == [{"w": torch.tensor(2.0), "n": 1}]
    assert not seen[0]["w"].requires_grad
