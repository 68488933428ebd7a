"""Validation and test: what they return, what they read, and that they leave no trace."""

import random
from collections import deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import Callback, ConfigError, DataError, LeydenError, Module, ModuleError
from leyden.plugins import ModelCheckpoint
from leyden.testing import Regression, batches, quiet_trainer

A, B = [torch.tensor([1.0])], [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]


class Mean(Module):
    """Logs the mean of what it is evaluated on, and keeps what it read."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.read = []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.read += batch.tolist()
        self.log("mean", batch.mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def evaluated(loaders, module=None, method="test", **choices):
    return getattr(quiet_trainer(**choices), method)(module or Mean(), loaders, verbose=False)


# What is returned and printed


@pytest.mark.parametrize("method", ["validate", "test"])
def test_an_evaluation_returns_what_was_logged_as_python_numbers(method):
    results = evaluated(B, method=method)
    assert results == [{"mean": 3.0}]
    assert type(results[0]["mean"]) is float


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: dict(zip("ab", pair, strict=True))])
def test_several_loaders_give_a_dict_each(kind):
    pair = [DataLoader(torch.cat(data), batch_size=2) for data in (A, B)]
    assert evaluated(kind(pair)) == [
        {"mean/dataloader_idx_0": 1.0},
        {"mean/dataloader_idx_1": 3.0},
    ]


def test_a_joint_value_of_several_loaders_is_in_each_dict_under_its_own_name():
    class Joint(Mean):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("joint", batch.mean(), add_dataloader_idx=False)

    assert evaluated({"a": A, "b": B}, Joint()) == [{"joint": 2.5}] * 2


def test_what_is_logged_at_the_end_of_several_loaders_is_no_loaders_own():
    class Joint(Mean):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("mean", batch.mean())

        def on_test_epoch_end(self):
            self.log("mean", 7.0)

    assert evaluated({"a": A, "b": B}, Joint()) == [
        {"mean/dataloader_idx_0": 1.0, "mean": 7.0},
        {"mean/dataloader_idx_1": 3.0, "mean": 7.0},
    ]


def test_the_index_of_the_loader_is_passed_where_the_step_takes_it():
    class Indexed(Mean):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.read.append((batch_idx, dataloader_idx))

        def validation_step(self, batch, batch_idx, scale=2.0):
            self.read.append((batch_idx, scale))

    several, one, other = Indexed(), Indexed(), Indexed()
    evaluated({"a": A, "b": B}, several)
    evaluated(A, one)
    evaluated(A, other, "validate")
    assert several.read == [(0, 0), (0, 1), (1, 1)]
    assert one.read == [(0, 0)]
    assert other.read == [(0, 2.0)]


def test_nothing_logged_gives_empty_dicts():
    class Silent(Mean):
        def test_step(self, batch):
            """Log nothing."""

    assert evaluated({"a": A, "b": B}, Silent()) == [{}, {}]


def test_results_are_printed_unless_asked_not_to(capsys):
    quiet_trainer().test(Mean(), B)
    printed = capsys.readouterr().out
    assert "test:" in printed
    assert "mean  3" in printed
    quiet_trainer().test(Mean(), B, verbose=False)
    assert capsys.readouterr().out == ""


def test_metrics_are_complete_at_the_end_hooks():
    seen = []

    class Reads(Callback):
        def on_test_batch_end(self, trainer, *args):
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        on_test_epoch_end = on_test_end = on_test_batch_end

    evaluated(B, callbacks=[Reads()])
    assert seen == [{}, {}, {"mean": 3.0}, {"mean": 3.0}]


# What is read


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [1.0, 2.0]), (0.5, [1.0, 2.0]), (9, [1.0, 2.0, 6.0]), (0, [])]
)
@pytest.mark.parametrize(("method", "name"), [("validate", "val"), ("test", "test")])
def test_limits_are_batches_or_shares_of_them(method, name, limit, expected):
    module = Mean()
    evaluated(B, module, method, **{f"limit_{name}_batches": limit})
    assert module.read == expected


def test_no_validation_happens_with_a_limit_of_zero():
    module = Mean()
    quiet_trainer(limit_val_batches=0).fit(module, A, B)
    assert module.read == []


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, []), (1, [1.0, 1.0, 2.0]), (-1, [1.0, 1.0, 2.0, 6.0])]
)
def test_the_sanity_check_reads_so_many_batches_of_each_loader(steps, expected):
    module = Mean()
    trainer = quiet_trainer(num_sanity_val_steps=steps, check_val_every_n_epoch=2)
    trainer.fit(module, A, {"a": A, "b": B})
    assert module.read == expected
    assert trainer.state.validations == 0


def test_the_sanity_check_keeps_to_the_limit_of_validation():
    module = Mean()
    quiet_trainer(limit_val_batches=1, check_val_every_n_epoch=2).fit(module, A, B)
    assert module.read == [1.0, 2.0]


def test_fast_dev_run_tries_one_batch_of_everything():
    module = Mean()
    trainer = quiet_trainer(fast_dev_run=True, max_epochs=7)
    assert trainer.fit(module, A * 5, B).steps == 1
    trainer.test(module, B, verbose=False)
    assert module.read == [1.0, 2.0] * 2


def test_overfitting_trains_and_validates_on_the_first_batches_in_order():
    class Reads(Mean):
        def training_step(self, batch, batch_idx):
            self.read.append(("train", batch.tolist()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.read.append(("val", batch.tolist()))

    module = Reads()
    shuffled = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    quiet_trainer(overfit_batches=2, num_sanity_val_steps=0, max_epochs=2).fit(module, shuffled)
    first = [[0.0, 1.0], [2.0, 3.0]]
    epoch = [("train", batch) for batch in first] + [("val", batch) for batch in first]
    assert module.read == epoch * 2


# Which weights


def test_the_best_checkpoint_or_any_path_gives_the_weights(tmp_path):
    class Worsens(Regression):
        def on_validation_epoch_end(self):
            self.log("worse", float(self.current_epoch))

        def test_step(self, batch, batch_idx):
            self.log("weight", self.layer.weight[0, 0])

    data = batches(4)
    saver = ModelCheckpoint(tmp_path, monitor="worse", save_last=True, filename="{epoch}")
    trainer = quiet_trainer(callbacks=[saver], max_epochs=3)
    module = Worsens()
    trainer.fit(module, data, data)
    last = module.layer.weight[0, 0].item()
    assert trainer.test(module, data, verbose=False) == [{"weight": last}]

    [best] = trainer.test(module, data, ckpt_path="best", verbose=False)
    first_epoch = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["state_dict"]
    assert best["weight"] == first_epoch["layer.weight"][0, 0].item() != last
    [from_path] = trainer.test(module, data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert from_path == {"weight": last}
    assert trainer.test(dataloaders=data, verbose=False) == [best]


def test_an_evaluation_without_a_model_needs_one_fitted_before():
    with pytest.raises(ConfigError, match=r"no model to test\. Pass one: trainer\.test\(model"):
        quiet_trainer().test(dataloaders=A)


def test_the_best_checkpoint_needs_one_to_be_known():
    with pytest.raises(LeydenError, match="ckpt_path='best': there is no such checkpoint"):
        quiet_trainer().test(Mean(), A, ckpt_path="best")


# What cannot be evaluated


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("loaders", [None, [], {}])
def test_no_data_is_an_error_that_says_where_it_could_come_from(method, loaders):
    name = {"validate": "val"}.get(method, method)
    message = rf"no data to {method} with\. .*trainer\.{method}\(…\).*{name}_dataloader\(\) on Mean"
    with pytest.raises(DataError, match=message):
        getattr(quiet_trainer(), method)(Mean(), loaders)


@pytest.mark.parametrize("loaders", [None, [], {}])
def test_no_data_to_train_on_is_an_error(loaders):
    message = r"no data to fit with\. .*trainer\.fit\(…\).*train_dataloader\(\) on Mean"
    with pytest.raises(DataError, match=message):
        quiet_trainer().fit(Mean(), loaders)


def test_a_fit_without_validation_data_does_not_validate():
    module = Mean()
    quiet_trainer().fit(module, A, [])
    assert module.read == []


@pytest.mark.parametrize("loaders", [7, DataLoader, "data", [DataLoader([1]), 7]])
def test_what_gives_no_batches_is_refused(loaders):
    with pytest.raises(DataError, match=r"is no loader of test batches\. Pass a DataLoader"):
        evaluated(loaders)


def test_a_data_set_is_no_loader():
    dataset = torch.utils.data.TensorDataset(torch.ones(3))
    with pytest.raises(DataError, match=r"TensorDataset.* is no loader of training batches"):
        quiet_trainer().fit(Mean(), dataset)


def test_an_empty_loader_is_refused():
    with pytest.raises(DataError, match=r"test loader has no batch: len\(\) is 0.*drop_last"):
        evaluated(DataLoader(torch.ones(3), batch_size=4, drop_last=True))


def test_a_generator_that_is_used_up_is_an_error_and_no_silent_pass():
    generator = (batch for batch in B)
    with pytest.raises(DataError, match=r"gave no batch.*iterated more than once"):
        quiet_trainer(max_epochs=2).fit(Mean(), A, generator)


def test_a_module_without_the_step_is_refused():
    class Untested(Mean):
        test_step = Module.test_step

    message = r"Untested has no test_step\(batch, batch_idx\), which this run needs"
    with pytest.raises(ModuleError, match=message):
        evaluated(A, Untested())


def test_validation_data_without_a_validation_step_warns():
    class Unvalidated(Mean):
        validation_step = Module.validation_step

    with pytest.warns(UserWarning, match="Unvalidated has no validation_step, so it is not"):
        quiet_trainer().fit(Unvalidated(), A, B)


def test_a_share_of_less_than_one_batch_is_refused():
    message = "limit_test_batches=0.1 of 2 batches is less than one. Pass at least 0.5"
    with pytest.raises(ConfigError, match=message):
        evaluated(B, limit_test_batches=0.1)


# No trace


def test_a_validation_leaves_the_training_draws_as_they_are():
    def drawn(**choices):
        class Draws(Mean):
            def draw(self):
                return random.random(), float(np.random.rand()), float(torch.rand(()))

            def training_step(self, batch, batch_idx):
                self.read.append((batch.tolist(), self.draw()))
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch, batch_idx):
                torch.manual_seed(99)
                self.draw()

        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        module = Draws()
        train = DataLoader(torch.arange(6.0), shuffle=True)
        val = DataLoader(torch.arange(6.0), shuffle=True)
        quiet_trainer(max_epochs=2, **choices).fit(module, train, val)
        return module.read

    without = drawn(limit_val_batches=0)
    assert len(without) == 12
    assert drawn() == without
    assert drawn(val_check_interval=2, num_sanity_val_steps=-1, validate_at="start") == without


Kept = namedtuple("Kept", "value")


class Caches(Module):
    """Keeps what it computes in validation in every way, and trains through all of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.lazy = nn.LazyLinear(1)
        self.register_buffer("buffer", torch.zeros(2))
        self.child = nn.Module()
        self.cached, self.by_name, self.listed = None, {}, []
        self.queued, self.named, self.nested = deque(maxlen=2), Kept(None), {"deep": [{}]}

    def validation_step(self, batch, batch_idx):
        doubled = batch * 2
        self.cached = self.child.cached = self.by_name["x"] = doubled
        self.listed.append(doubled)
        self.queued.append(doubled)
        self.named = Kept(doubled)
        self.nested["deep"][0]["x"] = (doubled, "text")
        self.buffer = doubled.mean(0)
        self.lazy(batch)

    test_step = predict_step = validation_step

    def training_step(self, batch, batch_idx):
        kept = [self.cached, self.child.cached, self.by_name["x"], self.listed[-1], self.queued[-1]]
        kept += [self.named.value, self.nested["deep"][0]["x"][0], self.buffer]
        for value in kept:
            value += 1  # an inference tensor could not be written to
            batch = batch * value
        return (self.layer(batch) + self.lazy(batch)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("before", ["sanity check", "validate", "test", "predict"])
def test_what_an_evaluation_leaves_in_the_module_can_be_trained_through(before, inference_mode):
    module, data = Caches(), [torch.ones(3, 2)]
    trainer = quiet_trainer(inference_mode=inference_mode)
    if before == "sanity check":
        trainer.fit(module, data, data)
    else:
        getattr(trainer, before)(module, data)
        trainer.fit(module, data)
    assert trainer.global_step == 1
    assert module.lazy.weight.grad is not None


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluations_keep_no_graph(inference_mode):
    modes = []

    class Looks(Mean):
        def look(self, *args):
            modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        validation_step = on_validation_batch_start = on_validation_batch_end = look
        on_validation_epoch_start = on_validation_epoch_end = look

    evaluated(A, Looks(), "validate", inference_mode=inference_mode)
    assert modes == [(inference_mode, False)] * 5


def test_a_loader_that_keeps_its_batches_can_serve_an_evaluation_and_training():
    class Remembers:
        made = None

        def __iter__(self):
            self.made = self.made or [torch.ones(2) * 2]
            return iter(self.made)

    loader, module = Remembers(), Mean()
    trainer = quiet_trainer()
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    assert not loader.made[0].is_inference()
    assert module.w.item() == -2.0


def test_metrics_of_an_evaluation_can_take_part_in_training():
    class Uses(Mean):
        def training_step(self, batch, batch_idx):
            return (self.w * batch * self.trainer.callback_metrics["mean"]).mean()

    module = Uses()
    quiet_trainer(validate_at="start").fit(module, A, [torch.tensor([3.0])])
    assert module.w.item() == -3.0


def test_metrics_read_within_an_evaluation_can_take_part_in_training():
    kept = []

    class Keeps(Callback):
        def on_validation_epoch_end(self, trainer, module):
            kept.append(trainer.callback_metrics["mean"])

    class Uses(Mean):
        def training_step(self, batch, batch_idx):
            return (self.w * batch * kept[-1]).mean()

    module = Uses()
    quiet_trainer(callbacks=[Keeps()]).fit(module, A, [torch.tensor([3.0])])
    assert module.w.item() == -3.0


def test_an_evaluation_that_fails_leaves_no_metrics_open():
    class Fails(Mean):
        def test_step(self, batch, batch_idx):
            self.log("x", 1.0)
            raise RuntimeError("mine")

    trainer = quiet_trainer()
    with pytest.raises(RuntimeError, match="mine"):
        trainer.test(Fails(), A)
    assert trainer.callback_metrics == {}
