"""A resumed training goes on as if it had never stopped, and a second fit where one ended."""

import logging
import math
import random

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from leyden import Callback, CheckpointError, Module, Trainer
from leyden.plugins import MixedPrecision, ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:The loss became NaN or infinite")


def options():
    """Return the options of a run whose first step overflows."""
    scaler = GradScaler("cpu", init_scale=2.0**16, backoff_factor=2.0**-8)
    return {
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 1.0,
        "precision": MixedPrecision(torch.float16, scaler),
    }


class Net(Module):
    """Dropout, Adam, a schedule per step and one per epoch; it notes each batch it trains on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        position = (self.trainer.current_epoch, batch_idx, self.trainer.global_step)
        self.seen.append((*position, x.sum().item(), random.random()))
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        per_step = {"scheduler": StepLR(optimizer, 2, 0.9), "interval": "step"}
        return [optimizer], [per_step, ExponentialLR(optimizer, 0.8)]


class Weighted(Net):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "weight": 1.0 + batch_idx % 3}


class SaveWhen(Callback):
    """Saves at ``path`` the first time a moment and a condition meet."""

    def __init__(self, path, moment, **condition):
        self.path, self.moment, self.condition = path, moment, condition

    def reached(self, trainer, moment):
        now = {"epoch": trainer.current_epoch, "batch": trainer.state.batch}
        if moment == self.moment and now == self.condition and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.reached(trainer, "batch end")

    def on_save_point(self, trainer, module, at):
        self.reached(trainer, at)


def loader():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)


def seeded(make, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    return make()


def fitted(module, data=None, ckpt_path=None, **options):
    trainer = Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 3, **options},
    )
    trainer.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def state_of(trainer):
    """Return everything that a continued training depends on; times aside."""
    saved = trainer.state.as_dict()
    return {
        "weights": trainer.module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedules": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "scaler": trainer.precision_plugin.state_dict(),
        "counts": {name: saved[name] for name in saved if name not in ("elapsed", "validated_at")},
        "random": (random.random(), torch.rand(3)),
    }


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)
    else:
        assert one == other


MOMENTS = {
    "at the end of the first epoch": ("epoch", {"epoch": 1, "batch": 0}),
    "in the middle of the first": ("step", {"epoch": 0, "batch": 4}),
    "in the middle of the second": ("step", {"epoch": 1, "batch": 8}),
    "after the last batch of the second": ("step", {"epoch": 1, "batch": 10}),
    "inside a step": ("batch end", {"epoch": 1, "batch": 6}),
    "inside the last, shorter step": ("batch end", {"epoch": 1, "batch": 9}),
    "when all is done": ("end", {"epoch": 3, "batch": 0}),
}


@pytest.mark.parametrize("make", [Net, Weighted])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_resumed_ends_as_an_unbroken_one(moment, make, tmp_path):
    when, condition = MOMENTS[moment]
    path = tmp_path / "saved.ckpt"
    unbroken = seeded(make, 7)
    expected = state_of(fitted(unbroken, callbacks=SaveWhen(path, when, **condition), **options()))
    module = seeded(make, 99)
    found = state_of(fitted(module, ckpt_path=path, **options()))
    assert_same(found, expected)
    assert module.seen == unbroken.seen[len(unbroken.seen) - len(module.seen) :]
    done = 10 * condition["epoch"] + condition["batch"]
    assert len(module.seen) == 30 - done
    assert (expected["counts"]["step"], expected["counts"]["skipped"]) == (8, 1)


def test_a_run_broken_again_and_again_ends_as_an_unbroken_one(tmp_path):  # Composer #3725
    unbroken = seeded(Net, 7)
    expected = state_of(fitted(unbroken, **options()))
    seen, path = [], None
    for count, (epoch, batch) in enumerate([(0, 4), (0, 6), (0, 7), (1, 8), (2, 1)]):
        following = tmp_path / f"{count}.ckpt"
        module = seeded(Net, 7 if path is None else 100 + count)
        save = SaveWhen(following, "batch end", epoch=epoch, batch=batch)
        fitted(module, ckpt_path=path, callbacks=save, **options())
        seen += module.seen[: 10 * epoch + batch - len(seen)]
        path = following
    module = seeded(Net, 200)
    assert_same(state_of(fitted(module, ckpt_path=path, **options())), expected)
    assert seen + module.seen == unbroken.seen


def test_a_shuffled_epoch_resumed_half_way_gives_each_sample_once(tmp_path):  # PL #19764
    path = tmp_path / "half.ckpt"

    def data():
        return DataLoader(TensorDataset(torch.eye(8, 4), torch.arange(8.0)[:, None]), shuffle=True)

    class Ids(Net):
        def training_step(self, batch, batch_idx):
            self.seen.append(int(batch[1]))
            return self.net(batch[0]).sum()

    first, second = seeded(Ids, 7), seeded(Ids, 8)
    fitted(first, data(), max_epochs=1, callbacks=SaveWhen(path, "step", epoch=0, batch=4))
    fitted(second, data(), max_epochs=1, ckpt_path=path)
    assert first.seen[4:] == second.seen
    assert sorted(first.seen) == list(range(8))


def test_a_second_epoch_resumed_half_way_keeps_its_own_order(tmp_path):  # accelerate #2016
    path, module, resumed = tmp_path / "second.ckpt", seeded(Net, 7), seeded(Net, 8)
    fitted(module, callbacks=SaveWhen(path, "step", epoch=1, batch=2))
    fitted(resumed, ckpt_path=path)
    assert resumed.seen == module.seen[12:]
    assert [row[3] for row in module.seen[:10]] != [row[3] for row in module.seen[10:20]]


class Stream(IterableDataset):
    """Ten batches in an order drawn anew each time."""

    def __iter__(self):
        for index in torch.randperm(10).tolist():
            yield torch.full((2, 4), float(index)), torch.ones(2, 1)


@pytest.mark.filterwarnings("ignore:The epoch goes on in its middle")
def test_a_stream_is_resumed_at_its_place(tmp_path):
    path, unbroken, module = tmp_path / "stream.ckpt", seeded(Net, 7), seeded(Net, 8)
    save = SaveWhen(path, "step", epoch=1, batch=4)
    expected = state_of(fitted(unbroken, DataLoader(Stream(), None), callbacks=save, **options()))
    found = state_of(fitted(module, DataLoader(Stream(), None), ckpt_path=path, **options()))
    assert module.seen == unbroken.seen[14:]
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:The epoch goes on in its middle")
def test_a_stream_that_draws_each_batch_is_resumed_at_its_place(tmp_path):
    class Noisy(Stream):
        def __iter__(self):
            for x, y in super().__iter__():
                yield x + torch.rand(4), y

    class Still(Net):
        def training_step(self, batch, batch_idx):
            self.eval()  # nothing but the data draws
            return super().training_step(batch, batch_idx)

    path, unbroken, module = tmp_path / "noisy.ckpt", seeded(Still, 7), seeded(Still, 8)
    save = SaveWhen(path, "step", epoch=1, batch=4)
    fitted(unbroken, DataLoader(Noisy(), None), callbacks=save)
    fitted(module, DataLoader(Noisy(), None), ckpt_path=path)
    assert module.seen == unbroken.seen[14:]


def test_several_optimizers_stepped_by_hand_are_resumed(tmp_path):
    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(self.net[part].parameters()) for part in (0, 2)]

    path, mixed = tmp_path / "two.ckpt", {"precision": "16-mixed"}
    save = SaveWhen(path, "batch end", epoch=1, batch=3)
    expected = fitted(seeded(Two, 7), callbacks=save, **mixed)
    expected_state = state_of(expected)
    found = fitted(seeded(Two, 8), ckpt_path=path, **mixed)
    assert_same(state_of(found), expected_state)
    assert_same(found.optimizers[1].state_dict(), expected.optimizers[1].state_dict())


def test_the_count_of_losses_that_are_not_finite_is_saved(tmp_path):
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 0 else 1)

    path, module = tmp_path / "nan.ckpt", seeded(Sometimes, 7)
    fitted(module, callbacks=SaveWhen(path, "step", epoch=1, batch=4))
    trainer = fitted(seeded(Sometimes, 8), ckpt_path=path)
    assert trainer.state.nonfinite == module.trainer.state.nonfinite == 30


def test_a_checkpoint_is_read_without_running_any_code_from_it(tmp_path):
    path = tmp_path / "inside.ckpt"
    fitted(Net(), callbacks=SaveWhen(path, "batch end", epoch=0, batch=6), **options())
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["epoch"], checkpoint["state"]["batch"]) == (0, 6)
    assert checkpoint["global_step"] + checkpoint["state"]["skipped"] == 1
    assert len(checkpoint["window"]["gradients"]) == 4


def test_a_checkpoint_between_steps_holds_no_gradients(tmp_path):
    path = tmp_path / "between.ckpt"
    fitted(Net(), callbacks=SaveWhen(path, "step", epoch=0, batch=8), **options())
    assert torch.load(path, weights_only=True)["window"] is None


def test_weights_alone_cannot_be_trained_on_from(tmp_path):
    trainer = fitted(Net(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match=r"holds weights alone.*Net\.load_from_checkpoint"):
        fitted(Net(), ckpt_path=tmp_path / "weights.ckpt")


def test_another_number_of_optimizers_is_refused(tmp_path):
    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = fitted(Net(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match=r"holds 2 schedulers and configure_optimizers.*0"):
        fitted(Plain(), ckpt_path=tmp_path / "one.ckpt")


def test_a_finished_run_resumed_with_its_limits_trains_nothing(tmp_path, caplog):  # PL #11425
    trainer = fitted(seeded(Net, 7), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    module = Net()
    with caplog.at_level(logging.INFO):
        fitted(module, ckpt_path=tmp_path / "end.ckpt", max_epochs=2)
    assert module.seen == []
    assert "Nothing was trained: max_epochs=2 reached. A higher limit" in caplog.text
    fitted(module, ckpt_path=tmp_path / "end.ckpt", max_epochs=3)
    assert [row[:2] for row in module.seen] == [(2, batch) for batch in range(10)]


def test_a_second_fit_with_the_same_limits_trains_nothing_and_says_so(tmp_path, caplog):
    files = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, save_last=True)
    module = seeded(Net, 7)
    trainer = fitted(module, max_epochs=2, callbacks=files, enable_checkpointing=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with caplog.at_level(logging.INFO):
        result = trainer.fit(module, loader())
    assert before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert (len(module.seen), trainer.global_step, trainer.current_epoch) == (20, 20, 2)
    assert "Nothing was trained: max_epochs=2 reached. A higher limit" in caplog.text
    assert (result.reason, result.steps, result.epochs) == ("max_epochs=2 reached", 20, 2)


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 9}])
def test_a_second_fit_with_a_higher_limit_goes_on(limit):
    unbroken = seeded(Net, 7)
    fitted(unbroken, **{**options(), "precision": "32-true", **limit})
    module = seeded(Net, 7)
    trainer = fitted(module, **{**options(), "precision": "32-true", "max_epochs": 2})
    for name, value in limit.items():
        setattr(trainer, name, value)
    trainer.fit(module, loader())
    assert_same(module.state_dict(), unbroken.state_dict())
    assert module.seen == unbroken.seen
    assert (trainer.global_step, trainer.current_epoch) == (9, 3)


def test_a_run_stopped_inside_an_epoch_stays_in_it_and_a_second_fit_finishes_it():
    class Stops(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if len(self.seen) == 12:
                self.trainer.should_stop = "for a moment"

    unbroken = seeded(Net, 7)
    fitted(unbroken)
    module = seeded(Stops, 7)
    trainer = fitted(module)
    assert (trainer.current_epoch, trainer.state.batch, trainer.global_step) == (1, 2, 12)
    assert trainer.state.stop == "for a moment"
    trainer.fit(module, loader())
    assert module.seen == unbroken.seen
    assert_same(module.state_dict(), unbroken.state_dict())
    assert trainer.current_epoch == 3


def test_another_module_begins_its_own_training():
    first, second = seeded(Net, 7), seeded(Net, 7)
    trainer = fitted(first, max_epochs=1)
    random.seed(7)
    trainer.fit(second, loader())
    assert (len(second.seen), trainer.global_step) == (10, 10)


@pytest.mark.parametrize("limit", [{"max_steps": 0}, {"max_epochs": 0}])
def test_a_limit_of_nothing_trains_nothing(limit):
    module = Net()
    trainer = fitted(module, **limit)
    assert (module.seen, trainer.global_step, trainer.current_epoch) == ([], 0, 0)


def test_an_epoch_that_was_skipped_is_not_gone_on_with(tmp_path):
    class Skips(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (0, 3):
                trainer.skip_epoch()

    path = tmp_path / "skipped.ckpt"
    unbroken = seeded(Net, 7)
    fitted(unbroken, callbacks=[Skips(), SaveWhen(path, "epoch", epoch=1, batch=0)])
    resumed = Net()
    fitted(resumed, ckpt_path=path, callbacks=Skips())
    assert len(unbroken.seen) == 4 + 10 + 10
    assert resumed.seen == unbroken.seen[4:]


def test_a_save_at_the_end_of_a_batch_counts_that_batch_and_its_step(tmp_path):  # PL #18060
    path = tmp_path / "three.ckpt"
    unbroken, resumed = seeded(Net, 7), Net()
    fitted(unbroken, callbacks=SaveWhen(path, "batch end", epoch=0, batch=3))
    saved = torch.load(path, weights_only=True)
    assert (saved["state"]["batch"], saved["state"]["step"], saved["global_step"]) == (3, 3, 3)
    fitted(resumed, ckpt_path=path)
    assert resumed.seen[0][:3] == (0, 3, 3)
    assert resumed.seen == unbroken.seen[3:]


def test_a_file_of_a_newer_format_is_refused_with_the_version_to_install(tmp_path):
    path = tmp_path / "newer.ckpt"
    trainer = fitted(Net(), max_epochs=1)
    checkpoint = trainer.dump_checkpoint()
    checkpoint["leyden"] |= {"format": 99, "version": "7.5.0"}
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=r"7\.5\.0 in format 99.*Install leyden 7\.5\.0 or"):
        fitted(Net(), ckpt_path=path)
