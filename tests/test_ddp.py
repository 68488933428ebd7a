"""DDP: one exchange for each optimizer step, equal weights on every rank, errors with names."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigError, Module
from leyden.strategies import DDP
from leyden.testing import on_ranks, quiet_trainer


def counting(state, bucket):
    """Average a bucket as DDP does, and count it."""
    state.append(bucket.index())
    tensor = bucket.buffer() / torch.distributed.get_world_size()
    work = torch.distributed.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Line(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Line):
    """Steps every fourth batch, and keeps the gradients of the others on their rank."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        closes = batch_idx % 4 == 3
        if closes:
            self.manual_backward(self.loss(batch) / 4)
            self.optimizers().step()
            self.optimizers().zero_grad()
        else:
            with self.no_sync():
                self.manual_backward(self.loss(batch) / 4)


class TwoNetworks(Module):
    """Two networks with an optimizer each, stepped in turn in every batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        for network, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward((network(x) - y).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.first, self.second)]


def samples(count):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def trained(module, ranks, batch_size, count=32, strategy=None, **choices):
    strategy = strategy or ("ddp" if ranks > 1 else "single_device")
    trainer = quiet_trainer(accelerator="cpu", strategy=strategy, devices=ranks, **choices)
    trainer.fit(module, DataLoader(samples(count), batch_size))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def on_two(make, options, **choices):
    """Train on two ranks; return the weights and how many buckets were exchanged."""
    exchanged = []
    strategy = DDP(comm_hook=counting, comm_state=exchanged, **options)
    weights = trained(make(), 2, 2, strategy=strategy, **choices)
    return weights, len(exchanged)


def accumulated(options):
    return on_two(Line, options, accumulate_grad_batches=4)


def by_hand():
    return on_two(ByHand, {})


def two_networks():
    return trained(TwoNetworks(), 2, 2)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "extra"),
    [({}, 0), ({"static_graph": True}, 1), ({"gradient_as_bucket_view": True}, 0)],
)
def test_a_window_of_four_batches_is_exchanged_once(options, extra):
    expected = trained(Line(), 1, 4, accumulate_grad_batches=4)
    for weights, exchanged in on_ranks(2, accumulated, options):
        assert exchanged == 2 + extra  # 8 batches a rank, one bucket
        assert_equal(weights, expected)


def test_no_sync_in_manual_optimization_exchanges_once_for_each_step():
    expected = trained(ByHand(), 1, 4)
    for weights, exchanged in on_ranks(2, by_hand):
        assert exchanged == 2
        assert_equal(weights, expected)


def test_two_networks_stepped_in_turn_train_as_in_one_process():
    expected = trained(TwoNetworks(), 1, 4)
    for weights in on_ranks(2, two_networks):
        assert_equal(weights, expected)


def static_by_hand():
    with pytest.raises(ConfigError, match="static_graph=True"):
        trained(ByHand(), 2, 2, strategy=DDP(static_graph=True))
    return True


def test_a_static_graph_in_manual_optimization_is_refused():
    assert all(on_ranks(2, static_by_hand))


class Unused(Line):
    def __init__(self):
        super().__init__()
        self.left_out = nn.Linear(1, 1).double()


def unused(strategy):
    return trained(Unused(), 2, 2, strategy=strategy)


def test_parameters_without_a_gradient_are_named_with_the_option_that_allows_them():
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, unused, "ddp")
    assert "did not depend on left_out.weight, left_out.bias on rank" in str(raised.value)
    assert "ddp_find_unused_parameters_true" in str(raised.value)
    on_ranks(2, unused, "ddp_find_unused_parameters_true")


@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd"])
def test_gradients_may_travel_compressed(hook):
    first, second = on_ranks(2, compressed, hook)
    assert_equal(first, second)
    expected = trained(InFloat(), 1, 4)
    for name, tensor in expected.items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=0.02)


class InFloat(Line):
    def __init__(self):
        super().__init__()
        self.float()

    def training_step(self, batch, batch_idx):
        return self.loss([part.float() for part in batch])


def compressed(hook):
    return trained(InFloat(), 2, 2, strategy=DDP(comm_hook=hook))


def test_a_misspelt_hook_is_told_what_there_is():
    with pytest.raises(ConfigError, match=r"'bf-16'.*Did you mean 'bf16'"):
        DDP(comm_hook="bf-16")


class Normed(Line):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
        ).double()
        torch.manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def normed(ranks):
    module = Normed()
    weights = trained(module, ranks, 8 // ranks, sync_batchnorm=True)
    return weights | dict(module.named_buffers())


def test_batch_norms_see_the_batches_of_all_ranks():
    expected = normed(1)
    for found in on_ranks(2, normed, 2):
        assert_equal(found, expected)


class Scheduled(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]

    def on_train_batch_end(self, *_):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def rates(ranks):
    module = Scheduled()
    module.rates = []
    trained(module, ranks, 2, count=20 * ranks)
    return module.rates


def test_a_schedule_steps_once_for_each_optimizer_step_on_any_number_of_ranks():
    expected = [pytest.approx(1 - step / 10) for step in range(1, 11)]
    assert rates(1) == expected
    assert on_ranks(2, rates, 2) == [expected, expected]


class Tokens(Module):
    """The loss is a mean over items, of which batches hold different numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        losses = (batch * self.w)[batch >= 0]
        return {"loss": losses.mean(), "weight": losses.numel()}

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.w.grad.item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def weighted(ranks):
    # One and three items that count, padded with -1.
    data = torch.tensor([[4.0, -1, -1], [0, 0, 0]], dtype=torch.float64)
    module = Tokens()
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = quiet_trainer(
        accelerator="cpu", strategy=strategy, devices=ranks, accumulate_grad_batches=2 // ranks
    )
    trainer.fit(module, DataLoader(data, batch_size=1))
    return module.gradient


def test_a_weighted_mean_spans_the_batches_of_a_step_and_the_ranks():
    assert weighted(1) == 1.0
    assert on_ranks(2, weighted, 2) == [1.0, 1.0]
