"""What a ModelCheckpoint keeps, on disk and at a URL, in one run and the next."""

import logging
from datetime import timedelta
from uuid import uuid4

import pytest
import torch

from leyden import Callback, CheckpointError, Module, Trainer, locations
from leyden.plugins import FileCheckpointer, ModelCheckpoint
from leyden.plugins.retention import Rules, Saved


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """An empty folder that checkpoints go to."""
    return str(tmp_path / "c") if request.param == "local" else f"memory://{uuid4().hex}/runs/c"


class Scored(Module):
    """A scalar whose validation loss is the next of ``scores``, or 100 - global step."""

    def __init__(self, scores=()):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.scores = list(scores)

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.scores.pop(0) if self.scores else 100.0 - self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(tmp_path, *callbacks, module=None, batches=4, ckpt_path=None, **options):
    options = {"max_epochs": 1, "val_check_interval": 1, "num_sanity_val_steps": 0, **options}
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=options.pop("default_root_dir", tmp_path / "runs"),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = list(torch.arange(1.0, batches + 1))
    trainer.fit(module or Scored(), data, data[:1], ckpt_path=ckpt_path)
    return trainer


def names(folder):
    """Return the names of the files in ``folder``, of whatever kind."""
    if not locations.is_remote(folder):
        return sorted(path.name for path in locations.local(folder).rglob("*") if path.is_file())
    import fsspec

    system, place = fsspec.url_to_fs(folder)
    return sorted(path.rpartition("/")[2] for path in system.find(place))


def loaded(path):
    return FileCheckpointer().load(str(path))


# Rules


def saved(scores, times=None):
    return [
        Saved(f"{step}", torch.tensor(float(score)), step, (times or range(99))[step])
        for step, score in enumerate(scores)
    ]


def kept(scores, now=0.0, times=None, **reasons):
    none = {"best": 0, "newest": 0, "every_n_steps": None, "at_least": None, "prefers_high": False}
    rules = Rules(**{**none, **reasons})
    return [one.step for one in rules.kept(saved(scores, times), now)]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({}, []),
        ({"best": 2}, [1, 4]),
        ({"best": 2, "prefers_high": True}, [0, 2]),
        ({"best": -1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"newest": 3}, [4, 5, 6]),
        ({"newest": 9}, [0, 1, 2, 3, 4, 5, 6]),
        ({"every_n_steps": 2}, [2, 4, 6]),
        ({"at_least": timedelta(seconds=2), "now": 7.0}, [5, 6]),
        ({"best": 1, "newest": 1, "every_n_steps": 3}, [1, 3, 6]),
    ],
)
def test_one_reason_is_enough_to_keep(reasons, expected):
    assert kept([9, 1, 8, 7, 2, 6, 5], **reasons) == expected


def test_equal_scores_keep_the_earlier():
    assert kept([3, 1, 1], best=1) == [1]
    assert kept([3, 3, 1], best=1, prefers_high=True) == [0]


def test_steps_that_are_no_multiples_stand_for_the_next_below():
    rules = Rules(0, 0, 1000, None, False)
    files = [
        Saved(str(step), torch.tensor(0.0), step, 0.0) for step in (300, 937, 1874, 1990, 2811)
    ]
    assert [one.step for one in rules.kept(files, 0.0)] == [1874, 2811]


# In a run


def test_best_and_newest_and_milestones_are_kept_together(tmp_path, folder):
    callback = ModelCheckpoint(
        folder, "{step}", "val/loss", keep_newest=2, keep_every_n_train_steps=3
    )
    trained(tmp_path, callback, module=Scored([5, 1, 9, 8, 7, 6, 5, 4]), batches=8)
    assert names(folder) == [f"step={step}.ckpt" for step in (2, 3, 6, 7, 8)]
    assert callback.best_k_models == {callback.best_model_path: 1}
    assert callback.best_model_path == locations.join(folder, "step=2.ckpt")


def test_newest_are_kept_with_last_as_one_of_them(tmp_path, folder):
    callback = ModelCheckpoint(folder, "{step}", save_top_k=0, keep_newest=2, save_last=True)
    trained(tmp_path, callback)
    assert names(folder) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert loaded(callback.last_model_path)["state"]["step"] == 4
    assert callback.best_model_path == ""


class Clock(Callback):
    """Lets an hour pass with each step."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("leyden.plugins.model_checkpoint.time", lambda: self.now)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.now += 3600.0


def test_age_lets_files_go_but_never_the_newest(tmp_path, folder, monkeypatch):
    def callback(hours):
        return ModelCheckpoint(
            f"{folder}/{hours}", "{step}", save_top_k=0, keep_for=timedelta(hours=hours)
        )

    long, short = callback(2), callback(0.5)
    short.CHECKPOINT_NAME_LAST = "newest"
    for one in (long, short):
        trained(tmp_path, one, Clock(monkeypatch), batches=5)
    assert names(f"{folder}/2") == ["step=3.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert names(f"{folder}/0.5") == ["step=5.ckpt"]


def test_what_is_kept_survives_resume(tmp_path, folder):
    def callback():
        return ModelCheckpoint(
            folder, "{step}", "val/loss", keep_newest=2, keep_every_n_train_steps=4
        )

    whole = callback()
    trained(tmp_path, whole, module=Scored([3, 1, 9, 8, 7, 6, 5, 4, 2, 8]), batches=10)
    unbroken = names(folder)
    for path in FileCheckpointer().find(folder):
        FileCheckpointer().remove(path)
    trained(tmp_path, callback(), module=Scored([3, 1, 9, 8, 7, 6]), batches=10, max_steps=6)
    second = callback()
    newest = FileCheckpointer().find(folder)[0]
    trained(tmp_path, second, module=Scored([5, 4, 2, 8]), batches=10, ckpt_path=newest)
    assert (
        names(folder)
        == unbroken
        == ["step=10.ckpt"] + [f"step={step}.ckpt" for step in (2, 4, 8, 9)]
    )
    assert second.best_k_models == whole.best_k_models


class Dies(BaseException):
    """Stands for a process that is killed."""


class DyingBeforeRemoval(FileCheckpointer):
    def remove(self, path):
        raise Dies


def test_file_that_a_killed_run_could_not_delete_goes_after_the_next_save(tmp_path, folder):
    def callback():
        return ModelCheckpoint(folder, "{step}", save_on_exception=False)

    with pytest.raises(Dies):
        trained(tmp_path, callback(), checkpointer=DyingBeforeRemoval())
    assert names(folder) == ["step=1.ckpt", "step=2.ckpt"]
    resume = locations.join(folder, "step=2.ckpt")
    trained(tmp_path, callback(), ckpt_path=resume, max_steps=3)
    assert names(folder) == ["step=3.ckpt"]


class NoRemoval(FileCheckpointer):
    refusals = 0

    def remove(self, path):
        self.refusals += 1
        if self.refusals == 1:
            raise CheckpointError(f"{path!r} cannot be deleted: no permission.")
        super().remove(path)


def test_deletion_that_fails_is_said_and_tried_again_and_ends_nothing(tmp_path, folder, caplog):
    trained(tmp_path, ModelCheckpoint(folder, "{step}"), checkpointer=NoRemoval())
    assert names(folder) == ["step=4.ckpt"]
    assert caplog.text.count("cannot be deleted") == 1


# The file that a run was resumed from, and files of others


def test_file_resumed_from_stays_until_a_newer_one_is_complete(tmp_path, folder):
    """PL #21813: for a URL as for a path."""
    first = ModelCheckpoint(folder, "{step}", "val/loss")
    trained(tmp_path, first, module=Scored([5, 6]), max_steps=2)
    resume = first.best_model_path
    assert names(folder) == ["step=1.ckpt"]

    class Watching(FileCheckpointer):
        def save(self, checkpoint, path):
            assert self.exists(resume)
            super().save(checkpoint, path)

        def remove(self, path):
            assert self.exists(path.replace("step=1", "step=3"))
            super().remove(path)

    second = ModelCheckpoint(folder, "{step}", "val/loss")
    module = Scored([6, 4])
    trained(tmp_path, second, module=module, ckpt_path=resume, max_steps=3, checkpointer=Watching())
    assert names(folder) == ["step=3.ckpt"]


class Failing(FileCheckpointer):
    def save(self, checkpoint, path):
        raise CheckpointError(f"The checkpoint {path!r} cannot be written: the disk is full.")


def test_file_resumed_from_stays_if_every_save_fails(tmp_path, folder):
    first = ModelCheckpoint(folder, "{step}")
    trained(tmp_path, first, max_steps=2)
    second = ModelCheckpoint(folder, "{step}", when_failed="warn")
    resume = first.best_model_path
    with pytest.warns(UserWarning, match="the disk is full"):
        trained(tmp_path, second, ckpt_path=resume, checkpointer=Failing())
    assert names(folder) == ["step=2.ckpt"]
    assert second.best_model_path == resume


def test_new_run_in_the_folder_of_another_leaves_its_files(tmp_path, folder):
    for _ in range(2):
        trained(tmp_path, ModelCheckpoint(folder, "{step}", save_last=True), max_steps=2)
    assert names(folder) == ["last-v1.ckpt", "last.ckpt", "step=2-v1.ckpt", "step=2.ckpt"]


def test_run_that_begins_from_weights_alone_deletes_nothing_of_the_old_one(tmp_path, folder):
    first = ModelCheckpoint(folder, "{step}")
    trained(tmp_path, first, max_steps=2)
    trainer = Trainer(
        callbacks=[ModelCheckpoint(folder, "{step}")], max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=tmp_path / "runs",
    )  # fmt: skip
    data = [torch.tensor(1.0)]
    trainer.fit(Scored(), data, data, ckpt_path=first.best_model_path, restore="weights")
    assert names(folder) == ["step=1.ckpt", "step=2.ckpt"]


# URLs


@pytest.mark.parametrize("save_last", [True, "link"])
def test_url_holds_what_a_folder_would(tmp_path, folder, save_last):
    callback = ModelCheckpoint(folder, "{step}", "val/loss", save_top_k=2, save_last=save_last)
    trained(tmp_path, callback, module=Scored([4, 2, 3, 5]))
    assert names(folder) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert [locations.name_of(path) for path in callback.best_k_models] == [
        "step=2.ckpt",
        "step=3.ckpt",
    ]
    assert callback.last_model_path == locations.join(folder, "last.ckpt")
    assert loaded(callback.last_model_path)["state"]["step"] == 4
    state = loaded(callback.last_model_path)["callbacks"][callback.state_key]
    assert state["last_model_path"] == callback.last_model_path
    assert state["dirpath"] == folder


def test_root_that_is_a_url_holds_the_checkpoints_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = f"memory://{uuid4().hex}"
    callback = ModelCheckpoint(filename="{step}")
    trainer = trained(tmp_path, callback, default_root_dir=root, name="mine", max_steps=2)
    assert callback.dirpath == f"{root}/mine/{trainer.run_dir.name}/checkpoints"
    assert names(root) == ["step=2.ckpt"]


def test_run_resumed_on_another_machine_goes_on_in_the_folder_of_its_url(tmp_path, monkeypatch):
    root = f"memory://{uuid4().hex}"
    for machine, steps in (("a", 2), ("b", 4)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        if machine == "b":  # where another run has had the number
            (tmp_path / machine / "runs" / "mine" / "version_0").mkdir(parents=True)
            (tmp_path / "a" / "runs").rename(tmp_path / "gone")
        callback = ModelCheckpoint(filename="{step}")
        options = {"default_root_dir": root, "name": "mine", "ckpt_path": "auto"}
        trained(tmp_path, callback, max_steps=steps, **options)
    assert callback.dirpath == f"{root}/mine/version_0/checkpoints"
    assert names(root) == ["step=4.ckpt"]


def test_file_url_is_a_local_folder(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    first = ModelCheckpoint(f"file://{tmp_path}/c", "{step}")
    trained(tmp_path, first, max_steps=2)
    second = ModelCheckpoint(tmp_path / "c", "{step}")
    trained(tmp_path, second, max_steps=3, ckpt_path=first.best_model_path)
    assert names(tmp_path / "c") == ["step=3.ckpt"]
    assert caplog.text == ""


def test_s3_holds_what_a_folder_would(tmp_path, s3):
    def callback():
        return ModelCheckpoint(f"{s3}/runs/c", "{step}", "val/loss", save_last=True)

    first = callback()
    trained(tmp_path, first, module=Scored([4, 2, 3]), max_steps=3)
    assert names(s3) == ["last.ckpt", "step=2.ckpt"]
    second = callback()
    trained(tmp_path, second, module=Scored([1]), ckpt_path="auto", max_steps=4)
    assert names(s3) == ["last.ckpt", "step=4.ckpt"]
    assert loaded(second.last_model_path)["state"]["step"] == 4
    assert second.best_model_path == f"{s3}/runs/c/step=4.ckpt"
