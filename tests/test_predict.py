"""Prediction: what it returns, what it streams, and what it keeps alive."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from leyden import Callback, Module
from leyden.testing import quiet_trainer

A, B = [torch.tensor([1.0])], [torch.tensor([2.0, 3.0]), torch.tensor([4.0])]


class Doubles(Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.w * x

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def values(predictions):
    return [tensor.tolist() for tensor in predictions]


class Events(Callback):
    """Keeps the names of the hooks told to it."""

    def __init__(self):
        self.told = []

    def on_predict_batch_end(self, *args):
        self.told.append("batch")

    def on_predict_end(self, *args):
        self.told.append("end")

    def on_exception(self, trainer, module, exception):
        self.told.append(type(exception).__name__)

    def teardown(self, trainer, module, stage):
        self.told.append(f"teardown {stage}")


# What is returned


def test_one_loader_gives_a_list_of_predictions():
    assert values(quiet_trainer().predict(Doubles(), B)) == [[4.0, 6.0], [8.0]]


def test_several_loaders_give_a_list_each():
    predictions = quiet_trainer().predict(Doubles(), {"a": A, "b": B})
    assert [values(one) for one in predictions] == [[[2.0]], [[4.0, 6.0], [8.0]]]


def test_a_loader_without_predictions_keeps_its_place():
    trainer = quiet_trainer(limit_predict_batches=0)
    assert trainer.predict(Doubles(), {"a": A, "b": B}) == [[], []]
    assert trainer.predict(Doubles(), B) == []


def test_nothing_is_returned_if_not_wanted():
    events = Events()
    trainer = quiet_trainer(callbacks=[events])
    assert trainer.predict(Doubles(), B, return_predictions=False) is None
    assert events.told == ["batch", "batch", "end", "teardown predict"]


def test_by_default_the_inputs_of_a_batch_are_passed_to_forward():
    pairs = [(x, torch.zeros(1)) for x in B]
    assert values(quiet_trainer().predict(Doubles(), pairs)) == [[4.0, 6.0], [8.0]]


def test_a_predict_step_returns_whatever_it_likes():
    class Named(Doubles):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return {"at": (dataloader_idx, batch_idx), "x": self(batch)}

    predictions = quiet_trainer().predict(Named(), {"a": A, "b": B})
    assert [p["at"] for one in predictions for p in one] == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("inference_mode", [True, False])
def test_predictions_can_be_trained_on(inference_mode):
    trainer, module = quiet_trainer(inference_mode=inference_mode), Doubles()
    targets = trainer.predict(module, B)
    loss = sum(nn.functional.mse_loss(module(x) + 1, y) for x, y in zip(B, targets, strict=True))
    loss.backward()
    assert not any(target.requires_grad for target in targets)
    trainer.fit(module, targets)
    assert trainer.global_step == 2


def test_prediction_needs_no_training_step():
    class Net(Module):
        def predict_step(self, batch, batch_idx):
            return batch + 1

    assert values(quiet_trainer().predict(Net(), A)) == [[2.0]]


def test_the_model_fitted_last_predicts():
    trainer, module = quiet_trainer(), Doubles()
    trainer.fit(module, A)
    assert values(trainer.predict(dataloaders=A)) == [[1.0]]


# Streaming


def test_a_stream_is_read_lazily_and_in_order():
    asked = []

    class Asks:
        def __iter__(self):
            for number in range(10):
                asked.append(number)
                yield torch.tensor([float(number)])

    stream = quiet_trainer().predict(Doubles(), Asks(), stream=True)
    assert asked == []
    assert [next(stream).item() for _ in range(3)] == [0.0, 2.0, 4.0]
    assert len(asked) <= 4  # an unsized loader is read one ahead
    stream.close()


def test_a_stream_read_to_its_end_is_a_whole_run():
    events = Events()
    stream = quiet_trainer(callbacks=[events]).predict(Doubles(), {"a": A, "b": B}, stream=True)
    assert values(stream) == [[2.0], [4.0, 6.0], [8.0]]
    assert events.told == ["batch", "batch", "batch", "end", "teardown predict"]


def test_closing_a_stream_takes_the_run_down_and_is_no_error():
    events, module = Events(), Doubles()
    trainer = quiet_trainer(callbacks=[events])
    stream = trainer.predict(module, B, stream=True)
    next(stream)
    assert trainer.predicting
    assert not module.training
    stream.close()
    assert not trainer.is_running
    assert module.training
    assert events.told == ["batch", "teardown predict"]
    assert list(stream) == []
    assert trainer.fit(module, A).steps == 1


def test_what_goes_wrong_when_a_stream_is_closed_is_raised_there():
    class Fails(Callback):
        def teardown(self, trainer, module, stage):
            raise RuntimeError("mine")

    stream = quiet_trainer(callbacks=[Fails()]).predict(Doubles(), B, stream=True)
    next(stream)
    with pytest.raises(RuntimeError, match="mine"):
        stream.close()


def test_what_goes_wrong_while_streaming_is_told_and_raised():
    class Fails(Doubles):
        def predict_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    events = Events()
    stream = quiet_trainer(callbacks=[events]).predict(Fails(), B, stream=True)
    with pytest.raises(RuntimeError, match="mine"):
        next(stream)
    assert events.told == ["RuntimeError", "teardown predict"]


def test_the_callers_code_between_predictions_runs_with_gradients():
    stream = quiet_trainer().predict(Doubles(), B, stream=True)
    for _ in stream:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


class Counting(IterableDataset):
    """Samples without end, each with the process it comes from."""

    def __iter__(self):
        number = 0
        while True:
            yield torch.tensor([float(number), float(get_worker_info() is not None)])
            number += 1


def test_closing_a_stream_ends_the_loaders_workers():
    class Passes(Doubles):
        def predict_step(self, batch, batch_idx):
            return batch

    loader = DataLoader(Counting(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    began = []

    class Watches:
        def __iter__(self):
            iterator = iter(loader)
            began.extend(iterator._workers)
            yield from iterator

    stream = quiet_trainer().predict(Passes(), Watches(), stream=True)
    assert [next(stream).tolist() for _ in range(3)] == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert [worker.is_alive() for worker in began] == [True]
    stream.close()
    assert [worker.is_alive() for worker in began] == [False]


# Memory


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_predictions_that_are_not_wanted_are_let_go(stream, inference_mode):
    """PL #15656: none is alive when the next is made, however long the run."""
    made, alive = [], []

    class Watched(Doubles):
        def predict_step(self, batch, batch_idx):
            alive.append(sum(ref() is not None for ref in made))
            output = torch.zeros(1000)
            made.append(weakref.ref(output))
            return output

    trainer = quiet_trainer(inference_mode=inference_mode)
    data = [torch.zeros(1)] * 100
    if stream:
        for output in trainer.predict(Watched(), data, stream=True):
            del output
    else:
        trainer.predict(Watched(), data, return_predictions=False)
    assert len(made) == 100
    assert set(alive) == {0}
