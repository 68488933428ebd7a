"""What strategies and launchers refuse, and what they say to do instead."""

import pytest
import torch
from torch import nn

from leyden import ConfigError, DataError
from leyden.strategies import DDP, FSDP, Mesh
from leyden.strategies.flight_recorder import FlightRecorder
from leyden.strategies.launchers.elastic import Elastic
from leyden.strategies.launchers.slurm import Slurm
from leyden.strategies.sharding import named_parameters, units
from leyden.testing import Regression, batches, on_ranks, quiet_trainer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.blocks[0].weight


@pytest.mark.parametrize("name", ["timeout", "first_timeout"])
@pytest.mark.parametrize("value", [0, -1, "5 min"])
def test_a_timeout_that_is_no_time(name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value!r} must be seconds, more than 0"):
        DDP(**{name: value})


def test_a_device_that_ranks_cannot_share():
    with pytest.raises(ConfigError, match=r"DDP runs on 'cpu' and 'cuda', not on 'mps'.*cpu"):
        DDP().connect("mps", 2, 1)


def test_more_processes_on_a_machine_than_devices(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    told = r"LOCAL_RANK=2 finds no device among devices=\[0, 1\].*as many processes"
    with pytest.raises(ConfigError, match=told):
        DDP().connect("cuda", [0, 1], 1)


def test_a_launcher_that_gives_ranks_no_time():
    with pytest.raises(ConfigError, match=r"grace=-1 must be whole seconds"):
        Elastic(grace=-1)


def test_slurm_starts_nothing_itself():
    with pytest.raises(ConfigError, match=r"srun starts the 4 processes.*srun --ntasks=4"):
        Slurm().launch(None, 4)


def test_a_list_of_tasks_that_slurm_does_not_write(monkeypatch):
    told = {"PROCID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "two"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ConfigError, match=r"SLURM_STEP_TASKS_PER_NODE='two'.*'2\(x3\),1'"):
        Slurm().joins()


def test_copies_of_a_mesh_by_the_name_that_fsdp_has():
    with pytest.raises(ConfigError, match=r"replicate as its axis dp_replicate"):
        Mesh(replicate=2)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("Linear", r"shard='Linear' must be classes of layers, such as \(Block,\)"),
        ((nn.Conv2d,), r"shard= chose no layer with parameters of Model\. It is made of: Linear, "),
        (nn.Linear, r"chose 'blocks\.0', which shares blocks\.0\.weight, head\.weight: tied"),
    ],
)
def test_layers_that_cannot_be_sharded_by_themselves(chosen, told):
    with pytest.raises(ConfigError, match=told):
        units(Model(), chosen)


def test_ignored_parameters_that_are_not_there():
    with pytest.raises(ConfigError, match=r"ignored='tail' names no parameter or layer of Model"):
        named_parameters(Model(), ["head", "tail"])


def test_a_call_in_a_process_that_has_used_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    trainer = quiet_trainer(strategy="ddp", accelerator="cpu", devices=2)
    with pytest.raises(ConfigError, match=r"CUDA has been used in this process.*Restart the kern"):
        trainer.fit(Regression(), batches(2))


def test_a_call_in_a_process_that_has_a_group_of_its_own(monkeypatch):
    trainer = quiet_trainer(strategy="ddp", accelerator="cpu", devices=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(ConfigError, match=r"distributed has been initialised.*2 processes forked"):
        trainer.fit(Regression(), batches(2))


def on_two():
    """Return what is said where it takes two ranks."""
    told = []
    strategy = DDP()
    strategy.connect("cpu", 2, 1)
    calls = [
        lambda: strategy._check_number(4, 1),
        FlightRecorder(5).begin,
        lambda: trained_twice(FSDP(), FSDP(replicate=2)),
        lambda: quiet_trainer(strategy="fsdp", accelerator="cpu", devices=2).validate(
            Regression(), torch.utils.data.DataLoader(samples(1))
        ),
        lambda: quiet_trainer(strategy="ddp", accelerator="cpu", devices=2).fit(
            Regression(), torch.utils.data.DataLoader(samples(1))
        ),
    ]
    one = quiet_trainer(strategy="ddp", accelerator="cpu", devices=2)
    (values,) = one.validate(Regression(), torch.utils.data.DataLoader(samples(1)))
    told.append(values["val/loss"])
    for call in calls:
        with pytest.raises((ConfigError, DataError)) as raised:
            call()
        told.append(str(raised.value))
    return told


def samples(count):
    return torch.utils.data.TensorDataset(torch.ones(count, 3), torch.ones(count, 1))


def trained_twice(*strategies):
    module = Regression()
    for strategy in strategies:
        quiet_trainer(strategy=strategy, accelerator="cpu", devices=2).fit(module, batches(1))


def test_what_it_takes_two_ranks_to_refuse():
    first, second = on_ranks(2, on_two)
    module = Regression()
    (alone,) = quiet_trainer().validate(module, torch.utils.data.DataLoader(samples(1)))
    for loss, number, recorder, layout, evaluation, training in (first, second):
        assert loss == pytest.approx(alone["val/loss"])  # one rank has no batch of it
        assert "devices=4 on num_nodes=1 are 4 processes, and 2 have been started" in number
        assert "comes too late" in recorder and "TORCH_FR_BUFFER_SIZE=5" in recorder
        assert "layer.weight was sharded over" in layout and "load a checkpoint" in layout
        assert "fewer samples than" in training and "2 ranks" in training
        assert "fewer samples than ranks" in evaluation
