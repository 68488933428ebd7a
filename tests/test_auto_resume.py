"""``ckpt_path="auto"``: the same command is first run, restart and requeue."""

import logging
import os
from pathlib import Path

import pytest
import torch

from leyden import Callback, ConfigError
from leyden.loggers import CSVLogger
from leyden.plugins import ModelCheckpoint
from leyden.testing import Regression, batches, quiet_trainer

DATA = batches(6)


class Notes(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steps.append(trainer.global_step)


def fitted(tmp_path, *savers, max_steps, ckpt_path="auto", **options):
    notes = Notes()
    savers = savers or [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]
    options = {"default_root_dir": tmp_path, "name": "run", "max_epochs": -1, **options}
    trainer = quiet_trainer(
        callbacks=[*savers, notes], max_steps=max_steps, enable_checkpointing=True, **options
    )
    trainer.fit(Regression(), DATA, ckpt_path=ckpt_path)
    return trainer, notes.steps


def test_it_begins_where_there_is_nothing_and_then_goes_on_in_the_same_folder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first, steps = fitted(tmp_path, max_steps=4)
    assert steps == [0, 1, 2, 3]
    assert "No checkpoint to go on from in" in caplog.text
    second, steps = fitted(tmp_path, max_steps=8)
    assert steps == [4, 5, 6, 7]
    assert second.run_dir == first.run_dir
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["version_0"]


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    trainer, _ = fitted(tmp_path, max_steps=6)
    newest = Path(trainer.checkpoint_callback.best_model_path)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.warns(UserWarning, match=r"passes over .*step=6\.ckpt, and takes the one before"):
        _, steps = fitted(tmp_path, max_steps=7)
    assert steps == [4, 5, 6]


def test_a_truncated_checkpoint_is_passed_over(tmp_path):
    trainer, _ = fitted(tmp_path, max_steps=6)
    newest = Path(trainer.checkpoint_callback.best_model_path)
    os.truncate(newest, newest.stat().st_size - 100)
    _, steps = fitted(tmp_path, max_steps=5)
    assert steps == [4]


def test_the_newest_of_all_savers_is_taken(tmp_path):
    def savers():
        return (
            ModelCheckpoint(tmp_path / "often", every_n_train_steps=2),
            ModelCheckpoint(tmp_path / "seldom", every_n_train_steps=3),
        )

    fitted(tmp_path, *savers(), max_steps=3)
    _, steps = fitted(tmp_path, *savers(), max_steps=5)
    assert steps == [3, 4]


def test_files_of_weights_alone_are_no_place_to_go_on_from(tmp_path):
    saver = lambda: ModelCheckpoint(  # noqa: E731
        tmp_path / "w", every_n_train_steps=2, save_weights_only=True
    )
    fitted(tmp_path, saver(), max_steps=4)
    _, steps = fitted(tmp_path, saver(), max_steps=2)
    assert steps == [0, 1]


def test_it_looks_where_a_logger_has_taken_the_run(tmp_path):
    for steps in ([0, 1], [2, 3]):
        logger = CSVLogger(tmp_path / "logs", name="mine")
        _, seen = fitted(tmp_path, max_steps=steps[-1] + 1, logger=logger)
        assert seen == steps


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restarted_job_goes_on_without_being_told(tmp_path, monkeypatch, name):
    fitted(tmp_path, max_steps=4, ckpt_path=None)
    monkeypatch.setenv(name, "1")
    _, steps = fitted(tmp_path, max_steps=6, ckpt_path=None)
    assert steps == [4, 5]


def test_the_first_start_of_a_job_is_no_restart(tmp_path, monkeypatch):
    fitted(tmp_path, max_steps=4)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    _, steps = fitted(tmp_path, max_steps=2, ckpt_path=None)
    assert steps == [0, 1]


def test_only_fit_goes_on_by_itself(tmp_path):
    trainer, _ = fitted(tmp_path, max_steps=2)
    with pytest.raises(ConfigError, match=r"test\(ckpt_path='auto'\): only fit goes on"):
        trainer.test(Regression(), DATA, ckpt_path="auto")


def test_a_finished_run_trains_nothing_more(tmp_path):  # PL #11425
    trainer, _ = fitted(tmp_path, max_steps=4)
    weights = {k: v.clone() for k, v in trainer.module.state_dict().items()}
    again, steps = fitted(tmp_path, max_steps=4)
    assert steps == []
    assert all(torch.equal(v, weights[k]) for k, v in again.module.state_dict().items())
