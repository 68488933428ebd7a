"""Event files, read back as TensorBoard reads them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from torch import nn
from torch.utils.data import DataLoader

from leyden import Module, Trainer
from leyden.loggers import TensorBoardLogger


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def table(folder):
    """Return the rows that TensorBoard's HParams page shows for ``folder``."""
    events = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(events, str(folder))))
    columns = context.experiment_from_metadata(
        RequestContext(), "", True, context.hparams_metadata(RequestContext(), ""), []
    )
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=99,
        allowed_statuses=range(4),
        aggregation_type=api_pb2.AGGREGATION_AVG,
    )
    groups = Handler(RequestContext(), context, "", request).run().session_groups
    rows = [
        SimpleNamespace(
            hparams={name: getattr(v, v.WhichOneof("kind")) for name, v in group.hparams.items()},
            metrics={metric.name.tag: metric.value for metric in group.metric_values},
            status=api_pb2.Status.Name(group.sessions[0].status),
        )
        for group in groups
    ]
    return {metric.name.tag for metric in columns.metric_infos}, rows


def opened(folder, resumed_at=None, **options):
    logger = TensorBoardLogger(**options)
    logger.open(folder, resumed_at)
    return logger


# PL #1228: one folder, the user's metric in the table, no placeholder.
def test_hyperparameters_stand_in_the_table_with_the_final_metrics(tmp_path):
    logger = opened(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "opt": {"name": "adam", "betas": [0.5, 1]}, "flag": True})
    for step in range(3):
        logger.log_metrics({"val/loss": 4.0 / 2**step}, step)
    logger.close("success")
    names, [row] = table(tmp_path)
    assert names == {"val/loss"}
    assert row.metrics == {"val/loss": 1.0}
    opt = {"opt/name": "adam", "opt/betas": "[0.5, 1]"}
    assert row.hparams == {"lr": 0.1, **opt, "flag": "True"}
    assert row.status == "STATUS_SUCCESS"
    assert set(scalars(tmp_path)) == {"val/loss"}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_runs_stand_in_one_table(tmp_path):
    for lr in (0.25, 0.5):
        logger = TensorBoardLogger(tmp_path)
        logger.log_hyperparams({"lr": lr})
        logger.log_metrics({"val/loss": 2 * lr, "epoch": 7}, step=1)
        logger.close()
    names, rows = table(tmp_path)
    assert names == {"val/loss"}
    assert [(row.hparams["lr"], row.metrics["val/loss"]) for row in rows] == [(0.25, 0.5), (0.5, 1)]


KILLED = """
import os, sys
from leyden.loggers import TensorBoardLogger
logger = TensorBoardLogger(sys.argv[1])
logger.log_hyperparams({"lr": 0.5})
logger.log_metrics({"val/loss": 2.0}, step=1)
if sys.argv[2] == "kill":
    logger.flush()
    os._exit(9)
"""


def run_to_its_end(folder, how):
    command = [sys.executable, "-W", "error", "-c", KILLED, str(folder), how]
    return subprocess.run(command).returncode


def test_a_killed_run_stands_in_the_table_too(tmp_path):
    assert run_to_its_end(tmp_path, "kill") == 9
    names, [row] = table(tmp_path)
    assert names == {"val/loss"}
    assert (row.hparams, row.metrics) == ({"lr": 0.5}, {"val/loss": 2.0})
    assert row.status == "STATUS_UNKNOWN"


def test_what_nobody_closed_is_written_when_the_program_ends(tmp_path):
    assert run_to_its_end(tmp_path, "end") == 0
    assert scalars(tmp_path / "version_0") == {"val/loss": [(1, 2.0)]}


def test_an_interrupted_run_that_is_resumed_ends_in_one_row(tmp_path):
    first = opened(tmp_path / "run")
    first.log_hyperparams({"lr": 0.5})
    for step in range(1, 4):
        first.log_metrics({"loss": 8.0}, step)
    first.close("interrupted")
    second = opened(tmp_path / "run", resumed_at=2)
    second.log_hyperparams({"lr": 0.5})
    second.log_metrics({"loss": 4.0, "val/loss": 2.0}, step=3)
    second.close("success")
    _, [row] = table(tmp_path)
    assert row.metrics == {"loss": 4.0, "val/loss": 2.0}
    assert row.status == "STATUS_SUCCESS"
    assert scalars(tmp_path / "run")["loss"] == [(1, 8.0), (2, 8.0), (3, 4.0)]


def test_opening_makes_no_event_file_and_loads_no_tensorboard(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from leyden.loggers import TensorBoardLogger
        logger = TensorBoardLogger()
        logger.open(Path(sys.argv[1]))
        logger.log_hyperparams({"lr": 0.5})
        sys.exit("tensorboard" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hparams.json"]


def test_a_prefix_goes_before_every_name(tmp_path):
    logger = opened(tmp_path, prefix="fold1")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close()
    assert scalars(tmp_path) == {"fold1-loss": [(1, 0.5)]}


def test_experiment_is_the_summary_writer_of_the_run(tmp_path):
    logger = opened(tmp_path)
    logger.experiment.add_image("picture", torch.zeros(3, 4, 5), 2)
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    [image] = events.Images("picture")
    assert (image.step, image.width, image.height) == (2, 5, 4)
    assert len(list(tmp_path.glob("events*"))) == 1


class Drops(nn.Module):
    """Its layers are in different modes, and its forward draws random numbers in both."""

    def __init__(self, example):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.frozen = nn.Dropout().eval()
        self.example_input_array = example

    def forward(self, x, scale=1):
        return {"out": self.frozen(self.linear(x)) * scale + torch.rand(2)}


ONES = torch.ones(4, 3)


@pytest.mark.parametrize("example", [ONES, (ONES, ONES[:, :2]), {"scale": ONES[:, :2], "x": ONES}])
def test_the_graph_is_logged_and_training_goes_on_as_before(tmp_path, example):
    module, generator = Drops(example), torch.get_rng_state()
    logger = opened(tmp_path, log_graph=True)
    logger.log_graph(module)
    logger.close()
    nodes = [node.name for node in EventAccumulator(str(tmp_path)).Reload().Graph().node]
    assert any("Linear[linear]" in name for name in nodes)
    assert [part.training for part in module.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("example", "reason"),
    [(torch.ones(4, 7), "cannot be multiplied"), (None, "it has no example_input_array")],
)
def test_a_graph_that_cannot_be_traced_is_a_warning(tmp_path, example, reason):
    module, logger = Drops(example), opened(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match=f"graph of Drops is not shown.*{reason}.*log_graph=False"):
        logger.log_graph(module)
    assert [part.training for part in module.modules()] == [True, True, False]
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close()
    assert scalars(tmp_path) == {"loss": [(1, 0.5)]}


@pytest.mark.parametrize(("log_graph", "resumed_at"), [(False, None), (True, 5)])
def test_no_graph_unless_asked_for_and_none_again_on_resume(tmp_path, log_graph, resumed_at):
    logger = opened(tmp_path, resumed_at, log_graph=log_graph)
    logger.log_graph(Drops(ONES))
    logger.log_metrics({"loss": 0.5}, step=6)
    logger.close()
    assert not EventAccumulator(str(tmp_path)).Reload().Tags()["graph"]


class Fitted(Module):
    def __init__(self, lr=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)
        self.example_input_array = ONES

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 4.0 / (1 + self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


# PL #1228 again, through a Trainer.
def test_a_fit_stands_in_the_table_with_its_final_validation_loss(tmp_path):
    data = DataLoader(torch.ones(4, 3), batch_size=2)
    logger = TensorBoardLogger(log_graph=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=2, logger=logger, **quiet)
    trainer.fit(Fitted(), data, data)
    names, [row] = table(tmp_path)
    assert names == {"val/loss"}
    assert (row.hparams, row.metrics) == ({"lr": 0.5}, {"val/loss": 2.0})
    assert row.status == "STATUS_SUCCESS"
    events = EventAccumulator(trainer.log_dir).Reload()
    assert set(events.Tags()["scalars"]) == {"val/loss", "epoch"}
    assert any("Linear[net]" in node.name for node in events.Graph().node)
