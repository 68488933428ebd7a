import os
import subprocess
import sys
from importlib import metadata

import pytest

from leyden.cli import main


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution of one module with entry points."""
    monkeypatch.setenv("LEYDEN_DISABLE_PLUGINS", "")
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, source, entry_points):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["new", "--help"], ["plugins"]])
def test_the_command_line_loads_neither_torch_nor_copier_nor_rich(argv):
    done = run_python(
        "import sys\n"
        "from leyden.cli import main\n"
        "try:\n"
        f"    main({argv})\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'copier', 'rich', 'tensorboard', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
        LEYDEN_DISABLE_PLUGINS="all",
    )
    assert done.returncode == 0, done.stderr


def test_the_installed_command_prints_the_version(capsys):
    (script,) = metadata.entry_points(group="console_scripts", name="leyden")
    with pytest.raises(SystemExit) as stop:
        script.load()(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"leyden {metadata.version('leyden')}\n"


def test_without_a_command_the_usage_is_shown_and_the_exit_code_is_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: leyden" in capsys.readouterr().err


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["plugin"]) == 2
    error = capsys.readouterr().err
    assert "No command is called 'plugin'. Did you mean 'plugins'? Known: new, plugins." in error


def test_plugins_lists_the_built_in_parts_with_their_distribution(capsys):
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["kind", "name", "from"]
    for row in (
        ["strategy", "single_device", "leyden"],
        ["precision", "bf16-mixed", "leyden"],
        ["checkpointer", "file", "leyden"],
        ["logger", "csv", "leyden"],
        ["callback", "early_stopping", "leyden"],
        ["profiler", "simple", "leyden"],
        ["template", "minimal", "leyden"],
        ["template", "plugin", "leyden"],
    ):
        assert row in rows


REGISTERS = """
from leyden.hookspecs import hookimpl

@hookimpl
def register_{kind}():
    return {{"{name}": "nowhere:Nothing"}}
"""


def test_plugins_lists_what_an_installed_package_adds(install, capsys):
    source = REGISTERS.format(kind="launchers", name="flux")
    install("leyden-flux", source, "[leyden]\nslurm_parts = leyden_flux\n")
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["launcher", "flux", "leyden-flux"] in rows
    assert ["installed", "slurm_parts", "leyden-flux"] in rows


def test_plugins_shows_a_broken_package_with_its_error_beside_the_others(install, capsys):
    install("leyden-broken", "import no_such_module", "[leyden]\nbroken = leyden_broken\n")
    install("leyden-odd", "def register_loggers(): ...", "[leyden]\nodd = leyden_odd\n")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "single_device" in out
    broken = [line for line in out.splitlines() if line.startswith("broken: ")]
    assert len(broken) == 2
    assert "'broken' of package 'leyden-broken' cannot be loaded" in broken[0]
    assert "No module named 'no_such_module'" in broken[0]
    assert "leyden_odd.register_loggers is named like a hook" in broken[1]


def test_plugins_shows_a_name_registered_twice(install, capsys):
    source = REGISTERS.format(kind="loggers", name="csv")
    install("leyden-twice", source, "[leyden]\ntwice = leyden_twice\n")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "broken: logger: The logger 'csv' is registered twice, by leyden and by" in out
    assert "single_device" in out


def test_plugins_shows_a_registration_that_fails(install, capsys):
    source = REGISTERS.format(kind="loggers", name="odd").replace("return", "1 / 0; return")
    install("leyden-odd", source, "[leyden]\nodd = leyden_odd\n")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "broken: logger: division by zero" in out
    assert "single_device" in out


def test_a_package_adds_a_command_that_is_given_its_arguments(install, capsys):
    source = "def sweep(argv):\n    print('sweeping', argv)\n    return 7\n"
    install("leyden-sweep", source, "[leyden.commands]\nsweep = leyden_sweep:sweep\n")
    assert main(["sweep", "--over", "lr"]) == 7
    assert capsys.readouterr().out == "sweeping ['--over', 'lr']\n"


def test_help_names_added_commands_without_importing_them(install, capsys):
    install("leyden-sweep", "1 / 0", "[leyden.commands]\nsweep = leyden_sweep:sweep\n")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "sweep  (from leyden-sweep)" in capsys.readouterr().out


def test_a_command_that_cannot_be_imported_is_named_with_its_package(install, capsys):
    install("leyden-sweep", "", "[leyden.commands]\nsweep = leyden_sweep:sweep\n")
    assert main(["sweep"]) == 2
    assert "'sweep' of package 'leyden-sweep' cannot be loaded" in capsys.readouterr().err


def test_a_command_of_two_packages_is_refused(install, capsys):
    for name in ("leyden-one", "leyden-two"):
        module = name.replace("-", "_")
        install(name, "def sweep(argv): ...", f"[leyden.commands]\nsweep = {module}:sweep\n")
    assert main(["sweep"]) == 2
    assert "'sweep' is provided by leyden-one and leyden-two." in capsys.readouterr().err


def test_a_package_adds_a_template_that_new_renders_by_name(install, tmp_path):
    template = tmp_path / "template"
    template.mkdir()
    (template / "copier.yml").write_text("colour: {type: str, default: blue}\n")
    (template / "{{ package }}.txt.jinja").write_text("{{ name }} is {{ colour }}.\n")
    source = REGISTERS.format(kind="templates", name="own").replace(
        "nowhere:Nothing", f"{template}"
    )
    install("leyden-own", source, "[leyden]\nown = leyden_own\n")
    project = tmp_path / "project"
    assert main(["new", "my-spark", "--template", "own", "--yes", "--dest", str(project)]) == 0
    assert (project / "my_spark.txt").read_text() == "my-spark is blue.\n"


def test_a_template_that_is_no_folder_is_named_with_its_package(install, capsys):
    source = REGISTERS.format(kind="templates", name="own")
    install("leyden-own", source, "[leyden]\nown = leyden_own\n")
    assert main(["new", "my-spark", "--template", "own", "--yes"]) == 2
    error = capsys.readouterr().err
    assert "The template 'own' of leyden-own names 'nowhere:Nothing', which is no folder." in error
