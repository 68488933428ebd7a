"""Steps and blocks are compiled in place: same names, same numbers, nothing compiled twice."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from leyden import Callback, Module
from leyden.testing import on_ranks, quiet_trainer

# torch's own look at a value between two graphs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
TRAIN = [(x, x.sum(1, keepdim=True)) for x in torch.randn(10, 4, 8)]
VAL = TRAIN[:3]


@pytest.fixture(autouse=True)
def forgotten():
    """Let each test compile anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(F.gelu(self.layer(x)))


class Net(Module):
    """Twelve blocks: more than torch compiles one function for, were each one compiled apart."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.blocks(x))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * (1 + 0 * self.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Counts(Callback):
    """Notes after each batch how many functions were compiled so far, and the names there are."""

    def __init__(self, counter):
        self.counter, self.counts, self.names = counter, [], set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.counts.append(self.counter.frame_count)
        self.names.update(name for name, _ in module.named_parameters())
        self.names.update(trainer.dump_checkpoint()["state_dict"])


def trainer(**choices):
    return quiet_trainer(**{"max_epochs": 3, "log_every_n_steps": 1, **choices})


def fitted(data=TRAIN, val=VAL, **choices):
    torch.manual_seed(0)
    module = Net()
    trainer(**choices).fit(module, data, val)
    return module


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_nothing_is_compiled_after_the_warm_up_and_names_and_numbers_stay(blocks, recompute):
    counter = CompileCounterWithBackend("aot_eager")
    counts = Counts(counter)
    module = fitted(
        compile={"backend": counter, "blocks": blocks},
        activation_checkpointing=recompute,
        callbacks=[counts],
    )
    # Validation and training each; of blocks, the first and those whose input is another's output.
    assert 2 <= counts.counts[0] <= 4
    assert len(counts.counts) == 30
    assert counts.counts[-1] == counts.counts[11]
    assert counts.names == set(Net().state_dict())
    assert same(module, fitted(activation_checkpointing=recompute))
    assert all("forward" not in part.__dict__ for part in module.modules())


def test_blocks_share_what_is_compiled_for_one():
    counter = CompileCounterWithBackend("aot_eager")
    fitted(compile={"backend": counter, "blocks": True}, max_epochs=1, val=None)
    # The first block's input needs no gradient; the other eleven's does.
    assert counter.frame_count == 2


def test_true_compiles_the_steps_of_evaluations_too():
    counts = {}
    module = Net()
    for stage in ("validate", "test", "predict"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        it = trainer(compile={"backend": counter})
        getattr(it, stage)(module, VAL, **({} if stage == "predict" else {"verbose": False}))
        counts[stage] = counter.frame_count
    assert all(counts.values())
    assert not hasattr(module, "_orig_mod")


def test_a_checkpoint_of_a_compiled_fit_loads_into_a_plain_one_and_back(tmp_path):
    whole = fitted()
    options = {"backend": "aot_eager", "blocks": True}
    for first, second in ((options, None), (None, options)):
        torch.manual_seed(0)
        it = trainer(compile=first, max_epochs=1)
        it.fit(Net(), TRAIN, VAL)
        it.save_checkpoint(tmp_path / "a")
        module = Net()
        trainer(compile=second).fit(module, TRAIN, VAL, ckpt_path=tmp_path / "a")
        assert same(module, whole)


def test_a_module_that_is_passed_compiled_keeps_its_own_compiler():
    counter, other = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    module = torch.compile(Net(), backend=counter)
    trainer(compile={"backend": other}, max_epochs=1).fit(module, TRAIN)
    assert counter.frame_count >= 1
    assert other.frame_count == 0


def test_manual_optimization_is_compiled_too():
    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()

    modules = []
    for options in ({"backend": "aot_eager", "blocks": True}, None):
        torch.manual_seed(0)
        modules.append(ByHand())
        trainer(compile=options).fit(modules[-1], TRAIN)
    assert same(*modules)


def on_two_ranks(blocks):
    options = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "max_epochs": 2}
    counter = CompileCounterWithBackend("aot_eager")
    counts = Counts(counter)
    compiled = fitted(compile={"backend": counter, "blocks": blocks}, callbacks=[counts], **options)
    assert counts.counts[0] >= 1
    assert counts.counts[-1] == counts.counts[6]
    plain = fitted(**options)
    return [
        torch.allclose(x, y, rtol=1e-5, atol=1e-7)
        for x, y in zip(compiled.parameters(), plain.parameters(), strict=True)
    ]


@pytest.mark.parametrize("blocks", [False, True])
def test_copies_on_two_ranks_are_compiled_and_train_alike(blocks):
    assert all(map(all, on_ranks(2, on_two_ranks, blocks)))
