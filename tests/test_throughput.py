"""Throughput counts what it says, over all ranks, and FLOPs are those worked out by hand."""

import weakref
from time import sleep

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leyden import Callback, ConfigError, Module, Trainer
from leyden.plugins import Throughput
from leyden.plugins.flops import StepFlops, named_peak
from leyden.testing import on_ranks, quiet_trainer

DATA = [torch.randn(4, 8) for _ in range(12)]
FORWARD = 2 * 4 * (8 * 32 + 32 * 8) * 3 + 2 * 4 * 8
"""Of a batch of 4: three blocks of two products, and the head; a multiply-add is two."""
BACKWARD = 2 * FORWARD - 2 * 4 * 8 * 32
"""Each product has two gradients, but the first has none for the batch."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class Net(Module):
    def __init__(self, pause=0.0):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 1)
        self.pause = pause

    def training_step(self, batch, batch_idx):
        if self.pause:
            sleep(self.pause)
        return self.head(self.blocks(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        sleep(self.pause)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Records:
    """A logger that keeps what it is sent."""

    save_dir = name = version = log_dir = None

    def __init__(self):
        self.sent = []

    def open(self, folder, resumed_at=None):
        pass

    def log_metrics(self, metrics, step):
        self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        pass

    def log_graph(self, module):
        pass

    def flush(self):
        pass

    def close(self, status):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def fitted(callback, module=None, val=None, **choices):
    module = module or Net()
    quiet_trainer(callbacks=[callback], **choices).fit(module, DATA, val)
    return callback


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"compile": {"backend": "aot_eager", "blocks": True}},
        {"compile": {"backend": "aot_eager"}, "activation_checkpointing": "full"},
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_models_flops_are_counted_whatever_is_recomputed_or_compiled(choices):
    callback = fitted(Throughput(2), **choices)
    assert callback.flops_per_batch == FORWARD + BACKWARD
    # It has left no mode behind, and nothing compiles less than before.
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_batch_that_is_counted_keeps_no_more_than_others():
    made, alive = [], []

    class Watched(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.a.register_forward_hook(lambda _, __, out: made.append(weakref.ref(out)))

        def on_before_backward(self, loss):
            alive.append(sum(ref() is not None for ref in made))
            made.clear()

    fitted(Throughput(5), Watched(), activation_checkpointing="full")
    assert alive == [0] * 12


def test_attention_is_counted_in_both_directions():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with StepFlops() as counter:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    product = 2 * 2 * 16 * 16 * 8
    # Two products, and five in a backward that computes the first again as part of its algorithm.
    assert counter.get_total_flops() == 2 * product + 5 * product


def test_what_is_logged_is_what_was_trained_on():
    records, pause = Records(), 0.01
    fitted(
        Throughput(5, count_tokens=lambda batch: batch.numel(), peak_flops=1e9),
        Net(pause),
        logger=records,
    )
    steps = [step for step, _ in records.sent if any("throughput" in name for name in _)]
    assert steps == [5, 10]
    values = records.sent[-1][1]
    rate = values["throughput/batches_per_s"]
    assert 0 < rate <= 1 / pause
    assert values["throughput/samples_per_s"] == pytest.approx(4 * rate)
    assert values["throughput/tokens_per_s"] == pytest.approx(32 * rate)
    flops = (FORWARD + BACKWARD) * rate
    assert values["throughput/device_flops_per_s"] == pytest.approx(flops)
    assert values["throughput/mfu"] == pytest.approx(flops / 1e9)


def test_validation_takes_none_of_the_time():
    pause = 0.01
    plain = fitted(Throughput(10), Net(pause))
    often = fitted(Throughput(10), Net(pause), [DATA[0]] * 4, val_check_interval=2)
    # With the twenty batches of validation counted, it would be a third of this.
    rates = [c.values["throughput/batches_per_s"] for c in (plain, often)]
    assert rates[1] > 0.6 * rates[0]


def test_flops_that_are_given_are_not_counted():
    callback = fitted(Throughput(5, flops_per_sample=1000))
    values = callback.values
    assert callback.flops_per_batch is None
    assert values["throughput/device_flops_per_s"] == pytest.approx(
        1000 * values["throughput/samples_per_s"]
    )
    assert (
        "throughput/device_flops_per_s" not in fitted(Throughput(5, flops_per_sample=False)).values
    )


def test_accumulated_batches_make_one_record_a_step():
    records = Records()
    fitted(Throughput(1), logger=records, accumulate_grad_batches=3)
    assert [step for step, sent in records.sent if "throughput/batches_per_s" in sent] == [
        1,
        2,
        3,
        4,
    ]


def test_a_step_that_fails_while_it_is_counted_leaves_no_mode_behind():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        fitted(Throughput(5), Fails())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class Counted(Callback):
    """Keeps the number of samples that this rank has trained on, and for how long."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches += 1


def on_two_ranks():
    callback = Throughput(4, count_tokens=lambda batch: batch.numel())
    quiet_trainer(callbacks=[callback], strategy="ddp", devices=2, accelerator="cpu").fit(
        Net(0.02), torch.utils.data.DataLoader(torch.randn(48, 8), 4)
    )
    return callback.values


def test_all_ranks_are_counted():
    first, second = on_ranks(2, on_two_ranks)
    assert first == second
    # A rank cannot take more than 1 / 0.02 batches a second, and two of them do.
    assert 50 < first["throughput/batches_per_s"] <= 100
    assert first["throughput/samples_per_s"] == pytest.approx(4 * first["throughput/batches_per_s"])
    assert first["throughput/tokens_per_s"] == pytest.approx(32 * first["throughput/batches_per_s"])
    # Operations are those of one device.
    assert first["throughput/device_flops_per_s"] == pytest.approx(
        (FORWARD + BACKWARD) * first["throughput/batches_per_s"] / 2
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_of_devices_by_their_names(name, peak):
    assert named_peak(name) == peak


def test_by_name_and_with_what_is_allowed():
    assert any(isinstance(c, Throughput) for c in Trainer(callbacks=["throughput"]).callbacks)
    with pytest.raises(ConfigError, match="every_n_steps=0 must be a whole number, at least 1"):
        Throughput(0)
