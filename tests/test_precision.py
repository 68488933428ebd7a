"""Precisions: which dtypes compute, and what the gradient scaler does to counts and gradients."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import MixedPrecision

MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
TRUE = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


class Net(Module):
    """A layer that notes in which dtypes it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.ones_(self.layer.weight), nn.init.zeros_(self.layer.bias)
        self.register_buffer("table", torch.ones(1))
        self.seen = {}

    def training_step(self, batch, batch_idx):
        out = self.layer(batch["x"])
        self.seen["fit"] = (batch["x"].dtype, out.dtype, torch.zeros(1).dtype)
        return out.float().square().mean()

    def validation_step(self, batch, batch_idx):
        out = self.layer(batch["x"])
        self.seen["validate"] = (batch["x"].dtype, out.dtype, torch.zeros(1).dtype)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(number=5):
    return [{"x": torch.ones(2, 4), "index": torch.tensor([index])} for index in range(number)]


def fitted(module, data=None, val=None, **options):
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data or batches(), val)
    return trainer


@pytest.mark.parametrize(("name", "dtype"), TRUE.items())
def test_true_precision_has_one_dtype_for_weights_inputs_and_new_tensors(name, dtype):
    module = Net()
    fitted(module, val=batches(1), precision=name)
    assert module.seen == dict.fromkeys(("fit", "validate"), (dtype, dtype, dtype))
    assert (module.layer.weight.dtype, module.table.dtype, module.dtype) == (dtype, dtype, dtype)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("name", "dtype"), MIXED.items())
def test_mixed_precision_keeps_weights_in_float32_and_runs_layers_shorter(name, dtype):
    module = Net()
    fitted(module, val=batches(1), precision=name)
    assert module.seen == dict.fromkeys(("fit", "validate"), (torch.float32, dtype, torch.float32))
    assert module.layer.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_integers_of_a_batch_stay_integers():
    class Indexed(Net):
        def training_step(self, batch, batch_idx):
            self.seen["index"] = batch["index"].dtype
            return super().training_step(batch, batch_idx)

    module = Indexed()
    fitted(module, precision="bf16-true")
    assert module.seen["index"] == torch.int64


def test_a_step_that_raises_leaves_the_default_dtype_alone():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fitted(Broken(), precision="64-true")
    assert torch.get_default_dtype() is torch.float32


class Warming(Net):
    """A layer with a per-step warm-up, which notes each rate it was updated with."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: (step + 1) / 1000)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def overflowing(factor=2.0**-20):
    """Return 16-mixed whose first two steps overflow: 2^40 and 2^20 are infinite in float16."""
    return MixedPrecision(
        torch.float16, GradScaler("cpu", init_scale=2.0**40, backoff_factor=factor)
    )


def test_skipped_steps_advance_neither_schedule_nor_step():  # PL #5558
    module = Warming()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of the order of the two steps
        trainer = fitted(module, precision=overflowing())
    state = trainer.state
    assert (state.step, state.skipped, state.optimizer_steps) == (3, 2, [3])
    assert (state.total_batches, trainer.global_step) == (5, 3)
    assert module.rates == [0.001, 0.001, 0.001, 0.002, 0.003]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_an_epoch_whose_steps_are_all_skipped_leaves_its_schedule_alone():
    class PerEpoch(Warming):
        def configure_optimizers(self):
            (optimizer,), (config,) = super().configure_optimizers()
            return [optimizer], [config["scheduler"]]

    module = PerEpoch()
    trainer = fitted(module, batches(1), precision=overflowing(), max_epochs=4)
    assert (trainer.global_step, trainer.state.skipped) == (2, 2)
    assert module.rates == [0.001, 0.001, 0.001, 0.002]


def test_skipped_steps_do_not_count_towards_max_steps():
    trainer = fitted(Warming(), batches(9), precision=overflowing(), max_steps=3, max_epochs=None)
    assert (trainer.global_step, trainer.state.total_batches) == (3, 5)


def test_a_fused_optimizer_that_skips_is_not_counted_either():
    class Fused(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), fused=True)

    module = Fused()
    trainer = fitted(module, precision=overflowing())
    assert (trainer.global_step, trainer.state.skipped) == (3, 2)
    assert trainer.optimizers[0].state[module.layer.weight]["step"].item() == 3


def test_gradients_are_scaled_after_backward_and_true_before_the_step():
    norms = []

    class Watch(Callback):
        def on_after_backward(self, trainer, module):
            norms.append(module.layer.bias.grad.item())

        def on_before_optimizer_step(self, trainer, module, optimizer):
            norms.append(module.layer.bias.grad.item())

    precision = MixedPrecision(torch.float16, GradScaler("cpu", init_scale=4.0))
    fitted(Net(), batches(1), precision=precision, callbacks=Watch())
    assert norms == [32.0, 8.0]  # 2 · (4 + 0), times 4 and as it is


def test_16_mixed_scales_by_default_and_bf16_mixed_does_not():
    assert fitted(Net(), precision="16-mixed").precision_plugin.scaler.get_scale() > 1
    assert fitted(Net(), precision="bf16-mixed").precision_plugin.scaler is None


def test_a_scaler_that_is_switched_off_counts_every_step():
    precision = MixedPrecision(torch.float16, GradScaler("cpu", enabled=False))
    assert fitted(Net(), precision=precision).global_step == 5


def test_two_optimizers_on_one_loss_are_unscaled_alike_when_the_scale_moves_between():
    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            one.step(), two.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.1) for p in self.layer.parameters()]

    module, growing = Two(), GradScaler("cpu", init_scale=4.0, growth_interval=1)
    expected = copy.deepcopy(module.layer)
    with torch.autocast("cpu", torch.float16):
        expected(torch.ones(2, 4)).float().square().mean().backward()
    trainer = fitted(module, batches(1), precision=MixedPrecision(torch.float16, growing))
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert torch.equal(module.layer.weight, expected.weight)
    assert torch.equal(module.layer.bias, expected.bias)
    assert trainer.precision_plugin.state_dict()["scale"] == 8.0
    assert (trainer.global_step, trainer.state.optimizer_steps) == (1, [1, 1])


@pytest.mark.parametrize(("name", "dtype"), MIXED.items())
def test_a_forward_after_a_step_by_hand_sees_the_new_weights(name, dtype):
    class Twice(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                loss = super().training_step(batch, batch_idx)
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            self.losses = loss.item()

    module = Twice()
    expected = copy.deepcopy(module.layer)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            loss = expected(torch.ones(2, 4)).float().square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    scaler = GradScaler("cpu", init_scale=1.0) if dtype is torch.float16 else None
    fitted(module, batches(1), precision=MixedPrecision(dtype, scaler))
    assert module.losses == loss.item()
    assert torch.equal(module.layer.weight, expected.weight)


def test_an_optimizer_with_a_closure_is_refused_in_16_mixed():
    class Closure(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match=r"LBFGS evaluates .*precision='16-mixed'.*'bf16-mixed'"):
        fitted(Closure(), precision="16-mixed")


def test_a_dtype_that_cannot_be_mixed_is_refused():
    with pytest.raises(ConfigError, match=r"torch\.int8 cannot be mixed\. Use torch\.float16"):
        MixedPrecision(torch.int8)


def test_a_misspelt_precision_names_the_closest():
    with pytest.raises(ConfigError, match=r"'bf16mixed'.* Did you mean 'bf16-mixed'"):
        Trainer(precision="bf16mixed")
