"""What ranks decide together, and how seldom they talk about it."""

import math
import os
import time

import pytest
import torch
from torch import nn

from leyden import Callback, CheckpointError, Module
from leyden.strategies.processes import Processes
from leyden.testing import on_ranks, quiet_trainer


class Apart(Processes):
    """Ranks that exchange decisions, and no gradients: what they train is each one's own."""

    def __init__(self):
        super().__init__()
        self.exchanges = 0

    def place(self, module, precision):
        module.to(self.device)

    def prepare(self, module, step):
        return getattr(module, step)

    def sync_gradients(self, enabled):
        pass

    def sync_batchnorm(self, module):
        pass

    def exchange(self, numbers):
        self.exchanges += 1
        return super().exchange(numbers)


class Weight(Module):
    """Trains one weight; ``step(self, batch_idx)`` says what its loss is multiplied by, or None."""

    def __init__(self, step=lambda module, batch_idx: 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.factor = step

    def training_step(self, batch, batch_idx):
        factor = self.factor(self, batch_idx)
        return None if factor is None else self.weight * batch * factor

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(*callbacks, module=None, batches=50, val=None, ckpt_path=None, **choices):
    trainer = quiet_trainer(
        accelerator="cpu", strategy=Apart(), devices=2, callbacks=list(callbacks), **choices
    )
    trainer.fit(module or Weight(), [torch.ones(())] * batches, val, ckpt_path=ckpt_path)
    return trainer


def count_exchanges():
    began = time.perf_counter()
    trainer = fitted(batches=3000)
    return trainer.strategy.exchanges, time.perf_counter() - began


def test_ranks_exchange_about_once_a_second_however_short_the_steps():
    for exchanges, seconds in on_ranks(2, count_exchanges):
        # They double their distance from 1 batch on; the beginning and the end are settled too.
        assert exchanges <= math.log2(3000) + seconds + 4


class AsksOnRankOne(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.01)
        if trainer.global_rank == 1 and batch_idx == 3:
            trainer.should_stop = "rank 1 has enough"


def stopped():
    state = fitted(AsksOnRankOne()).state
    return state.stop, state.step


def test_a_request_of_one_rank_ends_all_at_one_step_for_its_reason():
    first, second = on_ranks(2, stopped)
    assert first == second
    assert first[0] == "rank 1 has enough"
    assert 4 <= first[1] < 50


class Slow(Callback):
    """Lets the clocks of the ranks tell different times, and notes when it is validated."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(0.002 * (1 + trainer.global_rank))

    def on_validation_start(self, trainer, module):
        self.steps.append(trainer.global_step)


def validated_by_time():
    slow = Slow()
    fitted(slow, val=[torch.ones(())], num_sanity_val_steps=0, val_check_interval="0.001 min")
    return slow.steps


def test_validation_by_the_clock_comes_at_the_same_steps_on_every_rank():
    first, second = on_ranks(2, validated_by_time)
    assert first == second
    assert first


def left_out(module, batch_idx):
    return None if module.global_rank == 1 and batch_idx == 2 else 1.0


def fit_with(step, **choices):
    trainer = fitted(module=Weight(step), batches=8, **choices)
    return trainer.state.step, trainer.state.skipped


def test_a_batch_left_out_on_one_rank_is_an_error_on_all_that_counts_the_losses():
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, fit_with, left_out)
    for rank in (0, 1):
        assert f"rank {rank} raised" in str(raised.value)
    assert "different numbers of losses" in str(raised.value)


def infinite(module, batch_idx):
    return math.inf if module.global_rank == 1 and batch_idx == 2 else 1.0


def skip_infinite():
    return fit_with(infinite, nonfinite_loss="skip")


def test_a_loss_that_is_infinite_on_one_rank_is_left_out_on_all():
    assert on_ranks(2, skip_infinite) == [(7, 1)] * 2


def resume_from_nowhere(path):
    with pytest.raises(CheckpointError, match=r"nowhere\.ckpt"):
        fitted(ckpt_path=path)
    return True


def test_a_checkpoint_that_is_not_there_is_an_error_on_every_rank(tmp_path):
    path = str(tmp_path / "nowhere.ckpt")
    assert on_ranks(2, resume_from_nowhere, path, timeout=20) == [True, True]


def test_ranks_that_see_different_data_draw_differently():
    first, second = on_ranks(2, drawn)
    assert first != second


def drawn():
    values = []

    def step(module, batch_idx):
        values.append(torch.rand(()).item())
        return 1.0

    torch.manual_seed(0)
    fitted(module=Weight(step), batches=3)
    return values


class Contrastive(Module):
    """Its loss is of all pairs of a batch, over ranks too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer = torch.nn.Linear(3, 2).double()

    def training_step(self, batch, batch_idx):
        own = self.layer(batch)
        every = self.all_gather(own, sync_grads=True).reshape(-1, 2)
        return (every @ every.T).tanh().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrasted(strategy="single_device", ranks=1):
    module = Contrastive()
    x = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    part = int(os.environ.get("RANK", "0")) if ranks > 1 else 0
    trainer = quiet_trainer(accelerator="cpu", devices=ranks, strategy=strategy)
    trainer.fit(module, [batch.chunk(ranks)[part] for batch in x])
    weight = module.layer.weight.detach()
    return weight.full_tensor() if strategy == "fsdp" else weight


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_flow_through_what_is_gathered_from_all_ranks(strategy):
    expected = contrasted()
    for weight in on_ranks(2, contrasted, strategy, 2):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)
