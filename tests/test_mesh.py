"""Meshes: their sizes, who sees which data, how layers are split, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from leyden import ConfigError, Module, ModuleError
from leyden.strategies import FSDP, Mesh
from leyden.testing import Regression, batches, on_ranks, quiet_trainer


def of_several():
    return [
        places(dp_replicate=2, tp=2),
        places(dp_shard=-1, tp=2),
        places(tp=4),
        places(dp_replicate=2, dp_shard=-1),
    ]


def places(**sizes):
    strategy = Mesh(**sizes)
    strategy.connect("cpu", 4, 1)
    seen = strategy.all_gather(torch.tensor([strategy.rank]))
    found = strategy.data_rank, strategy.data_world_size, seen.flatten().tolist()
    strategy.close()
    return found


def test_ranks_along_tp_see_the_same_data_and_the_others_different():
    pairs = [(0, 2, [0, 2]), (0, 2, [1, 3]), (1, 2, [0, 2]), (1, 2, [1, 3])]
    for rank, found in enumerate(on_ranks(4, of_several)):
        assert found == [
            pairs[rank],
            pairs[rank],
            (0, 1, [rank]),
            (rank, 4, [0, 1, 2, 3]),
        ]


@pytest.mark.parametrize(("axis", "kind"), [("pp", "pipeline"), ("cp", "context")])
def test_axes_that_come_later_are_refused_by_name(axis, kind):
    with pytest.raises(ConfigError, match=rf"{axis}=2\): {kind} parallelism comes with a later"):
        Mesh(**{axis: 2})


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp_replicate": -1}, {"dp_shard": 1.5}])
def test_a_size_that_is_no_number_of_ranks_is_refused(sizes):
    with pytest.raises(ConfigError, match="must be a number of ranks"):
        Mesh(**sizes)


def misfits():
    with pytest.raises(ConfigError) as raised:
        Mesh(dp_shard=2, tp=3).connect("cpu", 2, 1)
    with pytest.raises(ConfigError, match=r"replicate=3.*2 processes"):
        FSDP(replicate=3).connect("cpu", 2, 1)
    return str(raised.value)


def test_sizes_that_contradict_the_number_of_processes_are_shown_with_it():
    (message, _) = on_ranks(2, misfits)
    assert "dp_replicate=1 x dp_shard=2 x tp=3" in message
    assert "the 2 processes" in message and "= 6" in message


class Split(Module):
    def __init__(self, how="plan"):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        if how == "tied":
            self.out = nn.Linear(4, 6)
            self.out.weight = self.up.weight

    def training_step(self, batch, batch_idx):
        return (self.down(self.up(batch).relu()) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def parallelize(self, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if self.how == "by itself":
            parallelize_module(self, mesh["tp"], plan)
            return None
        if self.how == "misspelt":
            plan["uq"] = ColwiseParallel()
        return plan


def splits():
    weights = []
    for how in ("plan", "by itself"):
        module = Split(how)
        trainer = quiet_trainer(accelerator="cpu", devices=2, strategy=Mesh(tp=2))
        trainer.fit(module, [torch.ones(2, 4)] * 2)
        assert isinstance(module.up.weight, DTensor)
        assert Shard(0) in module.up.weight.placements
        assert module.up.weight.to_local().shape == (3, 4)
        weights.append(module.up.weight.full_tensor().detach())
    return weights


def refusals():
    found = []
    for module in (Split("tied"), Split("misspelt"), Regression()):
        trainer = quiet_trainer(accelerator="cpu", devices=2, strategy=Mesh(tp=2))
        with pytest.raises((ConfigError, ModuleError)) as raised:
            trainer.fit(module, batches(2))
        found.append(str(raised.value))
    return found


def test_a_module_returns_its_plan_or_applies_it_itself():
    for plan, by_itself in on_ranks(2, splits):
        assert torch.equal(plan, by_itself)


def test_a_plan_that_cannot_be_meant_is_refused():
    (tied, misspelt, without), _ = on_ranks(2, refusals)
    assert "up.weight and out.weight are one parameter" in tied
    assert "has a plan for uq" in misspelt
    assert "Regression has no parallelize(mesh)" in without
