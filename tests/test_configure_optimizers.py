"""configure_optimizers: everything it may return, and what it is told when it returns another."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from leyden import ConfigError, Module, ModuleError, Trainer


class Net(Module):
    """A layer whose optimizers and schedules are those that ``configured`` returns."""

    def __init__(self, configured, manual=False):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.configured = configured
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean() if self.automatic_optimization else None

    def configure_optimizers(self):
        return self.configured(self)


def fitted(module, batches=1, **options):
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, [torch.ones(1, 1)] * batches)
    return trainer


def sgd(module):
    return SGD(module.parameters(), lr=0.1)


def with_step(module):
    optimizer = sgd(module)
    return optimizer, StepLR(optimizer, 1)


def in_dict(module, **settings):
    optimizer, schedule = with_step(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **settings}}


SHAPES = {
    "an optimizer": (sgd, 0),
    "a list": (lambda m: [sgd(m)], 0),
    "a tuple": (lambda m: (sgd(m),), 0),
    "a pair": (with_step, 1),
    "two lists": (lambda m: [[part] for part in with_step(m)], 1),
    "two lists, no schedule": (lambda m: ([sgd(m)], []), 0),
    "a dict": (lambda m: {"optimizer": sgd(m)}, 0),
    "a dict without schedule": (lambda m: {"optimizer": sgd(m), "lr_scheduler": None}, 0),
    "a dict with schedule": (
        lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": StepLR(o, 1)},
        1,
    ),
    "a dict with settings": (in_dict, 1),
    "a list of dicts": (lambda m: [in_dict(m)], 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_allowed_trains(shape):
    configured, schedules = SHAPES[shape]
    module = Net(configured)
    before = module.layer.weight.item()
    trainer = fitted(module)
    assert module.layer.weight.item() == pytest.approx(before - 0.1, abs=1e-6)
    assert len(trainer.optimizers) == 1
    configs = trainer.lr_scheduler_configs
    assert [type(config.scheduler) for config in configs] == [StepLR] * schedules
    assert all((config.interval, config.frequency) == ("epoch", 1) for config in configs)


def test_a_pair_may_hold_a_scheduler_with_its_settings():
    def configured(module):
        optimizer, schedule = with_step(module)
        return optimizer, {"scheduler": schedule, "interval": "step", "name": "decay"}

    config = fitted(Net(configured)).lr_scheduler_configs[0]
    assert (config.interval, config.name, config.scheduler.last_epoch) == ("step", "decay", 1)


def test_one_optimizer_may_have_several_schedules():
    def configured(module):
        optimizer, schedule = with_step(module)
        return [optimizer], [schedule, {"scheduler": StepLR(optimizer, 5), "interval": "step"}]

    configs = fitted(Net(configured)).lr_scheduler_configs
    assert [config.interval for config in configs] == ["epoch", "step"]


def test_every_schedule_knows_its_optimizer():
    def configured(module):
        optimizers = [SGD([parameter], lr=0.1) for parameter in module.parameters()]
        return optimizers, [StepLR(optimizer, 1) for optimizer in reversed(optimizers)]

    configs = fitted(Net(configured, manual=True)).lr_scheduler_configs
    assert [config.opt_idx for config in configs] == [1, 0]


def test_several_dicts_give_several_optimizers():
    def configured(module):
        weight, bias = (SGD([parameter], lr=0.1) for parameter in module.parameters())
        return [{"optimizer": weight}, {"optimizer": bias, "lr_scheduler": StepLR(bias, 1)}]

    trainer = fitted(Net(configured, manual=True))
    assert len(trainer.optimizers) == 2
    assert [config.opt_idx for config in trainer.lr_scheduler_configs] == [1]


@pytest.mark.parametrize("as_settings", [False, True])
def test_a_monitor_beside_the_scheduler_is_its_own(as_settings):
    def configured(module):
        schedule = ReduceLROnPlateau(optimizer := sgd(module))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "strict": False} if as_settings else schedule,
            "monitor": "val/loss",
        }

    config = fitted(Net(configured, manual=True)).lr_scheduler_configs[0]
    assert (config.monitor, config.reduce_on_plateau) == ("val/loss", True)


@pytest.mark.parametrize("empty", [None, [], ([], [])])
def test_no_optimizer_trains_nothing_and_says_so(empty):
    module = Net(lambda module: empty)
    before = module.layer.weight.item()
    with pytest.warns(UserWarning, match="returned no optimizer, so this fit .* trains nothing"):
        trainer = fitted(module)
    assert module.layer.weight.item() == before
    assert (trainer.global_step, trainer.state.total_batches, trainer.current_epoch) == (0, 1, 1)


def test_steps_are_no_limit_where_there_is_no_optimizer():
    with pytest.raises(ConfigError, match=r"max_steps=5 would never be reached.*Pass max_epochs"):
        fitted(Net(lambda module: None), max_epochs=None, max_steps=5)


@pytest.mark.parametrize(
    ("configured", "shown"),
    [
        (lambda m: "adam", "str 'adam'"),
        (lambda m: SGD.step, "function <function"),
        (lambda m: [sgd(m), None], "list "),
        (lambda m: [with_step(m)[1]], "list "),
        (lambda m: ([sgd(m)], [], [1]), "tuple "),
        (lambda m: {"lr_scheduler": None}, "dict {'lr_scheduler': None}"),
        (lambda m: {}, "dict {}"),
        (lambda m: m.parameters(), "generator "),
    ],
)
def test_any_other_shape_is_refused_and_all_allowed_are_listed(configured, shown):
    with pytest.raises(ModuleError) as error:
        fitted(Net(configured))
    assert f"Net.configure_optimizers() returned {shown}" in str(error.value)
    assert "Return an optimizer; a list of optimizers; (optimizer, scheduler)" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intervall": "step"}, "the key 'intervall'. Did you mean 'interval'?"),
        ({"freq": 1}, "the key 'freq'.* Allowed: scheduler, interval, frequency, monitor"),
        ({"interval": "batch"}, "interval='batch' of a scheduler is neither 'step' nor 'epoch'"),
        ({"frequency": 0}, "frequency=0 of a scheduler must be a whole number, at least 1"),
        ({"frequency": 0.5}, r"frequency=0\.5 of a scheduler must be a whole number"),
    ],
)
def test_wrong_settings_of_a_scheduler_are_refused(settings, message):
    with pytest.raises(ModuleError, match=message):
        fitted(Net(lambda module: in_dict(module, **settings)))


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (lambda m: {"optimiser": sgd(m)}, r"the key 'optimiser'\. Did you mean 'optimizer'\?"),
        (lambda m: {"optimizer": sgd(m), "frequency": 2}, "the key 'frequency'.* Allowed: optim"),
        (lambda m: ([sgd(m)], ["cosine"]), "returned 'cosine' as a scheduler. Return an object"),
        (lambda m: ([sgd(m)], [{"interval": "step"}]), "returned None as a scheduler"),
        (lambda m: (sgd(m), with_step(m)[1]), "StepLR sets the rates of an optimizer that Net"),
        (
            lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": ReduceLROnPlateau(o)},
            "ReduceLROnPlateau needs to know what to watch. Return .*'monitor': 'val/loss'",
        ),
    ],
)
def test_wrong_parts_are_refused(configured, message):
    with pytest.raises(ModuleError, match=message):
        fitted(Net(configured))


def test_several_optimizers_need_manual_optimization():
    def configured(module):
        return [SGD([parameter], lr=0.1) for parameter in module.parameters()]

    with pytest.raises(
        ModuleError, match=r"Net has 2 optimizers.* self.automatic_optimization = F"
    ):
        fitted(Net(configured))


def test_an_optimizer_over_nothing_is_refused():
    for parameters in ([], [{"params": []}]):
        with pytest.raises(ModuleError, match=r"no parameters. .*self.parameters"):
            fitted(Net(lambda module, chosen=parameters: SGD(chosen, lr=0.1)))


def test_an_optimizer_over_another_network_is_refused():
    other = nn.Linear(1, 1)
    with pytest.raises(ModuleError, match="holds 2 parameters, none of which is in Net"):
        fitted(Net(lambda module: SGD(other.parameters(), lr=0.1)))


def test_an_optimizer_over_a_part_of_another_network_is_warned_of():
    other = nn.Parameter(torch.zeros(()))
    with pytest.warns(UserWarning, match="SGD holds 1 parameters that are not in Net"):
        fitted(Net(lambda module: SGD([*module.parameters(), other], lr=0.1)))


def test_a_parameter_that_no_optimizer_holds_is_named_once():
    def configured(module):
        return SGD([module.layer.weight], lr=0.1)

    with pytest.warns(UserWarning, match=r"No optimizer holds layer\.bias, so it is not") as seen:
        fitted(Net(configured), log_every_n_steps=1)
    assert len(seen) == 1


def test_of_many_parameters_that_no_optimizer_holds_five_are_named():
    module = Net(lambda module: SGD(module.layer.parameters(), lr=0.1))
    module.rest = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    with pytest.warns(UserWarning, match=r"rest\.0\.weight, .*rest\.2\.weight and 3 more, so"):
        fitted(module)


def test_a_frozen_parameter_needs_no_optimizer():
    module = Net(lambda module: SGD([module.layer.weight], lr=0.1))
    module.layer.bias.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(module)


class Lazy(Net):
    """Makes a layer in its first forward, when the optimizer is already made."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "late"):
            self.late = nn.Linear(1, 1)
        return self.late(super().training_step(batch, batch_idx).reshape(1)).mean()


@pytest.mark.parametrize("every", [1, 50])
def test_a_layer_made_in_forward_is_warned_of(every):
    with pytest.warns(UserWarning, match=r"holds late\.weight, late\.bias.*not in forward") as seen:
        fitted(Lazy(sgd), log_every_n_steps=every)
    assert len(seen) == 1


def test_it_is_warned_of_long_before_the_end_of_an_epoch():
    with pytest.warns(UserWarning, match=r"holds late\.weight, late\.bias") as seen:
        trainer = fitted(Lazy(sgd), batches=9, max_steps=4, log_every_n_steps=2)
    assert (len(seen), trainer.current_epoch) == (1, 0)


def test_the_optimizers_error_is_the_users_own_where_it_is_another():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        fitted(Net(lambda module: SGD(module.parameters(), lr=-1.0)))


def test_a_module_without_configure_optimizers_is_refused():
    class Bare(Module):
        def training_step(self, batch, batch_idx):
            return batch.sum()

    with pytest.raises(ModuleError, match=r"Bare has no configure_optimizers\(\)"):
        fitted(Bare())
