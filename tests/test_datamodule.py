"""DataModule: its life in a run, its hooks, and its data beside that of a Module."""

from collections import defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from leyden import DataError, DataModule, Module
from leyden.plugins import ModelCheckpoint
from leyden.testing import quiet_trainer


class Reads(Module):
    """Keeps every batch with the step that read it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.read = []

    def keep(self, step, batch):
        self.read.append((step, batch.tolist()))

    def training_step(self, batch, batch_idx):
        self.keep("train", batch)
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.keep("val", batch)

    def test_step(self, batch, batch_idx):
        self.keep("test", batch)

    def predict_step(self, batch, batch_idx):
        self.keep("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Data(DataModule):
    """Notes what happens to it, and gives the loaders 1 to 4."""

    def __init__(self):
        self.told = []

    def prepare_data(self):
        self.told.append("prepare_data")

    def setup(self, stage):
        self.told.append(f"setup {stage}")

    def teardown(self, stage):
        self.told.append(f"teardown {stage}")

    def on_exception(self, exception):
        self.told.append(f"on_exception {exception}")

    def loader(self, name, value):
        self.told.append(name)
        return [torch.tensor([value])]

    def train_dataloader(self):
        return self.loader("train", 1.0)

    def val_dataloader(self):
        return self.loader("val", 2.0)

    def test_dataloader(self):
        return self.loader("test", 3.0)

    def predict_dataloader(self):
        return self.loader("predict", 4.0)


# Life


@pytest.mark.parametrize(
    ("method", "loaders", "read"),
    [
        ("fit", ["train", "val"], [("train", [1.0]), ("val", [2.0])]),
        ("validate", ["val"], [("val", [2.0])]),
        ("test", ["test"], [("test", [3.0])]),
        ("predict", ["predict"], [("predict", [4.0])]),
    ],
)
def test_a_run_prepares_sets_up_asks_and_tears_down(method, loaders, read):
    data, module = Data(), Reads()
    trainer = quiet_trainer(num_sanity_val_steps=0)
    getattr(trainer, method)(module, datamodule=data)
    assert data.told == ["prepare_data", f"setup {method}", *loaders, f"teardown {method}"]
    assert module.read == read
    assert data.trainer is trainer
    assert trainer.datamodule is data


def test_a_datamodule_may_stand_where_the_loaders_do():
    module = Reads()
    quiet_trainer(num_sanity_val_steps=0).fit(module, Data())
    quiet_trainer().test(module, Data(), verbose=False)
    assert module.read == [("train", [1.0]), ("val", [2.0]), ("test", [3.0])]


def test_a_run_that_fails_tells_and_tears_down():
    class Fails(Reads):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    data = Data()
    with pytest.raises(RuntimeError, match="mine"):
        quiet_trainer(limit_val_batches=0).fit(Fails(), datamodule=data)
    assert data.told[-2:] == ["on_exception mine", "teardown fit"]


def test_a_datamodule_is_set_up_before_its_module_and_torn_down_after():
    order = []

    class Ordered(Data):
        def setup(self, stage):
            order.append("data")

        teardown = setup

    class Module(Reads):
        def setup(self, stage):
            order.append("module")

        teardown = setup

    quiet_trainer().test(Module(), datamodule=Ordered(), verbose=False)
    assert order == ["data", "module", "module", "data"]


def test_a_module_may_bring_its_own_data():
    class Whole(Reads):
        def setup(self, stage):
            self.data = [torch.tensor([5.0])]

        def train_dataloader(self):
            return self.data

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    module = Whole()
    trainer = quiet_trainer(num_sanity_val_steps=0)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    steps = ["train", "val", "val", "test", "predict"]
    assert module.read == [(step, [5.0]) for step in steps]


def test_the_datamodule_goes_before_the_module_and_loaders_before_both():
    class Whole(Reads):
        def test_dataloader(self):
            return [torch.tensor([5.0])]

    first, second = Whole(), Whole()
    quiet_trainer().test(first, datamodule=Data(), verbose=False)
    quiet_trainer().test(second, [torch.tensor([6.0])], verbose=False)
    assert (first.read, second.read) == ([("test", [3.0])], [("test", [6.0])])


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("fit", {"train_dataloaders": [torch.ones(1)]}, "train"),
        ("fit", {"val_dataloaders": [torch.ones(1)]}, "val"),
        ("test", {"dataloaders": [torch.ones(1)]}, "test"),
    ],
)
def test_loaders_and_a_datamodule_together_are_refused(method, arguments, name):
    message = f"Both {name}_dataloaders and datamodule were passed. Pass one of them"
    with pytest.raises(DataError, match=message):
        getattr(quiet_trainer(), method)(Reads(), **arguments, datamodule=Data())


def test_a_datamodule_without_the_data_is_an_error_that_names_it():
    class Half(DataModule):
        def train_dataloader(self):
            return [torch.ones(1)]

    message = r"no data to test with.*define test_dataloader\(\) on Half"
    with pytest.raises(DataError, match=message):
        quiet_trainer().test(Reads(), datamodule=Half())


def test_a_method_that_returns_no_loader_is_an_error():
    class Forgets(DataModule):
        def train_dataloader(self):
            """Return nothing."""

    message = r"no data to fit with.*train_dataloader\(\) on Forgets and let it return a loader"
    with pytest.raises(DataError, match=message):
        quiet_trainer().fit(Reads(), datamodule=Forgets())


def test_hyperparameters_and_state_are_in_the_checkpoint_and_come_back(tmp_path):
    class Stateful(Data):
        def __init__(self, size: int = 3):
            super().__init__()
            self.save_hyperparameters()
            self.position = 0

        def train_dataloader(self):
            self.position += 1
            return super().train_dataloader()

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state_dict):
            self.restored = state_dict

    def trainer(epochs):
        return quiet_trainer(
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
            reload_dataloaders_every_n_epochs=1,
        )

    trainer(2).fit(Reads(), datamodule=Stateful(size=5))
    data = Stateful()
    trainer(3).fit(Reads(), datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert data.restored == {"position": 2}
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["datamodule_hyper_parameters"] == {"size": 3}


# Batch transfer


class Marks:
    """Hooks that mark each batch with who saw it: the last decimal is the latest."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.told.append(("before", dataloader_idx))
        return batch * 10 + self.mark

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.told.append((device.type, dataloader_idx))
        return batch * 10 + self.mark + 1

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.told.append(("after", dataloader_idx))
        return batch * 10 + self.mark + 2


class MarkingModule(Marks, Reads):
    mark = 1

    def __init__(self):
        super().__init__()
        self.told = []


class MarkingData(Marks, Data):
    mark = 5


def test_a_modules_transfer_hooks_change_the_batch_in_order():
    module = MarkingModule()
    data = [torch.tensor([0.0])]
    quiet_trainer(num_sanity_val_steps=0).fit(module, data, {"a": data, "b": data})
    assert module.read == [("train", [123.0]), ("val", [123.0]), ("val", [123.0])]
    assert module.told == [(name, i) for i in (0, 0, 1) for name in ("before", "cpu", "after")]


def test_a_datamodules_transfer_hooks_replace_the_modules_one_by_one():
    class BeforeOnly(Data):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch * 0 + 9

    whole, part = MarkingModule(), MarkingModule()
    quiet_trainer().test(whole, datamodule=MarkingData(), verbose=False)
    quiet_trainer().test(part, datamodule=BeforeOnly(), verbose=False)
    assert whole.read == [("test", [3567.0])]
    assert part.read == [("test", [923.0])]


def test_without_hooks_a_batch_on_its_device_stays_the_same_object():
    batch = torch.ones(1)

    class Looks(Reads):
        def test_step(self, given, batch_idx):
            assert given is batch

    quiet_trainer().test(Looks(), [batch], verbose=False)


Named = namedtuple("Named", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str = "a"
    extra: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "extra", self.x * 0)


class Tagged(list):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


X = torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "inside"),
    [
        ([X, "text"], lambda batch: batch[0]),
        ((X, None), lambda batch: batch[0]),
        ({"x": {"deep": [X]}}, lambda batch: batch["x"]["deep"][0]),
        (Named(X, 3), lambda batch: batch.x),
        (defaultdict(list, x=X), lambda batch: batch["x"] if batch["new"] == [] else None),
        (MappingProxyType({"x": X}), lambda batch: batch["x"]),
        (Sample(X), lambda batch: batch.x + batch.extra),
        (Tagged([X], "tag"), lambda batch: batch[0] if batch.tag == "tag" else None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_converted_wherever_they_are_and_collections_keep_their_types(batch, inside):
    seen = []

    class Looks(Reads):
        def test_step(self, given, batch_idx):
            seen.append((type(given), inside(given).dtype))

    quiet_trainer(precision="64-true").test(Looks(), [batch], verbose=False)
    assert seen == [(type(batch), torch.float64)]
    assert inside(batch).dtype is torch.float32


# From data sets


def test_data_sets_become_loaders_of_which_the_training_one_is_shuffled():
    data = TensorDataset(torch.arange(6.0))
    module = DataModule.from_datasets(data, data, data, data, batch_size=4)
    assert isinstance(module.train_dataloader().sampler, RandomSampler)
    for name in ("val", "test", "predict"):
        loader = getattr(module, f"{name}_dataloader")()
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_several_data_sets_become_several_loaders_and_a_stream_is_not_shuffled():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(3.0))

    data = TensorDataset(torch.arange(2.0))
    module = DataModule.from_datasets(Stream(), [data, data], {"a": data}, drop_last=True)
    assert [float(batch) for batch in module.train_dataloader()] == [0.0, 1.0, 2.0]
    assert len(module.val_dataloader()) == 2
    assert list(module.test_dataloader()) == ["a"]
    assert module.val_dataloader()[0].drop_last


def test_data_sets_that_were_not_given_are_missing():
    class Ones(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.ones(1)

    module = Reads()
    data = DataModule.from_datasets(train_dataset=Ones())
    assert isinstance(data.train_dataloader(), DataLoader)
    assert quiet_trainer().fit(module, datamodule=data).steps == 2
    with pytest.raises(DataError, match=r"no data to test with.*test_dataloader\(\)"):
        quiet_trainer().test(module, datamodule=data)
