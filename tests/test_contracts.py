"""Every registered strategy and precision passes the contract that plugin authors test with."""

import pytest
import torch

from leyden.manager import Registry
from leyden.strategies.single_device import SingleDevice
from leyden.testing import check_precision, check_strategy

REGISTRY = Registry()


@pytest.mark.parametrize("name", REGISTRY.listed("strategy"))
def test_strategy(name):
    check_strategy(name)


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
