"""What goes wrong silently elsewhere is refused, or goes right."""

import copy

import pytest
import torch
from torch import nn

from leyden import Callback, CheckpointError, ConfigError, Module, ModuleError, Trainer
from leyden.testing import Regression, batches, quiet_trainer


class MadeLate(Module):
    """Makes its layer in ``configure_model``, without asking whether it is there already."""

    def configure_model(self):
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_of_configure_model_are_not_made_again(tmp_path):
    module, trainer = MadeLate(), quiet_trainer()
    trainer.fit(module, batches())
    trained = module.layer.weight.detach().clone()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(module, batches(2), verbose=False)
    assert torch.equal(module.layer.weight, trained)
    loaded = MadeLate.load_from_checkpoint(tmp_path / "a.ckpt")
    quiet_trainer().test(loaded, batches(2), verbose=False)
    assert torch.equal(loaded.layer.weight, trained)


def test_setup_that_loses_trained_layers_is_refused():
    class MadeInSetup(MadeLate):
        def setup(self, stage):
            self.layer = nn.Linear(3, 1)

        def configure_model(self):
            pass

    module, trainer = MadeInSetup(), quiet_trainer()
    trainer.fit(module, batches())
    with pytest.raises(ModuleError, match=r"setup\(\) made layer.weight, layer.bias anew"):
        trainer.test(module, batches(2), verbose=False)


def test_a_run_inside_a_run_is_refused():
    class Nesting(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.validate(module, batches(2), verbose=False)

    with pytest.raises(ConfigError, match=r"This Trainer is in the middle of its fit.*deepcopy"):
        quiet_trainer(callbacks=[Nesting()]).fit(Regression(), batches())

    class OnACopy(Callback):
        def on_train_epoch_end(self, trainer, module):
            twin = copy.deepcopy(module)
            self.found = quiet_trainer().validate(twin, batches(2), verbose=False)

    on_a_copy = OnACopy()
    quiet_trainer(callbacks=[on_a_copy]).fit(Regression(), batches())
    assert on_a_copy.found[0]["val/loss"] > 0


def test_an_open_stream_of_predictions_is_named_and_closed():
    module, trainer = Regression(), quiet_trainer()
    stream = trainer.predict(module, batches(4), stream=True)
    next(stream)
    with pytest.raises(ConfigError, match=r"in the middle of its predict.*close\(\) its stream"):
        trainer.fit(module, batches())
    stream.close()
    assert trainer.fit(module, batches()).steps == 8
    assert module.training


class TwoLayers(Regression):
    groups = ((0, 1), (2, 3))

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def configure_optimizers(self):
        both = [self.a.weight, self.b.weight, self.layer.weight, self.layer.bias]
        return torch.optim.Adam([{"params": [both[i] for i in group]} for group in self.groups])

    def forward(self, inputs):
        return self.layer(self.a(self.b(inputs)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": ((0,), (1, 2, 3))}, r"differ in parameters: \[\['a.weight', 'b.weight'\], "),
        (
            {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1)},
            r"differ in kind: Adam was saved, and SGD is there",
        ),
    ],
)
def test_an_optimizers_state_goes_to_the_same_optimizer_alone(tmp_path, change, message):
    trainer = quiet_trainer()
    trainer.fit(TwoLayers(), batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = type("Other", (TwoLayers,), change)()
    with pytest.raises(CheckpointError, match=message):
        quiet_trainer(max_epochs=2).fit(other, batches(), ckpt_path=tmp_path / "a.ckpt")


def test_an_optimizers_state_goes_by_names_in_whatever_order(tmp_path):
    trainer = quiet_trainer()
    trainer.fit(TwoLayers(), batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    reordered = type("Reordered", (TwoLayers,), {"groups": ((1, 0), (2, 3))})()
    again = quiet_trainer(max_epochs=1)
    again.fit(reordered, batches(), ckpt_path=tmp_path / "a.ckpt")
    for name in ("a", "b"):
        kept = trainer.optimizers[0].state[getattr(trainer.module, name).weight]["exp_avg"]
        taken = again.optimizers[0].state[getattr(reordered, name).weight]["exp_avg"]
        assert torch.equal(kept, taken)


@pytest.mark.parametrize("weights_only", [True, False])
def test_training_goes_on_from_a_whole_checkpoint_alone(tmp_path, weights_only):
    trainer = quiet_trainer()
    trainer.fit(Regression(), batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
    again = quiet_trainer(max_epochs=2)
    if weights_only:
        with pytest.raises(CheckpointError, match=r"cannot go on .* lacks optimizer_states"):
            again.fit(Regression(), batches(), ckpt_path=tmp_path / "a.ckpt")
    else:
        assert again.fit(Regression(), batches(), ckpt_path=tmp_path / "a.ckpt").steps == 16


def test_a_damaged_entry_is_named(tmp_path):
    trainer = quiet_trainer()
    trainer.fit(Regression(), batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    torch.save({**checkpoint, "callbacks": 5}, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="is damaged: its 'callbacks'"):
        quiet_trainer(max_epochs=2).fit(Regression(), batches(), ckpt_path=tmp_path / "b.ckpt")


def test_arguments_that_a_module_does_not_take_are_refused(tmp_path):
    trainer = quiet_trainer()
    trainer.fit(Regression(), batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"has no such argument. Did you mean 'lr'\?"):
        Regression.load_from_checkpoint(tmp_path / "a.ckpt", lrr=3)


def test_steps_that_would_run_nothing_are_refused():
    class Yields(Regression):
        def validation_step(self, batch, batch_idx):
            yield 1

    class Awaits(Regression):
        async def training_step(self, batch, batch_idx):
            return 1

    for module in (Yields(), Awaits()):
        with pytest.raises(ModuleError, match="is async or has a yield"):
            quiet_trainer().fit(module, batches(), batches())


def test_an_exception_leaves_no_parameter_frozen():
    class Raising(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            self.toggle_optimizer(self.optimizers()[0])
            raise RuntimeError("mine")

        def configure_optimizers(self):
            parts = (self.layer, self.other)
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    module = Raising()
    with pytest.raises(RuntimeError, match="mine"):
        quiet_trainer().fit(module, batches())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_two_values_for_one_logged_name_are_refused():
    class Clashing(Regression):
        def training_step(self, batch, batch_idx):
            self.log("a", 1.0, on_step=True, on_epoch=True)
            self.log("a_epoch", 2.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ModuleError, match="both record a_epoch"):
        quiet_trainer().fit(Clashing(), batches())


def test_a_training_that_never_steps_ends():
    class Idle(Regression):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ModuleError, match=r"100 epochs in a row updated no weights.*max_epochs"):
        quiet_trainer(max_epochs=-1, max_steps=5).fit(Idle(), batches(1))


def test_a_shorter_epoch_on_resume_is_said(tmp_path):
    class Saving(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    quiet_trainer().fit(Saving(), batches(8))
    with pytest.warns(UserWarning, match="saved after batch 6 of an epoch, which now has 4"):
        quiet_trainer().fit(Regression(), batches(4), ckpt_path=tmp_path / "a.ckpt")


def test_a_failing_teardown_leaves_the_trainer_usable():
    class Fails(Callback):
        def teardown(self, trainer, module, stage):
            if trainer.current_epoch == 1:
                raise RuntimeError("mine")

    trainer, module = quiet_trainer(callbacks=[Fails()]), Regression()
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(module, batches())
    trainer.max_epochs = 2
    assert trainer.fit(module, batches()).steps == 16


def test_a_device_is_no_place_for_a_checkpoint(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    trainer = quiet_trainer()
    trainer.fit(Regression(), batches())
    with pytest.raises(CheckpointError, match="is there and is no file"):
        trainer.save_checkpoint(tmp_path / "pipe")


def test_a_run_stays_in_its_folder_when_the_script_goes_elsewhere(tmp_path, monkeypatch):
    class Moving(Regression):
        def on_train_start(self):
            monkeypatch.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(max_epochs=1, logger="csv", enable_progress_bar=False, name="moved")
    trainer.fit(Moving(), batches())
    assert (tmp_path / "runs/moved/version_0/checkpoints").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"limit_val_batches": float("nan")}, "limit_val_batches=nan is no number"),
        ({"limit_train_batches": float("inf")}, "limit_train_batches=inf is a share"),
        ({"fast_dev_run": "x"}, "fast_dev_run='x' must be a whole number"),
        ({"enable_checkpointing": "False"}, "enable_checkpointing='False' is a switch"),
        ({"profiler": 3}, "is no Callback"),
    ],
)
def test_more_wrong_choices(choices, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        Trainer(logger=False, **choices)


def test_none_leaves_a_choice_at_its_default():
    trainer = Trainer(
        logger=False, fast_dev_run=None, accumulate_grad_batches=None, validate_at=None,
        overfit_batches=None,
    )  # fmt: skip
    assert (trainer.fast_dev_run, trainer.accumulate_grad_batches) == (0, 1)
    assert (trainer.validate_at, trainer.overfit_batches) == (frozenset(), 0)


def test_a_datamodule_is_one():
    with pytest.raises(ConfigError, match="datamodule=5 is no DataModule"):
        quiet_trainer().fit(Regression(), datamodule=5)


def test_last_is_looked_for_where_this_trainer_saves(tmp_path):
    from leyden.plugins import ModelCheckpoint

    def fitted(epochs, **where):
        saver = ModelCheckpoint(save_last=True, **where)
        return Trainer(
            max_epochs=epochs, logger=False, enable_progress_bar=False, name="run",
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[saver],
        )  # fmt: skip

    fitted(5).fit(Regression(), batches(2))  # an older run, elsewhere
    fitted(1, dirpath=tmp_path / "mine").fit(Regression(), batches(2))
    again = fitted(3, dirpath=tmp_path / "mine")
    assert again.fit(Regression(), batches(2), ckpt_path="last").steps == 6
    assert again.ckpt_path == str(tmp_path / "mine/last.ckpt")
    with pytest.raises(Exception, match=r"no such checkpoint in \S*other.*save_last=True"):
        fitted(3, dirpath=tmp_path / "other").fit(Regression(), batches(2), ckpt_path="last")


def test_loggers_are_there_before_a_run(tmp_path):
    trainer = Trainer(
        max_epochs=1, logger="csv", default_root_dir=tmp_path, enable_progress_bar=False
    )
    trainer.logger.log_hyperparams({"by_hand": 7})
    trainer.fit(Regression(), batches())
    from pathlib import Path

    assert '"by_hand": 7' in (Path(trainer.log_dir) / "hparams.json").read_text()


def test_a_logger_in_use_keeps_its_folder(tmp_path):
    from leyden.loggers import CSVLogger

    logger = CSVLogger(tmp_path / "logs")
    logger.log_metrics({"before": 1.0}, step=0)
    trainer = Trainer(max_epochs=1, logger=logger, enable_progress_bar=False)
    trainer.fit(Regression(), batches())
    assert trainer.log_dir == logger.log_dir == str(tmp_path / "logs/version_0")


def test_callbacks_log_as_the_module_does():
    class Logging(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log("from_callback", float(batch_idx))
            self.log_dict({"a": 1.0, "b": 2.0})

    logging, trainer = Logging(), None
    trainer = quiet_trainer(callbacks=[logging])
    result = trainer.fit(Regression(), batches(4))
    assert (result.metrics["from_callback"], result.metrics["b"]) == (3.0, 2.0)
    assert not hasattr(logging, "log")  # nothing of the run is kept


def test_a_callback_keeps_what_it_calls_log_itself():
    class Own(Callback):
        def __init__(self):
            self.log, self.seen = [], []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log.append(batch_idx)

    own = Own()
    trainer = quiet_trainer(callbacks=[own], max_epochs=2)
    trainer.fit(Regression(), batches(3))
    assert own.log == [0, 1, 2, 0, 1, 2]


def test_the_last_batch_is_known():
    seen = []

    class Asking(Regression):
        def training_step(self, batch, batch_idx):
            seen.append(self.trainer.is_last_batch)
            return super().training_step(batch, batch_idx)

    quiet_trainer(max_epochs=2).fit(Asking(), batches(3))
    assert seen == [False, False, True] * 2


def test_hyperparameters_that_are_no_data_are_all_named():
    class Port(Regression):
        def __init__(self, net, optimizer, width=3):
            super().__init__()
            self.save_hyperparameters()

    message = r"'net' is of type Linear.*ignore=\['net', 'optimizer'\]\).*attributes of your own"
    with pytest.raises(ConfigError, match=message):
        quiet_trainer().fit(Port(nn.Linear(1, 1), torch.optim.SGD), batches())


def test_classes_in_place_of_objects_are_refused():
    class GivesAClass(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD

    with pytest.raises(ModuleError, match=r"Regression is a class. Pass an object"):
        quiet_trainer().fit(Regression, batches())
    with pytest.raises(ModuleError, match=r"returned the class SGD. Make one of it: SGD\(self"):
        quiet_trainer().fit(GivesAClass(), batches())


def test_the_command_runs_as_a_module():
    import subprocess
    import sys

    command = [sys.executable, "-m", "leyden.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("leyden ")


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many"])
def test_a_weight_is_a_number_of_items(weight):
    class Weighted(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "weight": weight}

    with pytest.raises(ModuleError, match=r"returned the weight .* a number from 0 on"):
        quiet_trainer().fit(Weighted(), batches())
