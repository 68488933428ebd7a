"""What every registered logger does, read back from the files it left."""

import copy
import csv
import importlib
import json
import math
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from leyden import Module, Trainer
from leyden.errors import ConfigError
from leyden.loggers.registry import register_loggers
from leyden.protocols import Logger


def points_of_csv(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            yield from ((step, name, float(value)) for name, value in row.items() if value)


def points_of_jsonl(folder):
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        step = row.pop("step")
        row.pop("time")
        yield from ((step, name, float(value)) for name, value in row.items())


def points_of_tensorboard(folder):
    events = EventAccumulator(str(folder)).Reload()
    for name in events.Tags()["scalars"]:
        yield from ((point.step, name, point.value) for point in events.Scalars(name))


READERS = {"csv": points_of_csv, "jsonl": points_of_jsonl, "tensorboard": points_of_tensorboard}


def points(kind, folder):
    return sorted(READERS[kind](Path(folder)))


@pytest.fixture(params=register_loggers())
def kind(request):
    return request.param


@pytest.fixture
def make(kind):
    module, name = register_loggers()[kind].split(":")
    return getattr(importlib.import_module(module), name)


def test_follows_the_protocol(make):
    logger = make()
    assert isinstance(logger, Logger)
    assert (logger.save_dir, logger.name, logger.version, logger.log_dir) == (None,) * 4


def test_what_is_logged_is_read_back(kind, make, tmp_path):
    logger = make()
    logger.open(tmp_path)
    assert logger.log_dir == str(tmp_path)
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=1)
    logger.log_metrics({"loss": 0.25, "acc/top-1, %": 1.0}, step=2)
    logger.close("success")
    assert points(kind, tmp_path) == [
        (1, "epoch", 0.0),
        (1, "loss", 0.5),
        (2, "acc/top-1, %", 1.0),
        (2, "loss", 0.25),
    ]


def test_what_is_flushed_is_there_for_others(kind, make, tmp_path):
    logger = make()
    logger.open(tmp_path)
    for step in range(100):
        logger.log_metrics({"loss": 0.5}, step)
    logger.flush()
    assert points(kind, tmp_path) == [(step, "loss", 0.5) for step in range(100)]
    logger.close("success")


def test_nan_and_infinities_are_numbers_too(kind, make, tmp_path):
    logger = make(tmp_path)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300}, step=3)
    logger.close("success")
    nan, *others = points(kind, logger.log_dir)
    assert nan[:2] == (3, "a")
    assert math.isnan(nan[2])
    large = math.inf if kind == "tensorboard" else 1e300  # an event file keeps 32 bits
    assert others == [(3, "b", math.inf), (3, "c", -math.inf), (3, "d", large)]


def test_a_tensor_of_one_number_is_a_number(kind, make, tmp_path):
    logger = make(tmp_path)
    logger.log_metrics(
        {
            "graph": torch.tensor(0.5, requires_grad=True),
            "half": torch.tensor(0.25, dtype=torch.bfloat16),
            "int": torch.tensor(7),
        },
        step=0,
    )
    logger.close("success")
    assert points(kind, logger.log_dir) == [(0, "graph", 0.5), (0, "half", 0.25), (0, "int", 7.0)]


def test_a_resumed_run_has_each_point_once(kind, make, tmp_path):
    first = make()
    first.open(tmp_path)
    for step in range(1, 8):
        first.log_metrics({"loss": float(step)}, step)
    first.close("interrupted")
    second = make()
    second.load_state_dict(first.state_dict())
    second.open(tmp_path, resumed_at=4)
    for step in range(5, 7):
        second.log_metrics({"loss": -float(step)}, step)
    second.close("success")
    kept = [(step, "loss", float(step)) for step in range(1, 5)]
    assert points(kind, tmp_path) == [*kept, (5, "loss", -5.0), (6, "loss", -6.0)]


@pytest.mark.parametrize("before", [[], [3], [3, 5]], ids=str)
def test_what_a_step_logs_after_it_was_saved_is_there_once(kind, make, tmp_path, before):
    first = make()
    first.open(tmp_path)
    for step in before:
        first.log_metrics({"step's": float(step)}, step)
    first.flush()
    saved = first.state_dict()
    first.log_metrics({"epoch's": 1.0}, 5)  # of the same step, and lost: nobody saved it
    first.close("failed")
    for _ in range(2):  # the second is killed before it has logged anything, or saved
        resumed = make()
        resumed.load_state_dict(saved)
        resumed.open(tmp_path, resumed_at=5)
    resumed.log_metrics({"epoch's": 1.0}, 5)
    resumed.close("success")
    wanted = [(5, "epoch's", 1.0), *((step, "step's", float(step)) for step in before)]
    assert points(kind, tmp_path) == sorted(wanted)


def test_opened_again_without_resuming_it_goes_on_below(kind, make, tmp_path):
    for step in (5, 6):
        logger = make()
        logger.open(tmp_path)
        logger.log_metrics({f"loss{step}": 1.0}, step)
        logger.close("success")
    assert points(kind, tmp_path) == [(5, "loss5", 1.0), (6, "loss6", 1.0)]


def test_what_is_logged_after_close_is_kept(kind, make, tmp_path):
    logger = make()
    logger.open(tmp_path, resumed_at=0)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close("success")
    logger.log_metrics({"late": 2.0}, step=1)
    logger.close("success")
    assert points(kind, tmp_path) == [(1, "late", 2.0), (1, "loss", 0.5)]


KILLED = """
import importlib, os, sys
from pathlib import Path
module, name, folder = sys.argv[1:]
logger = getattr(importlib.import_module(module), name)()
logger.open(Path(folder))
logger.log_hyperparams({"lr": 0.5})
for step in range(20):
    logger.log_metrics({"a": 1.0} if step < 7 else {"a": 1.0, "b": 2.0}, step)
logger.flush()
os._exit(9)
"""


def test_a_killed_process_leaves_all_it_flushed(kind, tmp_path):
    where = [*register_loggers()[kind].split(":"), str(tmp_path)]
    assert subprocess.run([sys.executable, "-c", KILLED, *where]).returncode == 9
    b = [(step, "b", 2.0) for step in range(7, 20)]
    assert points(kind, tmp_path) == sorted([(step, "a", 1.0) for step in range(20)] + b)
    assert json.loads((tmp_path / "hparams.json").read_text()) == {"lr": 0.5}


def test_hyperparameters_are_readable_json(make, tmp_path):
    logger = make()
    logger.log_hyperparams({"lr": 0.1, "optimizer": {"betas": (0.9, math.nan)}, "flag": True})
    logger.open(tmp_path)
    logger.log_hyperparams({"data": Path("a/b"), "act": torch.nn.ReLU, "none": None})
    logger.close("success")
    assert json.loads((tmp_path / "hparams.json").read_text(), parse_constant=pytest.fail) == {
        "lr": 0.1,
        "optimizer": {"betas": [0.9, "NaN"]},
        "flag": True,
        "data": "a/b",
        "act": "<class 'torch.nn.modules.activation.ReLU'>",
        "none": None,
    }


def test_hyperparameters_alone_are_written_too(make, tmp_path):
    logger = make(tmp_path, "run")
    logger.log_hyperparams({"lr": 0.1})
    assert logger.log_dir is None
    logger.close()
    assert (tmp_path / "run" / "version_0" / "hparams.json").exists()


def test_used_alone_it_makes_the_next_version(kind, make, tmp_path):
    (tmp_path / "run" / "version_9").mkdir(parents=True)
    for number in (10, 11):
        logger = make(tmp_path, name="run")
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.close()
        assert logger.log_dir == str(tmp_path / "run" / f"version_{number}")
        assert points(kind, logger.log_dir) == [(1, "loss", 0.5)]


@pytest.mark.parametrize(("version", "folder"), [(3, "version_3"), ("mine", "mine")])
def test_used_alone_it_takes_the_version_it_is_told(make, tmp_path, version, folder):
    logger = make(tmp_path, version=version)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close()
    assert logger.log_dir == str(tmp_path / folder)


def test_runs_that_begin_at_once_get_a_folder_each(make, tmp_path):
    def begin(_):
        logger = make(tmp_path)
        logger.log_hyperparams({"lr": 0.1})
        logger.flush()
        logger.close()
        return logger.log_dir

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(begin, range(24)))) == 24


def test_state_finds_the_folder_again(make, tmp_path):
    first = make(tmp_path)
    first.log_metrics({"loss": 0.5}, step=1)
    first.close()
    second = make(tmp_path)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.log_metrics({"loss": 0.25}, step=2)
    second.close()
    assert second.log_dir == first.log_dir == str(tmp_path / "version_0")


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])
@pytest.mark.parametrize("is_open", [False, True])
def test_can_be_copied_and_pickled(kind, make, tmp_path, twin, is_open):
    logger = make(tmp_path, "run", 1)
    if is_open:
        logger.log_metrics({"loss": 0.5}, step=1)
    other = twin(logger)
    other.log_metrics({"loss": 0.25}, step=2)
    logger.close()
    other.close()
    first = [(1, "loss", 0.5)] if is_open else []
    assert points(kind, tmp_path / "run" / "version_1") == [*first, (2, "loss", 0.25)]


def test_without_any_folder_it_says_what_to_pass(make):
    with pytest.raises(ConfigError, match=rf"{make.__name__} has no folder .* Pass save_dir="):
        make().log_metrics({"loss": 0.5}, step=1)


@pytest.mark.parametrize("version", [None, 0])
def test_a_save_dir_that_is_a_file_is_refused(make, tmp_path, version):
    (tmp_path / "taken").write_text("not a folder")
    with pytest.raises(ConfigError, match=rf"{make.__name__} cannot write in '.*taken.*save_dir"):
        make(tmp_path / "taken", version=version).log_metrics({"loss": 0.5}, step=1)


def test_a_folder_that_cannot_be_written_is_refused_when_opened(make):
    if not Path("/proc").is_dir():
        pytest.skip("needs a folder that nobody, root neither, can write in")
    logger = make()
    with pytest.raises(ConfigError, match="cannot write in '/proc/self'"):
        logger.open(Path("/proc/self"))
    assert logger.log_dir is None


def test_the_package_of_loggers_loads_none_of_them():
    code = "import sys, leyden.loggers as l; l.CSVLogger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(ImportError, match="WandLogger"):
        from leyden.loggers import WandLogger  # noqa: F401


class Counts(Module):
    """Logs the number of the step as its loss, and half of it as the validation's."""

    def __init__(self, lr=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.log("train/loss", float(self.global_step + 1))
        return self.weight * 0

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.global_step / 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def fit(root, ckpt_path=None, max_epochs=2, **options):
    data = DataLoader(torch.zeros(6, 1), batch_size=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        default_root_dir=root, max_epochs=max_epochs, log_every_n_steps=1, **quiet, **options
    )
    trainer.fit(Counts(), data, data, ckpt_path=ckpt_path)
    return trainer


def points_of_a_fit(steps):
    epochs = {(step, "epoch", (step - 1) // 3) for step in range(1, steps + 1)}
    losses = {(step, "train/loss", step) for step in range(1, steps + 1)}
    return epochs | losses | {(step, "val/loss", step / 2) for step in range(3, steps + 1, 3)}


def test_a_fit_is_logged_by_name(kind, tmp_path):
    trainer = fit(tmp_path, logger=kind)
    assert set(points(kind, trainer.log_dir)) == points_of_a_fit(6)
    assert json.loads((Path(trainer.log_dir) / "hparams.json").read_text()) == {"lr": 0.5}


def test_a_resumed_fit_goes_on_in_its_folder(kind, tmp_path):
    first = fit(tmp_path, logger=kind)
    [checkpoint] = Path(first.log_dir).glob("checkpoints/*.ckpt")
    for step in (7, 8):  # as if it had gone on after the checkpoint, and been killed
        first.logger.log_metrics({"train/loss": -1.0}, step)
    first.logger.close("failed")
    second = fit(tmp_path, ckpt_path=checkpoint, max_epochs=3, logger=kind)
    assert second.log_dir == first.log_dir
    read = points(kind, second.log_dir)
    assert set(read) == points_of_a_fit(9)
    assert len([point for point in read if point[1] != "epoch"]) == 9 + 3


def test_several_loggers_of_a_fit_share_its_folder(tmp_path):
    trainer = fit(tmp_path, logger=list(READERS))
    assert [logger.log_dir for logger in trainer.loggers] == [trainer.log_dir] * len(READERS)
    for kind in READERS:
        assert set(points(kind, trainer.log_dir)) == points_of_a_fit(6)


def test_a_fit_logs_where_its_logger_was_told_to(kind, make, tmp_path):
    fit(tmp_path / "runs", logger=make(tmp_path / "logs", "mine", 4))
    assert set(points(kind, tmp_path / "logs" / "mine" / "version_4")) == points_of_a_fit(6)


def test_without_loggers_nothing_is_written(tmp_path):
    fit(tmp_path, logger=False, enable_checkpointing=False)
    assert list(tmp_path.iterdir()) == []
