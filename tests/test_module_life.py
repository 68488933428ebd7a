"""A Module is a plain torch.nn.Module: before, after and without a fit."""

import copy
import pickle

import pytest
import torch
from torch import nn

from leyden import Module, ModuleError, Trainer


class Net(Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = [torch.ones(4, 2)] * 10


def trainer(**choices) -> Trainer:
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**{"max_epochs": 1, "enable_model_summary": False, **off, **choices})


def fitted() -> Net:
    module = Net()
    trainer().fit(module, DATA)
    return module


@pytest.mark.parametrize("make", [Net, fitted])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_hold_the_weights_and_no_run(make, duplicate):
    module = make()
    twin = duplicate(module)
    assert torch.equal(twin.net.weight, module.net.weight)
    assert twin.net.weight is not module.net.weight
    assert twin.hparams == {"width": 3}
    with pytest.raises(ModuleError, match="not attached to a Trainer"):
        _ = twin.trainer


def test_copy_made_during_a_fit_leaves_the_run_out():
    class Copying(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.__dict__["twin"] = copy.deepcopy(self)

    module = Copying()
    trainer(max_epochs=1).fit(module, DATA[:1])
    with pytest.raises(ModuleError, match="not attached"):
        _ = module.twin.trainer


@pytest.mark.parametrize("make", [Net, fitted])
def test_exports_and_runs_alone(make):
    module = make()
    exported = torch.export.export(module, (torch.ones(4, 2),)).module()
    assert torch.equal(exported(torch.ones(4, 2)), module(torch.ones(4, 2)))


def test_state_dict_has_the_parameters_alone():
    assert set(fitted().state_dict()) == {"net.weight", "net.bias"}


def test_compiled_part_leaves_no_prefix_in_a_checkpoint(tmp_path):
    # PL #20233
    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend="eager")

    module, path = Compiled(), tmp_path / "compiled.ckpt"
    it = trainer()
    it.fit(module, DATA)
    it.save_checkpoint(path)
    assert set(torch.load(path, weights_only=True)["state_dict"]) == {"net.weight", "net.bias"}
    plain = Net.load_from_checkpoint(path)
    assert torch.equal(plain.net.weight, module.net.weight)

    it.fit(plain, DATA)
    it.save_checkpoint(path)
    again = Compiled.load_from_checkpoint(path)
    assert torch.equal(again.net.weight, plain.net.weight)


# torch's own look at a value between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_module_logs_and_compiles_once():
    # PL #20233: the step number changes, the metrics too, and nothing is compiled again.
    from torch._dynamo.testing import CompileCounter

    counts = []

    class Counting(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + 0 * self.global_step)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counts.append(counter.frame_count)

        def validation_step(self, batch, batch_idx):
            self.log("val", self(batch).mean())

    counter = CompileCounter()
    it = trainer(log_every_n_steps=1, max_epochs=3, num_sanity_val_steps=0)
    it.fit(torch.compile(Counting(), backend=counter), DATA, DATA[:2])
    assert counts[0] >= 1
    assert len(counts) == 30
    # Once for the first batch, once for a step count that changes, once for an epoch count.
    assert counts[-1] == counts[11]
    assert len(set(counts)) <= 4
    assert it.callback_metrics["loss_epoch"] > 0


def test_freeze_and_unfreeze():
    module = Net()
    module.freeze()
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_loading_draws_no_random_number(tmp_path):
    # PL #20204
    it = trainer()
    it.fit(Net(), DATA)
    it.save_checkpoint(tmp_path / "net.ckpt")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    Net.load_from_checkpoint(tmp_path / "net.ckpt")
    assert torch.equal(torch.rand(1), expected)


def test_loading_takes_saved_arguments_and_those_given(tmp_path):
    it = trainer()
    it.fit(Net(width=5), DATA)
    it.save_checkpoint(tmp_path / "net.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "net.ckpt").hparams.width == 5
    with pytest.raises(Exception, match="do not fit Net"):
        Net.load_from_checkpoint(tmp_path / "net.ckpt", width=4)


def test_properties_outside_a_run():
    module = Net()
    assert (module.global_step, module.current_epoch, module.global_rank) == (0, 0, 0)
    assert module.logger is None
    assert module.loggers == []
    assert module.device == torch.device("cpu")
    assert module.dtype == torch.float32
