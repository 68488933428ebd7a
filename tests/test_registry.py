"""What a Trainer can ask for by name, and where the names come from."""

import os
import re
import subprocess
import sys

import pytest

from leyden import Callback, ConfigError, PluginError, hookimpl
from leyden.installed import installed
from leyden.manager import KINDS, Registry
from leyden.plugins import Timer
from leyden.strategies.single_device import SingleDevice
from leyden.testing import Regression, batches, quiet_trainer


def registers(kind, **factories):
    """Return a plugin that registers ``factories`` under ``kind``."""
    hook = KINDS[kind]
    return type("Provider", (), {hook: hookimpl(lambda self: factories, specname=hook)})()


def test_a_plugin_registers_a_part_that_is_used_by_name():
    class Noted(SingleDevice):
        made = 0

        def __init__(self):
            super().__init__()
            Noted.made += 1

    trainer = quiet_trainer(plugins=[registers("strategy", noted=Noted)], strategy="noted")
    assert Noted.made == 0
    trainer.fit(Regression(), batches(2))
    assert isinstance(trainer.strategy, Noted)


def test_a_registered_string_is_imported_when_it_is_used():
    plugin = registers("callback", clock="leyden.plugins.timer:Timer", absent="no.such:Thing")
    trainer = quiet_trainer(plugins=[plugin], callbacks=["clock"])
    assert [type(one) for one in trainer.callbacks] == [Timer]
    message = (
        r"Cannot import 'no\.such:Thing' for the callback 'absent' of Trainer\(plugins=\[…\]\)"
    )
    with pytest.raises(PluginError, match=message):
        quiet_trainer(plugins=[plugin], callbacks=["absent"])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"strategy": "singel_device"}, "No strategy is called 'singel_device'. Did you mean "),
        ({"precision": "bf16-mixd"}, "No precision is called 'bf16-mixd'. Did you mean 'bf16-m"),
        ({"logger": "tensorbord"}, "No logger is called 'tensorbord'. Did you mean 'tensorboar"),
        ({"callbacks": ["lr_montior"]}, "No callback is called 'lr_montior'. Did you mean 'lr_m"),
        ({"profiler": "simpel"}, "No profiler is called 'simpel'. Did you mean 'simple'? Known: "),
        ({"checkpointer": "flie"}, "No checkpointer is called 'flie'. Did you mean 'file'? Known"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(choice, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        quiet_trainer(**choice)


def test_a_name_registered_twice_is_refused_when_the_trainer_is_made():
    plugins = [registers("launcher", flux=dict), registers("launcher", flux=list)]
    message = "The launcher 'flux' is registered twice, by Trainer(plugins=[…]) and by Trainer("
    with pytest.raises(PluginError, match=re.escape(message)):
        quiet_trainer(plugins=plugins)
    with pytest.raises(PluginError, match=r"The logger 'csv' is registered twice, by leyden and"):
        quiet_trainer(plugins=[registers("logger", csv=dict)])


@pytest.mark.parametrize("given", [["csv"], {"csv2": 3}, {3: dict}, "csv"])
def test_what_is_no_dict_of_factories_is_refused(given):
    plugin = type("Provider", (), {"register_loggers": hookimpl(lambda self: given)})()
    with pytest.raises(PluginError, match=r"Provider\.register_loggers returned .* Return a dict"):
        quiet_trainer(plugins=[plugin])


def test_a_plugin_that_registers_nothing_this_time_may_return_none():
    plugin = type("Provider", (), {"register_loggers": hookimpl(lambda self: None)})()
    assert "csv" in Registry([plugin]).listed("logger")


def test_every_plugin_is_asked_once_for_each_trainer():
    asked = []

    class Provider:
        @hookimpl
        def register_callbacks(self):
            asked.append("callbacks")
            return {"clock": Timer}

        @hookimpl(specname="register_callbacks")
        def more_of_them(self):
            asked.append("more")
            return {"watch": Timer}

    trainer = quiet_trainer(plugins=[Provider()], callbacks=["clock", "watch"])
    trainer.fit(Regression(), batches(2))
    assert sorted(asked) == ["callbacks", "more"]


def test_equal_plugins_both_register():
    class Provider:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other):
            return True

        __hash__ = None

        @hookimpl
        def register_callbacks(self):
            return {self.name: Timer}

    listed = Registry([Provider("one"), Provider("other")]).listed("callback")
    assert {"one", "other"} <= set(listed)


def test_a_class_instead_of_a_part_is_refused():
    for choice in ({"strategy": SingleDevice}, {"callbacks": [Timer]}):
        with pytest.raises(ConfigError, match=r"is a class, and a \w+ is an object. Pass \w+\(…\)"):
            quiet_trainer(**choice)


def test_an_object_that_lacks_what_the_loop_asks_for_is_refused():
    class Half(SingleDevice):
        reduce = property()

    message = (
        r"Half object .* cannot serve as a strategy: it lacks reduce\. See leyden\.protocols\."
    )
    with pytest.raises(
        ConfigError, match=message + r"Strategy, or pass one of these names: .*single"
    ):
        quiet_trainer(strategy=Half())


def test_a_callback_in_plugins_works_and_may_register_too():
    class Both(Callback):
        started = False

        @hookimpl
        def register_callbacks(self):
            return {"clock": Timer}

        def on_train_start(self, trainer, module):
            self.started = True

    both = Both()
    trainer = quiet_trainer(plugins=[both], callbacks=["clock"])
    trainer.fit(Regression(), batches(2))
    assert both.started


HOOKS = """
import leyden

@leyden.hookimpl
def on_train_start(trainer):
    print("{name} was told")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with one module and one entry point."""
    monkeypatch.delenv("LEYDEN_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution, name, source, attribute=""):
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0")
        (info / "entry_points.txt").write_text(f"[leyden]\n{name} = {module}{attribute}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_an_installed_plugin_hooks_into_every_run(install, capsys):
    install("leyden-bell", "bell", HOOKS.format(name="bell"))
    trainer = quiet_trainer()
    trainer.fit(Regression(), batches(2))
    assert "bell was told" in capsys.readouterr().out
    assert "leyden_bell (leyden-bell)" in trainer.explain()


@pytest.mark.parametrize("names", ["bell", "leyden-bell", "Leyden_Bell", "gong, bell", "all"])
def test_an_installed_plugin_is_kept_out_by_its_name_or_its_package(
    install, capsys, monkeypatch, names
):
    install("leyden-bell", "bell", HOOKS.format(name="bell"))
    monkeypatch.setenv("LEYDEN_DISABLE_PLUGINS", names)
    quiet_trainer().fit(Regression(), batches(2))
    assert "bell was told" not in capsys.readouterr().out
    assert list(installed()) == []


def test_keeping_one_out_leaves_the_others_and_the_built_in_ones(install, capsys, monkeypatch):
    install("leyden-bell", "bell", HOOKS.format(name="bell"))
    install("leyden-gong", "gong", HOOKS.format(name="gong"))
    monkeypatch.setenv("LEYDEN_DISABLE_PLUGINS", "bell")
    quiet_trainer().fit(Regression(), batches(2))
    out = capsys.readouterr().out
    assert ("bell was told" in out, "gong was told" in out) == (False, True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (HOOKS.replace("trainer", "trianer"), "asks for 'trianer', which this hook does not offer"),
        ("", "hooks into nothing"),
    ],
)
def test_an_installed_plugin_that_cannot_be_used_is_named_with_its_package(install, source, reason):
    install("leyden-bell", "bell", source.replace("{name}", "bell"))
    with pytest.raises(PluginError) as error:
        quiet_trainer()
    message = str(error.value)
    assert "The installed plugin 'bell' of package 'leyden-bell' cannot be loaded" in message
    assert reason in message
    assert "keep it out with LEYDEN_DISABLE_PLUGINS=bell" in message


CLASS = """
import leyden

class Bell:
    @leyden.hookimpl
    def on_train_start(self):
        print("an object was told")
"""


def test_an_installed_class_is_made_without_arguments(install, capsys):
    install("leyden-bell", "bell", CLASS, ":Bell")
    quiet_trainer().fit(Regression(), batches(2))
    assert "an object was told" in capsys.readouterr().out


def test_a_process_of_its_own_finds_what_is_installed(install, tmp_path):
    install("leyden-bell", "bell", HOOKS.format(name="bell"))
    code = "from leyden.manager import Registry; print(Registry().plugins[-1][1])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.stdout, done.returncode) == ("leyden-bell\n", 0), done.stderr


@pytest.mark.parametrize(
    ("name", "instead"),
    [("ddp_spawn", "'ddp'"), ("fsdp2", "'fsdp'"), ("mesh", "Mesh"), ("model_parallel", "Mesh")],
)
def test_a_strategy_with_another_name_elsewhere_is_told_its_name_here(name, instead):
    told = rf"strategy='{name}' has another name here\. .*{instead}"
    with pytest.raises(ConfigError, match=told):
        quiet_trainer(strategy=name, accelerator="cpu")
