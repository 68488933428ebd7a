"""What an accelerator's values go through, which are not waited for: shown here with the CPU's."""

import math
from types import SimpleNamespace

import pytest
import torch

from leyden import State
from leyden.entry import BLOCK, Entry, Options
from leyden.run import LossWatch

VALUES = [math.sin(i) for i in range(3 * BLOCK + 7)]
WEIGHTS = [1.0 + i % 5 for i in range(len(VALUES))]


def entry(reduce_fx: str) -> Entry:
    options = Options(False, None, False, True, reduce_fx, False, True, False)
    return Entry("x", options, in_batch=True, in_training=True, suffix="")


def expected(reduce_fx: str, values: list[float], weights: list[float]) -> float:
    if reduce_fx == "mean":
        return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)
    return {"sum": math.fsum, "min": min, "max": max}[reduce_fx](values)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, len(VALUES)])
def test_blocks_of_tensors_come_to_what_all_values_come_to(reduce_fx, count):
    reduced = entry(reduce_fx)
    for value, weight in zip(VALUES[:count], WEIGHTS[:count], strict=True):
        reduced.add(torch.tensor(value, dtype=torch.float64), weight)
    assert float(reduced.epoch_value()) == pytest.approx(
        expected(reduce_fx, VALUES[:count], WEIGHTS[:count]), rel=1e-14
    )


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_tensors_of_two_kinds_and_numbers_mix(reduce_fx):
    reduced = entry(reduce_fx)
    for i, (value, weight) in enumerate(zip(VALUES, WEIGHTS, strict=True)):
        kinds = (float, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float64))
        reduced.add(kinds[i % 3](value), weight)
    assert float(reduced.epoch_value()) == pytest.approx(
        expected(reduce_fx, VALUES, WEIGHTS), rel=1e-6
    )


def test_reading_does_not_change_what_an_epoch_comes_to():
    unread, read = entry("mean"), entry("mean")
    for value, weight in zip(VALUES, WEIGHTS, strict=True):
        unread.add(torch.tensor(value), weight)
        read.add(torch.tensor(value), weight)
        read.epoch_value()
    assert torch.equal(unread.epoch_value(), read.epoch_value())


def test_at_most_a_block_of_values_is_kept():
    reduced = entry("mean")
    for value in VALUES:
        reduced.add(torch.tensor(value), 1.0)
        assert len(reduced.block) < BLOCK


@pytest.mark.filterwarnings("ignore:The loss became NaN")
def test_losses_are_looked_at_when_they_are_read():
    state = State()
    watch = LossWatch(state, "continue", SimpleNamespace(device=torch.device("cuda")))
    for loss in (1.0, math.nan, math.inf, 2.0):
        assert watch.accept(torch.tensor(loss, requires_grad=True))
    assert state.nonfinite == 0
    watch.read()
    watch.read()
    assert state.nonfinite == 2
