"""Reading data: any iterable is a loader, lengths are believed, several are read side by side."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from leyden import Callback, ConfigError, DataError, Module
from leyden.data import CombinedLoader
from leyden.plugins import ModelCheckpoint
from leyden.testing import quiet_trainer


class Reads(Module):
    """Keeps what it trains and validates on; its gradients sum up the batches."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.trained, self.validated, self.gradients = [], [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(plain(batch))
        return self.w * total(batch)

    def validation_step(self, batch, batch_idx):
        self.validated.append(plain(batch))

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.w.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def plain(batch):
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(plain(value) for value in batch)
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def total(batch):
    parts = batch.values() if isinstance(batch, dict) else batch
    return sum(float(part) for part in parts if part is not None)


def fitted(train, val=None, **choices):
    module = Reads()
    quiet_trainer(num_sanity_val_steps=0, **choices).fit(module, train, val)
    return module


def numbers(count):
    return DataLoader(torch.arange(1.0, count + 1))


class Stream:
    """Batches 1, 2, 3 … without saying how many."""

    def __init__(self, count):
        self.count, self.asked = count, 0

    def __iter__(self):
        for number in range(1, self.count + 1):
            self.asked += 1
            yield torch.tensor([float(number)])


class Promises(Stream):
    """Gives ``count`` batches where ``len`` says something else."""

    def __init__(self, count, promised):
        super().__init__(count)
        self.promised = promised

    def __len__(self):
        return self.promised


# Any iterable


@pytest.mark.parametrize(
    "loader",
    [
        [torch.tensor([1.0]), torch.tensor([2.0])],
        (torch.tensor([1.0]), torch.tensor([2.0])),
        DataLoader(torch.tensor([1.0, 2.0])),
        Stream(2),
        torch.tensor([[1.0], [2.0]]),
        iter([torch.tensor([1.0]), torch.tensor([2.0])]),
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_whatever_yields_batches_is_a_loader(loader):
    assert fitted(loader).trained == [[1.0], [2.0]]


def test_a_list_of_pairs_is_one_loader_and_a_list_of_loaders_several():
    pairs = [(torch.tensor([1.0]), torch.tensor([2.0]))]
    assert fitted(pairs).trained == [([1.0], [2.0])]
    assert fitted([numbers(1), numbers(1)]).trained == [[[1.0], [1.0]]]


def test_a_data_set_that_is_read_in_order_and_has_no_length_ends_where_it_ends():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(1.0, 4.0))

    assert fitted(DataLoader(Endless(), batch_size=2)).trained == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("loader", [Stream(5), numbers(5)], ids=["unsized", "sized"])
def test_a_short_last_window_is_divided_by_what_it_holds(loader):
    """PL #19987."""
    assert fitted(loader, accumulate_grad_batches=2).gradients == [1.5, 3.5, 5.0]


@pytest.mark.parametrize(
    ("limit", "expected"), [(2, 2), (7, 5), (1.0, 5), (0.4, 2), (0, 0), (0.0, 0)]
)
def test_limits_are_batches_or_shares_of_them(limit, expected):
    assert len(fitted(numbers(5), limit_train_batches=limit).trained) == expected


@pytest.mark.parametrize(("limit", "expected"), [(2, 2), (7, 5), (1.0, 5), (0, 0), (0.0, 0)])
def test_a_limit_holds_for_a_loader_without_a_length(limit, expected):
    stream = Stream(5)
    assert len(fitted(stream, limit_train_batches=limit).trained) == expected
    assert stream.asked == expected


def test_a_share_of_an_unknown_number_is_refused():
    message = "limit_train_batches=0.5 is a share of the training batches, and this loader has no"
    with pytest.raises(ConfigError, match=message):
        fitted(Stream(5), limit_train_batches=0.5)


def test_a_sized_loader_is_asked_for_a_batch_only_after_the_one_before_was_used():
    """So that data made from the model, such as a replay buffer's, is fresh."""

    class Fresh:
        def __len__(self):
            return 3

        def __iter__(self):
            for _ in range(3):
                yield module.w.detach().clone().reshape(1) - 1

    module = Reads()
    quiet_trainer().fit(module, Fresh())
    assert module.trained == [[-1.0], [0.0], [0.0]]


def test_the_numbers_of_batches_can_be_read():
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            seen.append((trainer.num_training_batches, trainer.num_val_batches))
            seen.append(trainer.num_sanity_val_batches)

    trainer = quiet_trainer(callbacks=[Looks()], limit_val_batches=3, num_sanity_val_steps=2)
    trainer.fit(Reads(), Stream(2), {"a": numbers(5), "b": numbers(1), "c": Stream(4)})
    assert seen == [(float("inf"), [3, 1, float("inf")]), [2, 1, 2]]


# Lengths that are not true


@pytest.mark.parametrize("window", [1, 2])
def test_fewer_batches_than_promised_end_the_epoch_which_is_whole(window):
    ended = []

    class Ends(Reads):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.log("gradient", self.w.grad)

        def on_train_epoch_end(self):
            ended.append(self.global_step)

    module = Ends()
    trainer = quiet_trainer(accumulate_grad_batches=window, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="promised 5 batches and it gave 3.*correct the loader"):
        result = trainer.fit(module, Promises(3, promised=5), numbers(1))
    assert module.gradients == ([1.0, 2.0, 3.0] if window == 1 else [1.5, 3.0])
    assert module.validated == [[1.0]]
    assert (result.epochs, result.steps) == (1, len(module.gradients))
    assert ended == [result.steps]


def test_more_batches_than_promised_are_left():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = fitted(Promises(5, promised=3), Promises(5, promised=2), max_epochs=2)
    assert module.trained == [[1.0], [2.0], [3.0]] * 2
    assert module.validated == [[1.0], [2.0]] * 2


def test_a_promise_of_batches_where_there_is_none_is_an_error():
    with pytest.raises(DataError, match=r"The loader gave no batch\. Check its data set"):
        fitted(Promises(0, promised=3))


def test_a_stream_that_gives_nothing_is_an_error():
    with pytest.raises(DataError, match="The loader gave no batch"):
        fitted(Stream(0))


def test_a_generator_lasts_for_one_epoch():
    generator = (torch.ones(1) for _ in range(2))
    with pytest.raises(DataError, match="iterated more than once: a generator cannot"):
        fitted(generator, max_epochs=2)


# Several at once


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("max_size_cycle", [(1, 1), (2, 2), (1, 3)]),
        ("max_size", [(1, 1), (2, 2), (None, 3)]),
        ("min_size", [(1, 1), (2, 2)]),
    ],
)
@pytest.mark.parametrize("kind", [numbers, Stream], ids=["sized", "unsized"])
def test_modes_of_reading_side_by_side(mode, expected, kind):
    loader = CombinedLoader({"a": kind(2), "b": kind(3)}, mode)
    batches = [{"a": a and [float(a)], "b": [float(b)]} for a, b in expected]
    assert [plain(batch) for batch in loader] == batches
    assert fitted(loader).trained == batches
    if kind is numbers:
        assert len(loader) == len(expected)


def test_a_dict_of_loaders_gives_dicts_and_a_list_lists_the_shorter_beginning_again():
    named = fitted({"a": numbers(2), "b": numbers(3)}).trained
    assert named[2] == {"a": [1.0], "b": [3.0]}
    assert fitted([numbers(2), numbers(3)]).trained[2] == [[1.0], [3.0]]
    assert fitted((numbers(2), numbers(3))).trained[2] == ([1.0], [3.0])


def test_a_combined_loader_can_be_validated_on():
    loader = CombinedLoader([numbers(1), numbers(2)], "max_size")
    assert fitted(numbers(1), loader).validated == [[[1.0], [1.0]], [None, [2.0]]]


def test_loaders_of_one_length_are_not_begun_again_at_the_end():
    first, second = Stream(2), Stream(2)
    assert len(list(CombinedLoader([first, second]))) == 2
    assert (first.asked, second.asked) == (2, 2)


def test_an_endless_loader_can_stand_beside_one_that_ends():
    class Endless:
        def __iter__(self):
            while True:
                yield torch.zeros(1)

    trained = fitted(CombinedLoader([Endless(), Stream(2)], "min_size")).trained
    assert trained == [[[0.0], [1.0]], [[0.0], [2.0]]]


@pytest.mark.parametrize(
    ("loaders", "mode", "error", "message"),
    [
        ([[1.0]], "longest", ConfigError, "mode='longest'.*'max_size_cycle', 'max_size'"),
        ([[1.0]], "sequential", ConfigError, "one after the other, pass them as a list"),
        ({}, "min_size", DataError, "{} holds no loader"),
        ({"a": 3}, "min_size", DataError, "Loader 'a' is 3, which has no batches"),
        ([numbers(1), None], "min_size", DataError, "Loader 1 is None"),
        ({"a": [numbers(1)]}, "min_size", DataError, "'a' is itself a collection of loaders"),
    ],
)
def test_what_cannot_be_read_side_by_side_is_refused(loaders, mode, error, message):
    with pytest.raises(error, match=message):
        CombinedLoader(loaders, mode)


def test_a_loader_that_cannot_begin_again_is_named():
    loader = CombinedLoader({"once": (n for n in range(2)), "long": range(3)})
    with pytest.raises(DataError, match=r"Loader 'once' gives no batch.*more than once"):
        list(loader)


# Epochs


class Epochs(Sampler):
    """Yields 3e, 3e + 1, 3e + 2 in epoch e."""

    epoch = -1

    def __iter__(self):
        return iter(range(3 * self.epoch, 3 * self.epoch + 3))

    def __len__(self):
        return 3

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_the_sampler_knows_the_epoch_before_it_is_iterated(workers, tmp_path):
    """PL #21938: also where the run resumes."""

    def loader():
        context = "fork" if workers else None
        data = torch.arange(12.0)
        return DataLoader(
            data, sampler=Epochs(), num_workers=workers, multiprocessing_context=context
        )

    saver = ModelCheckpoint(tmp_path, save_last=True)
    first, second = Reads(), Reads()
    quiet_trainer(max_epochs=2, callbacks=[saver]).fit(first, loader())
    trainer = quiet_trainer(max_epochs=4, callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    trainer.fit(second, loader(), ckpt_path=saver.last_model_path)
    assert first.trained == [[float(n)] for n in range(6)]
    assert second.trained == [[float(n)] for n in range(6, 12)]


def test_every_part_of_a_loader_that_wants_the_epoch_is_told_once():
    told = []

    class Wants(Epochs, torch.utils.data.Dataset):
        def __init__(self, name):
            self.name = name

        def __getitem__(self, index):
            return torch.ones(())

        def set_epoch(self, epoch):
            self.epoch = epoch
            told.append((self.name, epoch))

    class Batches(Wants):
        def __iter__(self):
            return iter([[0]])

        def __len__(self):
            return 1

    data = Wants("data set")
    loaders = {
        "a": DataLoader(data, batch_sampler=Batches("batch sampler")),
        "b": DataLoader(data, sampler=Wants("sampler")),
    }
    fitted({"a": loaders["a"]}, max_epochs=2)
    assert told == [(n, e) for e in range(2) for n in ("data set", "batch sampler")]
    told.clear()
    fitted(loaders["b"])
    assert told == [("data set", 0), ("sampler", 0)]


def made(**choices):
    """Return the epochs in which the loaders of training and validation were made."""

    class Makes(Reads):
        def train_dataloader(self):
            epochs["train"].append(self.current_epoch)
            return numbers(1)

        def val_dataloader(self):
            epochs["val"].append(self.current_epoch)
            return numbers(1)

    epochs = {"train": [], "val": []}
    ckpt_path = choices.pop("ckpt_path", None)
    quiet_trainer(**choices).fit(Makes(), ckpt_path=ckpt_path)
    assert epochs["train"] == epochs["val"]
    return epochs["train"]


def test_loaders_are_made_once_unless_they_are_to_be_made_anew():
    assert made(max_epochs=6) == [0]
    assert made(max_epochs=6, reload_dataloaders_every_n_epochs=2) == [0, 2, 4]


def test_a_resumed_run_makes_its_loaders_at_the_same_epochs(tmp_path):
    """PL #21492."""
    saver = ModelCheckpoint(tmp_path, save_last=True)
    every_two = {"reload_dataloaders_every_n_epochs": 2}
    assert made(max_epochs=2, callbacks=[saver], **every_two) == [0]
    again = {
        "ckpt_path": saver.last_model_path,
        "callbacks": [ModelCheckpoint(tmp_path, save_last=True)],
    }
    assert made(max_epochs=6, **again, **every_two) == [2, 4]


# Overfitting


@pytest.mark.parametrize("kind", ["one", "several"])
def test_overfitting_reads_a_shuffled_loader_in_order_and_leaves_the_users_own_alone(kind):
    loader = DataLoader(torch.arange(1.0, 5.0), shuffle=True)
    module = fitted(loader if kind == "one" else {"a": loader}, overfit_batches=0.5, max_epochs=2)
    expected = [[1.0], [2.0]] * 2
    assert module.trained == (expected if kind == "one" else [{"a": batch} for batch in expected])
    assert isinstance(loader.sampler, RandomSampler)


def test_overfitting_takes_a_stream_as_it_comes():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(1.0, 9.0))

    assert fitted(DataLoader(Endless()), overfit_batches=2).trained == [[1.0], [2.0]]
