"""The published order: of the hooks in a run, and of everyone at one hook."""

import inspect
import re
from pathlib import Path

import torch

import leyden
from leyden import Callback, Trainer, hookimpl, loop
from leyden.hook_names import HOOK_NAMES
from leyden.loggers import CSVLogger
from leyden.plugins import ModelCheckpoint
from leyden.testing import Regression, batches, quiet_trainer


def test_the_outline_of_the_loop_names_every_hook_in_the_order_of_the_contract():
    found = re.findall(r"\b(?:setup|teardown|on_\w+)\b", loop.__doc__)
    # A hook with several moments stands in the contract where it stands last.
    assert list(reversed(dict.fromkeys(reversed(found)))) == list(HOOK_NAMES)


def outline(lines):
    """Return indented ``lines`` as a list of a line and the outline below it."""
    found = []
    for line in lines:
        if line.startswith(" "):
            found[-1][1].append(line[4:])
        elif line:
            found.append((line, []))
    return [(line, outline(below)) for line, below in found]


def below(nodes, line):
    """Return the outline below ``line``, wherever it stands."""
    return next((x for n, b in nodes if (x := b if n == line else below(b, line))), None)


OUTLINE = outline(loop.__doc__.split("\n\n")[1].splitlines())


def played(nodes, due=()):
    """Yield what an outline says of one epoch of two batches, one step, one validation batch."""
    for line, inner in nodes:
        condition, _, text = line.rpartition(": ")
        if condition and condition not in due:
            continue
        if text == "for each batch" and ("training_step", []) in inner:
            yield from played(inner, ("first of a step",))
            yield from played(inner, ("last of a step", "when due"))
        elif inner:
            yield from played(inner)
        else:
            for word in text.split(", "):
                few = word == "a few batches of validate"
                yield from played(below(OUTLINE, "when due: validate")) if few else [word]


class Recorded(Regression):
    """Notes what it does, in the outline's words."""

    def __init__(self, seen):
        super().__init__()
        self.__dict__["seen"] = seen

    def training_step(self, batch, batch_idx):
        self.seen.append("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.seen.append("validation_step")

    def test_step(self, batch, batch_idx):
        self.seen.append("test_step")

    def predict_step(self, batch, batch_idx):
        self.seen.append("predict_step")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append("zero_grad")
        optimizer.zero_grad()

    def backward(self, loss):
        self.seen.append("backward")
        loss.backward()

    def configure_gradient_clipping(self, optimizer, *_):
        self.seen.append("clip")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.seen.append("optimizer step")
        optimizer.step()

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append(scheduler.name)
        scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
        schedulers[0].name, schedulers[1].name = "per-step schedules", "per-epoch schedules"
        intervals = zip(schedulers, ("step", "epoch"), strict=True)
        return [optimizer], [{"scheduler": s, "interval": i} for s, i in intervals]


def recorder(seen):
    """Return a plugin that notes every hook."""

    def noting(hook):
        def note(self, **given):
            seen.append(f'{hook}("{given["at"]}")' if "at" in given else hook)

        return hookimpl(note)

    return type("Recorder", (), {hook: noting(hook) for hook in HOOK_NAMES})()


def recorded_run(tmp_path, **choices):
    """Return what is noted, the Module that notes it, and its Trainer."""
    seen = []

    class Records(CSVLogger):
        def log_metrics(self, metrics, step):
            if "train/loss" in metrics:
                seen.append("log")

    trainer = quiet_trainer(
        plugins=[recorder(seen)], logger=Records(), default_root_dir=tmp_path, **choices
    )
    return seen, Recorded(seen), trainer


def test_a_fit_happens_as_the_outline_of_the_loop_says(tmp_path):
    seen, module, trainer = recorded_run(
        tmp_path, accumulate_grad_batches=2, num_sanity_val_steps=1, log_every_n_steps=1
    )
    trainer.fit(module, batches(2), batches(1))
    assert seen == ["setup", *played(below(OUTLINE, "fit")), "teardown"]


def test_other_runs_happen_as_the_outline_of_the_loop_says(tmp_path):
    seen, module, trainer = recorded_run(tmp_path)
    validation = list(played(below(OUTLINE, "when due: validate")))
    for method, expected in (
        ("validate", validation),
        ("test", list(played(below(OUTLINE, "test")))),
        ("predict", list(played(below(OUTLINE, "predict")))),
    ):
        seen.clear()
        getattr(trainer, method)(module, batches(1))
        assert seen == ["setup", *expected, "teardown"]


def test_an_epoch_with_a_validation_word_for_word(tmp_path):
    seen, module, trainer = recorded_run(
        tmp_path, num_sanity_val_steps=0, log_every_n_steps=1, limit_train_batches=1
    )
    trainer.fit(module, batches(1), batches(1))
    assert seen == [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_before_zero_grad",
        "zero_grad",
        "on_train_batch_start",
        "training_step",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "clip",
        "optimizer step",
        "per-step schedules",
        "on_train_batch_end",
        "log",
        "on_validation_start",
        "on_validation_model_eval",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "validation_step",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_validation_model_train",
        'on_save_point("step")',
        "on_train_epoch_end",
        "per-epoch schedules",
        'on_save_point("epoch")',
        'on_save_point("end")',
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def everyone(hook, seen):
    """Return a Trainer and a Module whose every part notes its name at ``hook``."""

    def noting(base, name, **mark):
        def note(self, *given):
            seen.append(name)

        return type(name, (base,), {hook: hookimpl(note, **mark) if mark else note})()

    saver = noting(Callback, "saver", trylast=True)
    saver.is_saver = True
    # The saver and the last come first in the list, and the first comes last.
    callbacks = [
        saver,
        noting(Callback, "last", trylast=True),
        noting(Callback, "a"),
        noting(Callback, "b"),
        noting(Callback, "first", tryfirst=True),
    ]
    plugin = noting(object, "plugin", specname=hook)
    trainer = quiet_trainer(plugins=[plugin], callbacks=callbacks, num_sanity_val_steps=1)
    return trainer, noting(Regression, "module")


def test_at_a_start_plugins_come_as_listed_and_then_the_module():
    """PL #17131."""
    for hook in ("setup", "on_fit_start", "on_train_batch_start", "on_before_backward"):
        seen = []
        trainer, module = everyone(hook, seen)
        trainer.fit(module, batches(1), batches(1))
        assert seen == ["first", "plugin", "a", "b", "module", "last", "saver"], hook


def test_at_an_end_the_module_comes_before_the_plugins():
    for hook in ("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"):
        seen = []
        trainer, module = everyone(hook, seen)
        trainer.fit(module, batches(1), batches(1))
        assert seen == ["first", "module", "plugin", "a", "b", "last", "saver"], hook


def test_teardown_comes_in_reverse():
    seen = []
    trainer, module = everyone("teardown", seen)
    trainer.fit(module, batches(1), batches(1))
    assert seen == ["saver", "last", "module", "b", "a", "plugin", "first"]


def test_every_hook_has_one_of_the_three_orders():
    start = ["first", "plugin", "a", "b", "module", "last", "saver"]
    end = ["first", "module", "plugin", "a", "b", "last", "saver"]
    for hook in HOOK_NAMES:
        trainer, module = everyone(hook, [])
        explained = re.findall(r"\d\. (\w+)", trainer.explain(module))
        wanted = start[::-1] if hook == "teardown" else end if hook.endswith("_end") else start
        assert explained == wanted, hook


def test_a_callback_sees_what_the_module_logged_at_the_same_end(tmp_path):
    read = {}

    class Own(Regression):
        def on_validation_epoch_end(self):
            self.log("val/own", 3.0)

        def on_train_epoch_end(self):
            self.log("train/own", 4.0)

    class Reads(Callback):
        def on_validation_epoch_end(self, trainer, module):
            read["val/own"] = trainer.callback_metrics["val/own"].item()

        def on_train_epoch_end(self, trainer, module):
            read["train/own"] = trainer.callback_metrics["train/own"].item()

    quiet_trainer(callbacks=[Reads()]).fit(Own(), batches(2), batches(1))
    assert read == {"val/own": 3.0, "train/own": 4.0}


def test_a_checkpoint_callback_listed_first_saves_last(tmp_path):
    found = {}

    class Looks(Callback):
        def on_save_point(self, trainer, module, at):
            found[at] = len([*tmp_path.rglob("*.ckpt")])

        def on_save_checkpoint(self, trainer, module, checkpoint):
            found["while saving"] = len([*tmp_path.rglob("*.ckpt")])

    trainer = Trainer(
        max_epochs=1, logger=False, default_root_dir=tmp_path,
        callbacks=[ModelCheckpoint(), Looks()],
    )  # fmt: skip
    trainer.fit(Regression(), batches(2), batches(1))
    assert found == {"step": 0, "epoch": 0, "while saving": 0, "end": 1}


def test_at_most_five_frames_lie_between_fit_and_the_users_step():
    package = Path(inspect.getfile(leyden)).parent
    frames = []

    class Own(Regression):
        def training_step(self, batch, batch_idx):
            files = [Path(frame.filename) for frame in inspect.stack()[1:]]
            frames.append([file for file in files if package in file.parents])
            return super().training_step(batch, batch_idx)

    quiet_trainer(accumulate_grad_batches=2, gradient_clip_val=1.0).fit(Own(), batches(2))
    assert all(len(stack) <= 5 for stack in frames), frames
    assert len(frames) == 2
    assert {file.name for file in frames[0]} == {"launch.py", "trainer.py", "loop.py", "step.py"}
