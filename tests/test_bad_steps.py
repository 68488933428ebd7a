"""A training_step that returns what it should not, or a loss that is no number."""

import math

import pytest
import torch
from torch import nn

from leyden import Callback, ModuleError, NonFiniteLossError, Trainer
from leyden import Module as LeydenModule

pytestmark = pytest.mark.filterwarnings("ignore:The loss became NaN or infinite")


class Scalar(LeydenModule):
    """One weight from 1; what a step returns is ``returns(w, batch)``."""

    def __init__(self, returns=lambda w, batch: w * batch):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.returns = returns

    def training_step(self, batch, batch_idx):
        return self.returns(self.w, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)


class Lbfgs(Scalar):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def fitted(module, *values, **options):
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, [torch.tensor(float(value)) for value in values or (1,)])
    return trainer


@pytest.mark.parametrize("kind", [Scalar, Lbfgs])
@pytest.mark.parametrize(
    ("returns", "shown"),
    [
        (lambda w, batch: 1.5, "float 1.5"),
        (lambda w, batch: "loss", "str 'loss'"),
        (lambda w, batch: [w * batch], r"list \[tensor\(1\., grad_fn="),
        (lambda w, batch: (w * batch).repeat(3), r"a tensor of shape \(3,\)"),
        (lambda w, batch: (w * batch).reshape(1), r"a tensor of shape \(1,\)"),
        (lambda w, batch: {"los": w * batch, "n": 1}, r"a dict without 'loss': \['los', 'n'\]"),
        (lambda w, batch: {"loss": 1.5}, "float 1.5"),
    ],
)
def test_what_is_no_loss_is_refused(returns, shown, kind):
    message = f"{kind.__name__}.training_step returned {shown}.*a tensor of shape \\(\\)"
    with pytest.raises(ModuleError, match=message):
        fitted(kind(returns))


@pytest.mark.parametrize("kind", [Scalar, Lbfgs])
@pytest.mark.parametrize(
    "returns",
    [lambda w, batch: (w * batch).detach(), lambda w, batch: {"loss": batch * 2}],
)
def test_a_loss_that_depends_on_nothing_is_refused(returns, kind):
    with pytest.raises(
        ModuleError, match=r"returned a loss that depends on no parameter. .*detach"
    ):
        fitted(kind(returns))


def test_an_error_of_autograd_itself_is_raised_as_it_is():
    graphs = []

    def returns(w, batch):
        graphs.append(graphs[0] if graphs else w.exp())
        return graphs[-1]

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fitted(Scalar(returns), 1, 1)


@pytest.mark.parametrize(
    "returns",
    [
        lambda w, batch: {"loss": w * batch},
        lambda w, batch: {"loss": w * batch, "logits": w * 3, "text": ["kept"]},
    ],
)
def test_a_dict_with_the_loss_trains_and_reaches_the_hook_without_its_graph(returns):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs)

    module = Scalar(returns)
    fitted(module, 1, callbacks=Watch())
    assert module.w.item() == 0.875
    assert (seen[0]["loss"].item(), seen[0].get("text", ["kept"])) == (1.0, ["kept"])
    assert not any(getattr(value, "requires_grad", False) for value in seen[0].values())


@pytest.mark.parametrize("none", [None, {"loss": None}])
def test_none_leaves_a_batch_out(none):
    module = Scalar(lambda w, batch: none if batch < 0 else w * batch)
    trainer = fitted(module, 1, -1, 2)
    assert module.w.item() == 1 - 3 / 8
    state = trainer.state
    assert (state.step, state.skipped, state.total_batches, state.nonfinite) == (2, 1, 3, 0)


def test_losses_that_are_not_finite_are_counted_and_trained_on():
    module = Scalar()
    trainer = fitted(module, 1, math.nan, 1, math.inf)
    assert (trainer.state.nonfinite, trainer.state.skipped, trainer.global_step) == (4 - 1, 0, 4)
    assert module.w.isnan()


@pytest.mark.parametrize("policy", ["continue", "skip"])
def test_the_first_of_them_is_warned_of_once(policy):
    with pytest.warns(UserWarning, match=r"became NaN or infinite before step .*'stop' r") as seen:
        fitted(Scalar(), 1, math.nan, math.nan, 1, nonfinite_loss=policy, log_every_n_steps=1)
    assert len(seen) == 1


def test_on_the_cpu_they_are_counted_at_once():
    counts = []

    class Watch(Callback):
        def on_save_point(self, trainer, module, at):
            counts.append(trainer.state.nonfinite)

    fitted(Scalar(), math.nan, 1, 1, 1, callbacks=Watch(), log_every_n_steps=2)
    assert counts == [1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize("returns", [lambda w, x: w * x, lambda w, x: {"loss": w * x}])
def test_they_may_be_left_out(returns):
    module = Scalar(returns)
    state = fitted(module, 1, math.nan, 2, -math.inf, nonfinite_loss="skip").state
    assert module.w.item() == 1 - 3 / 8
    assert (state.nonfinite, state.skipped, state.step, state.total_batches) == (2, 2, 2, 4)


def test_one_left_out_does_not_count_in_its_window():
    module = Scalar()
    options = {"nonfinite_loss": "skip", "accumulate_grad_batches": 2}
    state = fitted(module, 1, math.nan, 2, 4, math.nan, math.nan, **options).state
    assert module.w.item() == 1 - (1 + 3) / 8
    assert (state.nonfinite, state.skipped, state.step) == (3, 1, 2)


@pytest.mark.parametrize(
    ("kind", "value"), [(Scalar, math.nan), (Scalar, math.inf), (Lbfgs, math.nan)]
)
def test_they_may_stop_the_run_before_the_weights_are_harmed(kind, value):
    module = kind(lambda w, batch: w * batch if batch != batch or batch > 1 else w * 0 + 1)
    message = f"The loss is {value} at batch 1 of epoch 0, after 1 steps. .*nonfinite_loss='skip'"
    with pytest.raises(NonFiniteLossError, match=message):
        fitted(module, 1, value, nonfinite_loss="stop")
    assert module.w.isfinite()
    assert module.trainer.state.nonfinite == 1


def test_a_step_that_takes_only_the_batch_is_given_only_that():
    class Short(Scalar):
        def training_step(self, batch):
            return self.w * batch

    module = Short()
    fitted(module)
    assert module.w.item() == 0.875


def test_a_step_that_takes_no_batch_is_refused():
    class Empty(Scalar):
        def training_step(self):
            return self.w

    with pytest.raises(ModuleError, match=r"Empty\.training_step\(\).* takes no batch"):
        fitted(Empty())
