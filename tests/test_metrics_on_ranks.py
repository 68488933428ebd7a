"""Values logged on several ranks: reduced by name, exactly, whoever logged them in which order."""

import os

import pytest
import torch
from torch import nn

from leyden import Callback, Module
from leyden.testing import on_ranks, quiet_trainer


class Logs(Module):
    """Logs in each step what ``log(self, batch_idx)`` says."""

    def __init__(self, log):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.log_values = log

    def training_step(self, batch, batch_idx):
        self.log_values(self, batch_idx)
        return self.weight * batch.mean()

    def validation_step(self, batch, batch_idx):
        self.log_values(self, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer_on(ranks, **choices):
    return quiet_trainer(accelerator="cpu", strategy="ddp", devices=ranks, **choices)


def validated(log, batches, *callbacks):
    """Return what a validation on this rank over as many batches as it has of its own comes to."""
    module, trainer = Logs(log), trainer_on(2, callbacks=list(callbacks))
    rank = int(os.environ["RANK"])
    trainer.validate(module, [torch.ones(1)] * batches[rank], verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def ones(module, batch_idx):
    module.log("one", 1.0, batch_size=1)


def sizes(module, batch_idx):
    values, weights = (([1, 2, 3], [4, 4, 2]), ([10, 20], [4, 1]))[module.global_rank]
    module.log("mean", values[batch_idx], batch_size=weights[batch_idx])
    for reduction in ("sum", "min", "max"):
        module.log(reduction, float(values[batch_idx]), reduce_fx=reduction)
    module.log("first", float(values[batch_idx]), batch_size=1, rank_zero_only=True)


def test_a_constant_stays_what_it_is_however_many_batches_each_rank_has():
    for values in on_ranks(2, validated, ones, (3, 2)):
        assert values["one"] == 1.0


def test_epoch_means_weigh_every_sample_of_every_rank_alike():
    for values in on_ranks(2, validated, sizes, (3, 2)):
        assert values["mean"] == pytest.approx((4 * 1 + 4 * 2 + 2 * 3 + 4 * 10 + 1 * 20) / 15)
        assert (values["sum"], values["min"], values["max"]) == (36, 1, 20)
        assert values["first"] == 2.0  # the mean of rank 0's alone


def swapped(module, batch_idx):
    if module.global_rank == 0:
        module.log("a", 1.0, batch_size=1)
        module.log("b", 3.0, batch_size=1)
    else:
        module.log("b", 9.0, batch_size=1)
        module.log("a", 7.0, batch_size=1)


def left_out(module, batch_idx):
    if module.global_rank == 0:
        module.log("a", 1.0, batch_size=1)
    module.log("b", 3.0, batch_size=1)


def test_names_bring_values_together_not_the_order_they_were_logged_in():
    for values in on_ranks(2, validated, swapped, (1, 1), timeout=20):
        assert (values["a"], values["b"]) == (4.0, 6.0)


def test_a_value_that_one_rank_leaves_out_is_the_mean_of_those_that_logged_it():
    for values in on_ranks(2, validated, left_out, (2, 2), timeout=20):
        assert (values["a"], values["b"]) == (1.0, 3.0)


class Seen(Callback):
    """Keeps what hooks at the end of an epoch see."""

    def __init__(self):
        self.seen = {}

    def on_validation_epoch_end(self, trainer, module):
        self.seen["validation"] = float(trainer.callback_metrics["mean"])

    def on_train_epoch_end(self, trainer, module):
        module.log("end", float(trainer.global_rank))
        self.seen["train"] = float(trainer.callback_metrics["mean"])


def seen_in_hooks():
    seen = Seen()
    trainer = trainer_on(2, callbacks=[seen])
    trainer.fit(Logs(both_stages), [torch.ones(1)] * 2, [torch.ones(1)] * 2)
    return seen.seen, float(trainer.callback_metrics["end"])


def both_stages(module, batch_idx):
    module.log("mean", 2.0 * module.global_rank, on_step=False, on_epoch=True, batch_size=1)


def test_hooks_at_the_end_of_an_epoch_see_the_mean_over_ranks():
    for seen, end in on_ranks(2, seen_in_hooks):
        assert seen == {"validation": 1.0, "train": 1.0}
        assert end == 0.5


def step_values():
    local, shared = [], []

    def log(module, batch_idx):
        module.log("local", float(module.global_rank))
        module.log("shared", float(module.global_rank), sync_dist=True)

    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            local.append(float(trainer.callback_metrics["local"]))
            shared.append(float(trainer.callback_metrics["shared"]))

    trainer_on(2, callbacks=[Keep()]).fit(Logs(log), [torch.ones(1)] * 2)
    return local, shared


def test_step_values_are_of_their_rank_unless_sync_dist_asks_for_the_mean():
    found = on_ranks(2, step_values)
    assert [local for local, _ in found] == [[0.0, 0.0], [1.0, 1.0]]
    assert [shared for _, shared in found] == [[0.5, 0.5], [0.5, 0.5]]


def metric_object(is_logged_everywhere):
    from torchmetrics import MeanMetric

    class WithMetric(Logs):
        def __init__(self):
            super().__init__(None)
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean.update(batch)
            if is_logged_everywhere or self.global_rank == 0:
                self.log("mean", self.mean, on_epoch=True)

    trainer = trainer_on(2)
    rank = int(os.environ["RANK"])
    batches = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([10.0])]][rank]
    trainer.validate(WithMetric(), batches, verbose=False)
    return float(trainer.callback_metrics["mean"])


def test_a_metric_object_is_reduced_over_every_sample_of_every_rank():
    assert on_ranks(2, metric_object, True) == [4.0, 4.0]


def test_a_metric_object_on_some_ranks_alone_is_an_error_that_names_key_and_ranks():
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, metric_object, False, timeout=20)
    message = "self.log('mean', …) got a metric object on some ranks and not on rank 1"
    assert str(raised.value).count(message) == 2
