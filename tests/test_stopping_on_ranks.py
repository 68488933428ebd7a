"""Stopping, validating and ending epochs on several ranks: decided together, at one batch."""

import math
import os
import time

import pytest
import torch
from torch import nn

from leyden import Callback, Module
from leyden.plugins import EarlyStopping, Timer
from leyden.testing import on_ranks, quiet_trainer


def own_rank():
    return int(os.environ["RANK"])


class Scored(Module):
    """Logs in each epoch the next of its rank's scores: one validation, one step value."""

    def __init__(self, scores=((0.0,), (0.0,), (0.0,))):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.scores = scores

    def score(self):
        own = self.scores[self.global_rank]
        return own[min(self.trainer.current_epoch, len(own) - 1)]

    def training_step(self, batch, batch_idx):
        self.log("own", self.score())
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.score(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fitted(*callbacks, module=None, batches=2, val=False, **choices):
    trainer = quiet_trainer(
        accelerator="cpu",
        strategy="ddp",
        callbacks=list(callbacks),
        **{"max_epochs": 10, "num_sanity_val_steps": 0, **choices},
    )
    data = [torch.ones(1)] * batches
    trainer.fit(module or Scored(), data, data[:1] if val else None)
    return trainer


def ending(trainer):
    state = trainer.state
    return state.stop, state.step, state.epoch


# Uneven numbers of batches


class Counts(Scored):
    """Counts validations and batches, and logs a value to be reduced over ranks."""

    def __init__(self):
        super().__init__()
        self.validations, self.batches = [], 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return (self.w * batch).mean()

    def on_validation_end(self):
        self.validations.append(self.global_step)


class Stream:
    """Gives as many batches as its rank has, and does not say how many."""

    def __init__(self, counts):
        self.count = counts[own_rank()]

    def __iter__(self):
        return iter([torch.ones(1)] * self.count)


def validated_each_second_step(counts, is_sized):
    module = Counts()
    data = [torch.ones(1)] * counts[own_rank()] if is_sized else Stream(counts)
    trainer = quiet_trainer(
        accelerator="cpu", strategy="ddp", num_sanity_val_steps=0, val_check_interval="2 steps"
    )
    trainer.fit(module, data, [torch.ones(1)])
    return module.validations, module.batches, module.w.item()


@pytest.mark.parametrize("is_sized", [True, False])
def test_ranks_with_unlike_numbers_of_batches_validate_together(is_sized):
    found = on_ranks(2, validated_each_second_step, (7, 5), is_sized, timeout=20)
    # The epoch ends with the batches that both have, and each step adds -1 to the weight.
    assert found == [([2, 4], 5, -5.0)] * 2


# Reasons that one rank sees


class AsksOn(Callback):
    """Asks to stop on one rank after a batch, or at the end of an epoch."""

    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.01)
        if trainer.global_rank == self.rank and self.at == "batch" and batch_idx == 3:
            trainer.should_stop = f"rank {self.rank} has enough"

    def on_train_epoch_end(self, trainer, module):
        if trainer.global_rank == self.rank and self.at == "epoch":
            trainer.should_stop = f"rank {self.rank} has enough"


def asked(rank, at):
    return ending(fitted(AsksOn(rank, at), batches=20))


@pytest.mark.parametrize("at", ["batch", "epoch"])
def test_one_rank_that_asks_stops_all_of_three_after_one_step(at):
    first, *others = on_ranks(3, asked, 2, at, timeout=30)
    assert others == [first, first]
    reason, steps, epochs = first
    assert reason == "rank 2 has enough"
    if at == "epoch":
        assert (steps, epochs) == (20, 1)
    else:
        assert 4 <= steps < 200


def asked_too_early():
    return ending(fitted(AsksOn(1, "epoch"), min_epochs=3, max_epochs=5))


def test_a_request_before_the_minimum_waits_for_it_on_every_rank():
    # It is made anew at the end of each epoch, and counts at the third.
    assert on_ranks(2, asked_too_early, timeout=30) == [("rank 1 has enough", 6, 3)] * 2


def early(monitor, scores, options):
    stopping = EarlyStopping(monitor, **{"patience": 1, **options})
    module = Scored(scores)
    trainer = fitted(stopping, module=module, val=monitor == "v")
    return *ending(trainer), stopping.wait_count, float(stopping.best_score)


def test_early_stopping_goes_by_the_mean_over_ranks():
    # Means are 5, 4, 4.5: rank 0's own values improve, rank 1's get worse at once.
    found = on_ranks(2, early, "v", ((5.0, 3.0, 2.0), (5.0, 5.0, 7.0)), {}, timeout=30)
    reason, steps, epochs, wait_count, best = found[0]
    assert found[1] == found[0]
    assert "v has not improved on 4 for 1 checks (last 4.5)" in reason
    assert (steps, epochs, wait_count, best) == (6, 3, 1, 4.0)


def test_early_stopping_goes_by_rank_0s_value_where_each_has_its_own():
    # By its own values rank 1 would stop after two epochs.
    found = on_ranks(2, early, "own", ((5.0, 4.0, 3.0, 3.5), (1.0, 2.0, 3.0, 4.0)), {}, timeout=30)
    reason, steps, epochs, wait_count, best = found[0]
    assert found[1] == found[0]
    assert "own has not improved on 3" in reason
    assert (steps, epochs, wait_count, best) == (8, 4, 1, 3.0)


def test_nan_on_one_rank_makes_the_mean_nan_and_stops_all():
    scores = ((3.0, 2.0, 1.0), (3.0, math.nan, 1.0))
    found = on_ranks(2, early, "v", scores, {}, timeout=30)
    for reason, steps, epochs, _, best in found:
        assert reason == "v is nan (best so far 3)"
        assert (steps, epochs, best) == (4, 2, 3.0)


@pytest.mark.parametrize(("rank", "epochs"), [(0, 2), (1, 10)])
def test_nan_in_a_value_of_its_rank_counts_on_rank_0_alone(rank, epochs):
    falling = [10.0 - epoch for epoch in range(10)]
    scores = [list(falling), list(falling)]
    scores[rank][1] = math.nan
    for reason, _, ended, _, _ in on_ranks(2, early, "own", scores, {}, timeout=30):
        assert ended == epochs
        assert reason == ("own is nan (best so far 10)" if rank == 0 else "max_epochs=10 reached")


class Rare(Scored):
    """Logs its score on rank 1 alone."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("own", 1.0)
        return (self.w * batch).mean()


def early_without_rank_0():
    message = r"EarlyStopping\(monitor='own'\)"
    with pytest.raises(Exception, match=message):
        fitted(EarlyStopping("own"), module=Rare())
    return True


def test_a_monitored_value_that_rank_0_lacks_is_an_error_on_every_rank():
    assert on_ranks(2, early_without_rank_0, timeout=20) == [True, True]


# Clocks


class Slow(Callback):
    """Takes longer on rank 1, whose own clock would end it at another step."""

    def __init__(self):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.002 * (1 + 2 * trainer.global_rank))


def timed(choice):
    """Train with a limit of half a second, given in one of the ways there are."""
    limit = {"milliseconds": 500}
    callbacks, choices = [Slow()], {}
    if choice == "max_time":
        choices["max_time"] = limit
    else:
        callbacks.append(Timer(limit, interval=choice))
    return ending(fitted(*callbacks, batches=10, max_epochs=-1, **choices))


@pytest.mark.parametrize("choice", ["max_time", "step", "epoch"])
def test_a_time_limit_ends_every_rank_after_one_step(choice):
    first, second = on_ranks(2, timed, choice, timeout=30)
    assert first == second
    reason, steps, epochs = first
    assert "the time limit of 0:00:00.500000 is over" in reason
    if choice == "epoch":
        assert steps == 10 * epochs


class TimesOutOnRankOne(Timer):
    """A clock that is over at once on rank 1, and nowhere else."""

    def __init__(self):
        super().__init__({"hours": 0 if own_rank() == 1 else 10})


def timed_out_on_one():
    return ending(fitted(TimesOutOnRankOne(), batches=10))


def test_a_clock_that_is_over_on_one_rank_ends_all():
    first, second = on_ranks(2, timed_out_on_one, timeout=30)
    assert first == second
    assert "the time limit of 0:00:00 is over" in first[0]
    assert first[1] < 100


# Epochs that are left


BATCHES = 30
"""Ranks exchange after batches 1, 3, 7 and 15 at the latest."""


class SkipsOn(Callback):
    """Skips the rest of the first epoch, at a moment, on some ranks; notes the batches of each."""

    def __init__(self, ranks, moment):
        self.ranks, self.moment, self.batches = ranks, moment, [0, 0, 0]

    def _skip(self, trainer, moment):
        is_asked = self.moment == moment and trainer.current_epoch == 0
        if is_asked and trainer.global_rank in self.ranks:
            trainer.skip_epoch()

    def on_train_epoch_start(self, trainer, module):
        self._skip(trainer, "epoch start")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            self._skip(trainer, "batch start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches[trainer.current_epoch] += 1
        if batch_idx == 3:
            self._skip(trainer, "batch end")

    def on_train_epoch_end(self, trainer, module):
        self._skip(trainer, "epoch end")


def skipped(ranks, moment, options):
    skips = SkipsOn(ranks, moment)
    trainer = fitted(skips, batches=BATCHES, max_epochs=2, **options)
    return ending(trainer), skips.batches, float(trainer.module.w)


@pytest.mark.parametrize(
    ("ranks", "moment", "options"),
    [
        ((1,), "epoch start", {}),
        ((1,), "batch start", {}),
        ((1,), "batch end", {"accumulate_grad_batches": 3}),
        ((0, 1), "batch end", {}),
    ],
)
def test_an_epoch_that_one_rank_skips_ends_on_all_after_one_batch(ranks, moment, options):
    first, second = on_ranks(2, skipped, ranks, moment, options, timeout=40)
    assert first == second
    (reason, steps, epochs), (in_first, in_second, _), weight = first
    assert (reason, epochs) == ("max_epochs=2 reached", 2)
    assert 1 <= in_first < BATCHES
    assert in_second == BATCHES
    window = options.get("accumulate_grad_batches", 1)
    assert steps == -(-in_first // window) + BATCHES // window
    assert weight == -steps


def test_a_skip_asked_for_when_the_epoch_is_over_leaves_the_next_whole():
    for _, batches, _ in on_ranks(2, skipped, (1,), "epoch end", {}, timeout=40):
        assert batches == [BATCHES, BATCHES, 0]
