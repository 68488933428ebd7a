"""The pages say what the code does, and what they show runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leyden import overrides
from leyden.hook_names import HOOK_NAMES, LIGHTNING, REGISTRATIONS
from leyden.manager import KINDS, Registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def generate(monkeypatch):
    """Return docs/generate.py as a module."""
    monkeypatch.setenv("LEYDEN_DISABLE_PLUGINS", "")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_current(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_out_of_date_is_named_with_what_to_run(
    generate, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main([]) == 0
    (tmp_path / "hooks.md").write_text("something else")
    (tmp_path / "names.md").unlink()
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "docs/hooks.md does not say what the code does. Run: python docs/generate.py",
        "docs/names.md does not say what the code does. Run: python docs/generate.py",
    ]


def test_the_page_of_hooks_has_a_line_for_every_hook_and_override():
    lines = (ROOT / "docs" / "hooks.md").read_text().splitlines()
    rows = [line.split("`")[1] for line in lines if line.startswith("| `")]
    own = {*vars(overrides.DataHooks), *vars(overrides.TrainingHooks)}
    overridden = {name for name in own if not name.startswith("_")} - set(HOOK_NAMES)
    assert sorted(rows) == sorted([*HOOK_NAMES, *REGISTRATIONS, *overridden])


def test_the_page_of_names_has_every_built_in_name(monkeypatch):
    monkeypatch.setenv("LEYDEN_DISABLE_PLUGINS", "all")
    text = (ROOT / "docs" / "names.md").read_text()
    for kind in KINDS:
        for name in Registry().listed(kind):
            assert f"| `{name}` |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_hooks_that_a_page_names_exist(page):
    known = {*HOOK_NAMES, *LIGHTNING, *vars(overrides.DataHooks)}
    named = set(re.findall(r"\bon_[a-z_]+[a-z]\b", page.read_text()))
    assert named - known - {"on_step", "on_epoch"} == set()


def test_what_the_page_on_plugins_shows_runs(tmp_path):
    """Each block goes on from the ones above it, as a reader does."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.S)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LEYDEN_DISABLE_PLUGINS": "all"}
    command = [sys.executable, "-W", "error", "page.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(blocks) == 9


def test_what_the_page_on_plugins_says_of_variables_and_names_is_so():
    text = (ROOT / "docs" / "plugins.md").read_text()
    assert set(re.findall(r"register_\w+[a-z]", text)) == set(REGISTRATIONS)
    source = "".join(path.read_text() for path in (ROOT / "framework").glob("*.py"))
    for variable in set(re.findall(r"LEYDEN_[A-Z_]+", text)):
        assert f'"{variable}"' in source
