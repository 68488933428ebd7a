"""A signal ends a run at its next step boundary, saved, with the code a shell expects."""

# PL #19916

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from leyden import Module, Trainer
from leyden.testing import quiet_trainer

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from leyden import Callback, Module, Trainer
from leyden.plugins import ModelCheckpoint

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            for number in {signals}:
                os.kill(os.getpid(), number)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def teardown(self, stage):
        print("teardown", self.trainer.global_step, flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell put us aside
trainer = Trainer(
    max_epochs=100, logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir={folder!r}, name="run", callbacks=[ModelCheckpoint(save_last=True)],
)
trainer.fit(Net(), [torch.ones(2, 1)] * 50)
print("the next line ran", trainer.interrupted, trainer.global_step)
"""


def run_script(
    folder: Path, *signals: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    code = SCRIPT.format(
        folder=str(folder), signals=f"[{', '.join(f'signal.{s}' for s in signals)}]"
    )
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, *flags, str(script)], capture_output=True, text=True, timeout=60, input=""
    )


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_signal_ends_a_script_at_the_step_boundary_with_one_save(tmp_path, name, code):
    done = run_script(tmp_path, name)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == "teardown 4"  # the step that was interrupted finished
    saved = list(tmp_path.glob("run/version_0/checkpoints/*.ckpt"))
    steps = {torch.load(path, weights_only=True)["global_step"] for path in saved}
    assert steps == {4}


def test_second_interrupt_ends_at_once(tmp_path):
    done = run_script(tmp_path, "SIGINT", "SIGINT")
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout.strip() == "teardown 3"  # the step did not finish
    assert done.returncode != 0


@pytest.mark.parametrize(("second", "code"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_second_terminate_ends_at_once(tmp_path, second, code):
    done = run_script(tmp_path, "SIGTERM", second)
    assert done.returncode == code
    assert done.stdout.strip() == "teardown 3"


def test_the_terminate_of_slurms_time_limit_does_not_break_the_end_that_its_usr1_began(tmp_path):
    done = run_script(tmp_path, "SIGUSR1", "SIGTERM")
    assert done.returncode == 138
    assert done.stdout.strip() == "teardown 4"


def test_at_a_prompt_control_returns_and_the_run_is_marked(tmp_path):
    done = run_script(tmp_path, "SIGINT", flags=("-i",))
    assert "the next line ran True 4" in done.stdout, done.stderr


class Interrupting(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        signal.raise_signal(signal.SIGTERM)
        self.log("val", 1.0)

    def predict_step(self, batch, batch_idx):
        signal.raise_signal(signal.SIGTERM)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Raising(Interrupting):
    def __init__(self, number) -> None:
        super().__init__()
        self.number = number

    def training_step(self, batch, batch_idx):
        signal.raise_signal(self.number)
        return super().training_step(batch, batch_idx)


def trainer(**choices) -> Trainer:
    return quiet_trainer(**{"max_epochs": 2, **choices})


NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


def test_handlers_are_restored_after_a_run():
    before = handlers()
    with pytest.raises(SystemExit) as ended:
        trainer(num_sanity_val_steps=0).fit(
            Interrupting(), [torch.ones(2, 1)], [torch.ones(2, 1)] * 3
        )
    assert ended.value.code == 143
    assert handlers() == before


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_a_signal_that_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        it = trainer(num_sanity_val_steps=0, max_epochs=1)
        it.fit(Raising(number), [torch.ones(2, 1)] * 2)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert (it.global_step, it.interrupted) == (2, False)


def test_a_handler_of_the_users_own_keeps_usr1():
    told = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        it = trainer(max_epochs=1)
        it.fit(Raising(signal.SIGUSR1), [torch.ones(2, 1)] * 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [signal.SIGUSR1] * 2
    assert (it.global_step, it.interrupted) == (2, False)


def test_a_training_that_was_to_stop_already_is_not_called_interrupted():
    class Stopping(Interrupting):
        def on_before_optimizer_step(self, optimizer):
            self.trainer.should_stop = "enough"

        def on_train_batch_end(self, outputs, batch, batch_idx):
            signal.raise_signal(signal.SIGTERM)

    it = trainer()
    with pytest.raises(SystemExit):
        it.fit(Stopping(), [torch.ones(2, 1)] * 2)
    assert it.state.stop == "enough"


def test_interrupted_validation_is_no_result():
    it = trainer(num_sanity_val_steps=0)
    with pytest.raises(SystemExit):
        it.fit(Interrupting(), [torch.ones(2, 1)], [torch.ones(2, 1)] * 3)
    assert "val" not in it.callback_metrics
    assert it.interrupted_by == signal.SIGTERM


def test_prediction_ends_after_the_batch_that_was_interrupted():
    it = trainer()
    with pytest.raises(SystemExit):
        it.predict(Interrupting(), [torch.ones(2, 1)] * 3)
    assert not it.is_running


def test_a_fit_that_is_interrupted_before_it_begins_says_so_whatever_ended_the_one_before():
    class Late(Interrupting):
        def setup(self, stage):
            if self.trainer.global_step:
                signal.raise_signal(signal.SIGTERM)

    it, module = trainer(max_epochs=1), Late()
    it.fit(module, [torch.ones(2, 1)])
    assert it.state.stop == "max_epochs=1 reached"
    it.max_epochs = 2
    with pytest.raises(SystemExit):
        it.fit(module, [torch.ones(2, 1)])
    assert (it.state.stop, it.global_step) == ("interrupted by SIGTERM", 1)
