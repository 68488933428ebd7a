"""Accumulation: one optimizer step is the mean over what its batches really held."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from leyden import Callback, ConfigError, ModuleError, Trainer
from leyden import Module as LeydenModule


class Scalar(LeydenModule):
    """One weight w from 0; loss = mean(w·x); plain SGD at rate 1: gradients are means of inputs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.w.grad.item())


class Stream(IterableDataset):
    """Values without a length, that note when each is read."""

    def __init__(self, values, events=None):
        self.values, self.events = values, [] if events is None else events

    def __iter__(self):
        for value in self.values:
            self.events.append(f"read {value:g}")
            yield torch.tensor(float(value))


class Promising(list):
    """A loader whose ``len()`` is more than it gives."""

    def __len__(self):
        return super().__len__() + 1


def numbers(*values):
    return [torch.tensor(float(value)) for value in values]


def fitted(module, data, window=2, **options):
    trainer = Trainer(
        accumulate_grad_batches=window,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("make", [list, lambda data: DataLoader(Stream(data), batch_size=None)])
def test_last_window_divides_by_the_batches_it_holds(make):  # PL #19987
    module = Scalar()
    trainer = fitted(module, make(numbers(1, 2, 3, 4, 5)))
    assert module.gradients == [1.5, 3.5, 5.0]
    assert module.w.item() == -10.0
    assert (trainer.global_step, trainer.state.total_batches) == (3, 5)


def test_each_epoch_begins_its_own_window():
    module = Scalar()
    fitted(module, numbers(1, 2, 3), max_epochs=2)
    assert module.gradients == [1.5, 3.0, 1.5, 3.0]


def test_a_limit_ends_the_epoch_and_its_window():
    for data in (numbers(1, 2, 3, 4, 5, 6), DataLoader(Stream(range(1, 7)), batch_size=None)):
        module = Scalar()
        fitted(module, data, limit_train_batches=3)
        assert module.gradients == [1.5, 3.0]


def test_max_steps_counts_windows():
    module = Scalar()
    trainer = fitted(module, numbers(*range(1, 9)), max_steps=3, max_epochs=None)
    assert module.gradients == [1.5, 3.5, 5.5]
    assert (trainer.global_step, trainer.state.batch) == (3, 6)


def noted(events):
    class Noting(Scalar):
        def training_step(self, batch, batch_idx):
            events.append(f"train {batch:g}")
            return super().training_step(batch, batch_idx)

    return Noting()


def test_a_stream_is_read_one_ahead_to_know_its_last_batch():
    events = []
    fitted(noted(events), DataLoader(Stream(range(3), events), batch_size=None), window=1)
    assert events == ["read 0", "read 1", "train 0", "read 2", "train 1", "train 2"]


def test_a_loader_with_a_length_is_read_when_its_batch_is_needed():
    events = []

    class Sized(Stream):
        def __len__(self):
            return 3

    fitted(noted(events), Sized(range(3), events), window=1)
    assert events == ["read 0", "train 0", "read 1", "train 1", "read 2", "train 2"]


def test_a_loader_that_ends_early_still_gives_its_last_window_the_right_size():
    module = Scalar()
    with pytest.warns(UserWarning, match="promised 6 batches and it gave 5"):
        fitted(module, Promising(numbers(1, 2, 3, 4, 5)))
    assert module.gradients == [1.5, 3.5, 5.0]


def test_loss_is_divided_for_backward_and_shown_undivided():
    shown = []

    class Watch(Callback):
        def on_before_backward(self, trainer, module, loss):
            shown.append(loss.item())

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            shown.append(outputs.item())
            assert not outputs.requires_grad

    module = Scalar()
    nn.init.ones_(module.w)
    fitted(module, numbers(4, 6), callbacks=Watch())
    assert shown == [2.0, 4.0, 3.0, 6.0]


def test_accumulated_batches_give_the_gradient_of_one_large_batch():
    gradients = []
    for window, data in ((2, [torch.tensor([1.0, 5]), torch.tensor([3.0, 7])]),
                         (1, [torch.tensor([1.0, 5, 3, 7])])):  # fmt: skip
        module = Scalar()
        fitted(module, data, window)
        gradients += module.gradients
    assert gradients == [4.0, 4.0]


class Weighted(Scalar):
    """Returns the mean over the items that are not NaN, and how many they are."""

    as_weight = float

    def training_step(self, batch, batch_idx):
        valid = batch[~batch.isnan()]
        return {"loss": (self.w * valid).mean(), "weight": self.as_weight(len(valid))}


@pytest.mark.parametrize("as_weight", [int, float, torch.tensor, lambda n: torch.tensor(float(n))])
def test_weights_make_the_gradient_a_mean_over_items(as_weight):  # PL #20350
    nan = math.nan
    for window, data in ((2, [[4, nan, nan, nan], [nan, 0, 0, 0]]), (1, [[4, 0, 0, 0]])):
        module = Weighted()
        module.as_weight = as_weight
        fitted(module, [torch.tensor(row, dtype=torch.float32) for row in data], window)
        assert module.gradients == [1.0]


def test_weights_hold_in_a_short_last_window_and_in_a_stream():
    rows = [torch.ones(1), torch.full((3,), 2.0), torch.full((5,), 7.0)]
    for data in (rows, (row for row in rows)):
        module = Weighted()
        fitted(module, data)
        assert module.gradients == pytest.approx([7 / 4, 7.0])


def test_weights_keep_the_digits_of_float64():
    module = Weighted()
    fitted(module, [torch.tensor([1.0]), torch.tensor([0.0, 0.0])], precision="64-true")
    assert module.gradients == [pytest.approx(1 / 3, abs=1e-16)]


def test_a_window_of_zero_weight_changes_nothing():
    class Empty(Scalar):
        def training_step(self, batch, batch_idx):
            return {"loss": self.w * 0.0, "weight": torch.tensor(0)}

    module = Empty()
    nn.init.ones_(module.w)
    fitted(module, numbers(1, 2))
    assert module.w.item() == 1.0


@pytest.mark.parametrize("weighted", [0, 1])
def test_weights_for_some_batches_only_are_refused(weighted):
    class Sometimes(Weighted):
        def training_step(self, batch, batch_idx):
            result = super().training_step(batch, batch_idx)
            return result if batch_idx == weighted else result["loss"]

    with pytest.raises(ModuleError, match="'weight' for some batches of an optimizer step and"):
        fitted(Sometimes(), [torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize("weight", [torch.ones(2), "3", [3]])
def test_a_weight_that_is_no_number_is_refused(weight):
    module = Weighted()
    module.as_weight = lambda n: weight
    with pytest.raises(
        ModuleError, match=r"returned the weight .* a number from 0 on, or a tensor of shape"
    ):
        fitted(module, [torch.ones(1)])


class Picky(Scalar):
    """Leaves out batches whose value is negative."""

    def training_step(self, batch, batch_idx):
        return None if batch < 0 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [list, iter])
def test_a_batch_left_out_does_not_count_in_its_window(make):
    module = Picky()
    trainer = fitted(module, make(numbers(1, -1, 2, 4, -1, 6, -1)))
    assert module.gradients == [1.0, 3.0, 6.0]
    assert (trainer.global_step, trainer.state.skipped) == (3, 1)


def test_a_window_left_out_whole_updates_nothing():
    module = Picky()
    trainer = fitted(module, numbers(-1, -1, 3, 5))
    assert module.gradients == [4.0]
    assert (trainer.global_step, trainer.state.skipped, trainer.state.total_batches) == (1, 1, 4)


def test_an_epoch_left_inside_a_window_steps_on_what_it_has():
    class Leaves(Scalar):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch == 5:
                self.trainer.skip_epoch()

    module = Leaves()
    trainer = fitted(module, numbers(1, 3, 5, 7, 9), max_epochs=2)
    assert module.gradients == [2.0, 5.0] * 2
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)


def test_an_epoch_left_in_a_window_that_holds_nothing_does_not_open_the_next_one():
    told = []

    class Leaves(Picky):
        def on_before_zero_grad(self, optimizer):
            told.append((self.current_epoch, self.trainer.state.batch))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch == -1:
                self.trainer.skip_epoch()

    module = Leaves()
    trainer = fitted(module, numbers(1, 3, -1, 7), max_epochs=2)
    assert told == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert (module.gradients, trainer.state.skipped) == ([2.0, 2.0], 0)


def test_zero_grad_happens_once_a_window():
    told = []

    class Told(Scalar):
        def on_before_zero_grad(self, optimizer):
            told.append(self.trainer.state.batch)

    fitted(Told(), numbers(1, 2, 3, 4, 5))
    assert told == [0, 2, 4]


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_accumulate_grad_batches_must_be_a_whole_number(value):
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=.*at least 1"):
        Trainer(accumulate_grad_batches=value)
