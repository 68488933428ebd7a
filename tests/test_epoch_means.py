"""Epoch values: means weighted by samples, sums, extremes, and how samples are counted."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from leyden import DataError, Module
from leyden.testing import quiet_trainer

Pair = namedtuple("Pair", "x y")


@dataclass
class Sized:
    x: torch.Tensor
    scale: float = 1.0


class Logs(Module):
    """Logs ``value(batch)`` as ``x`` for the epoch, with ``options``."""

    def __init__(self, value, **options):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.value, self.options = value, {"on_step": False, "on_epoch": True, **options}

    def training_step(self, batch, batch_idx):
        self.log("x", self.value(batch), **self.options)
        return self.w * 1.0

    def validation_step(self, batch, batch_idx):
        self.log("x", self.value(batch), **self.options)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def epoch_value(data, value, **options):
    """Return what ``value`` came to, the same in a training epoch and in an evaluation."""
    module = value if isinstance(value, Module) else Logs(value, **options)
    trained = quiet_trainer().fit(module, data).metrics["x"]
    [evaluated] = quiet_trainer().validate(module, data, verbose=False)
    assert evaluated == {"x": trained}
    return trained


def packed(*targets_and_rows):
    """Return a batch whose first tensor has the rows of all its samples, one after the other."""
    return SimpleNamespace(
        rows=torch.zeros(sum(rows for _, rows in targets_and_rows), 2),
        targets=torch.tensor([float(target) for target, _ in targets_and_rows]),
    )


PACKED = [packed((0, 4), (1, 5)), packed((2, 6))]
"""PL #10349: three samples with targets 0, 1, 2 in batches of 9 and 6 rows."""


def target_mean(batch):
    targets = batch["targets"] if isinstance(batch, dict) else batch.targets
    return targets.mean()


# Weights


def test_the_mean_is_over_samples_and_not_over_batches():
    data = [torch.tensor([0.0, 1.0]), torch.tensor([5.0])]
    assert epoch_value(data, torch.mean) == 2.0


def test_python_numbers_are_weighed_like_tensors():
    data = [torch.tensor([0.0, 1.0]), torch.tensor([5.0])]
    assert epoch_value(data, lambda batch: float(batch.mean())) == 2.0


def test_numbers_and_tensors_may_alternate_under_one_name():
    data = [torch.tensor([1.0, 1.0]), torch.tensor([5.0]), torch.tensor([2.0, 2.0])]

    def mixed(batch):
        return batch.mean() if len(batch) == 1 else float(batch.mean())

    assert epoch_value(data, mixed) == pytest.approx(11 / 5)


@pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 6.0), ("min", 1.0), ("max", 5.0)])
def test_sums_and_extremes_are_not_weighed(reduce_fx, expected):
    data = [torch.tensor([1.0, 1.0]), torch.tensor([5.0])]
    assert epoch_value(data, torch.mean, reduce_fx=reduce_fx) == expected
    assert epoch_value(data, torch.mean, reduce_fx=reduce_fx, batch_size=7) == expected


@pytest.mark.parametrize("function", [torch.sum, sum])
def test_a_reduction_may_be_the_function_of_its_name(function):
    data = [torch.tensor([1.0, 1.0]), torch.tensor([5.0])]
    assert epoch_value(data, torch.mean, reduce_fx=function) == 6.0


def test_the_size_passed_goes_before_the_size_counted():
    data = [torch.tensor([0.0, 1.0]), torch.tensor([5.0])]
    assert epoch_value(data, torch.mean, batch_size=1) == 2.75


def test_batches_of_no_weight_do_not_count():
    class Masked(Logs):
        def training_step(self, batch, batch_idx):
            self.log("x", 1.0 + batch_idx, on_step=False, on_epoch=True, batch_size=batch_idx % 2)
            self.log("none", 1.0, on_step=False, on_epoch=True, batch_size=0)
            return self.w * 1.0

    result = quiet_trainer().fit(Masked(None), [torch.zeros(2)] * 3)
    assert result.metrics == {"x": 2.0}


def test_epoch_hooks_weigh_each_value_alike():
    class Twice(Logs):
        def on_train_epoch_end(self):
            self.log("end", 1.0)
            self.log("end", 2.0)

    result = quiet_trainer().fit(Twice(torch.mean), [torch.zeros(3), torch.zeros(1)])
    assert result.metrics["end"] == 1.5


# Precision


def test_long_means_of_single_precision_values_do_not_drift():
    value = torch.tensor(0.1)
    count = 3000
    mean = epoch_value([torch.zeros(1)] * count, lambda _: value)
    assert mean == pytest.approx(float(value), rel=1e-12)


def test_small_values_are_not_lost_beside_large_ones():
    data = [torch.tensor([1e8]), *[torch.tensor([1.0])] * 100]
    assert epoch_value(data, torch.mean, reduce_fx="sum") == 1e8 + 100


def test_half_precision_values_are_summed_in_double():
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert epoch_value([torch.zeros(1)] * 1000, lambda _: one, reduce_fx="sum") == 1000.0


@pytest.mark.parametrize("reduce_fx", ["mean", "min", "max"])
def test_python_numbers_keep_their_precision(reduce_fx):
    assert epoch_value([torch.zeros(1)] * 2, lambda _: 0.1, reduce_fx=reduce_fx) == 0.1


# How samples are counted


X, Y = torch.zeros(3, 2), torch.zeros(3)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, [Y, Y]],
        {"x": X, "y": Y, "name": "a"},
        {"x": X, "labels": ["a", "b", "c"], "scale": 0.5},
        Pair(X, Y),
        Sized(X),
        (X, torch.tensor(1.0)),
        (np.zeros((3, 2)), Y),
        SimpleNamespace(batch_size=3, rows=torch.zeros(9)),
        SimpleNamespace(batch_size=torch.Size([3, 2])),
        SimpleNamespace(num_graphs=3, x=torch.zeros(9, 1), edge_index=torch.zeros(2, 30)),
        namedtuple("Packed", "rows batch_size")(torch.zeros(9), 3),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_samples_are_counted_where_the_batch_tells(batch):
    """One batch of three samples beside one of one: the mean is weighed three to one."""
    single = torch.zeros(1)
    assert epoch_value([batch, single], lambda given: 1.0 if given is single else 5.0) == 4.0


@pytest.mark.parametrize("batch", [7, 0.5, None, torch.tensor(2.0)], ids=repr)
def test_a_lone_number_is_one_sample(batch):
    assert epoch_value([batch] * 3, lambda _: 2.0) == 2.0


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"rows": torch.zeros(9, 2), "targets": torch.zeros(2)}, r"tensors of \[2, 9\] rows"),
        (pack_sequence([torch.ones(3), torch.ones(2)]), r"tensors of \[3, 5\] rows"),
        (packed((0, 4), (1, 5)), "no tensors in a SimpleNamespace"),
        (["a", "b"], "no tensors in a list"),
    ],
    ids=["packed rows", "packed sequence", "unknown object", "strings"],
)
def test_a_count_that_cannot_be_known_is_asked_for_and_not_guessed(batch, found):
    message = f"samples weigh the epoch mean of 'x': .* {found}.*batch_size=n.*count_samples"
    with pytest.raises(DataError, match=message):
        quiet_trainer().fit(Logs(lambda _: 1.0), [batch])


def test_a_count_is_asked_for_only_where_it_matters():
    batch = ["a", "b"]
    assert quiet_trainer().fit(Logs(lambda _: 1.0, on_step=True, on_epoch=False), [batch])
    assert epoch_value([batch], lambda _: 1.0, reduce_fx="max") == 1.0


def test_packed_batches_weigh_by_the_size_passed():
    class Passes(Logs):
        def training_step(self, batch, batch_idx):
            self.options["batch_size"] = len(batch.targets)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

    assert epoch_value(PACKED, Passes(target_mean)) == 1.0


def test_packed_batches_weigh_by_the_modules_own_count():
    class Counts(Logs):
        def count_samples(self, batch):
            return len(batch.targets)

    assert epoch_value(PACKED, Counts(target_mean)) == 1.0


def test_packed_batches_weigh_by_the_size_they_offer():
    for batch in PACKED:
        batch.batch_size = len(batch.targets)
    assert epoch_value(PACKED, target_mean) == 1.0


def test_a_modules_count_may_leave_some_batches_to_be_counted():
    class Counts(Logs):
        def count_samples(self, batch):
            return 3 if isinstance(batch, str) else None

    data = ["packed", torch.tensor([5.0])]
    assert epoch_value(data, Counts(lambda batch: 1.0 if batch == "packed" else 5.0)) == 2.0


def test_a_batch_is_counted_once_however_many_values_are_logged():
    counted = []

    class Counts(Logs):
        def count_samples(self, batch):
            counted.append(len(batch))
            return len(batch)

        def training_step(self, batch, batch_idx):
            for name in "abc":
                self.log(name, 1.0, on_step=False, on_epoch=True)
            return self.w * 1.0

    quiet_trainer().fit(Counts(None), [torch.zeros(2), torch.zeros(1)])
    assert counted == [2, 1]
