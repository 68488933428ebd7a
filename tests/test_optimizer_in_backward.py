"""A step taken in backward is the step of the loop, bit for bit, with one gradient alive."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leyden import Callback, ConfigError, Module
from leyden.testing import on_ranks, quiet_trainer

DATA = [(x, x.sum(1, keepdim=True)) for x in torch.randn(6, 4, 8, generator=torch.manual_seed(3))]


class Net(Module):
    """Three layers, the last of them tied to nothing and the middle one in a group of its own."""

    def __init__(self, kind=torch.optim.AdamW, schedule=False, **options):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.kind, self.schedule, self.options = kind, schedule, options

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        first, *others = [p for p in self.net[2].parameters()]
        rest = [p for n, p in self.named_parameters() if not n.startswith("net.2.")]
        groups = [{"params": rest}, {"params": [first, *others], "lr": 0.003}]
        optimizer = self.kind(groups, lr=0.01, **self.options)
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make(*args, **kwargs):
    torch.manual_seed(0)
    return Net(*args, **kwargs)


def fitted(in_backward, module, ckpt_path=None, **choices):
    trainer = quiet_trainer(optimizer_in_backward=in_backward, **{"max_epochs": 2, **choices})
    trainer.fit(module, DATA, ckpt_path=ckpt_path)
    return trainer


def same(first, second):
    """Return whether two structures of tensors and plain values are equal, bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


KINDS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("schedule", [False, True])
def test_weights_and_states_are_those_of_the_loops_step(kind, options, schedule, recwarn):
    plain, early = make(kind, schedule, **options), make(kind, schedule, **options)
    one, other = fitted(False, plain), fitted(True, early)
    assert same(dict(plain.state_dict()), dict(early.state_dict()))
    kept = [t.dump_checkpoint()["optimizer_states"] for t in (one, other)]
    assert same(*kept)
    assert (other.global_step, other.state.optimizer_steps) == (12, [12])
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("saved_in_backward", [False, True])
@pytest.mark.parametrize("resumed_in_backward", [False, True])
def test_a_checkpoint_of_either_goes_on_with_either(
    tmp_path, saved_in_backward, resumed_in_backward
):
    whole = make(schedule=True)
    fitted(False, whole)
    fitted(saved_in_backward, make(schedule=True), max_epochs=1).save_checkpoint(tmp_path / "a")
    module = make(schedule=True)
    fitted(resumed_in_backward, module, ckpt_path=tmp_path / "a")
    assert same(dict(whole.state_dict()), dict(module.state_dict()))


def test_one_gradient_at_most_is_alive_and_none_after_backward():
    alive, after = [], []

    class Counts(Callback):
        def on_fit_start(self, trainer, module):
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _: alive.append(sum(p.grad is not None for p in module.parameters()))
                )

        def on_after_backward(self, trainer, module):
            after.append(sum(p.grad is not None for p in module.parameters()))

    module = make()
    fitted(True, module, callbacks=[Counts()], max_epochs=1)
    # This hook comes after the step's own, which has freed the gradient.
    assert set(after) == {0}
    assert set(alive) == {0}
    assert len(alive) == 6 * 6


def test_nothing_of_it_stays_on_the_parameters():
    module = make()
    fitted(True, module)
    before = module.net[0].weight.detach().clone()
    F.mse_loss(module.net(DATA[0][0]), DATA[0][1]).backward()
    assert torch.equal(module.net[0].weight, before)
    assert module.net[0].weight.grad is not None


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Clips(Net):
    def configure_gradient_clipping(self, optimizer, value, algorithm):
        pass


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("module", "choices", "message"),
    [
        (make(), {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (make(), {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        (make(), {"precision": "16-mixed"}, "precision='16-mixed' scales gradients"),
        (ByHand(), {}, "steps its optimizers itself"),
        (Clips(), {}, "overrides configure_gradient_clipping"),
        (make(Own), {}, "Own cannot step one parameter alone"),
    ],
)
def test_what_needs_all_gradients_together_is_refused_by_name(module, choices, message):
    with pytest.raises(ConfigError, match=message):
        fitted(True, module, **choices)
    assert not module.net[0].weight._post_accumulate_grad_hooks


def refused_on_ranks():
    with pytest.raises(ConfigError, match="average their gradients after backward"):
        fitted(True, make(), strategy="ddp", devices=2, accelerator="cpu")


def test_copies_that_average_gradients_are_refused():
    on_ranks(2, refused_on_ranks)
