"""A Module starts from the weights of another architecture, and is told what it got."""

import argparse
import random

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leyden import CheckpointError, Module, Trainer


class Net(Module):
    def __init__(self, classes=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4, bias=False)
        self.outside = nn.Linear(4, 4, bias=False)
        self.outside.weight = self.inside.weight


def saved(path, state, name=lambda name: name):
    """Write the state_dict ``state`` with its names changed by ``name``, and return the path."""
    torch.save({name(key): value for key, value in state.items()}, path)
    return path


def same(module, other):
    own, others = module.state_dict(), other.state_dict()
    return own.keys() == others.keys() and all(torch.equal(own[n], others[n]) for n in own)


def filled(module):
    """Return ``module`` with weights and statistics that no fresh one has."""
    for index, tensor in enumerate(module.state_dict().values()):
        tensor.copy_(torch.full_like(tensor, index + 2))
    return module


@pytest.mark.parametrize("holder", [None, "state_dict", "model", "model_state_dict"])
def test_weights_stand_alone_in_a_file_or_below_a_usual_name(tmp_path, holder):
    source, net = filled(Net()), Net()
    state = source.state_dict()
    torch.save(state if holder is None else {holder: state, "epoch": 3}, tmp_path / "w.pt")
    report = net.load_weights(tmp_path / "w.pt")
    assert same(net, source)
    assert report.matched == list(state)
    assert report.is_complete


def test_weights_come_from_a_checkpoint_of_a_run(tmp_path):
    source, net = Net(), Net()
    trainer = Trainer(max_steps=2, logger=False, enable_checkpointing=False)
    trainer.fit(source, torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    net.load_weights(tmp_path / "run.ckpt")
    assert same(net, source)


def test_weights_come_from_a_safetensors_file(tmp_path):
    source, net = filled(Net()), Net()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    net.load_weights(tmp_path / "w.safetensors")
    assert same(net, source)


def test_weights_come_from_a_url():
    import fsspec

    source, net = filled(Net()), Net()
    with fsspec.open("memory://load_weights/w.safetensors", "wb") as file:
        from safetensors.torch import save

        file.write(save(source.state_dict()))
    net.load_weights("memory://load_weights/w.safetensors")
    assert same(net, source)


def test_objects_beside_the_weights_are_passed_over(tmp_path):
    source, net = filled(Net()), Net()
    content = {"model": source.state_dict(), "args": argparse.Namespace(lr=0.1), "norm": nn.ReLU()}
    torch.save(content, tmp_path / "w.pt")
    net.load_weights(tmp_path / "w.pt")
    assert same(net, source)


def test_a_prefix_takes_what_is_below_it_alone(tmp_path):
    source, net = filled(Net()), Net()
    path = saved(tmp_path / "w.pt", source.state_dict(), lambda name: f"model.{name}")
    torch.save(torch.load(path) | {"loss.scale": torch.ones(1)}, path)
    for prefix in ("model.", "model"):
        report = net.load_weights(path, prefix=prefix)
        assert same(net, source)
        assert report.ignored == ["loss.scale"]


def test_a_prefix_map_and_names_give_new_names(tmp_path):
    source, net = filled(Net()), Net()
    state = {name.replace("body.", "enc."): t for name, t in source.state_dict().items()}
    state["w"] = state.pop("head.weight")
    path = saved(tmp_path / "w.pt", state)
    net.load_weights(path, prefix={"enc.": "body."}, rename={"w": "head.weight"})
    assert same(net, source)


def test_an_empty_prefix_puts_all_names_below_another(tmp_path):
    source, net = filled(Net()), Net()
    path = saved(tmp_path / "w.pt", source.head.state_dict())
    report = net.load_weights(path, prefix={"": "head"}, strict=False)
    assert report.matched == ["head.weight", "head.bias"]
    assert torch.equal(net.head.weight, source.head.weight)


def test_the_beginning_of_a_name_ends_at_a_dot(tmp_path):
    net = Net()
    path = saved(tmp_path / "w.pt", {"he.weight": torch.ones(2, 4), "head.bias": torch.ones(2)})
    report = net.load_weights(path, rename={"he": "head"}, strict=False)
    assert report.matched == ["head.weight", "head.bias"]


def test_a_function_renames_and_leaves_out(tmp_path):
    source, net = filled(Net()), Net()
    path = saved(tmp_path / "w.pt", source.state_dict(), str.upper)
    report = net.load_weights(
        path, strict=False, rename=lambda name: None if "HEAD" in name else name.lower()
    )
    assert report.ignored == ["HEAD.WEIGHT", "HEAD.BIAS"]
    assert report.missing == ["head.weight", "head.bias"]
    assert torch.equal(net.body[0].weight, source.body[0].weight)


def test_what_is_ignored_stays_as_it_was_made(tmp_path):
    source, net = filled(Net(classes=5)), Net()
    before = net.head.weight.clone()
    path = saved(tmp_path / "w.pt", source.state_dict())
    report = net.load_weights(path, ignore=["head.*"])
    assert report.ignored == ["head.weight", "head.bias"]
    assert torch.equal(net.head.weight, before)
    assert torch.equal(net.body[1].running_var, source.body[1].running_var)


def test_ignored_names_may_be_those_of_the_module_or_of_the_file_alone(tmp_path):
    state = filled(Net()).state_dict()
    state["old.scale"] = torch.ones(1)
    del state["head.weight"]
    path = saved(tmp_path / "w.pt", state)
    report = Net().load_weights(path, ignore=["old.*", "*d.weight"])
    assert report.ignored == ["old.scale", "head.weight"]
    assert "body.0.weight" in report.matched


@pytest.mark.parametrize("pattern", ["fc.*", "head.*"], ids=["in the file", "in the module"])
def test_what_is_ignored_may_be_named_as_before_or_after_renaming(tmp_path, pattern):
    net, source = Net(), filled(Net())
    before = net.head.weight.clone()
    path = saved(tmp_path / "w.pt", source.state_dict(), lambda name: name.replace("head", "fc"))
    net.load_weights(path, rename={"fc": "head"}, ignore=[pattern], strict=False)
    assert torch.equal(net.head.weight, before)
    assert torch.equal(net.body[0].weight, source.body[0].weight)


def test_the_longest_beginning_of_a_name_counts(tmp_path):
    path = saved(tmp_path / "w.pt", {"a.b.weight": torch.ones(2, 4), "a.bias": torch.ones(4)})
    report = Net().load_weights(path, rename={"a": "body.0", "a.b": "head"}, strict=False)
    assert report.matched == ["body.0.bias", "head.weight"]


def test_what_does_not_fit_raises_with_the_report_and_changes_nothing(tmp_path):
    net, state = Net(), filled(Net(classes=5)).state_dict()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    del state["body.0.bias"]
    path = saved(tmp_path / "w.pt", {**state, "extra": torch.ones(2)})
    with pytest.raises(CheckpointError) as caught:
        net.load_weights(path)
    assert str(caught.value) == (
        "The weights do not fit Net.\n"
        f"{path}: 6 weights match\n"
        "  1 missing in the file: body.0.bias\n"
        "  1 unexpected in the file: extra\n"
        "  2 of another shape: head.weight (5x4 there, 2x4 here), head.bias (5 there, 2 here)\n"
        "Match them with prefix=, rename= or ignore=, or pass strict=False to load those that "
        "match."
    )
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)


def test_those_that_fit_are_loaded_without_strict(tmp_path):
    source, net = filled(Net(classes=5)), Net()
    report = net.load_weights(saved(tmp_path / "w.pt", source.state_dict()), strict=False)
    assert report.wrong_shape == {"head.weight": ((5, 4), (2, 4)), "head.bias": ((5,), (2,))}
    assert not report.is_complete
    assert torch.equal(net.body[0].weight, source.body[0].weight)


def test_no_match_at_all_is_an_error_without_strict_too(tmp_path):
    path = saved(tmp_path / "w.pt", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"0 weights match(.|\n)*or ignore=\.$"):
        Net().load_weights(path, strict=False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (lambda name: f"model.{name}", "Did you mean prefix='model.'? 9 more would match."),
        (lambda name: name.replace("body.", "net.0."), "prefix={'net.0.': 'body.'}? 7 more would"),
        (lambda name: name.replace("0.bias", "0.biass"), "Did you mean 'body.0.bias'?"),
    ],
    ids=["all below a prefix", "part below another", "a name that is near"],
)
def test_an_error_says_what_would_make_them_match(tmp_path, name, hint):
    path = saved(tmp_path / "w.pt", Net().state_dict(), name)
    with pytest.raises(CheckpointError) as caught:
        Net().load_weights(path)
    assert hint in str(caught.value)


def test_no_prefix_is_guessed_from_a_few_names(tmp_path):
    changed = {"head.bias": "top.bias"}
    path = saved(tmp_path / "w.pt", Net().state_dict(), lambda n: changed.get(n, n.upper()))
    with pytest.raises(CheckpointError) as caught:
        Net().load_weights(path)
    assert "more would match" not in str(caught.value)


def test_a_hint_can_be_followed(tmp_path):
    source, net = filled(Net()), Net()
    path = saved(tmp_path / "w.pt", source.body.state_dict())
    with pytest.raises(CheckpointError, match=r"prefix=\{'': 'body.'\}\? 7 more would match"):
        net.load_weights(path)
    net.load_weights(path, prefix={"": "body."}, ignore=["head.*"])
    assert torch.equal(net.body[0].weight, source.body[0].weight)


def test_two_weights_do_not_come_to_one_name(tmp_path):
    path = saved(tmp_path / "w.pt", {"a.bias": torch.ones(2), "head.bias": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"Both 'a.bias' and 'head.bias' of .* 'head.bias'"):
        Net().load_weights(path, rename={"a": "head"})


def test_a_file_without_weights_is_refused_with_what_it_holds(tmp_path):
    torch.save({"epoch": 1, "model": {"depth": 3}}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"no weights(.|\n)*It holds: epoch, model\."):
        Net().load_weights(tmp_path / "w.pt")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        Net().load_weights(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        Net().load_weights(tmp_path / "none.safetensors")


def test_a_compiled_part_takes_and_gives_the_same_names(tmp_path):
    source, net = filled(Net()), Net()
    net.body = torch.compile(net.body, backend="eager")
    net.load_weights(saved(tmp_path / "plain.pt", source.state_dict()))
    assert torch.equal(net.body.get_parameter("_orig_mod.0.weight"), source.body[0].weight)
    other = Net()
    torch.save({"model": net.state_dict()}, tmp_path / "compiled.pt")
    other.load_weights(tmp_path / "compiled.pt")
    assert same(other, source)


def test_a_tied_weight_may_be_in_the_file_once(tmp_path):
    path = saved(tmp_path / "w.pt", {"outside.weight": torch.eye(4)})
    tied = Tied()
    report = tied.load_weights(path)
    assert report.matched == ["outside.weight", "inside.weight"]
    assert tied.inside.weight is tied.outside.weight
    assert torch.equal(tied.inside.weight, torch.eye(4))


def test_weights_are_taken_into_the_modules_dtype(tmp_path):
    net = Net().to(torch.bfloat16)
    net.load_weights(saved(tmp_path / "w.pt", filled(Net()).double().state_dict()))
    assert net.head.weight.dtype == torch.bfloat16
    assert net.head.weight.unique().tolist() == [9.0]


def test_layers_made_late_are_there_to_take_weights(tmp_path):
    class Late(Net):
        def configure_model(self):
            self.late = nn.Linear(2, 2)

    source = Late()
    source.configure_model()
    late = Late()
    late.load_weights(saved(tmp_path / "w.pt", filled(source).state_dict()))
    assert torch.equal(late.late.weight, source.late.weight)


def test_loading_draws_no_random_number(tmp_path):
    """PL #20204: what is drawn after a load is what would have been drawn without it."""

    class Random(Net):
        def __init__(self, classes=2):
            super().__init__(classes)
            self.noise = random.random() + numpy.random.rand()

        def configure_model(self):
            self.late = nn.Linear(2, 2)

    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    path = saved(tmp_path / "w.pt", Net().state_dict())
    torch.save({"state_dict": torch.load(path), "hyper_parameters": {}}, tmp_path / "c.ckpt")
    net, results = Random(), []
    for load in (
        lambda: None,
        lambda: net.load_weights(path, strict=False),
        lambda: Random.load_from_checkpoint(tmp_path / "c.ckpt", strict=False),
    ):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        load()
        results.append(drawn())
    assert results[0] == results[1] == results[2]
