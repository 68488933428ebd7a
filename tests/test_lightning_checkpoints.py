"""Checkpoints of pytorch-lightning are read: weights, hyperparameters, optimizers and counters.

``data/lightning_2_6.ckpt`` was written by pytorch-lightning 2.6.6, which this ran under::

    from argparse import Namespace
    from collections import OrderedDict
    from pathlib import Path

    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.utilities.parsing import AttributeDict

    class Net(pl.LightningModule):
        def __init__(self, width, lr, sizes, folder, options, table, order, act, loss):
            super().__init__()
            self.save_hyperparameters()
            self.body = torch.nn.Linear(3, width)
            self.norm = torch.nn.BatchNorm1d(width)

        def training_step(self, batch, batch_idx):
            return self.norm(self.body(batch)).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    pl.seed_everything(0)
    net = Net(
        4, 0.1, (1, 2), Path("data/raw"), Namespace(depth=2, at=Path("/x")), AttributeDict(a=1),
        OrderedDict(b=2), torch.nn.ReLU(), torch.nn.functional.mse_loss,
    )
    stop = pl.callbacks.EarlyStopping("loss", strict=False, check_on_train_epoch_end=False)
    trainer = pl.Trainer(
        max_steps=5, logger=False, accelerator="cpu", enable_checkpointing=False, callbacks=[stop]
    )
    trainer.fit(net, torch.utils.data.DataLoader(torch.arange(18.0).reshape(6, 3), batch_size=2))
    trainer.save_checkpoint("lightning_2_6.ckpt")
"""

import argparse
import collections
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from leyden import CheckpointError, Module, Trainer, checkpoints

FILE = Path(__file__).parent / "data" / "lightning_2_6.ckpt"
ROWS = torch.arange(18.0).reshape(6, 3)
left_out = pytest.mark.filterwarnings("ignore:.*Not taken over")


class Net(Module):
    def __init__(
        self, width, lr=1.0, sizes=(), folder=None, options=None, table=None, order=None, **others
    ):
        super().__init__()
        self.made_with = (width, lr, sizes, folder, options, table, order, others)
        self.lr = lr
        self.body = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def training_step(self, batch, batch_idx):
        return self.norm(self.body(batch)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plain(Module):
    """Takes what a test saved."""

    def __init__(self, **given):
        super().__init__()
        self.given = given


def written(path, hyper_parameters, **others):
    """Write a checkpoint at ``path`` as Lightning would, and return the path."""
    content = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {},
        "hparams_name": "kwargs",
        "hyper_parameters": hyper_parameters,
        **others,
    }
    torch.save(content, path)
    return path


def trainer(**choices):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**quiet, enable_model_summary=False, **choices)


@left_out
def test_a_module_is_made_again_with_weights_and_hyperparameters():
    net = Net.load_from_checkpoint(FILE)
    assert net.made_with == (
        4, 0.1, (1, 2), Path("data/raw"), {"depth": 2, "at": Path("/x")}, {"a": 1}, {"b": 2}, {}
    )  # fmt: skip
    assert [type(value) for value in net.made_with[4:7]] == [dict, dict, dict]
    weight = [[-0.0495, 0.2646, -0.5203], [-0.3549, -0.1524, 0.2248]]
    torch.testing.assert_close(net.body.weight[:2], torch.tensor(weight), atol=5e-5, rtol=0)
    assert net.norm.num_batches_tracked == 5


def test_what_is_not_taken_over_is_listed_once():
    with pytest.warns(UserWarning) as caught:
        Net.load_from_checkpoint(FILE)
    assert [str(warning.message) for warning in caught] == [
        f"{FILE} was written by pytorch-lightning 2.6.6. Not taken over: hyper_parameters.act "
        "(torch.nn.modules.activation.ReLU); hyper_parameters.loss (torch.nn.functional.mse_loss); "
        "the state of callbacks (EarlyStopping); random generators and the order of the data, "
        "which it does not hold. Pass hyperparameters that are left out as arguments."
    ]


def test_a_file_of_data_alone_gives_a_message_and_no_warning(tmp_path, caplog):
    path = written(tmp_path / "l.ckpt", {"a": 1}, callbacks={"Timer{}": {}}, loops={})
    with caplog.at_level(logging.INFO, "leyden"):
        assert Plain.load_from_checkpoint(path).given == {"a": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} was written by pytorch-lightning 2.6.6. Not taken over: the state of callbacks "
        "(Timer); random generators and the order of the data, which it does not hold."
    ]


@left_out
def test_weights_alone_can_be_taken():
    net = Net(4)
    report = net.load_weights(FILE)
    assert report.is_complete
    assert torch.equal(net.body.weight, Net.load_from_checkpoint(FILE).body.weight)


@left_out
def test_a_fit_goes_on_where_lightning_stopped():
    """The file was saved two batches into the second epoch of three: the third is next."""
    net, by_hand = Net(4, lr=0.1), Net.load_from_checkpoint(FILE)
    raw = checkpoints.open(FILE)
    optimizer = torch.optim.Adam(by_hand.parameters())
    optimizer.load_state_dict(raw.optimizer_states[0])
    assert optimizer.param_groups[0]["lr"] == 0.05
    by_hand.training_step(ROWS[4:], 2).backward()
    optimizer.step()

    resumed = trainer(max_steps=6)
    result = resumed.fit(net, DataLoader(ROWS, batch_size=2), ckpt_path=FILE)
    assert (result.steps, result.epochs, resumed.state.total_batches) == (6, 2, 6)
    for own, other in zip(net.state_dict().values(), by_hand.state_dict().values(), strict=True):
        assert torch.equal(own, other)
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(
    ("started", "used", "ended", "place"),
    [(0, 0, False, (0, 0)), (2, 1, False, (1, 1)), (2, 3, True, (2, 0))],
    ids=["before training", "in an epoch", "after an epoch"],
)
def test_the_place_in_training_is_the_one_of_lightnings_loops(
    tmp_path, started, used, ended, place
):
    loop = {
        "epoch_progress": {"current": {"started": started}},
        "epoch_loop.batch_progress": {
            "current": {"processed": used}, "total": {"processed": 7}, "is_last_batch": ended
        },
    }  # fmt: skip
    path = written(tmp_path / "l.ckpt", {}, loops={"fit_loop": loop}, global_step=4)
    state = checkpoints.open(path)["state"]
    assert state == {"epoch": place[0], "batch": place[1], "total_batches": 7, "step": 4}


def test_the_scaler_is_taken_over(tmp_path):
    path = written(tmp_path / "l.ckpt", {}, MixedPrecision={"scale": 8.0})
    assert checkpoints.open(path)["precision"] == {"scale": 8.0}


def test_training_does_not_go_on_from_weights_alone(tmp_path):
    path = written(tmp_path / "l.ckpt", {})
    with pytest.raises(CheckpointError, match="it lacks optimizer_states"):
        trainer(max_steps=1).fit(Net(4), DataLoader(ROWS), ckpt_path=path)


@pytest.mark.parametrize("saved", [{"a": 1, "b": 2}, argparse.Namespace(a=1, b=2)])
def test_hyperparameters_that_were_one_argument_are_one_again(tmp_path, saved):
    class Configured(Module):
        def __init__(self, config, extra=0):
            super().__init__()
            self.sum = config.a + config["b"] + extra

    path = written(tmp_path / "l.ckpt", saved, hparams_name="config")
    assert Configured.load_from_checkpoint(path, extra=4).sum == 7


class Settings(dict):
    """A dict that is more than one."""


class Values(list):
    """A list that is more than one."""


def test_classes_of_dicts_and_lists_come_back_as_dicts_and_lists(tmp_path):
    settings = Settings(a=1)
    settings.noted = True
    counts = collections.defaultdict(list, c=[2])
    path = written(tmp_path / "l.ckpt", {"s": settings, "v": Values([1, 2]), "d": counts})
    given = Plain.load_from_checkpoint(path).given
    assert given == {"s": {"a": 1}, "v": [1, 2], "d": {"c": [2]}}
    assert [type(value) for value in given.values()] == [dict, list, dict]


def test_an_object_leaves_its_place_and_no_other_is_left_out(tmp_path):
    saved = {
        "kept": [1, {"x": 2}], "lost": [1, numpy.float64(2)], "deep": {"a": range(2), "b": 3},
        "kind": dict, "places": {1, 2},
    }  # fmt: skip
    path = written(tmp_path / "l.ckpt", saved)
    with pytest.warns(UserWarning, match=r"deep\.a \(builtins\.range\); hyper_parameters\.kind \("):
        given = Plain.load_from_checkpoint(path).given
    assert given == {"kept": [1, {"x": 2}], "deep": {"b": 3}, "places": {1, 2}}


class Attack:
    """Runs ``function`` when a pickle of it is loaded by the plain loader."""

    def __init__(self, function, *arguments):
        self.parts = (function, arguments)

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize(
    "function", [os.system, subprocess.check_call, importlib.import_module, exec, getattr]
)
def test_a_file_made_to_run_code_is_refused_and_nothing_runs(tmp_path, function):
    canary = tmp_path / "canary"
    command = f"touch {canary}" if function is os.system else ["touch", str(canary)]
    arguments = {
        exec: (f"open({str(canary)!r}, 'w')",),
        importlib.import_module: ("canary_module",),
        getattr: (canary, "touch"),
    }.get(function, (command,))
    path = written(tmp_path / "l.ckpt", {"x": Attack(function, *arguments)})
    for read in (Plain.load_from_checkpoint, checkpoints.open, Net(4).load_weights):
        with pytest.raises(CheckpointError, match=r"made to run code on whoever loads it\. None"):
            read(path)
    assert not canary.exists()


def test_a_class_that_a_file_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('canary').touch()\n"
        "class Thing:\n"
        "    def __setstate__(self, state):\n"
        "        Path(__file__).with_name('canary').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    thing = importlib.import_module("canary_module").Thing()
    thing.value = 1
    path = written(tmp_path / "l.ckpt", {"x": thing, "y": 2})
    (tmp_path / "canary").unlink()
    del sys.modules["canary_module"]
    with pytest.warns(UserWarning, match=r"hyper_parameters\.x \(canary_module\.Thing\)"):
        assert Plain.load_from_checkpoint(path).given == {"y": 2}
    assert not (tmp_path / "canary").exists()
    assert "canary_module" not in sys.modules


def test_objects_in_a_file_of_another_program_are_still_refused(tmp_path):
    torch.save({"state_dict": {}, "x": argparse.Namespace(a=1)}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace, no tensor or plain value"):
        Plain.load_from_checkpoint(tmp_path / "other.ckpt")


def test_what_the_safe_loader_allows_is_as_before(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    path = written(tmp_path / "l.ckpt", {"x": argparse.Namespace(a=1)})
    assert Plain.load_from_checkpoint(path).given == {"x": {"a": 1}}
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_file_nested_without_end_is_an_error(tmp_path):
    saved = argparse.Namespace()
    saved.itself = saved
    path = written(tmp_path / "l.ckpt", {"x": saved})
    with pytest.raises(CheckpointError, match="nested too deep"):
        Plain.load_from_checkpoint(path)
