"""self.log: what is kept, under which name, who sees it when, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from leyden import Callback, ConfigError, Module, ModuleError
from leyden.testing import quiet_trainer

VALUES = [torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0]), torch.tensor([9.0])]
"""Batches of two, two and one sample, whose means are 2, 4 and 9."""


class Scalar(Module):
    """A parameter that starts at 0 and goes down by the mean of each batch."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def scalar(**methods):
    return type("Scalar", (Scalar,), methods)()


class Recorder:
    """A logger that keeps what it is given."""

    save_dir = name = version = log_dir = None

    def __init__(self):
        self.rows = []

    def open(self, folder, resumed_at=None):
        """Nothing to open."""

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        """Not kept."""

    log_graph = log_hyperparams

    def flush(self):
        """Nothing to write."""

    def close(self, status):
        """Nothing to close."""

    def state_dict(self):
        return {}

    load_state_dict = log_hyperparams


def logs(**options):
    """Return a training step that logs the mean of its batch as ``x``."""

    def training_step(self, batch, batch_idx):
        self.log("x", batch.mean(), **options)
        return Scalar.training_step(self, batch, batch_idx)

    return training_step


def fitted(data=VALUES, val=None, **methods):
    """Return the trainer of one epoch of a Scalar with ``methods``."""
    trainer = quiet_trainer(num_sanity_val_steps=0)
    trainer.fit(scalar(**methods), data, val)
    return trainer


def recorded(tmp_path, data=VALUES, val=None, choices=None, **methods):
    """Return what a logger was given in one epoch of a Scalar with ``methods``."""
    recorder = Recorder()
    trainer = quiet_trainer(
        logger=recorder,
        default_root_dir=tmp_path,
        **{"num_sanity_val_steps": 0, "log_every_n_steps": 1, **(choices or {})},
    )
    trainer.fit(scalar(**methods), data, val)
    return recorder.rows


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


# Names and places


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x": 9.0}),
        ({"on_step": True}, {"x": 9.0}),
        ({"on_step": False, "on_epoch": True}, {"x": 4.2}),
        ({"on_epoch": True}, {"x": 4.2, "x_step": 9.0, "x_epoch": 4.2}),
    ],
)
def test_a_training_step_logs_per_step_by_default_and_both_get_endings(options, expected):
    trainer = fitted(training_step=logs(**options))
    assert numbers(trainer.callback_metrics) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x": 4.2}),
        ({"on_step": True}, {"x": 4.2, "x_step": 9.0, "x_epoch": 4.2}),
        ({"on_step": True, "on_epoch": False}, {"x": 9.0}),
    ],
)
def test_a_validation_step_logs_per_epoch_by_default(options, expected):
    seen = {}

    class Reads(Callback):
        def on_validation_epoch_end(self, trainer, module):
            seen.update(numbers(trainer.callback_metrics))

    step = logs(**options)
    trainer = quiet_trainer(callbacks=[Reads()])
    trainer.validate(scalar(validation_step=step), VALUES, verbose=False)
    assert seen == pytest.approx(expected)


def test_bar_and_loggers_see_the_names_with_endings_alone():
    trainer = fitted(training_step=logs(on_epoch=True, prog_bar=True))
    expected = {"x_step": 9.0, "x_epoch": 4.2}
    assert trainer.progress_bar_metrics == pytest.approx(expected)
    assert numbers(trainer.logged_metrics) == pytest.approx(expected)


def test_the_bar_shows_nothing_that_it_was_not_asked_to():
    assert fitted(training_step=logs()).progress_bar_metrics == {}


def test_a_name_may_hold_the_endings_themselves():
    def training_step(self, batch, batch_idx):
        self.log("per_epoch_step", batch.mean(), on_epoch=True)
        return (self.w * batch).mean()

    names = fitted(training_step=training_step).callback_metrics
    assert set(names) == {"per_epoch_step", "per_epoch_step_step", "per_epoch_step_epoch"}


def test_log_dict_logs_each_value_with_the_options():
    def training_step(self, batch, batch_idx):
        values = {"a": batch.sum(), "b": 2.0}
        self.log_dict(values, on_step=False, on_epoch=True, reduce_fx="sum", prog_bar=True)
        return (self.w * batch).mean()

    assert fitted(training_step=training_step).progress_bar_metrics == {"a": 21.0, "b": 6.0}


def test_options_for_several_ranks_are_accepted_on_one():
    options = {"sync_dist": True, "rank_zero_only": True, "sync_dist_group": None}
    assert numbers(fitted(training_step=logs(**options)).callback_metrics) == {"x": 9.0}


# Values


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        np.float32(3),
        np.float64(3),
        np.int64(3),
        np.array(3.0),
        np.array([3.0]),
        torch.tensor(3),
        torch.tensor([3.0]),
        torch.tensor([[3.0]], dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.float16),
        torch.tensor(3.0, requires_grad=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_every_kind_of_number_is_taken(value, reduce_fx):
    def training_step(self, batch, batch_idx):
        self.log("x", value, on_epoch=True, reduce_fx=reduce_fx)
        return (self.w * batch).mean()

    metrics = numbers(fitted(training_step=training_step).callback_metrics)
    assert metrics["x_step"] == 3.0
    assert metrics["x_epoch"] == (9.0 if reduce_fx == "sum" else 3.0)


@pytest.mark.parametrize("kind", [bool, torch.tensor])
def test_truth_values_average_to_a_share(kind):
    def training_step(self, batch, batch_idx):
        self.log("above_2", kind(bool(batch.mean() > 2)), on_step=False, on_epoch=True)
        return (self.w * batch).mean()

    metrics = fitted(training_step=training_step).callback_metrics
    assert float(metrics["above_2"]) == pytest.approx(3 / 5)


def test_nan_is_shown_and_not_hidden():
    def training_step(self, batch, batch_idx):
        for reduce_fx in ("mean", "sum", "min", "max"):
            value = math.nan if batch_idx == 1 else 1.0
            self.log(reduce_fx, value, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
        return (self.w * batch).mean()

    metrics = fitted(training_step=training_step).callback_metrics
    assert all(math.isnan(value) for value in metrics.values())
    assert len(metrics) == 4


def test_a_logged_parameter_buffer_or_view_keeps_the_value_it_had():
    class Mutates(Scalar):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def training_step(self, batch, batch_idx):
            self.seen += 1
            self.log_dict({"w": self.w, "view": self.seen[0], "both": self.seen[1]})
            self.seen *= 10
            return (self.w * batch).mean()

    trainer = quiet_trainer()
    trainer.fit(Mutates(), VALUES[:1])
    assert numbers(trainer.callback_metrics) == {"w": 0.0, "view": 1.0, "both": 1.0}


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_a_loss_that_is_added_to_after_it_was_logged_keeps_the_value_it_had(reduce_fx):
    def training_step(self, batch, batch_idx):
        loss = (self.w * batch).mean() + 1.0
        self.log("loss", loss, on_epoch=True, reduce_fx=reduce_fx)
        loss += 100.0
        return loss

    metrics = numbers(fitted(data=VALUES[:1], training_step=training_step).callback_metrics)
    assert metrics == {"loss": 1.0, "loss_step": 1.0, "loss_epoch": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3), r"self\.log\('x', …\) got a tensor of shape \(2, 3\).*\.mean\(\)"),
        (torch.ones(0), r"tensor of shape \(0,\)"),
        (np.ones(3), "got ndarray array"),
        ("0.5", "got str '0.5'. Log a number"),
        (None, "got NoneType None"),
        ({"a": 1.0}, r"got dict .* self\.log_dict"),
        ([1.0], r"got list \[1.0\]"),
    ],
    ids=repr,
)
def test_what_is_not_one_number_is_refused(value, message):
    def training_step(self, batch, batch_idx):
        self.log("x", value)

    with pytest.raises(ModuleError, match=message):
        fitted(training_step=training_step)


# Options that cannot be


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on_step": False}, ModuleError, "neither on_step nor on_epoch records nothing"),
        ({"on_step": False, "on_epoch": False}, ModuleError, "neither on_step nor on_epoch"),
        ({"reduce_fx": "median"}, ConfigError, "reduce_fx='median'.*'mean', 'sum', 'min' or 'max'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        fitted(training_step=logs(**options))


def test_a_name_must_be_a_string():
    def training_step(self, batch, batch_idx):
        self.log(3, 1.0)

    with pytest.raises(ModuleError, match="the name must be a string"):
        fitted(training_step=training_step)


def test_step_values_are_refused_in_a_hook_that_runs_once_an_epoch():
    def on_train_epoch_end(self):
        self.log("x", 1.0, on_step=True)

    with pytest.raises(ModuleError, match=r"once an epoch\. Leave on_step out"):
        fitted(on_train_epoch_end=on_train_epoch_end)


def test_one_name_with_other_options_is_refused():
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0, prog_bar=batch_idx > 0)
        return (self.w * batch).mean()

    message = r"self\.log\('x', …\) was called again with prog_bar=True after prog_bar=False"
    with pytest.raises(ModuleError, match=message):
        fitted(training_step=training_step)


def test_one_name_in_a_step_and_in_an_epoch_hook_is_refused():
    def on_train_epoch_end(self):
        self.log("x", 1.0)

    message = "again in a hook that runs once an epoch, after a step"
    with pytest.raises(ModuleError, match=message):
        fitted(training_step=logs(), on_train_epoch_end=on_train_epoch_end)


# Moments


@pytest.mark.parametrize(
    "hook",
    [
        "setup", "configure_model", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end",
        "on_validation_end", "on_train_end", "on_fit_end", "teardown",
    ],
)  # fmt: skip
def test_logging_where_there_is_no_epoch_is_refused(hook):
    def log(self, *args):
        self.log("x", 1.0)

    module = scalar(validation_step=lambda self, batch: None, **{hook: log})
    with pytest.raises(ModuleError, match="has no epoch to belong to here"):
        quiet_trainer().fit(module, VALUES, VALUES)


def test_logging_in_a_prediction_is_refused():
    def predict_step(self, batch, batch_idx):
        self.log("x", 1.0)

    with pytest.raises(ModuleError, match="what predict_step returns"):
        quiet_trainer().predict(scalar(predict_step=predict_step), VALUES)


def test_logging_outside_of_a_run_warns_and_records_nothing():
    module = scalar(training_step=logs())
    with pytest.warns(UserWarning, match="outside of a Trainer's run records nothing"):
        module.training_step(VALUES[0], 0)
    quiet_trainer().fit(module, VALUES)
    with pytest.warns(UserWarning, match="outside of a Trainer's run records nothing"):
        module.training_step(VALUES[0], 0)


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
        "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
        "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start",
        "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    ],
)  # fmt: skip
def test_a_hook_within_an_epoch_logs(hook):
    def log(self, *args):
        self.log("x", 2.0)

    methods = {"validation_step": lambda self, batch: None, hook: log}
    assert numbers(fitted(val=VALUES, **methods).callback_metrics) == {"x": 2.0}


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end"]
)
def test_a_callback_reads_in_the_same_hook_what_the_module_just_logged(hook):
    """PL #17131."""
    seen = []

    def log(self, *args):
        self.log("x", float(self.global_step))

    class Reads(Callback):
        pass

    def read(self, trainer, module, *args):
        seen.append((trainer.global_step, float(trainer.callback_metrics["x"])))

    setattr(Reads, hook, read)
    trainer = quiet_trainer(callbacks=[Reads()], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(scalar(validation_step=lambda self, batch: None, **{hook: log}), VALUES, VALUES)
    steps = [1, 2, 3, 4, 5, 6] if hook == "on_train_batch_end" else [3, 6]
    assert seen == [(step, step) for step in steps]


def test_a_callback_may_log_through_the_module():
    class Logs(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.log("from_callback", 1.0 + batch_idx, on_step=False, on_epoch=True)

    trainer = quiet_trainer(callbacks=[Logs()])
    trainer.fit(scalar(), VALUES)
    assert float(trainer.callback_metrics["from_callback"]) == pytest.approx(9 / 5)


def test_where_steps_and_validation_share_a_name_the_later_value_is_read():
    seen = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            seen.append(("train", float(trainer.callback_metrics["x"])))

        def on_validation_end(self, trainer, module):
            seen.append(("val", float(trainer.callback_metrics["x"])))

    trainer = quiet_trainer(callbacks=[Reads()], val_check_interval=2, num_sanity_val_steps=0)
    module = scalar(training_step=logs(), validation_step=logs())
    trainer.fit(module, VALUES, [torch.tensor([7.0])])
    assert seen == [("train", 2.0), ("train", 4.0), ("val", 7.0), ("train", 9.0)]


def test_between_epochs_the_plain_name_is_the_epochs_and_within_one_the_steps():
    seen = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            seen.append(float(trainer.callback_metrics["x"]))

        def on_train_epoch_end(self, trainer, module):
            seen.append(float(trainer.callback_metrics["x"]))

    trainer = quiet_trainer(callbacks=[Reads()])
    trainer.fit(scalar(training_step=logs(on_epoch=True)), VALUES)
    assert [*seen, float(trainer.callback_metrics["x"])] == pytest.approx([2, 4, 9, 4.2, 4.2])


def test_epoch_values_stay_readable_until_the_next_epochs_replace_them():
    seen = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(numbers(trainer.callback_metrics))

    def training_step(self, batch, batch_idx):
        self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return (self.w * batch).mean()

    trainer = quiet_trainer(callbacks=[Reads()], max_epochs=2)
    trainer.fit(scalar(training_step=training_step), VALUES[:2])
    assert seen == [{}, {}, {"epoch": 0.0}, {"epoch": 0.0}]
    assert numbers(trainer.callback_metrics) == {"epoch": 1.0}


def test_what_the_sanity_check_logged_is_forgotten(tmp_path):
    seen = []

    class Reads(Callback):
        def on_sanity_check_end(self, trainer, module):
            seen.append(numbers(trainer.callback_metrics))

        def on_train_batch_end(self, trainer, module, *args):
            seen.append(numbers(trainer.callback_metrics))

    choices = {"num_sanity_val_steps": 2, "callbacks": [Reads()], "check_val_every_n_epoch": 2}
    rows = recorded(tmp_path, VALUES[:1], VALUES, choices, validation_step=logs())
    assert seen == [{}, {}]
    assert rows == []


def test_fit_returns_the_last_value_of_everything():
    module = scalar(training_step=logs(on_epoch=True, logger=False))
    result = quiet_trainer().fit(module, VALUES)
    assert result.metrics == pytest.approx({"x": 4.2, "x_step": 9.0, "x_epoch": 4.2})


# Loggers


def test_loggers_get_step_values_at_every_nth_step_and_epoch_values_at_its_end(tmp_path):
    data = [torch.tensor([float(n)]) for n in range(1, 6)]
    rows = recorded(
        tmp_path, data, None, {"log_every_n_steps": 2}, training_step=logs(on_epoch=True)
    )
    assert rows == [
        (2, {"x_step": 2.0, "epoch": 0}),
        (4, {"x_step": 4.0, "epoch": 0}),
        (5, {"x_epoch": 3.0, "epoch": 0}),
    ]


def test_with_accumulation_loggers_get_the_value_of_the_batch_that_closed_the_step(tmp_path):
    data = [torch.tensor([float(n)]) for n in range(1, 6)]
    rows = recorded(tmp_path, data, None, {"accumulate_grad_batches": 2}, training_step=logs())
    assert [(step, row["x"]) for step, row in rows] == [(1, 2.0), (2, 4.0), (3, 5.0)]


def test_an_epoch_left_in_its_middle_is_recorded_as_far_as_it_went(tmp_path):
    choices = {"max_steps": 2, "log_every_n_steps": 9}
    rows = recorded(tmp_path, VALUES, None, choices, training_step=logs(on_epoch=True))
    assert rows == [(2, {"x_epoch": 3.0, "epoch": 0})]


def test_a_value_logged_between_due_steps_is_sent_once_at_the_next(tmp_path):
    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.log("rare", batch.mean())
        return (self.w * batch).mean()

    data = [torch.tensor([float(n)]) for n in range(1, 7)]
    rows = recorded(tmp_path, data, None, {"log_every_n_steps": 2}, training_step=training_step)
    assert rows == [(2, {"rare": 1.0, "epoch": 0})]


def test_values_of_epoch_hooks_and_of_validation_go_to_loggers_at_the_current_step(tmp_path):
    def on_train_epoch_end(self):
        self.log("end", 8.0)

    choices = {"val_check_interval": 2}
    methods = {"validation_step": logs(), "on_train_epoch_end": on_train_epoch_end}
    rows = recorded(tmp_path, VALUES, VALUES, choices, **methods)
    assert rows == [
        (2, {"x": pytest.approx(4.2), "epoch": 0}),
        (3, {"end": 8.0, "epoch": 0}),
    ]


def test_loggers_are_spared_what_is_not_for_them(tmp_path):
    def training_step(self, batch, batch_idx):
        self.log("private", 1.0, logger=False, on_epoch=True)
        self.log("public", 2.0, logger=True)
        return (self.w * batch).mean()

    rows = recorded(tmp_path, VALUES[:1], training_step=training_step)
    assert rows == [(1, {"public": 2.0, "epoch": 0})]


def test_step_values_of_an_evaluation_do_not_go_to_loggers(tmp_path):
    rows = recorded(tmp_path, VALUES, VALUES, validation_step=logs(on_step=True, on_epoch=False))
    assert rows == []


def test_loggers_get_python_numbers(tmp_path):
    rows = recorded(tmp_path, VALUES[:1], training_step=logs())
    assert type(rows[0][1]["x"]) is float
