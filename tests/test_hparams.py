from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from enum import Enum, Flag, IntEnum
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from leyden.errors import CheckpointError, ConfigError
from leyden.hparams import (
    HyperParameters,
    collect,
    decode,
    encode,
    for_logging,
    matching,
    types_in_annotations,
)

if TYPE_CHECKING:
    from nowhere import Unknown


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Adam:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class Config:
    width: int
    color: Color = Color.RED
    optimizers: list[Adam] = field(default_factory=list)


class Saver:
    def save_hyperparameters(self, *names: Any, ignore: Any = None) -> None:
        self.hparams = collect(inspect.currentframe().f_back, self, names, ignore)


class Base(Saver):
    def __init__(self, lr: float, momentum: float = 0.9) -> None:
        self.save_hyperparameters()
        self.seen_by_base = self.hparams


def through_file(params: dict[str, Any], types: Any = ()) -> HyperParameters:
    file = io.BytesIO()
    torch.save(encode(params, "Net"), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True), types)


def same(a: Any, b: Any) -> bool:
    """Equality that tells types, NaN and -0.0 apart, however deep."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Namespace, SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b) if isinstance(a, (float, complex, datetime)) else a == b


def namespace(entries: dict[str, Any]) -> Namespace:
    made = Namespace()
    vars(made).update(entries)
    return made


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**1999, 2**2039, -(2**3000)]),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.decimals(allow_nan=False),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(Path, st.from_regex(r"[a-z./ ]+", fullmatch=True)),
    st.sampled_from([PurePosixPath("/a"), PureWindowsPath("C:\\a"), Color.RED, Level.LOW]),
    st.sampled_from([Access.READ | Access.WRITE, Access(0), torch.bfloat16, torch.Size([1, 2])]),
    st.sampled_from([torch.device("cuda", 1), timezone(timedelta(hours=2)), Adam(0.5)]),
    st.datetimes(timezones=st.sampled_from([None, UTC])),
    st.dates(),
    st.timedeltas(),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    hnp.scalar_dtypes().flatmap(lambda d: hnp.arrays(d, ())).map(lambda a: a[()]),
    st.integers(0, 9).map(torch.arange),
)
hashables = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.none())
keys = st.one_of(hashables, st.sampled_from(["__leyden__", "value", "class", Color.BLUE]))
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashables, max_size=3),
        st.frozensets(hashables, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(), inner, max_size=3).map(HyperParameters),
        st.dictionaries(st.text(), inner, max_size=3).map(lambda d: SimpleNamespace(**d)),
        st.dictionaries(st.sampled_from(["self", "lr"]), inner).map(namespace),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), nested, max_size=4))
def test_every_value_comes_back_from_a_safely_loaded_file_as_it_was(params):
    back = through_file(params, types=[Color, Level, Access, Adam])
    assert type(back) is HyperParameters
    assert same(dict(back), params)


def test_entries_are_items_and_attributes():
    hparams = HyperParameters(lr=0.1)
    hparams.width = 64
    assert hparams["width"] == 64 and hparams.lr == 0.1
    del hparams.lr
    assert hparams == {"width": 64} and "width" in dir(hparams)
    assert repr(hparams) == "HyperParameters(width=64)"


def test_a_misspelt_entry_is_an_attribute_error_with_the_closest_name():
    hparams = HyperParameters(learning_rate=0.1)
    assert not hasattr(hparams, "width")
    with pytest.raises(AttributeError, match=r"no hyperparameter 'learning_rat'.*'learning_rate'"):
        _ = hparams.learning_rat
    with pytest.raises(AttributeError, match=r"no hyperparameter 'width'. Known: learning_rate"):
        del hparams.width


def test_an_entry_called_like_a_dict_method_is_an_item_alone():
    hparams = HyperParameters()
    with pytest.raises(AttributeError, match=r"set hparams\['items'\] instead"):
        hparams.items = 3
    hparams["items"] = 3
    assert list(hparams.items()) == [("items", 3)]


@pytest.mark.parametrize(
    "make",
    [copy.copy, copy.deepcopy, HyperParameters.copy, lambda h: pickle.loads(pickle.dumps(h))],
)
def test_copies_are_hyperparameters_too(make):
    hparams = HyperParameters(lr=0.1, layers=[1, 2])
    made = make(hparams)
    made.lr = 0.2
    assert type(made) is HyperParameters and made.layers == [1, 2] and hparams.lr == 0.1


def test_all_arguments_are_collected_defaults_and_kwargs_too():
    class Net(Saver):
        def __init__(self, width, *layers, depth=2, **others):
            self.save_hyperparameters()

    assert Net(8, 1, 2, lr=0.1).hparams == {"width": 8, "depth": 2, "lr": 0.1}


def test_a_base_collects_the_arguments_of_its_subclass_which_win():
    class Net(Base):
        def __init__(self, width, lr):
            super().__init__(lr=lr * 10)
            self.save_hyperparameters()

    net = Net(width=8, lr=1.0)
    assert net.seen_by_base == {"lr": 1.0, "momentum": 0.9, "width": 8}
    assert net.hparams == {"width": 8, "lr": 1.0}


def test_an_object_made_inside_another_init_collects_only_its_own():
    class Outer(Saver):
        def __init__(self, lr, depth):
            self.inner = Base(lr=5.0)
            self.save_hyperparameters()

    outer = Outer(1.0, 2)
    assert outer.inner.hparams == {"lr": 5.0, "momentum": 0.9}
    assert outer.hparams == {"lr": 1.0, "depth": 2}


def test_names_select_and_ignore_leaves_out():
    class Net(Saver):
        def __init__(self, width, lr, loss):
            self.save_hyperparameters("width", "lr")
            self.named = self.hparams
            self.save_hyperparameters(ignore="loss")
            self.rest = self.hparams
            self.save_hyperparameters(ignore=["loss", "lr"])

    net = Net(8, 0.1, torch.nn.MSELoss())
    assert net.named == net.rest == {"width": 8, "lr": 0.1}
    assert net.hparams == {"width": 8}


def test_a_name_that_is_no_argument_is_refused():
    class Net(Saver):
        def __init__(self, width):
            self.save_hyperparameters("widht")

    with pytest.raises(
        ConfigError, match=r"Net.__init__ has no such argument. Did you mean 'width'"
    ):
        Net(8)


def test_later_changes_of_an_argument_do_not_change_what_was_collected():
    class Net(Saver):
        def __init__(self, layers, net):
            self.save_hyperparameters()

    layers, module = [1, [2]], torch.nn.Linear(1, 1)
    net = Net(layers, module)
    layers[1].append(3)
    assert net.hparams.layers == [1, [2]]
    assert net.hparams.net is module  # what no file can hold is not copied either


@pytest.mark.parametrize(
    "config",
    [{"width": 8, "lr": 0.1}, Namespace(width=8, lr=0.1), SimpleNamespace(width=8, lr=0.1)],
)
def test_the_entries_of_one_object_are_collected_and_the_object_is_made_again(config):
    class Net(Saver):
        def __init__(self, cfg, depth=1):
            self.save_hyperparameters(cfg)

    net = Net(config)
    assert net.hparams == {"width": 8, "lr": 0.1}
    net.hparams.lr = 0.2
    arguments = matching(Net, through_file(net.hparams))
    assert list(arguments) == ["cfg"] and type(arguments["cfg"]) is type(config)
    assert Net(**arguments).hparams == {"width": 8, "lr": 0.2}


def test_the_fields_of_a_frozen_dataclass_are_collected_and_it_is_made_again():
    class Net(Saver):
        def __init__(self, cfg: Config):
            self.save_hyperparameters(cfg)

    net = Net(Config(8, optimizers=[Adam()]))
    assert net.hparams == {"width": 8, "color": Color.RED, "optimizers": [Adam()]}
    total = HyperParameters()
    total.update(net.hparams)  # as several calls of save_hyperparameters add up
    back = through_file(total, types_in_annotations(Net))
    assert matching(Net, back) == {"cfg": Config(8, optimizers=[Adam()])}


def test_an_object_with_ignored_entries_is_not_made_again():
    class Net(Saver):
        def __init__(self, cfg):
            self.save_hyperparameters(cfg, ignore="lr")

    net = Net({"width": 8, "lr": 0.1})
    assert net.hparams == {"width": 8}
    assert matching(Net, net.hparams) == {}


@pytest.mark.parametrize("names", [(3,), ({"lr": 1}, "width"), (Config,)])
def test_something_else_in_place_of_names_is_refused(names):
    class Net(Saver):
        def __init__(self, width=1):
            self.save_hyperparameters(*names)

    with pytest.raises(
        ConfigError, match="names of arguments, or one dict, Namespace or dataclass"
    ):
        Net()


def test_a_dataclass_collects_its_fields_from_post_init():
    @dataclass(eq=False)
    class Net(torch.nn.Module, Saver):
        width: int
        layers: list[int] = field(default_factory=lambda: [1])
        skipped: bool = False

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters(ignore="skipped")

    assert Net(8).hparams == {"width": 8, "layers": [1]}


def test_matching_keeps_what_a_callable_takes_by_name():
    params = {"lr": 0.1, "width": 8, "old": 1}
    assert matching(lambda lr, *, width=1: 0, params) == {"lr": 0.1, "width": 8}
    assert matching(lambda lr, **others: 0, params) == params
    assert matching(lambda lr, /, width: 0, params) == {"width": 8}


def test_dataclasses_and_enums_come_back_with_what_post_init_added():
    config = Config(3, Color.BLUE, [Adam()])
    object.__setattr__(config, "half", 1.5)
    back = through_file({"cfg": config}, types_in_annotations(_Annotated)).cfg
    assert back == config and back.half == 1.5


def test_a_field_added_since_takes_its_default():
    data = encode({"cfg": Adam(0.5)}, "Net")
    del data["cfg"]["value"]["betas"]
    assert decode(data, [Adam]).cfg == Adam(0.5)
    data = encode({"cfg": Config(1)}, "Net")
    del data["cfg"]["value"]["width"], data["cfg"]["value"]["optimizers"]
    with pytest.raises(CheckpointError, match="Config now has a field 'width' without a default"):
        decode(data, [Config, Color])


def test_a_class_that_is_not_handed_over_is_named_and_not_imported():
    data = encode({"model": {"cfg": Adam()}}, "Net")
    with pytest.raises(CheckpointError, match=r"'model.cfg' of .* is a .*Adam\..*types=\[Adam\]"):
        decode(data)


def test_a_class_of_a_script_is_found_under_the_name_of_its_module():
    data = encode({"cfg": Adam(0.5)}, "Net")
    data["cfg"]["class"] = "__main__:Adam"
    assert decode(data, [Color, Adam]).cfg == Adam(0.5)


tags = ["tuple", "set", "Namespace", "Path", "datetime", "numpy", "dict", "enum", "range", "?"]
hostile = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.fixed_dictionaries({"__leyden__": st.sampled_from(tags), "value": inner}),
        st.fixed_dictionaries(
            {
                "__leyden__": st.one_of(st.just("dataclass"), inner),
                "class": st.one_of(st.just(f"{__name__}:Adam"), inner),
                "value": inner,
            }
        ),
    ),
    max_leaves=8,
)


@given(hostile)
def test_whatever_a_file_holds_it_is_hyperparameters_or_an_error_of_ours(data):
    with contextlib.suppress(CheckpointError):
        assert type(decode(data, [Adam])) is HyperParameters


@pytest.mark.parametrize(
    "tagged",
    [
        {"__leyden__": "os.system", "value": "touch hacked"},
        {"__leyden__": "dataclass", "class": "os:system", "value": {}},
        {"__leyden__": "dataclass", "class": 3, "value": {}},
        {"__leyden__": "torch.dtype", "value": "load"},
        {"__leyden__": "numpy", "value": {"dtype": "O", "shape": [1], "data": b"12345678"}},
        {"__leyden__": "numpy", "value": {"dtype": "<f4", "shape": [10**9], "data": b"1234"}},
        {"__leyden__": "numpy", "value": {"dtype": "<f4", "shape": [1], "data": b"12345678"}},
        {"__leyden__": "Path"},
        {"__leyden__": ["Path"], "value": "a"},
        {"__leyden__": "Namespace", "value": [1]},
        {"__leyden__": "range", "value": ["a"]},
    ],
)
def test_a_hostile_or_damaged_file_is_an_error_that_names_the_hyperparameter(tagged):
    with pytest.raises(CheckpointError, match=r"Hyperparameter 'a\.b' of the checkpoint"):
        decode({"a": {"b": tagged}}, [Adam])


def test_data_that_is_no_dict_or_endless_is_refused():
    for damaged in ([1], {"__leyden__": "HyperParameters", "value": {"lr": 1}, "given": 3}):
        with pytest.raises(CheckpointError, match="are no dict"):
            decode(damaged)
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(CheckpointError, match="nested too deep"):
        decode(endless)


class Shape(str):
    pass


class Zone(tzinfo):
    pass


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD([torch.zeros(1)]),
        partial(print),
        print,
        lambda: 0,
        Config,
        object(),
        Shape("a"),
        defaultdict(int),
        np.array([object()]),
        torch.zeros(1, requires_grad=True) * 2,
        datetime(2020, 1, 1, tzinfo=Zone()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_data_is_refused_with_its_path_and_what_to_do(value):
    with pytest.raises(
        ConfigError,
        match=r"Net: hyperparameter 'model\.loss\.1.*' is of type .*, which a checkpoint cannot "
        r"hold\. Allowed: numbers, .*ignore=\['model'\]",
    ):
        encode({"model": {"loss": (0, value)}}, "Net")


def test_cycles_and_bottomless_nesting_are_refused():
    endless: list[Any] = []
    endless.append({"a": endless})
    with pytest.raises(ConfigError, match=r"'layers.0.a' contains itself.*ignore=\['layers'\]"):
        encode({"layers": endless}, "Net")
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"'layers.0.0' is nested more than 100 deep"):
        encode({"layers": deep}, "Net")


class _Annotated(Base):
    def __init__(
        self,
        cfg: Optional[Config],  # noqa: UP045
        odd: Unknown,
        levels: dict[str, list[Level]] | None = None,
    ) -> None: ...


def test_types_are_found_in_annotations_of_the_class_its_bases_and_its_fields():
    class Derived(_Annotated):
        def __init__(self, **others):
            super().__init__(**others)

    assert set(types_in_annotations(Derived)) == {Config, Color, Adam, Level}
    assert types_in_annotations(Base) == ()


def test_loggers_get_flat_numbers_and_text():
    params = {
        "lr": np.float32(0.5),
        "net": {"width": torch.tensor(8), "act": Color.RED, "opt": Adam()},
        "path": Path("data/x"),
        "none": None,
        "loss": torch.nn.Sequential(torch.nn.ReLU()),
        "long": "x" * 999,
    }
    flat = for_logging(params)
    assert flat.pop("long") == "x" * 199 + "…"
    assert flat == {
        "lr": 0.5,
        "net/width": 8,
        "net/act": "RED",
        "net/opt/lr": 0.1,
        "net/opt/betas": "(0.9, 0.99)",
        "path": "data/x",
        "none": "None",
        "loss": "Sequential( (0): ReLU() )",
    }
    assert {type(value) for value in flat.values()} == {float, int, str}


def test_omegaconf_containers_come_back_as_resolved_plain_containers():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"width": 8, "double": ["${width}"]})

    class Net(Saver):
        def __init__(self, cfg):
            self.save_hyperparameters(cfg)

    net = Net(config)
    assert net.hparams == {"width": 8, "double": [8]}
    assert matching(Net, through_file(net.hparams)) == {"cfg": {"width": 8, "double": [8]}}
    assert same(through_file({"cfg": config}).cfg, {"width": 8, "double": [8]})
    with pytest.raises(ConfigError, match=r"hyperparameter 'cfg' cannot be resolved: .*'no'"):
        encode({"cfg": omegaconf.OmegaConf.create({"a": "${no}"})}, "Net")


def test_attributes_are_read_inside_a_compiled_module():
    class Net(torch.nn.Module):
        def forward(self, x):
            return x * self.hparams.scale

    net = Net()
    net.hparams = HyperParameters(scale=3.0)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)) == 3.0
