"""Under Slurm a run that SIGUSR1 has cut is put back into the queue, once and once it is saved."""

# PL #21406, #20542

import logging
import os
import re
import signal

import pytest
import torch

from leyden import Callback
from leyden.plugins import ModelCheckpoint
from leyden.testing import Regression, batches, quiet_trainer

DATA = batches(6)
SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/asked.txt
ls {folder}/run/version_0/checkpoints >> {folder}/saved.txt
{then}
"""


class Raises(Callback):
    """Raises a signal at step 3, after the optimizer has stepped."""

    def __init__(self, number=signal.SIGUSR1, step=3):
        self.number, self.step = number, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            signal.raise_signal(self.number)


class Fails(Callback):
    def on_train_end(self, trainer, module):
        raise RuntimeError("no more")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Make this process a job of Slurm, whose command notes what it is asked and then does more."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    def does(then):
        command = tmp_path / "bin" / "scontrol"
        command.write_text(SCONTROL.format(folder=tmp_path, then=then))
        command.chmod(0o755)

    does("exit 0")
    return does


def fitted(tmp_path, *callbacks, **choices):
    choices = {"default_root_dir": tmp_path, "name": "run", **choices}
    trainer = quiet_trainer(callbacks=[*callbacks, ModelCheckpoint()], **choices)
    with pytest.raises((SystemExit, RuntimeError)) as ended:
        trainer.fit(Regression(), DATA)
    return ended.value


def asked(tmp_path):
    path = tmp_path / "asked.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_it_is_put_back_once_when_the_checkpoint_is_complete(tmp_path, slurm, caplog):
    caplog.set_level(logging.INFO)
    ended = fitted(tmp_path, Raises())
    assert ended.code == 138
    assert asked(tmp_path) == ["requeue 4711"]
    [name] = (tmp_path / "saved.txt").read_text().split()
    saved = torch.load(tmp_path / "run/version_0/checkpoints" / name, weights_only=True)
    assert saved["global_step"] == 3
    assert "Job 4711 is back in the queue" in caplog.text


def test_the_same_command_goes_on_when_slurm_starts_it_again(tmp_path, slurm, monkeypatch):
    fitted(tmp_path, Raises())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = quiet_trainer(callbacks=[ModelCheckpoint()], default_root_dir=tmp_path, name="run")
    model = Regression()
    again.fit(model, DATA)
    unbroken = Regression()
    quiet_trainer().fit(unbroken, DATA)
    assert torch.equal(model.layer.weight, unbroken.layer.weight)
    assert asked(tmp_path) == ["requeue 4711"]


def test_a_task_of_an_array_is_put_back_alone(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4700")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    fitted(tmp_path, Raises())
    assert asked(tmp_path) == ["requeue 4700_0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_other_signals_put_nothing_back(tmp_path, slurm, number):
    assert fitted(tmp_path, Raises(number)).code == 128 + number
    assert asked(tmp_path) == []


def test_a_run_that_has_reached_its_end_is_not_put_back(tmp_path, slurm):
    assert fitted(tmp_path, Raises(step=6)).code == 138
    assert asked(tmp_path) == []


def test_a_run_that_failed_is_not_put_back(tmp_path, slurm):
    assert str(fitted(tmp_path, Raises(), Fails())) == "no more"
    assert asked(tmp_path) == []


def test_it_can_be_switched_off(tmp_path, slurm, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("LEYDEN_REQUEUE", "0")
    assert fitted(tmp_path, Raises()).code == 138
    assert asked(tmp_path) == []
    assert "LEYDEN_REQUEUE=0: job 4711 is not put back into the queue." in caplog.text


def test_outside_of_slurm_nobody_is_asked(tmp_path, slurm, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    assert fitted(tmp_path, Raises()).code == 138
    assert asked(tmp_path) == []


def test_a_run_that_is_not_saved_would_begin_anew_and_is_not_put_back(slurm, tmp_path):
    trainer = quiet_trainer(callbacks=[Raises()])
    with pytest.warns(UserWarning, match="nothing saves checkpoints"), pytest.raises(SystemExit):
        trainer.fit(Regression(), DATA)
    assert asked(tmp_path) == []


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("echo 'job is held' >&2; exit 1", "job is held"),
        (None, "No such file or directory: 'scontrol'"),
    ],
    ids=["refused", "absent"],
)
def test_a_refusal_is_said_with_the_command_to_run(tmp_path, slurm, monkeypatch, then, problem):
    if then is None:
        (tmp_path / "bin" / "scontrol").unlink()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    else:
        slurm(then)
    message = f"Job 4711 is not back in the queue: .*{re.escape(problem)}.*'scontrol requeue 4711'"
    with pytest.warns(UserWarning, match=message):
        assert fitted(tmp_path, Raises()).code == 138
