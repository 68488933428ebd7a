"""Clipping: of complete, unscaled gradients, by norm or by value, or as the Module says."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import MixedPrecision


class Plane(Module):
    """Two weights whose gradients are the batch, 3 and -4: a norm of 5."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.clipped = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clipped.append([round(value, 4) for value in self.w.grad.tolist()])


def fitted(module, batches=1, **options):
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, [torch.tensor([3.0, -4.0])] * batches)
    return trainer


SCALED = "16-mixed with a scale of 1024"


def precision(name):
    if name == SCALED:
        return MixedPrecision(torch.float16, GradScaler("cpu", init_scale=1024.0))
    return name


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", SCALED])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3.0, -4.0]),
        ({"gradient_clip_val": 1.0}, [0.6, -0.8]),
        ({"gradient_clip_val": 10}, [3.0, -4.0]),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}, [0.6, -0.8]),
        ({"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}, [3.0, -3.5]),
    ],
)
def test_gradients_are_clipped_as_asked(options, expected, name):
    module = Plane()
    fitted(module, precision=precision(name), **options)
    assert module.clipped == [expected]


def test_hooks_see_gradients_before_they_are_clipped():
    seen = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(module.w.grad.tolist())

    fitted(Plane(), callbacks=Watch(), gradient_clip_val=1.0, precision=precision(SCALED))
    assert seen == [[3.0, -4.0]]


def test_accumulated_gradients_are_clipped_once_complete():
    module = Plane()
    fitted(module, 3, accumulate_grad_batches=2, gradient_clip_val=4.0)
    assert module.clipped == [[1.5, -2.0], [2.4, -3.2], [2.4, -3.2]]


def test_configure_gradient_clipping_may_be_overridden():
    told = []

    class Own(Plane):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            told.append((optimizer, gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val * 2)

    module = Own()
    trainer = fitted(module, gradient_clip_val=1.0, precision=precision(SCALED))
    assert module.clipped == [[1.2, -1.6]]
    assert told == [(trainer.optimizers[0], 1.0, "norm")]


def test_configure_gradient_clipping_is_called_without_a_value_too():
    class Own(Plane):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            assert gradient_clip_val is None
            self.w.grad.clamp_(max=1.0)

    module = Own()
    fitted(module)
    assert module.clipped == [[1.0, -4.0]]


def test_configure_gradient_clipping_may_call_the_default():
    class Own(Plane):
        def configure_gradient_clipping(self, *args, **kwargs):
            super().configure_gradient_clipping(*args, **kwargs)

    module = Own()
    fitted(module, gradient_clip_val=3.5, gradient_clip_algorithm="value")
    assert module.clipped == [[3.0, -3.5]]


@pytest.mark.filterwarnings("ignore:The loss became NaN or infinite")
def test_a_step_whose_gradients_overflow_is_skipped_clipped_or_not():
    class Overflowing(Plane):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 0 else 1)

    module = Overflowing()
    trainer = fitted(module, 2, gradient_clip_val=1.0, precision=precision(SCALED))
    assert (trainer.global_step, trainer.state.skipped) == (1, 1)
    assert module.w.tolist() == pytest.approx([-0.6, 0.8])


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_zero_and_none_do_not_clip(value):
    class Own(Plane):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, value)

    for module in (Plane(), Own()):
        fitted(module, gradient_clip_val=value)
        assert module.clipped == [[3.0, -4.0]]


@pytest.mark.parametrize("value", [-1.0, "much", math.nan])
def test_the_value_must_be_above_zero(value):
    with pytest.raises(ConfigError, match=r"gradient_clip_val=.* must be a number above 0"):
        Trainer(gradient_clip_val=value)


def test_the_algorithm_is_norm_or_value():
    with pytest.raises(ConfigError, match=r"gradient_clip_algorithm='nrom'.*Did you mean 'norm'"):
        Trainer(gradient_clip_algorithm="nrom")


def test_the_algorithm_is_checked_where_the_module_clips_too():
    class Own(Plane):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, 1.0, "values")

    with pytest.raises(ConfigError, match=r"gradient_clip_algorithm='values'.*'value'"):
        fitted(Own())


def test_an_optimizer_that_wraps_another_is_unscaled_once():
    class Wrapping(torch.optim.SGD):
        """Has an ``optimizer`` of its own, as lookahead has."""

        def __init__(self, parameters):
            super().__init__(parameters, lr=1.0)
            self.optimizer = torch.optim.SGD(self.param_groups, lr=1.0)

    class Net(Plane):
        def configure_optimizers(self):
            return Wrapping(self.parameters())

    module = Net()
    fitted(module, gradient_clip_val=1.0, precision=precision(SCALED))
    assert module.clipped == [[0.6, -0.8]]
