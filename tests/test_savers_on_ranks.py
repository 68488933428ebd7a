"""Saving on several ranks: decided once, the same on all, and whole or absent."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from leyden import Callback, CheckpointError, LeydenError, Module, Trainer
from leyden.plugins import FileCheckpointer, ModelCheckpoint, ShardedCheckpointer
from leyden.testing import on_ranks

LOSSES = [[3.0, 1.0, 2.0, 4.0], [1.0, 4.0, 3.0, 2.0], [0.0, 9.0, 9.0, 9.0]]
"""What each rank logs in steps 1 to 4: the best of rank 0 is step 2, of rank 1 step 1."""


def own_rank():
    return int(os.environ["RANK"])


class Scored(Module):
    """Logs a loss of its rank's own in each step, and in validations 100 - step."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.log("own", LOSSES[self.global_rank][batch_idx % 4])
        return (self.w * batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", 100.0 - self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fitted(folder, *callbacks, batches=4, val=False, ckpt_path=None, module=None, **choices):
    data = [torch.ones(1)] * batches
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "strategy": "ddp",
            "callbacks": list(callbacks),
            "default_root_dir": folder,
            "name": "run",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
            **choices,
        }
    )
    trainer.fit(module or Scored(), data, data[:1] if val else None, ckpt_path=ckpt_path)
    return trainer


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def step_of(path):
    return FileCheckpointer().load(path)["global_step"]


@dataclass
class Known:
    """What a saver knows, with its paths as names."""

    best: str
    last: str
    top: dict
    worst: str
    current: float
    folder: str
    listed: list
    best_step: int


def known(saver, folder):
    """Return what ``saver`` knows on this rank, once every file it names is loaded here."""
    named = {Path(path).name: score.item() for path, score in saver.best_k_models.items()}
    for path in saver.best_k_models:
        step_of(path)
    return Known(
        Path(saver.best_model_path).name,
        Path(saver.last_model_path).name,
        named,
        Path(saver.kth_best_model_path).name,
        float(saver.current_score),
        saver.dirpath,
        files(folder),
        step_of(saver.best_model_path),
    )


# One decision


def ranked(folder, save_top_k):
    saver = ModelCheckpoint(
        folder,
        "{step}-{own:.0f}",
        "own",
        every_n_train_steps=1,
        save_top_k=save_top_k,
        save_last=True,
    )
    fitted(folder, saver)
    return known(saver, folder)


@pytest.mark.parametrize("ranks", [2, 3])
def test_by_a_value_that_differs_rank_0_decides_for_all(tmp_path, ranks):
    first, *others = on_ranks(ranks, ranked, str(tmp_path), 2)
    assert others == [first] * (ranks - 1)
    assert first.top == {"step=2-own=1.ckpt": 1.0, "step=3-own=2.ckpt": 2.0}
    assert (first.best, first.best_step) == ("step=2-own=1.ckpt", 2)
    assert first.worst == "step=3-own=2.ckpt"
    assert (first.last, first.current) == ("last.ckpt", 4.0)
    # Step 1's file was the best of rank 1; it is removed as rank 0 has it.
    assert first.listed == ["last.ckpt", "step=2-own=1.ckpt", "step=3-own=2.ckpt"]


class Blind(FileCheckpointer):
    """Sees on ranks other than 0 a folder as it was before anything was in it."""

    def exists(self, path):
        return own_rank() == 0 and super().exists(path)

    def find(self, folder):
        return super().find(folder) if own_rank() == 0 else []


def beside_another(folder):
    saver = ModelCheckpoint(folder, "best", "own", every_n_train_steps=1)
    trainer = fitted(folder, saver, checkpointer=Blind())
    at_once = step_of(saver.best_model_path)
    trainer.validate(ckpt_path="best", dataloaders=[torch.ones(1)], verbose=False)
    return at_once, saver.best_model_path, trainer.ckpt_path, files(folder)


def test_a_name_that_is_taken_is_avoided_alike_though_one_rank_does_not_see_it(tmp_path):
    other = tmp_path / "best.ckpt"
    FileCheckpointer().save({"leyden": {}, "of": "another run"}, str(other))
    before = other.read_bytes()
    for at_once, best, validated, listed in on_ranks(2, beside_another, str(tmp_path)):
        # Step 2 is better than step 1, and may take the place of the run's own file.
        assert at_once == 2
        assert best == validated == str(tmp_path / "best-v1.ckpt")
        assert listed == ["best-v1.ckpt", "best.ckpt"]
    assert other.read_bytes() == before


def validated_first(folder):
    saver = ModelCheckpoint(folder, "{step}-{v:.0f}", "v", save_top_k=-1, every_n_train_steps=2)
    fitted(folder, saver, batches=6, val=True, val_check_interval=2)
    return known(saver, folder)


def test_a_validation_at_the_step_of_a_save_comes_first_on_every_rank(tmp_path):
    for found in on_ranks(2, validated_first, str(tmp_path)):
        assert found.listed == ["step=2-v=98.ckpt", "step=4-v=96.ckpt", "step=6-v=94.ckpt"]
        assert (found.best, found.best_step) == ("step=6-v=94.ckpt", 6)


class Averaged(Scored):
    """Its validations' means over two ranks are 1.75, 3 and 1.4."""

    def validation_step(self, batch, batch_idx):
        losses = [[3.0, 1.0, 2.0], [0.5, 5.0, 0.8]][self.global_rank]
        self.log("v", losses[self.trainer.state.validations - 1], batch_size=1)


def averaged(folder):
    saver = ModelCheckpoint(folder, "{step}", "v")
    fitted(folder, saver, val=True, module=Averaged(), batches=3, val_check_interval=1)
    return known(saver, folder)


def test_epoch_values_are_ranked_by_their_mean_over_ranks(tmp_path):
    for found in on_ranks(2, averaged, str(tmp_path)):
        # Of its own values alone rank 0 would keep step 2, and rank 1 step 1.
        assert (found.best, found.best_step) == ("step=3.ckpt", 3)
        assert found.top["step=3.ckpt"] == pytest.approx(1.4)


class LogsOnOneRank(Scored):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("rare", 1.0)
        return (self.w * batch).mean()


def monitors_what_rank_1_logs(folder):
    saver = ModelCheckpoint(folder, monitor="rare")
    with pytest.raises(LeydenError, match=r"ModelCheckpoint\(monitor='rare'\)"):
        fitted(folder, saver, module=LogsOnOneRank())
    return files(folder)


def test_a_monitored_value_that_rank_0_lacks_is_an_error_on_every_rank(tmp_path):
    assert on_ranks(2, monitors_what_rank_1_logs, str(tmp_path), timeout=20) == [[], []]


# The run's folder


def in_a_new_folder(root, saves):
    """Run with a root on a disk of the rank's own, of which rank 1's has runs already."""
    own = Path(root, f"disk of rank {own_rank()}")
    if own_rank() == 1:
        (own / "run" / "version_5").mkdir(parents=True)
    trainer = fitted(own, enable_checkpointing=saves)
    return trainer.run_dir


def test_a_folder_is_numbered_once_for_all_ranks(tmp_path):
    expected = tmp_path / "disk of rank 0" / "run" / "version_0"
    assert on_ranks(2, in_a_new_folder, str(tmp_path), True) == [expected] * 2
    assert files(tmp_path) == ["epoch=0-step=4.ckpt"]


def test_folders_made_on_demand_have_one_number_on_every_rank(tmp_path):
    names = [path.name for path in on_ranks(2, in_a_new_folder, str(tmp_path), False)]
    assert names == ["version_0", "version_0"]


def in_one_root(root):
    return str(fitted(root, enable_checkpointing=True).run_dir)


def test_ranks_that_share_a_disk_share_one_folder(tmp_path):
    for expected in (tmp_path / "run" / "version_0", tmp_path / "run" / "version_1"):
        assert on_ranks(3, in_one_root, str(tmp_path)) == [str(expected)] * 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["version_0", "version_1"]


# By hand


class SavesByHand(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def saved_by_hand(folder):
    during, after = f"{folder}/during.ckpt", f"{folder}/after.ckpt"
    trainer = fitted(folder, SavesByHand(during), enable_checkpointing=False)
    trainer.save_checkpoint(after)
    own = [FileCheckpointer().load(path) for path in (during, after)]
    return [(one["global_step"], one["leyden"]["world_size"], len(one["ranks"])) for one in own]


def test_every_rank_saves_by_hand_and_there_is_one_file_of_all(tmp_path):
    # A file is there as soon as the call returns, on every rank, in a run and after it.
    assert on_ranks(2, saved_by_hand, str(tmp_path)) == [[(2, 2, 2), (4, 2, 2)]] * 2
    assert files(tmp_path) == ["after.ckpt", "during.ckpt"]


def saved_where_nothing_can_be(folder):
    trainer = fitted(folder, enable_checkpointing=False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        trainer.save_checkpoint(f"{folder}/file/a.ckpt")
    return True


def test_a_save_by_hand_that_fails_on_rank_0_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert on_ranks(2, saved_where_nothing_can_be, str(tmp_path), timeout=20) == [True, True]


# Resuming


def resumed(folder, choice):
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    begun = []

    class Notes(Callback):
        def on_train_start(self, trainer, module):
            begun.append(trainer.global_step)

    trainer = fitted(
        folder, saver, Notes(), max_epochs=-1, max_steps=6, ckpt_path=choice, checkpointer=Blind()
    )
    return begun, trainer.ckpt_path, trainer.global_step


@pytest.mark.parametrize("choice", ["auto", "last"])
def test_every_rank_goes_on_from_what_rank_0_finds(tmp_path, choice):
    on_ranks(2, run_of_four_steps, str(tmp_path))
    for begun, path, steps in on_ranks(2, resumed, str(tmp_path), choice):
        assert begun == [4]
        assert Path(path).name in ("last.ckpt", "step=4.ckpt")
        assert steps == 6


def run_of_four_steps(folder):
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    fitted(folder, saver)


def resumed_from_nothing(folder):
    begun, path, steps = resumed(folder, "auto")
    return begun, path, steps


def test_auto_begins_on_every_rank_where_rank_0_finds_nothing(tmp_path):
    assert on_ranks(2, resumed_from_nothing, str(tmp_path)) == [([0], None, 6)] * 2


def resumed_last_of_nothing(folder):
    with pytest.raises(LeydenError, match=r"ckpt_path='last': there is no such checkpoint in"):
        fitted(folder, ckpt_path="last", enable_checkpointing=True)
    return True


def test_a_last_that_rank_0_does_not_find_is_an_error_on_every_rank(tmp_path):
    assert on_ranks(2, resumed_last_of_nothing, str(tmp_path), timeout=20) == [True, True]


# A rank that fails in a save


class FailsHalfWay(FileCheckpointer):
    """Has no space left in its second save, once half of it is written."""

    saves = 0

    def save(self, checkpoint, path):
        FailsHalfWay.saves += 1
        if FailsHalfWay.saves == 2:
            checkpoint = {**checkpoint, "no data": lambda: 0}
        super().save(checkpoint, path)


class FailsOnRankOne(ShardedCheckpointer):
    """Has no space left on rank 1 in its second save, where it is to write its parts."""

    saves = 0

    def _writer(self, data):
        FailsOnRankOne.saves += 1
        writer = super()._writer(data)
        if FailsOnRankOne.saves == 2 and own_rank() == 1:
            writer.write_data = _no_space
        return writer


def _no_space(*_):
    raise OSError(28, "No space left on device")


FAILING = {"file": FailsHalfWay, "sharded": FailsOnRankOne}


def failing(folder, kind, asynchronous, when_failed):
    """Train four steps with a save after each second one, the second of which fails."""
    checkpointer = FAILING[kind]()
    saver = ModelCheckpoint(
        folder,
        "{step}",
        every_n_train_steps=2,
        save_last=True,
        asynchronous=asynchronous,
        when_failed=when_failed,
    )
    error, steps = "", 0
    try:
        steps = fitted(folder, saver, batches=6, checkpointer=checkpointer).global_step
    except CheckpointError as raised:
        error = str(raised)
    best = saver.best_model_path
    return error, steps, Path(best).name, checkpointer.load(best)["global_step"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_a_save_that_fails_on_one_rank_ends_all_and_leaves_the_one_before(
    tmp_path, kind, asynchronous
):
    found = on_ranks(2, failing, str(tmp_path), kind, asynchronous, "raise", timeout=30)
    for error, _, best, step in found:
        assert "cannot be written" in error
        assert (Path(best).stem, step) == ("step=2", 2)
    kept = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    assert kept == {"step=2", "last"}
    assert not [name for name in files(tmp_path) if name.startswith(".step")]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_training_may_go_on_after_it_on_every_rank(tmp_path, kind, asynchronous):
    found = on_ranks(2, failing, str(tmp_path), kind, asynchronous, "warn", timeout=30)
    for error, steps, best, step in found:
        assert (error, steps) == ("", 6)
        assert (Path(best).stem, step) == ("step=6", 6)


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("the folder is locked")
        self.lock = threading.Lock()


class FailsWithLock(FileCheckpointer):
    def save(self, checkpoint, path):
        raise Locked


class FailsWithLockInParts(ShardedCheckpointer):
    def _write_rest(self, rest, data):
        if own_rank() == 0:
            raise Locked


UNTOLD = {"file": FailsWithLock, "sharded": FailsWithLockInParts}


def untold(folder, kind, by_hand):
    choices = {"checkpointer": UNTOLD[kind]()}
    try:
        if by_hand:
            fitted(folder, SavesByHand(f"{folder}/a"), enable_checkpointing=False, **choices)
        else:
            fitted(folder, ModelCheckpoint(folder), **choices)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_an_error_that_cannot_travel_is_told_in_words(tmp_path, kind, by_hand):
    for said in on_ranks(2, untold, str(tmp_path), kind, by_hand, timeout=20):
        assert "the folder is locked" in said


class RaisesInSave(Callback):
    """Raises on rank 1 in the second save, before anything of it is written."""

    def __init__(self):
        self.saves = 0

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.saves += 1
        if self.saves == 2 and trainer.global_rank == 1:
            raise ValueError("rank 1 cannot say what to save")


def raises_in_save(folder):
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    fitted(folder, saver, RaisesInSave(), batches=40)


def test_a_rank_that_raises_while_a_save_is_made_ends_all_and_leaves_whole_files(tmp_path):
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, raises_in_save, str(tmp_path), timeout=30)
    assert "rank 1 cannot say what to save" in str(raised.value)
    assert "in time" not in str(raised.value)
    assert "step=2.ckpt" in files(tmp_path)
    for name in files(tmp_path):
        assert step_of(str(tmp_path / name)) in (2, 4)
