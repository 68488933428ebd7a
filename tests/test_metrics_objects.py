"""Objects that reduce by themselves: those of torchmetrics, and any with update, compute, reset."""

import pytest
import torch
from torch import nn

from leyden import Callback, Module, ModuleError
from leyden.testing import quiet_trainer

torchmetrics = pytest.importorskip("torchmetrics")

DATA = [torch.tensor([1.0, 3.0]), torch.tensor([5.0])]
"""The mean over samples is 3, over batches 3.5."""


class Metered(Module):
    """Has a mean, and is told by ``step`` what to do with it."""

    def __init__(self, metric=None, step=None):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.metric = torchmetrics.MeanMetric() if metric is None else metric
        self.step = step or logs(on_epoch=True)

    def training_step(self, batch, batch_idx):
        self.step(self, batch)
        return self.w * 1.0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(self, batch)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def logs(update=False, name="mean", **options):
    """Return a step that updates the metric, or calls it for the batch's value, and logs it."""

    def step(module, batch):
        if update:
            module.metric.update(batch)
        else:
            module.metric(batch)
        module.log(name, module.metric, **options)

    return step


def fit(module, **choices):
    return quiet_trainer(**choices).fit(module, DATA).metrics


def validate(module, data=DATA):
    return quiet_trainer().validate(module, data, verbose=False)


class Plain:
    """The least that a metric object is."""

    def __init__(self):
        self.reset()

    def update(self, values):
        self.total += float(values.sum())

    def compute(self):
        return self.total

    def reset(self):
        self.total = 0.0


def test_a_called_object_gives_the_batchs_value_and_the_epochs():
    assert fit(Metered()) == {"mean": 3.0, "mean_step": 5.0, "mean_epoch": 3.0}


def test_a_called_object_logs_the_batchs_value_by_default_in_training():
    assert fit(Metered(step=logs())) == {"mean": 5.0}


def test_an_updated_object_gives_the_epochs_value():
    step = logs(update=True, on_step=False, on_epoch=True)
    assert fit(Metered(step=step)) == {"mean": 3.0}
    assert validate(Metered(step=logs(update=True))) == [{"mean": 3.0}]


@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": True}])
def test_an_updated_object_has_no_value_of_the_step(options):
    with pytest.raises(ModuleError, match=r"'mean'.*MeanMetric per step.*on_step=False"):
        fit(Metered(step=logs(update=True, **options)))


def test_any_object_with_update_compute_and_reset_will_do():
    plain = Plain()
    module = Metered(plain, logs(update=True, on_step=False, on_epoch=True))
    assert fit(module) == {"mean": 9.0}
    assert plain.total == 0.0


def test_the_object_begins_each_epoch_anew():
    seen = []

    class Reads(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(float(trainer.callback_metrics["mean"]))

    module = Metered()
    fit(module, max_epochs=3, callbacks=[Reads()])
    assert seen == [3.0, 3.0, 3.0]
    assert module.metric.update_count == 0


def test_each_evaluation_begins_anew_also_after_a_sanity_check():
    module = Metered(step=logs(update=True, on_step=False, on_epoch=True))
    module.training_step = lambda batch, batch_idx: module.w * 1.0
    trainer = quiet_trainer(max_epochs=2)
    assert trainer.fit(module, DATA, DATA).metrics == {"mean": 3.0}
    assert validate(module) == [{"mean": 3.0}]


def test_the_last_value_stays_readable_after_the_object_was_reset():
    trainer = quiet_trainer()
    trainer.fit(Metered(), DATA)
    for _ in range(2):
        assert {name: float(v) for name, v in trainer.callback_metrics.items()} == {
            "mean": 3.0, "mean_step": 5.0, "mean_epoch": 3.0,
        }  # fmt: skip


def test_bar_and_options_are_those_of_any_value():
    trainer = quiet_trainer()
    trainer.fit(Metered(step=logs(on_epoch=True, prog_bar=True, logger=False)), DATA)
    assert trainer.progress_bar_metrics == {"mean_step": 5.0, "mean_epoch": 3.0}
    assert trainer.logged_metrics == {}


def test_an_object_may_be_logged_once_an_epoch():
    class AtTheEnd(Metered):
        def on_validation_epoch_end(self):
            self.log("mean", self.metric)

    module = AtTheEnd(step=lambda module, batch: module.metric.update(batch))
    assert validate(module) == [{"mean": 3.0}]


def test_two_objects_under_one_name_are_refused():
    def step(module, batch):
        module.log("mean", torchmetrics.MeanMetric())

    with pytest.raises(ModuleError, match=r"two metric objects in one epoch.*a name of its own"):
        validate(Metered(step=step))


def test_an_object_that_computes_several_numbers_is_refused_with_its_name():
    confusion = torchmetrics.ConfusionMatrix(task="binary")

    def step(module, batch):
        module.metric.update(batch > 2, batch > 1)
        module.log("confusion", module.metric)

    with pytest.raises(ModuleError, match=r"'confusion', …\) got a tensor of shape \(2, 2\)"):
        validate(Metered(confusion, step))


# Collections


def collection(**options):
    metrics = {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()}
    return torchmetrics.MetricCollection(metrics, prefix="val/", **options)


def logs_all(update=True, **options):
    def step(module, batch):
        if update:
            module.metric.update(batch)
        else:
            module.metric(batch)
        module.log_dict(module.metric, **options)

    return step


def test_a_collection_is_logged_whole_under_its_prefixed_names():
    assert validate(Metered(collection(), logs_all())) == [{"val/mean": 3.0, "val/max": 5.0}]


def test_a_called_collection_gives_the_batchs_values_too():
    module = Metered(collection(), logs_all(update=False, on_epoch=True))
    values = fit(module)
    assert (values["val/mean_step"], values["val/mean_epoch"]) == (5.0, 3.0)
    assert (values["val/max_step"], values["val/max_epoch"]) == (5.0, 5.0)


def test_two_collections_can_be_logged_in_one_step():
    class Two(Metered):
        def __init__(self):
            super().__init__(collection())
            self.other = self.metric.clone(prefix="other/")

        def validation_step(self, batch, batch_idx):
            for metrics in (self.metric, self.other):
                metrics.update(batch)
                self.log_dict(metrics)

    expected = {"val/mean": 3.0, "val/max": 5.0, "other/mean": 3.0, "other/max": 5.0}
    assert validate(Two()) == [expected]


def test_metrics_of_a_collection_go_on_sharing_their_states():
    kinds = torchmetrics.classification
    metrics = torchmetrics.MetricCollection(
        [kinds.BinaryPrecision(), kinds.BinaryRecall(), kinds.BinaryAccuracy()]
    )

    def step(module, batch):
        module.metric.update((batch > 2).int(), (batch < 4).int())
        module.log_dict(module.metric)

    for _ in range(2):
        values = validate(Metered(metrics, step))
        assert values == [
            {"BinaryPrecision": 0.5, "BinaryRecall": 0.5, "BinaryAccuracy": pytest.approx(1 / 3)}
        ]
        assert len(metrics.compute_groups) == 1


def test_a_collection_under_one_name_is_refused():
    def step(module, batch):
        module.log("all", module.metric)

    with pytest.raises(ModuleError, match=r"'all', …\) got MetricCollection.*self\.log_dict"):
        validate(Metered(collection(), step))


# Several loaders

A, B = [torch.tensor([1.0])], [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]


@pytest.mark.parametrize("update", [True, False])
def test_one_object_logged_for_several_loaders_is_reset_between_them(update):
    """PL #18282."""
    assert validate(Metered(step=logs(update)), {"a": A, "b": B}) == [
        {"mean/dataloader_idx_0": 1.0},
        {"mean/dataloader_idx_1": 2.0},
    ]


def test_a_collection_logged_for_several_loaders_is_reset_between_them():
    assert validate(Metered(collection(), logs_all()), {"a": A, "b": B}) == [
        {"val/mean/dataloader_idx_0": 1.0, "val/max/dataloader_idx_0": 1.0},
        {"val/mean/dataloader_idx_1": 2.0, "val/max/dataloader_idx_1": 3.0},
    ]


def test_the_joint_value_of_several_loaders_has_a_name_and_an_object_of_its_own():
    class Joint(Metered):
        def __init__(self):
            super().__init__(step=logs(update=True))
            self.joint = torchmetrics.MeanMetric()

        def validation_step(self, batch, batch_idx, dataloader_idx):
            super().validation_step(batch, batch_idx)
            self.joint.update(batch)
            self.log("joint", self.joint, add_dataloader_idx=False)

    assert validate(Joint(), {"a": A, "b": B}) == [
        {"mean/dataloader_idx_0": 1.0, "joint": 1.75},
        {"mean/dataloader_idx_1": 2.0, "joint": 1.75},
    ]


def test_an_object_cannot_be_both_joint_and_apart():
    def step(module, batch):
        module.metric.update(batch)
        module.log("apart", module.metric)
        module.log("joint", module.metric, add_dataloader_idx=False)

    with pytest.raises(ModuleError, match=r"'apart' for each loader.*Use two objects"):
        validate(Metered(step=step), {"a": A, "b": B})


def test_an_object_updated_in_evaluation_can_be_updated_in_training():
    module = Metered(step=logs(update=True, on_step=False, on_epoch=True))
    validate(module)
    assert fit(module) == {"mean": 3.0}
    assert validate(module) == [{"mean": 3.0}]
