"""``fit`` is the loop one would write by hand: the same numbers, bit for bit."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from leyden import ConfigError, Module, ModuleError, Trainer

PRECISIONS = {
    "64-true": (torch.float64, None),
    "32-true": (torch.float32, None),
    "16-true": (torch.float16, None),
    "bf16-true": (torch.bfloat16, None),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}


def per_step(optimizer, steps):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def per_epoch(optimizer, steps):
    return ExponentialLR(optimizer, 0.5)


class Net(Module):
    """Two layers with dropout, trained by Adam and, where given, a schedule."""

    def __init__(self, schedule=None, interval="epoch"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.schedule, self.interval = schedule, interval

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self, steps=None):
        # float16 has no smaller eps than 6e-8
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, steps or self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


def loader(batches=10):
    """Return batches in a list: a DataLoader's order is leyden's own, and draws nothing."""
    x = torch.randn(batches, 2, 4, generator=torch.Generator().manual_seed(1))
    return [(one, one.sum(1, keepdim=True)) for one in x]


def trained_by_hand(module, data, dtype, autocast, window=1, clip=None, epochs=2):
    """Train ``module`` with a loop written out, and return its optimizer and scaler."""
    module.to(dtype)
    batches = len(data)
    optimizer = module.configure_optimizers(epochs * -(-batches // window))
    schedule = None
    if isinstance(optimizer, tuple):
        (optimizer,), (config,) = optimizer
        schedule = config["scheduler"]
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
    for _ in range(epochs):
        for index, (x, y) in enumerate(data):
            if index % window == 0:
                size = min(window, batches - index)
                optimizer.zero_grad()
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = module.training_step((x.to(dtype), y.to(dtype)), index)
            scaler.scale(loss / size).backward()
            if index % window == window - 1 or index == batches - 1:
                scaler.unscale_(optimizer)
                if clip is not None:
                    clip(module.parameters())
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                skipped = scaler.get_scale() < scale
                if schedule is not None and module.interval == "step" and not skipped:
                    schedule.step()
        if schedule is not None and module.interval == "epoch":
            schedule.step()
    return optimizer, scaler


def trained_by_fit(module, data, **options):
    """Train ``module`` with a Trainer, and return the Trainer."""
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data)
    return trainer


def assert_equal(one, other):
    """Compare two nested states: every tensor bit for bit, everything else by ``==``."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.isfinite().all()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_equal(mine, yours)
    else:
        assert one == other


def assert_fit_is_the_loop(precision="32-true", make=Net, window=1, clip=None, **options):
    torch.manual_seed(7)
    expected = make()
    start = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    optimizer, scaler = trained_by_hand(expected, loader(), *PRECISIONS[precision], window, clip)
    torch.manual_seed(7)
    module = make()
    trainer = trained_by_fit(module, loader(), precision=precision, **options)
    assert_equal(module.state_dict(), expected.state_dict())
    assert_equal(trainer.optimizers[0].state_dict(), optimizer.state_dict())
    assert_equal(trainer.precision_plugin.state_dict(), scaler.state_dict())
    for name, tensor in module.state_dict().items():
        assert not torch.equal(tensor, start[name].to(tensor.dtype)), f"{name} was not trained"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_equals_a_loop_written_by_hand(precision):
    assert_fit_is_the_loop(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_equals_it_with_accumulation_that_does_not_divide_the_epoch(precision):
    assert_fit_is_the_loop(precision, window=4, accumulate_grad_batches=4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_equals_it_with_clipping_by_norm(precision):
    clip = partial(clip_grad_norm_, max_norm=0.1)
    assert_fit_is_the_loop(precision, clip=clip, gradient_clip_val=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_equals_it_with_clipping_by_value(precision):
    clip = partial(clip_grad_value_, clip_value=0.1)
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    assert_fit_is_the_loop(precision, clip=clip, **options)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize(("schedule", "interval"), [(per_step, "step"), (per_epoch, "epoch")])
def test_fit_equals_it_with_a_schedule(schedule, interval, precision):
    assert_fit_is_the_loop(precision, partial(Net, schedule, interval))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit_equals_it_with_everything_at_once(precision):
    assert_fit_is_the_loop(
        precision,
        partial(Net, per_step, "step"),
        window=4,
        clip=partial(clip_grad_norm_, max_norm=0.1),
        accumulate_grad_batches=4,
        gradient_clip_val=0.1,
    )


def test_fit_with_validation_equals_fit_without():
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            torch.rand(3)  # would move the dropout that follows

    weights = []
    for validation in (None, loader(3)):
        torch.manual_seed(7)
        module = Validated()
        trainer = Trainer(
            max_epochs=2,
            val_check_interval=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader(), validation)
        weights.append(module.state_dict())
    assert trainer.state.validations == 6
    assert_equal(*weights)


def test_gradients_are_none_before_each_step_and_complete_before_its_update():
    seen = []

    class Watched(Net):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append([p.grad is None for p in self.parameters()])

        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad is not None for p in self.parameters()])

    trained_by_fit(Watched(), loader(2))
    assert seen == [[True] * 4] * 8


class LeastSquares(Module):
    """A layer fitted by LBFGS, which evaluates each batch as often as it likes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.evaluations = 0

    def training_step(self, batch, batch_idx):
        self.evaluations += 1
        x, y = batch
        return F.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=2)


def lbfgs_by_hand(module, data, autocast, clip):
    optimizer = module.configure_optimizers()

    def closure(batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module.training_step(batch, 0)
        loss.backward()
        if clip is not None:
            clip_grad_norm_(module.parameters(), clip)
        return loss

    for _ in range(2):
        for batch in data:
            optimizer.step(partial(closure, batch))
    return optimizer


class StepsItself(LeastSquares):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("make", [LeastSquares, StepsItself])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit_with_lbfgs_equals_torchs_own_loop(precision, clip, make):
    torch.manual_seed(7)
    expected = LeastSquares()
    optimizer = lbfgs_by_hand(expected, loader(), precision == "bf16-mixed", clip)
    torch.manual_seed(7)
    module = make()
    trainer = trained_by_fit(module, loader(), precision=precision, gradient_clip_val=clip)
    assert_equal(module.state_dict(), expected.state_dict())
    assert_equal(trainer.optimizers[0].state_dict(), optimizer.state_dict())
    assert module.evaluations == expected.evaluations > trainer.global_step == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 cannot be used with LBFGS"),
        ({"nonfinite_loss": "skip"}, "nonfinite_loss='skip' cannot be used with LBFGS"),
    ],
)
def test_what_lbfgs_cannot_do_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        trained_by_fit(LeastSquares(), loader(), **options)


def test_lbfgs_tells_its_hooks_of_each_evaluation_with_its_gradients():
    told = []

    class Watched(LeastSquares):
        def on_before_zero_grad(self, optimizer):
            told.append("zero")

        def on_before_optimizer_step(self, optimizer):
            assert self.layer.weight.grad is not None
            told.append("step")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert not outputs.requires_grad
            assert told == ["zero", "step"] * (len(told) // 2)

    module = Watched()
    trained_by_fit(module, loader(1))
    assert len(told) == 2 * module.evaluations


def test_lbfgs_needs_a_loss_for_each_batch():
    class Leaves(LeastSquares):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ModuleError, match="training_step returned no loss, and LBFGS needs one"):
        trained_by_fit(Leaves(), loader())


def test_a_step_with_a_sparse_part_updates_only_that_part():
    class Table(Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(4, 2, sparse=True)

        def training_step(self, batch, batch_idx):
            return self.rows(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Table()
    before = module.rows.weight.detach().clone()
    trained_by_fit(module, [torch.tensor([1]), torch.tensor([2])])
    moved = before - module.rows.weight.detach()
    assert torch.allclose(moved, torch.tensor([[0.0, 0], [2, 2], [2, 2], [0, 0]]))
