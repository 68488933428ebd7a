"""A Trainer checks its arguments when it is made, and says what is allowed."""

import pytest

from leyden import ConfigError, ModuleError, PluginError, Trainer
from leyden.testing import Regression, batches, quiet_trainer


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"max_epochs": -2},
            r"max_epochs=-2 must be a whole number, at least 0, or -1 for no limit",
        ),
        ({"max_epochs": 1.5}, r"max_epochs=1.5 must be a whole number"),
        ({"max_steps": True}, r"max_steps=True must be a whole number"),
        ({"min_epochs": -1}, r"min_epochs=-1 must be a whole number, at least 0"),
        ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches=0 must be .* at least 1"),
        ({"log_every_n_steps": 0}, r"log_every_n_steps=0 must be"),
        ({"limit_train_batches": 1.5}, r"limit_train_batches=1.5 is a share .* Pass 1 for"),
        ({"limit_val_batches": -1}, r"limit_val_batches=-1 is no number of batches"),
        ({"gradient_clip_val": -1.0}, r"gradient_clip_val=-1.0 must be a number above 0"),
        ({"gradient_clip_val": float("inf")}, r"gradient_clip_val=inf must be"),
        ({"gradient_clip_algorithm": "nrom"}, r"'nrom' is not known. Did you mean 'norm'"),
        ({"nonfinite_loss": "skpi"}, r"Did you mean 'skip'\? Allowed: 'continue', 'skip', 'stop'"),
        ({"deterministic": "yes"}, r"deterministic='yes' is not known"),
        ({"accelerator": "tpu"}, r"accelerator='tpu' is not known.*Allowed: 'auto', 'cpu'"),
        ({"devices": 0}, r"devices=0 asks for no device"),
        ({"devices": "two"}, r"devices='two' asks for no device"),
        ({"devices": [0, -1]}, r"asks for no device"),
        (
            {"strategy": "singel_device"},
            r"No strategy .*'singel_device'.*Did you mean 'single_device'",
        ),
        ({"strategy": "deepspeed"}, r"strategy='deepspeed' comes with the strategies of a later"),
        ({"precision": "bf16-mixde"}, r"No precision .*Did you mean 'bf16-mixed'"),
        ({"logger": "tensorbaord"}, r"No logger .*Did you mean 'tensorboard'"),
        ({"callbacks": ["early_stoping"]}, r"No callback .*Did you mean 'early_stopping'"),
        ({"checkpointer": "flie"}, r"No checkpointer .*Did you mean 'file'"),
        ({"profiler": "simpel"}, r"No profiler .*Did you mean 'simple'"),
        ({"precision": object()}, r"cannot serve as a precision: it lacks .*backward"),
        ({"strategy": object()}, r"cannot serve as a strategy: it lacks .*all_gather"),
        ({"val_check_interval": 0}, r"val_check_interval=0 must be at least 1"),
        ({"val_check_interval": "5 stpes"}, r"'5 stpes' is no interval. Pass .*'500 steps'"),
        ({"validate_at": "begin"}, r"validate_at='begin' is not known"),
        ({"num_sanity_val_steps": -2}, r"num_sanity_val_steps=-2 must be"),
        ({"max_epoch": 3}, r"Trainer has no argument 'max_epoch'. Did you mean 'max_epochs'"),
        ({"gpus": 1}, r"no argument 'gpus'. Use accelerator='gpu', devices="),
        ({"resume_from_checkpoint": "x"}, r"Use fit\(ckpt_path"),
    ],
)
def test_wrong_choice_is_refused_with_what_is_allowed(choices, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(**choices)


def test_one_process_cannot_have_several_devices():
    with pytest.raises(ConfigError, match="devices=2 on num_nodes=1 are several processes"):
        quiet_trainer(devices=2, strategy="single_device").fit(Regression(), batches())


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (32, "32-true"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
        (64, "64-true"),
        (16, "16-mixed"),
    ],
)
def test_lightnings_names_of_precisions(alias, name):
    assert quiet_trainer(precision=alias).precision == name


def test_object_that_is_no_callback_is_refused():
    with pytest.raises(PluginError, match=r"is no Callback. Derive it from leyden.Callback"):
        quiet_trainer(callbacks=[object()])


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        Trainer(5)


def test_only_modules_are_run():
    import torch

    with pytest.raises(ModuleError, match=r"runs a leyden.Module, not Linear. Derive"):
        quiet_trainer().fit(torch.nn.Linear(1, 1), batches())


@pytest.mark.parametrize("method", ["training_step", "configure_optimizers"])
def test_module_without_what_fit_needs(method):
    from leyden import Module

    incomplete = type("Incomplete", (Regression,), {method: getattr(Module, method)})
    with pytest.raises(ModuleError, match=f"Incomplete has no {method}"):
        quiet_trainer().fit(incomplete(), batches())


def test_without_a_limit_there_are_1000_epochs():
    assert Trainer(logger=False).max_epochs == 1000
    assert Trainer(logger=False, max_steps=5).max_epochs is None
    assert Trainer(logger=False, max_epochs=-1).max_epochs is None


def test_what_fit_returns():
    result = quiet_trainer(max_epochs=2).fit(Regression(), batches(8), batches(2))
    assert (result.reason, result.steps, result.epochs) == ("max_epochs=2 reached", 16, 2)
    assert set(result.metrics) == {"train/loss", "val/loss"}
    assert result.best_model_path is None


def test_a_reason_to_stop_is_reported():
    class Bored(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 3:
                self.trainer.should_stop = "three steps are enough"

    result = quiet_trainer(max_epochs=5).fit(Bored(), batches(8))
    assert (result.reason, result.steps, result.epochs) == ("three steps are enough", 3, 0)


def test_a_skipped_epoch_counts():
    class Hasty(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.skip_epoch()

    result = quiet_trainer(max_epochs=2).fit(Hasty(), batches(8))
    assert (result.steps, result.epochs) == (4, 2)


def test_start_up_line_names_what_runs(caplog):
    caplog.set_level("INFO", logger="leyden")
    quiet_trainer(precision="bf16-mixed").fit(Regression(), batches())
    line = next(m for m in caplog.messages if m.startswith("leyden "))
    for part in ("fit on cpu", "precision bf16-mixed", "single_device", "plugins none", "seed"):
        assert part in line


def test_attributes_of_lightning_and_misspelt_ones_are_pointed_out():
    with pytest.raises(AttributeError, match=r"no attribute 'fit_loop'. Use trainer.state"):
        Trainer(logger=False).fit_loop  # noqa: B018
    with pytest.raises(AttributeError, match=r"Did you mean 'global_step'\?"):
        Trainer(logger=False).globl_step  # noqa: B018
