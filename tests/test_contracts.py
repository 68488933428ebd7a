"""Every registered strategy and precision passes the contract that plugin authors test with."""

import pytest
import torch

from leyden.manager import Registry
from leyden.strategies.single_device import SingleDevice
from leyden.testing import check_precision, check_strategy, on_ranks

REGISTRY = Registry()


def checked(name, ranks):
    check_strategy(name, accelerator="cpu", devices=ranks)


SEVERAL = [(name, 2) for name in REGISTRY.listed("strategy") if name != "single_device"]


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, 1) for name in REGISTRY.listed("strategy")] + SEVERAL
)
def test_strategy(name, ranks):
    on_ranks(ranks, checked, name, ranks)  # apart: one that shards leaves its process group


@pytest.mark.parametrize("name", REGISTRY.listed("precision"))
def test_precision(name):
    check_precision(name)


def test_strategy_that_does_not_clip_is_found():
    class Unclipped(SingleDevice):
        def clip_grad_norm(self, parameters, max_norm):
            return torch.tensor(0.0)

    with pytest.raises(AssertionError, match=r"gradient_clip_val=0\.5"):
        check_strategy(Unclipped())


def test_precision_that_forgets_to_update_is_found():
    class Lazy(type(REGISTRY.make("precision", "32-true"))):
        def step(self, optimizer, closure=None):
            return True

    with pytest.raises(AssertionError, match="the loss went from"):
        check_precision(Lazy(torch.float32))
