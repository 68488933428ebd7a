import ast
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import copier
import pytest

from leyden.cli import main
from leyden.errors import ConfigError
from leyden.manager import Registry
from leyden.templating import package_name

TEMPLATES = sorted(Registry().listed("template"))


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=TEMPLATES)
def project(request, tmp_path):
    """Render each template as the project ``my-spark`` and return its folder."""
    folder = tmp_path / "project"
    argv = ["new", "my-spark", "--template", request.param, "--yes", "--dest", str(folder)]
    assert main(argv) == 0
    return folder


def test_the_shipped_templates_are_registered_by_name():
    assert TEMPLATES == ["minimal", "plugin"]


def test_a_project_has_its_package_tests_readme_and_gitignore(project):
    held = files_of(project)
    wanted = {"README.md", "pyproject.toml", ".gitignore", "src/my_spark/__init__.py"}
    assert wanted <= held
    assert [name for name in held if name.startswith("tests/test_")]
    assert not [name for name in held if name.endswith(".jinja") or name == "copier.yml"]


def test_a_project_holds_no_template_syntax_and_compiles(project):
    for path in project.rglob("*"):
        if path.is_file():
            assert "{{" not in path.read_text() and "{%" not in path.read_text(), path
            assert path.read_text().endswith("\n") or not path.read_text(), path
        if path.suffix == ".py":
            ast.parse(path.read_text())


def test_the_answers_name_the_template_and_no_place_on_this_machine(project):
    answers = (project / ".copier-answers.yml").read_text()
    assert "_src_path: leyden:" in answers and "name: my-spark" in answers
    here = str(Path(Registry().listed("template")["minimal"].factory).parent)
    for path in project.rglob("*"):
        assert not path.is_file() or here not in path.read_text(), path


def test_a_description_with_quotes_and_backslashes_makes_a_sound_pyproject(tmp_path):
    description = 'Says "hi" \\ é 🎉'
    data = {"name": "my-spark", "package": "my_spark", "leyden_version": "1"}
    for template in TEMPLATES:
        source, project = Registry().listed("template")[template].factory, tmp_path / template
        data |= {"description": description, "author": 'Ada "A" L.'}
        copier.run_copy(source, project, data=data, defaults=True, quiet=True)
        table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        assert table["description"] == description
    assert table["authors"] == [{"name": 'Ada "A" L.'}]


def test_the_plugin_project_is_found_by_its_entry_point_alone(tmp_path):
    assert main(["new", "my-spark", "--template=plugin", "--yes", f"--dest={tmp_path}"]) == 0
    table = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert table["entry-points"] == {"leyden": {"my_spark": "my_spark.registry"}}


def test_without_dest_a_project_is_made_in_a_folder_of_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-spark", "--yes"]) == 0
    assert (tmp_path / "my-spark" / "pyproject.toml").is_file()
    assert capsys.readouterr().out.startswith("Made my-spark.")


@pytest.mark.parametrize(
    ("name", "package"), [("spark", "spark"), ("My-Spark.2", "my_spark_2"), ("a_b", "a_b")]
)
def test_a_package_is_named_after_its_project(name, package):
    assert package_name(name) == package


@pytest.mark.parametrize("name", ["2fast", "my spark", "café", "-x", "", "a/b", "a\n", "a-"])
def test_a_name_that_no_package_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be a project's name: use letters, digits"):
        package_name(name)


@pytest.mark.parametrize("name", ["json", "test", "Torch", "leyden", "class"])
def test_a_name_that_hides_another_package_is_refused(name):
    with pytest.raises(ConfigError, match=f"would hide .* Choose another name.* 'my-{name}'"):
        package_name(name)


def test_a_bad_name_ends_with_exit_code_2_and_nothing_made(tmp_path, capsys):
    assert main(["new", "2fast", "--yes", "--dest", str(tmp_path / "x")]) == 2
    assert "'2fast' cannot be a project's name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_template_nobody_registers_is_answered_with_the_nearest(capsys):
    assert main(["new", "my-spark", "--template", "plugn"]) == 2
    error = capsys.readouterr().err
    assert "No template is called 'plugn'. Did you mean 'plugin'? Known: minimal, plugin." in error


def test_a_destination_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine.txt"):
        assert main(["new", "my-spark", "--yes", "--dest", str(taken)]) == 2
        assert "exists and is not an empty folder" in capsys.readouterr().err
    assert files_of(tmp_path) == {"mine.txt"}


def test_without_copier_the_extra_to_install_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "copier", None)
    assert main(["new", "my-spark", "--yes", "--dest", str(tmp_path)]) == 2
    assert "pip install 'leyden[cli]'" in capsys.readouterr().err


def new_from(stdin, folder):
    code = "import sys; from leyden.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "new", "my-spark", "--dest", str(folder)]
    return subprocess.Popen(command, stdin=stdin, stdout=stdin, stderr=subprocess.PIPE, text=True)


def test_questions_that_cannot_be_asked_are_answered_with_yes_as_the_way_out(tmp_path):
    with new_from(subprocess.DEVNULL, tmp_path / "x") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "standard input is no terminal. Pass --yes" in error
    assert not (tmp_path / "x").exists()


def test_on_a_terminal_the_questions_are_asked(tmp_path):
    ours, theirs = pty.openpty()
    with new_from(theirs, tmp_path) as process:
        os.close(theirs)
        shown = b""
        while b"What does it do" not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, b" Sparks.\r")
        _, error = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, error
    table = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert table["description"] == "A model trained with leyden. Sparks."
