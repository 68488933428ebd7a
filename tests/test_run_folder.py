"""Every run has a folder of its own, which its loggers share and a resumed run goes on in."""

import os
from pathlib import Path

import pytest

from leyden import ConfigError, Trainer
from leyden.loggers import CSVLogger
from leyden.run_folder import RunFolder
from leyden.testing import Regression, batches

QUIET = {
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def trainer(folder: Path, **choices) -> Trainer:
    return Trainer(**{**QUIET, "default_root_dir": folder, "name": "runs", **choices})


def test_runs_are_numbered(tmp_path):
    for number in range(3):
        it = trainer(tmp_path, logger="csv")
        it.fit(Regression(), batches())
        assert it.log_dir == str(tmp_path / "runs" / f"version_{number}")


def test_runs_started_at_the_same_moment_have_folders_of_their_own(tmp_path):
    started, folders = [], []
    for _ in range(4):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            path = RunFolder(tmp_path, "many").path
            os.write(write, f"{path.name}\n".encode())
            os._exit(0)
        started.append((child, read))
        os.close(write)
    for child, read in started:
        os.waitpid(child, 0)
        folders.append(os.read(read, 100))
        os.close(read)
    assert len(set(folders)) == 4


def test_loggers_and_checkpoints_share_it(tmp_path):
    it = trainer(tmp_path, logger=["csv", "jsonl", "tensorboard"])
    it.fit(Regression(), batches())
    assert {logger.log_dir for logger in it.loggers} == {it.log_dir}
    assert Path(it.checkpoint_callback.best_model_path).parent.parent == Path(it.log_dir)


def test_a_logger_that_names_a_folder_names_the_runs(tmp_path):
    it = trainer(tmp_path, logger=[CSVLogger(tmp_path / "mine", name="net", version="a"), "jsonl"])
    it.fit(Regression(), batches())
    assert it.log_dir == str(tmp_path / "mine" / "net" / "a")
    assert (tmp_path / "mine/net/a/metrics.jsonl").exists()


def test_loggers_that_name_other_folders_write_there(tmp_path):
    loggers = [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b", name="net"), "jsonl"]
    it = trainer(tmp_path, logger=loggers)
    it.fit(Regression(), batches())
    assert it.log_dir == str(tmp_path / "a/runs/version_0")
    for written in ("a/runs/version_0/metrics.csv", "b/net/version_0/metrics.csv"):
        assert (tmp_path / written).exists()
    assert (tmp_path / "a/runs/version_0/metrics.jsonl").exists()


def test_a_test_writes_in_the_folder_of_the_fit_before(tmp_path):
    class Tested(Regression):
        def test_step(self, batch, batch_idx):
            self.log("test/loss", 0.5)

    it, module = trainer(tmp_path, logger="csv"), Tested()
    it.fit(module, batches())
    folder = it.log_dir
    it.test(module, batches(), verbose=False)
    assert it.log_dir == folder
    assert "test/loss" in (Path(folder) / "metrics.csv").read_text()


def test_another_module_begins_another_folder(tmp_path):
    it = trainer(tmp_path, logger="csv")
    it.fit(Regression(), batches())
    it.fit(Regression(), batches())
    assert it.log_dir == str(tmp_path / "runs" / "version_1")


def test_without_logger_and_checkpoints_nothing_is_made(tmp_path):
    it = trainer(tmp_path, logger=False, enable_checkpointing=False)
    it.fit(Regression(), batches())
    it.test_dataloaders  # noqa: B018  reading makes nothing either
    assert it.log_dir is None
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_writes_nothing(tmp_path):
    trainer(tmp_path, fast_dev_run=True, callbacks=["model_checkpoint"]).fit(
        Regression(), batches(), batches()
    )
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    first = trainer(tmp_path, logger="csv")
    first.fit(Regression(), batches())
    second = trainer(tmp_path, logger="csv", max_epochs=2)
    second.fit(Regression(), batches(), ckpt_path=first.checkpoint_callback.best_model_path)
    assert second.log_dir == first.log_dir
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_last_is_found_by_a_new_trainer(tmp_path):
    from leyden.plugins import ModelCheckpoint

    first = trainer(tmp_path, logger=False, callbacks=[ModelCheckpoint(save_last=True)])
    first.fit(Regression(), batches())
    second = trainer(tmp_path, logger=False, max_epochs=2)
    assert second.fit(Regression(), batches(), ckpt_path="last").steps == 16


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be made in .* Pass another default_root_dir"):
        trainer(tmp_path, logger="csv").fit(Regression(), batches())
