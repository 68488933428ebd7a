"""Each hook, told to a Module, a Callback, a plugin and a wrapper with what it specifies."""

from collections import defaultdict

import pytest
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from leyden import Callback, Module, hookimpl
from leyden.hook_names import HOOK_NAMES
from leyden.testing import Regression, batches, quiet_trainer

STAGES = ("fit", "validate", "test", "predict")


class Runs(Regression):
    """Has every step, and fails when it is told to."""

    fails = False

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx, dataloader_idx):
        self.log("test/loss", 0.0)
        return torch.ones(2)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def noted(seen, kind, hook):
    """Return the method that notes the calls of ``hook`` on an object of this kind."""
    names = HOOK_NAMES[hook]
    if kind == "plugin":
        # A subset, by name, in an order of its own.
        subset = [*names[:0:-1]] if len(names) > 2 else ["module"]
        notes = ", ".join(f"{name}={name}" for name in subset)
        source = f"def {hook}(self, {', '.join(subset)}): seen[hook].append(dict({notes}))"
    elif kind == "wrapper":
        source = f"def {hook}(self, {', '.join(names)}):\n call = dict(locals())\n"
        source += " yield\n del call['self']\n seen[hook].append(call)"
    else:
        own = names[2:] if kind == "module" else names
        source = (
            f"def {hook}(self, *given): seen[hook].append(dict(zip({own}, given, strict=True)))"
        )
    namespace = {"seen": seen, "hook": hook}
    exec(source, namespace)
    method = namespace[hook]
    return method if kind in ("module", "callback") else hookimpl(method, wrapper=kind == "wrapper")


def implementing(base, kind, seen):
    """Return an object that notes every call of every hook."""
    return type(kind.title(), (base,), {hook: noted(seen, kind, hook) for hook in HOOK_NAMES})()


@pytest.fixture(scope="module", params=["alone", "wrapped"])
def calls(request, tmp_path_factory):
    """Return the calls of every hook, by the kind of object that was told."""
    seen = {kind: defaultdict(list) for kind in ("module", "callback", "plugin", "wrapper")}
    module = implementing(Runs, "module", seen["module"])
    plugins = [implementing(object, "plugin", seen["plugin"])]
    if request.param == "wrapped":
        plugins.append(implementing(object, "wrapper", seen["wrapper"]))
    else:
        del seen["wrapper"]
    callback = implementing(Callback, "callback", seen["callback"])
    path = tmp_path_factory.mktemp("every") / "a.ckpt"

    def trainer():
        return quiet_trainer(plugins=plugins, callbacks=[callback])

    fitted = trainer()
    fitted.fit(module, batches(2), batches(1))
    fitted.save_checkpoint(path)
    fitted.validate(module, batches(1), ckpt_path=path, verbose=False)
    loaders = [DataLoader(batches(count), batch_size=None) for count in (1, 2)]
    fitted.test(module, loaders, verbose=False)
    fitted.predict(module, batches(1))
    module.fails = True
    with pytest.raises(ZeroDivisionError):
        trainer().fit(module, batches(2))
    return seen


KINDS = {
    "trainer": lambda value: hasattr(value, "fit"),
    "module": lambda value: isinstance(value, Module),
    "stage": lambda value: value in STAGES,
    "at": lambda value: value in ("step", "epoch", "end"),
    "batch": lambda value: [part.shape for part in value] == [(4, 3), (4, 1)],
    "batch_idx": lambda value: value in (0, 1),
    "dataloader_idx": lambda value: value in (0, 1),
    "outputs": lambda value: value is None or isinstance(value, torch.Tensor),
    "optimizer": lambda value: isinstance(value, Optimizer),
    "loss": lambda value: value.shape == () and value.requires_grad,
    "checkpoint": lambda value: "state_dict" in value,
    "exception": lambda value: isinstance(value, ZeroDivisionError),
}


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_hook(calls, hook):
    for kind, seen in calls.items():
        assert seen[hook], f"{kind} was never told"
        for call in seen[hook]:
            if kind != "plugin":
                assert list(call) == [*HOOK_NAMES[hook][2 * (kind == "module") :]]
            for name, value in call.items():
                assert KINDS[name](value), f"{kind} was passed {name}={value!r}"
    assert len({len(seen[hook]) for seen in calls.values()}) == 1, "all are told as often"


def test_every_moment_of_a_hook_is_told(calls):
    told = calls["callback"]
    assert {call["stage"] for call in told["setup"]} == {*STAGES}
    assert {call["stage"] for call in told["teardown"]} == {*STAGES}
    assert [call["at"] for call in told["on_save_point"]] == ["step", "step", "epoch", "end"]
    places = [(c["dataloader_idx"], c["batch_idx"]) for c in told["on_test_batch_end"]]
    assert places == [(0, 0), (1, 0), (1, 1)]
    assert len(told["on_exception"]) == 1
