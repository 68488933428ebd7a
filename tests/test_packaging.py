import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
MAPPED = {
    "framework": "leyden",
    "strategies": "leyden/strategies",
    "plugins": "leyden/plugins",
    "loggers": "leyden/loggers",
    "templates": "leyden/templates",
}


def listed_by_git(*folders):
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("only a git checkout knows which files belong to it")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def run(*command, cwd=None, **env):
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist, and from it the wheel, of a copy with caches lying about; return both."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in listed_by_git(*MAPPED, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    for folder in ("framework", "templates/minimal/tests"):
        (source / folder / "__pycache__").mkdir()
        (source / folder / "__pycache__" / "left.cpython-311.pyc").touch()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def test_the_wheel_holds_exactly_the_files_of_the_mapped_folders(built):
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = set()
    for name in listed_by_git(*MAPPED):
        folder, *rest = PurePosixPath(name).parts
        expected.add("/".join([MAPPED[folder], *rest]))
    assert held == expected
    assert "leyden/templates/minimal/.copier-answers.yml.jinja" in held


def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_caches(built):
    with tarfile.open(built[0]) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert held >= {*listed_by_git(*MAPPED), "pyproject.toml", "README.md", "LICENSE"}
    assert not [name for name in held if "__pycache__" in name]


def test_the_wheel_brings_its_licence_its_types_and_the_leyden_command(built):
    with zipfile.ZipFile(built[1]) as wheel:
        info = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        folder = info.rpartition("/")[0]
        assert "Apache License" in wheel.read(f"{folder}/licenses/LICENSE").decode()
        assert "leyden/py.typed" in wheel.namelist()
        commands = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "leyden = leyden.cli:main" in commands


def test_every_folder_of_modules_is_a_package_that_is_shipped():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        PurePosixPath(name).parent for name in listed_by_git(*MAPPED) if name.endswith(".py")
    }
    packages = {
        ".".join([MAPPED[folder.parts[0]].replace("/", "."), *folder.parts[1:]])
        for folder in folders
    }
    assert packages == set(table["packages"])


def test_constraints_pin_every_requirement_exactly_and_leave_torchs_build_open():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and "@" not in line and "/" not in line for line in pins)
    assert "torch==2.13.0" in pins


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """Make an environment that has leyden from its wheel and all else from ours; return its bin."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    install(python, built[1])
    # A .pth file in a folder that a .pth file adds is not read: our editable leyden stays out.
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(str(Path(pytest.__file__).parent.parent))
    imported = run(python, "-c", "import leyden; print(leyden.__file__)", cwd=folder)
    assert Path(imported.strip()).is_relative_to(own)
    return folder / "bin"


def install(python, wheel):
    options = ("--quiet", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", ["minimal", "plugin"])
def test_a_project_of_the_installed_wheel_passes_its_own_checks(template, environment, tmp_path):
    project, python = tmp_path / "project", environment / "python"
    arguments = (f"my-{template}", "--template", template, "--yes", "--dest", project)
    run(python, environment / "leyden", "new", *arguments, cwd=tmp_path)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    run(python, "-m", "pip", "wheel", *options, project)
    install(python, next(tmp_path.glob("*.whl")))
    run(python, "-m", "pytest", cwd=project)
    run(python, "-m", "ruff", "check", cwd=project)
    run(python, "-m", "ruff", "format", "--check", cwd=project)
    run(python, "-m", "mypy", cwd=project, MYPY_CACHE_DIR=str(environment / "mypy_cache"))
