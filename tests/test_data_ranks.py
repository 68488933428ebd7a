"""Data on several ranks: dealt out once, of unlike length, and predictions put together again."""

import os
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from leyden import ConfigError, DataError, Module, seed_everything
from leyden.testing import on_ranks, quiet_trainer


def own_rank():
    return int(os.environ.get("RANK", "0"))


class Ids(Module):
    """Keeps the ids of each epoch's samples, and logs their number and mean in validations."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.w.weight)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).extend(batch.flatten().tolist())
        return self.w(batch.float().reshape(-1, 1)).mean()

    def validation_step(self, batch, batch_idx):
        ids = self.w(batch.float().reshape(-1, 1)) * 0 + batch.float().reshape(-1, 1)
        self.log("mean", ids.mean(), batch_size=len(batch))
        self.log("count", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index])


def trainer_on(strategy="ddp", **choices):
    return quiet_trainer(
        **{"accelerator": "cpu", "strategy": strategy, "num_sanity_val_steps": 0, **choices}
    )


# Samplers of the user's own


class Told:
    """Gives four ids an epoch, of which it has to be told: 0 to 3, then 4 to 7."""

    def __init__(self):
        self.epoch, self.told = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def ids(self):
        return list(range(4 * self.epoch, 4 * self.epoch + 4))


class OwnSampler(Told, Sampler):
    def __iter__(self):
        return iter(self.ids())

    def __len__(self):
        return 4


class OwnBatches(Told, Sampler):
    """Batches of two; there is no making it anew without what it was made with."""

    made = 0

    def __init__(self, required):
        super().__init__()
        self.required = required
        OwnBatches.made += 1

    def __iter__(self):
        ids = self.ids()
        return iter([ids[:2], ids[2:]])

    def __len__(self):
        return 2


class OwnData(Told, Dataset):
    """Holds other samples in each epoch."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([self.ids()[index]])


def loader_of(kind, workers):
    """Return a loader, and what of it is to be told the epoch."""
    data = Numbers(8)
    if kind == "data":
        own = OwnData()
        return DataLoader(own, num_workers=workers), own
    if kind == "sampler":
        own = OwnSampler()
        return DataLoader(data, sampler=own, num_workers=workers), own
    own = OwnBatches(required=True)
    return DataLoader(data, batch_sampler=own, num_workers=workers), own


def two_epochs(kind, workers, choices):
    module, (loader, own) = Ids(), loader_of(kind, workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_on(max_epochs=2, **choices).fit(module, loader)
    return module.seen, own.told, OwnBatches.made


@pytest.mark.parametrize(
    ("kind", "workers"), [("sampler", 0), ("batches", 1), ("data", 0), ("data", 1)]
)
def test_each_epoch_is_told_and_what_a_sampler_gives_is_dealt_out_once(kind, workers):
    first, second = on_ranks(2, two_epochs, kind, workers, {})
    for seen, told, made in (first, second):
        assert told == [0, 1]
        assert made == (kind == "batches")
        assert [len(ids) for ids in seen.values()] == [2, 2]
    if kind == "batches":
        assert first[0] == {0: [0, 1], 1: [4, 5]}
        assert second[0] == {0: [2, 3], 1: [6, 7]}
    else:
        assert first[0] == {0: [0, 2], 1: [4, 6]}
        assert second[0] == {0: [1, 3], 1: [5, 7]}


@pytest.mark.parametrize("kind", ["sampler", "batches", "data"])
def test_switched_off_every_rank_reads_all_that_its_loader_gives(kind):
    for seen, told, _ in on_ranks(2, two_epochs, kind, 0, {"use_distributed_sampler": False}):
        assert told == [0, 1]
        assert seen == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def with_own_distribution():
    data = Numbers(8)
    sampler = DistributedSampler(data, 2, own_rank(), shuffle=True, seed=3)
    module = Ids()
    trainer_on(max_epochs=2).fit(module, DataLoader(data, sampler=sampler))
    expected = {}
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        expected[epoch] = list(sampler)
    return module.seen, expected


def test_a_sampler_that_knows_ranks_is_told_the_epoch_and_left_as_it_is():
    found = on_ranks(2, with_own_distribution)
    for seen, expected in found:
        assert seen == expected
    for epoch in (0, 1):
        assert sorted(found[0][0][epoch] + found[1][0][epoch]) == list(range(8))
    assert found[0][0][0] != found[0][0][1]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4))


def stream_read(choices):
    module = Ids()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_on(**choices).fit(module, DataLoader(Streamed()))
    return module.seen[0], [str(one.message) for one in caught if "each rank" in str(one.message)]


def test_a_stream_is_read_by_each_rank_which_is_said_unless_it_is_switched_off():
    (ids, said), (other, silent) = on_ranks(2, stream_read, {})
    assert ids == other == [0, 1, 2, 3]
    assert "Streamed is an IterableDataset: each rank reads all that it gives" in said[0]
    assert silent == []
    for _, said in on_ranks(2, stream_read, {"use_distributed_sampler": False}):
        assert said == []


# Ranks with unlike numbers of batches


class Stream:
    """Gives its rank's batches, and does not say how many."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Promising(Stream):
    """Says that there are three batches, whatever it gives."""

    def __len__(self):
        return 3


PARTS = ([0, 1, 2], [3, 4], [5, 6, 7, 8, 9])
KINDS = {"sized": list, "stream": Stream, "promising": Promising}


def loader_on_rank(kind):
    return KINDS[kind]([torch.tensor([number]) for number in PARTS[own_rank()]])


def trained_and_evaluated(kind, strategy):
    module, trainer = Ids(), trainer_on(strategy)
    trainer.fit(module, loader_on_rank(kind))
    steps = trainer.global_step
    weight = module.state_dict()["w.weight"]
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    trainer.validate(module, loader_on_rank(kind), verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return steps, float(weight), values, module.seen[0]


@pytest.mark.parametrize(
    ("ranks", "kind", "strategy"),
    [(2, "sized", "ddp"), (3, "stream", "ddp"), (3, "sized", "fsdp"), (2, "stream", "fsdp")],
)
def test_training_ends_with_the_shortest_and_evaluation_counts_all(ranks, kind, strategy):
    found = on_ranks(ranks, trained_and_evaluated, kind, strategy, timeout=30)
    used = [number for part in PARTS[:ranks] for number in part[:2]]
    every = [number for part in PARTS[:ranks] for number in part]
    for rank, (steps, weight, values, seen) in enumerate(found):
        assert (steps, seen) == (2, PARTS[rank][:2])
        # Each step subtracts the mean of the ranks' numbers.
        assert weight == pytest.approx(-sum(used) / ranks)
        assert values["count"] == len(every)
        assert values["mean"] == pytest.approx(sum(every) / len(every))


def dealt(samples):
    module, trainer = Ids(), trainer_on()
    loader = DataLoader(Numbers(samples), batch_size=1)
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return trainer.global_step, module.seen[0], values


def test_of_five_samples_two_ranks_train_on_four_and_evaluate_all():
    first, second = on_ranks(2, dealt, 5)
    assert first[:2] == (2, [0, 2])
    assert second[:2] == (2, [1, 3])
    assert first[2] == second[2] == {"mean": 2.0, "count": 5.0}


def uses_promise(stage):
    trainer = trainer_on()
    getattr(trainer, stage)(Ids(), loader_on_rank("promising"))


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_a_rank_that_gives_less_than_it_promised_ends_all_and_says_which(stage):
    began = time.monotonic()
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, uses_promise, stage, timeout=30)
    assert time.monotonic() - began < 20
    assert "promised 3 batches and it gave 2 on rank 1 of the 2" in str(raised.value)
    assert "in time" not in str(raised.value)


def uses_nothing():
    batches = [torch.tensor([0])] * (1 - own_rank())
    trainer_on().fit(Ids(), Stream(batches))


def test_a_rank_without_any_batch_ends_all_and_says_so():
    with pytest.raises(AssertionError, match="The loader gave no batch") as raised:
        on_ranks(2, uses_nothing, timeout=30)
    assert "in time" not in str(raised.value)


# Predictions put together


class Predicts(Ids):
    """Returns a batch's ids in one of several shapes."""

    def __init__(self, shape="plain"):
        super().__init__()
        self.shape = shape

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        ids = batch.flatten()
        if self.shape == "nested":
            return {"ids": ids, "more": [(int(one), f"sample {one}") for one in ids]}
        if self.shape == "ragged":
            return [torch.full((int(one), 2), float(one), dtype=torch.bfloat16) for one in ids]
        self.w(batch.float().reshape(-1, 1))  # where parameters are sharded it takes every rank
        return ids


def predicted(samples, batch_size, options, shape="plain", strategy="ddp"):
    trainer, loader = trainer_on(strategy), DataLoader(Numbers(samples), batch_size, **options)
    own = trainer.predict(Predicts(shape), loader)
    return own, trainer.predict(Predicts(shape), loader, gather=True)


def ids_of(batches):
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize(
    ("ranks", "samples", "batch_size", "options", "expected"),
    [
        (2, 7, 2, {}, [[0, 1], [2, 3], [4, 5], [6]]),
        (3, 7, 2, {}, [[0, 1], [2, 3], [4, 5], [6]]),
        (2, 8, 2, {}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 9, 5, {"drop_last": True}, [[0, 1, 2], [3, 4]]),
        (2, 3, None, {}, [[0], [1], [2]]),
    ],
)
def test_all_predictions_come_in_the_order_of_the_data_each_once(
    ranks, samples, batch_size, options, expected
):
    found = on_ranks(ranks, predicted, samples, batch_size, options)
    alone = trainer_on("single_device").predict(
        Ids(), DataLoader(Numbers(samples), batch_size, **options)
    )
    for _, everything in found:
        assert [batch.tolist() for batch in everything] == expected
        assert ids_of(everything) == [number for batch in alone for number in batch.flatten()]
    # What each rank has by itself is a part of it.
    assert sorted(number for own, _ in found for number in ids_of(own)) == ids_of(found[0][1])


def test_a_metric_over_all_predictions_is_exact():
    for _, everything in on_ranks(2, predicted, 7, 2, {}):
        assert torch.cat(everything).float().mean() == 3.0


def test_nested_predictions_keep_their_form():
    for _, everything in on_ranks(2, predicted, 7, 2, {}, "nested"):
        assert ids_of([batch["ids"] for batch in everything]) == list(range(7))
        more = [one for batch in everything for one in batch["more"]]
        assert more == [(number, f"sample {number}") for number in range(7)]


def test_predictions_may_have_a_shape_for_each_sample():
    for _, everything in on_ranks(2, predicted, 5, 2, {}, "ragged"):
        tensors = [one for batch in everything for one in batch]
        assert [tuple(one.shape) for one in tensors] == [(number, 2) for number in range(5)]
        assert all(one.dtype == torch.bfloat16 for one in tensors)


def test_predictions_of_sharded_parameters_leave_the_additional_steps_out():
    for _, everything in on_ranks(3, predicted, 7, 2, {}, "plain", "fsdp"):
        assert ids_of(everything) == list(range(7))


def in_drawn_order(strategy):
    seed_everything(7)
    loader = DataLoader(Numbers(7), batch_size=2, shuffle=True)
    return ids_of(trainer_on(strategy).predict(Predicts(), loader, gather=True))


def test_in_a_shuffled_loader_the_order_is_that_of_one_process():
    expected = in_drawn_order("single_device")
    assert sorted(expected) == list(range(7)) != expected
    assert on_ranks(2, in_drawn_order, "ddp") == [expected] * 2


def of_two_loaders():
    loaders = [DataLoader(Numbers(count), batch_size=2) for count in (3, 6)]
    everything = trainer_on().predict(Predicts(), loaders, gather=True)
    return [ids_of(batches) for batches in everything]


def test_of_several_loaders_each_has_its_predictions():
    assert on_ranks(2, of_two_loaders) == [[[0, 1, 2], [0, 1, 2, 3, 4, 5]]] * 2


def refused(kind):
    data, choices = Numbers(4), {}
    match kind:
        case "list":
            loader = [torch.tensor([1])]
        case "stream":
            loader = DataLoader(Streamed())
        case "sampler":
            loader = DataLoader(data, sampler=DistributedSampler(data, 2, own_rank()))
        case "off":
            loader, choices = DataLoader(data), {"use_distributed_sampler": False}
    with pytest.raises(DataError, match=r"predict\(gather=True\): loader 0, a (list|DataLoader)"):
        trainer_on(**choices).predict(Predicts(), loader, gather=True)
    return True


@pytest.mark.parametrize("kind", ["list", "stream", "sampler", "off"])
def test_what_the_trainer_has_not_dealt_out_is_not_put_together(kind):
    assert on_ranks(2, refused, kind) == [True, True]


@pytest.mark.parametrize("choices", [{"stream": True}, {"return_predictions": False}])
def test_to_gather_what_is_not_kept_is_refused(choices):
    with pytest.raises(ConfigError, match="so it has to keep it"):
        quiet_trainer().predict(Predicts(), [torch.tensor([1])], gather=True, **choices)


def test_in_one_process_gathered_predictions_are_its_own():
    batches = [torch.tensor([1, 2]), torch.tensor([3])]
    assert ids_of(quiet_trainer().predict(Predicts(), batches, gather=True)) == [1, 2, 3]
