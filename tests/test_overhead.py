"""The budget: Python calls a batch over a bare loop, which no machine's speed can change."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn

from leyden import Callback, Module, Trainer

FEW, MANY = 100, 300
BATCHES = [torch.ones(8, 4)] * MANY


class Net(Module):
    def __init__(self, values: int = 0, on_epoch: bool = False) -> None:
        super().__init__()
        self.net, self.values, self.on_epoch = nn.Linear(4, 1), values, on_epoch

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        for i in range(self.values):
            self.log(f"value_{i}", loss, prog_bar=i == 0, on_step=True, on_epoch=self.on_epoch)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls(run, *arguments) -> int:
    """Return how many Python functions are entered while ``run(*arguments)`` runs."""
    count = Counter()

    def profile(frame, event, argument):
        count[event] += 1

    sys.setprofile(profile)
    try:
        run(*arguments)
    finally:
        sys.setprofile(None)
    return count["call"]


def calls_a_batch(run) -> float:
    run(FEW)  # what is imported or made once does not count
    return (calls(run, MANY) - calls(run, FEW)) / (MANY - FEW)


def bare(batches: int) -> None:
    net = Net()
    optimizer = net.configure_optimizers()
    for batch in BATCHES[:batches]:
        optimizer.zero_grad()
        loss = net.net(batch).mean()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def bare_calls() -> float:
    return calls_a_batch(bare)


def fit_with(tmp_path, module=Net, **choices):
    def fit(batches: int) -> None:
        trainer = Trainer(
            max_epochs=1, limit_train_batches=batches, default_root_dir=tmp_path, **choices
        )
        trainer.fit(module(), BATCHES)

    return fit


OFF = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_at_most_15_calls_with_nothing_attached(tmp_path, bare_calls):
    assert 0 < calls_a_batch(fit_with(tmp_path, **OFF)) - bare_calls <= 15


@pytest.mark.parametrize("on_epoch", [False, True])
def test_at_most_60_calls_with_the_defaults_and_one_value(tmp_path, bare_calls, on_epoch):
    fit = fit_with(tmp_path, lambda: Net(1, on_epoch))
    assert 15 < calls_a_batch(fit) - bare_calls <= 60


def test_unheard_hooks_cost_no_call(tmp_path):
    class Silent(Callback):
        def on_fit_start(self, trainer, pl_module):
            pass

    without = calls_a_batch(fit_with(tmp_path, **OFF))
    with_many = calls_a_batch(fit_with(tmp_path, callbacks=[Silent() for _ in range(20)], **OFF))
    assert abs(with_many - without) < 1


def test_cost_does_not_grow_with_the_length_of_the_run(tmp_path):
    fit = fit_with(tmp_path, lambda: Net(1, True), **{**OFF, "logger": "csv"})
    fit(FEW)
    early = calls(fit, 150) - calls(fit, 50)
    late = calls(fit, 300) - calls(fit, 200)
    assert late <= early * 1.01


def test_accumulation_calls_less_not_more(tmp_path, bare_calls):
    accumulated = calls_a_batch(fit_with(tmp_path, accumulate_grad_batches=4, **OFF))
    assert accumulated < calls_a_batch(fit_with(tmp_path, **OFF))
