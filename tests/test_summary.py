"""The summary of a module: every number against one worked out by hand."""

import random
import re

import pytest
import torch
from torch import nn

from leyden import Callback, Module, Trainer
from leyden.plugins import ModelSummary
from leyden.plugins.summary import summarize


class Net(Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.parts = list(parts)

    def forward(self, x):
        for name in self.parts:
            x = getattr(self, name)(x)
        return x

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parameters_and_bytes_are_counted_by_part_and_real_dtype():
    net = Net(a=nn.Linear(4, 3), b=nn.Linear(3, 2).double().requires_grad_(False))
    net.norm = nn.BatchNorm1d(2)
    summary = summarize(net)
    assert [(part.name, part.type, part.parameters, part.note) for part in summary.parts] == [
        ("a", "Linear", 15, ""), ("b", "Linear", 8, "frozen"), ("norm", "BatchNorm1d", 4, "")
    ]  # fmt: skip
    assert (summary.trainable_parameters, summary.frozen_parameters) == (19, 8)
    assert summary.total_parameters == 27
    assert summary.parameter_bytes == 19 * 4 + 8 * 8
    assert summary.buffer_bytes == 2 * 4 + 2 * 4 + 8  # mean and variance, and an int64 count


def test_a_shared_parameter_counts_once():
    net = Net(embedding=nn.Embedding(10, 4), head=nn.Linear(4, 10, bias=False))
    net.head.weight = net.embedding.weight
    summary = summarize(net)
    assert summary.total_parameters == 40
    assert [(part.parameters, part.note) for part in summary.parts] == [(40, ""), (0, "shared")]


def test_parameters_of_the_module_itself_have_a_line():
    net = Net(a=nn.Linear(2, 2, bias=False))
    net.scale = nn.Parameter(torch.ones(3))
    assert [(part.name, part.parameters) for part in summarize(net).parts] == [
        ("(itself)", 3), ("a", 4)
    ]  # fmt: skip


def test_parts_within_parts_are_listed_to_the_depth_asked_for():
    net = Net(body=nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))
    names = {depth: [part.name for part in summarize(net, depth).parts] for depth in (0, 1, 2, -1)}
    assert names == {
        0: [],
        1: ["body"],
        2: ["body", "body.0", "body.1"],
        -1: ["body", "body.0", "body.1", "body.1.0"],
    }


def test_uninitialized_parameters_are_said_and_stay_uninitialized():
    net = Net(lazy=nn.LazyLinear(3), last=nn.Linear(3, 1))
    net.example_input_array = torch.ones(2, 5)
    summary = summarize(net)
    assert [part.note for part in summary.parts] == ["uninitialized", ""]
    assert (summary.total_parameters, summary.uninitialized, summary.flops) == (4, 2, None)
    assert net.lazy.has_uninitialized_params()


def test_an_example_gives_shapes_and_flops():
    net = Net(a=nn.Linear(64, 32), relu=nn.ReLU(), b=nn.Linear(32, 10))
    net.example_input_array = torch.ones(8, 64)
    summary = summarize(net)
    assert summary.flops == 2 * 8 * (64 * 32 + 32 * 10)
    assert [(part.input, part.output) for part in summary.parts] == [
        ("[8, 64]", "[8, 32]"), ("[8, 32]", "[8, 32]"), ("[8, 32]", "[8, 10]")
    ]  # fmt: skip
    assert "Forward     37.9 KFLOPs" in str(summary)


B, T, D = 2, 16, 32
ATTENTION = 2 * B * T * (4 * D * D) + 2 * 2 * B * T * T * D
FEEDFORWARD = 2 * B * T * (2 * D * 64)


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("layer", "flops"),
    [
        (Attention(), 2 * 2 * B * T * T * D),
        (nn.TransformerEncoderLayer(D, 4, 64, batch_first=True), ATTENTION + FEEDFORWARD),
        (nn.LSTM(D, 8, batch_first=True), 2 * B * T * 4 * 8 * (D + 8)),
        (nn.Conv1d(T, 5, 3, bias=False), 2 * B * 5 * (D - 2) * T * 3),
    ],
)
def test_flops_of_layers_that_torch_fuses_are_counted_too(layer, flops):
    net = Net(layer=layer)
    net.example_input_array = torch.ones(B, T, D)
    assert summarize(net).flops == flops


def test_the_example_runs_as_in_evaluation_and_leaves_no_trace():
    seen = []
    net = Net(a=nn.Linear(2, 2), drop=nn.Dropout(), norm=nn.BatchNorm1d(2).eval())
    net.a.register_forward_hook(lambda part, *_: seen.append((part.training, torch.rand(1))))
    net.example_input_array = torch.ones(4, 2)
    before, mean = torch.get_rng_state(), net.norm.running_mean.clone()
    summary = summarize(net)
    assert [training for training, _ in seen] == [False]
    assert [part.training for part in net.modules()] == [True, True, True, False]
    assert (summary.train_modules, summary.eval_modules) == (3, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(net.norm.running_mean, mean)


def test_an_example_in_another_dtype_fits_the_module():
    net = Net(a=nn.Linear(2, 2)).double()
    net.example_input_array = torch.ones(4, 2)
    assert summarize(net).flops == 2 * 4 * 2 * 2


def test_arguments_of_an_example_go_by_position_or_by_name():
    class Sum(Module):
        def forward(self, x, y):
            return x @ y

    net = Sum()
    x, y = torch.ones(2, 3), torch.ones(3, 5)
    for example in ((x, y), {"y": y, "x": x}):
        net.example_input_array = example
        assert summarize(net).flops == 2 * 2 * 3 * 5


def test_a_forward_that_fails_warns_and_the_rest_is_shown():
    net = Net(a=nn.Linear(2, 2))
    net.example_input_array = torch.ones(4, 3)
    with pytest.warns(UserWarning, match="a forward of example_input_array failed: RuntimeError"):
        summary = summarize(net)
    assert summary.flops is None and summary.total_parameters == 6
    assert net.training and net.a.training


def test_a_fit_prints_the_summary_first(capsys):
    net = Net(a=nn.Linear(2, 2), b=nn.Linear(2, 1))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_steps=1, callbacks=[ModelSummary(0)], accelerator="cpu", **quiet).fit(
        net, [torch.ones(4, 2)]
    )
    out = capsys.readouterr().out
    assert "Parameters  9 trainable, 0 frozen, 9 in all\nSize        36 B and 0 B of buffers" in out
    assert "Linear" not in out  # max_depth=0, and only one summary


def test_the_summary_changes_nothing_that_a_fit_draws():
    def weights(**choices):
        torch.manual_seed(1)
        random.seed(1)
        net = Net(a=nn.Linear(2, 2), drop=nn.Dropout(), b=nn.Linear(2, 1))
        net.example_input_array = torch.ones(4, 2)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        Trainer(max_steps=3, accelerator="cpu", **quiet, **choices).fit(net, [torch.ones(4, 2)])
        return net.a.weight.detach()

    assert torch.equal(weights(enable_model_summary=True), weights(enable_model_summary=False))


def test_columns_hold_readable_numbers():
    net = Net(a=nn.Linear(1000, 1250), b=nn.ReLU())
    assert str(summarize(net)).splitlines()[:5] == [
        "Name  Type    Parameters",
        "------------------------",
        "a     Linear      1.25 M",
        "b     ReLU             0",
        "------------------------",
    ]


def shown(capsys, module, data, **choices):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, callbacks=[ModelSummary(0)], accelerator="cpu", **quiet, **choices).fit(
        module, data
    )
    out = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in out if line.strip()}


class Wide(Net):
    """A mebibyte of parameters in float32: 512 x 512."""

    def __init__(self, kind, **options):
        super().__init__(a=nn.Linear(512, 512, bias=False))
        self.kind, self.options = kind, options

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1, **self.options)


class Stubborn(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].sum().item() < 1e9
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.SGD, {}, "optimizer states 0.0"),
        (torch.optim.SGD, {"momentum": 0.9}, "optimizer states 1.0"),
        (torch.optim.AdamW, {}, "optimizer states 2.0"),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}, "optimizer states 3.0"),
        (Stubborn, {}, "optimizer states are not known"),
    ],
)
def test_memory_that_is_expected_and_the_peak(capsys, kind, options, states):
    lines = shown(capsys, Wide(kind, **options), [torch.ones(1, 512)])
    assert "parameters 1.0 + gradients 1.0" in lines["Memory"]
    assert states in lines["Memory"]
    peak = int(re.search(r"Peak memory (\d+) MiB", lines["Peak"])[1])
    # torch alone takes more than a hundred.
    assert 100 < peak < 100_000


def test_to_expect_memory_changes_no_optimizer(capsys):
    module = Wide(torch.optim.AdamW)
    states = []

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            states.append(dict(trainer.optimizers[0].state))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_steps=1, callbacks=[ModelSummary(), Looks()], accelerator="cpu", **quiet).fit(
        module, [torch.ones(1, 512)]
    )
    assert states == [{}]


# torch's own look at a value between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_is_recomputed_and_compiled_is_shown(capsys):
    net = Net(body=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), head=nn.Linear(3, 1))
    lines = shown(
        capsys,
        net,
        [torch.ones(2, 3)],
        activation_checkpointing="selective",
        compile={"blocks": True, "backend": "aot_eager"},
        activation_offload=True,
        optimizer_in_backward=True,
    )
    assert lines["Blocks"].endswith("2 of Linear: recomputed in backward (selective), compiled")
    assert lines["Steps"].endswith("activations kept on the CPU, optimizer stepped in backward")
    lines = shown(capsys, Net(head=nn.Linear(3, 1)), [torch.ones(2, 3)])
    assert "Blocks" not in lines
    assert "Steps" not in lines
