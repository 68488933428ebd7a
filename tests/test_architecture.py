"""The shape of the code: imports run one way, files stay short, hooks are called as specified."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.hook_names import HOOK_NAMES
from leyden.manager import BUILTIN

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "framework": "leyden",
    "strategies": "leyden.strategies",
    "plugins": "leyden.plugins",
    "loggers": "leyden.loggers",
    "templates": "leyden.templates",
}
RENDERED = ("templates/minimal", "templates/plugin")
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = re.findall(r"^\| (?:contract|L\d|above all) \| (.*) \|$", PAGE, re.MULTILINE)
LAYER = {
    f"leyden.{name}": level
    for level, names in enumerate(LAYERS)
    for name in re.findall(r"`(\w+)/?`", names)
}
"""The layers as docs/architecture.md has them: a new file is put there."""


def files(*folders):
    found = sorted(path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [p for p in found if not str(p.relative_to(ROOT)).startswith(RENDERED)]


def module_of(path):
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest]).removesuffix(".__init__")


def package_of(path):
    module = module_of(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imports(path, node=None, inside=False):
    """Yield every module imported, and whether a function does it; not those for typing alone."""
    for child in ast.iter_child_nodes(node or ast.parse(path.read_text())):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = package_of(path).split(".")
            base = package[: len(package) + 1 - child.level] if child.level else []
            base += child.module.split(".") if child.module else []
            whole = child.module is None or ".".join(base) in FOLDERS.values()
            names = [f".{alias.name}" for alias in child.names] if whole else [""]
            yield from ((".".join(base) + name, inside) for name in names)
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(path, child, inside or function)


def layer(module):
    """Return the level of ``module``; a package has one."""
    return LAYER[".".join(module.split(".")[:2])]


def test_every_file_of_the_framework_has_a_layer():
    modules = {".".join(module_of(path).split(".")[:2]) for path in files("framework")}
    assert modules - {"leyden"} == set(LAYER)


def test_the_framework_imports_only_its_own_layer_and_those_below():
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in files("framework")
        for name, _ in imports(path)
        if name.startswith("leyden") and layer(name) > layer(module_of(path))
    ]
    assert wrong == []


def test_imports_run_in_no_circle():
    graph = {module_of(path): {name for name, _ in imports(path)} for path in files()}
    assert graphlib.TopologicalSorter(graph).prepare() is None


@pytest.mark.parametrize("folder", ["strategies", "plugins", "loggers", "templates"])
def test_what_plugs_in_imports_only_the_contract_torch_and_its_own_folder(folder):
    allowed = {name for name, level in LAYER.items() if level == 0}
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in files(folder)
        for name, inside in imports(path)
        if name not in allowed
        and not f"{name}.".startswith(f"{FOLDERS[folder]}.")
        and name.split(".")[0] not in {"torch", *sys.stdlib_module_names}
        # Whatever else a plugin needs, it imports on use.
        and not (inside and not name.startswith("leyden"))
    ]
    assert wrong == []


def test_the_framework_names_its_built_ins_in_one_tuple_and_nowhere_else():
    named = {
        (path.name, node.value)
        for path in files("framework")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(
            r"leyden\.(strategies|plugins|loggers|templates)[a-z0-9_.]+(:\w+)?", node.value
        )
    }
    assert named == {("manager.py", name) for name in BUILTIN}


def test_only_two_files_import_pluggy():
    users = {module_of(p) for p in files() if any(n == "pluggy" for n, _ in imports(p))}
    assert users == {"leyden.hookspecs", "leyden.manager"}


def test_the_framework_folder_holds_nothing_that_is_mapped_beside_it():
    entries = {path.stem for path in (ROOT / "framework").iterdir()}
    assert not entries & {"plugins", "strategies", "loggers", "templates"}


def test_no_file_is_longer_than_400_lines():
    sources = [*files(), *(p for d in ("docs", "examples", "benchmarks") for p in files(d))]
    assert [p.name for p in sources if len(p.read_text().splitlines()) > 400] == []


def test_no_function_is_longer_than_60_lines():
    long = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
        if (path.name, node.name) != ("trainer.py", "__init__")
    ]
    assert long == []


def test_files_and_classes_are_named_for_what_they_hold():
    vague = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
    assert [path for path in files() if vague & set(path.stem.split("_"))] == []
    classes = [
        node.name
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name in classes if re.search("Connector|Handler|Mixin", name)] == []


def test_the_package_and_its_registry_of_names_load_no_torch():
    check = (
        "import sys, leyden; from leyden.manager import Registry; Registry().check(); "
        "loaded = {'torch', 'numpy', 'rich', 'tensorboard', 'fsspec'} & {*sys.modules}; "
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def told(path):
    """Yield each hook that ``path`` tells and the arguments of that call, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.For):
            pairs = [(node.iter, node.target, node.body)]
        elif isinstance(node, ast.GeneratorExp | ast.ListComp):
            pairs = [(loop.iter, loop.target, [node.elt]) for loop in node.generators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tell_everyone":
            pairs = []
            if isinstance(node.args[0], ast.Attribute):
                yield node.args[0].attr, [ast.unparse(argument) for argument in node.args[1:]]
        else:
            continue
        for iterated, target, body in pairs:
            if not isinstance(iterated, ast.Attribute) or "hook" not in ast.unparse(target):
                continue
            calls = [c for b in body for c in ast.walk(b) if isinstance(c, ast.Call)]
            (call,) = [c for c in calls if ast.unparse(c.func) == ast.unparse(target)]
            assert call.keywords == []
            yield iterated.attr, [ast.unparse(argument) for argument in call.args]


def specified(hook):
    """Return the arguments of ``hook``; an evaluation's hooks stand for three, all alike."""
    if hook in HOOK_NAMES:
        return HOOK_NAMES[hook]
    (arguments,) = {
        HOOK_NAMES[hook.replace("on_", f"on_{stage}_")]
        for stage in ("validation", "test", "predict")
    }
    return arguments


def test_every_hook_is_told_with_the_arguments_it_specifies():
    seen = {}
    for path in files("framework"):
        for hook, arguments in told(path):
            wanted = specified(hook)
            names = [argument.rpartition(".")[2] for argument in arguments]
            assert len(names) == len(wanted), (path.name, hook, arguments)
            assert names[:2] == ["trainer", "module"], (path.name, hook, arguments)
            for name, expected in zip(names, wanted, strict=True):
                assert name == expected or name not in wanted, (path.name, hook, arguments)
            seen[hook] = path.name
    shared = [hook for hook in seen if hook not in HOOK_NAMES]
    for stage in ("validation", "test", "predict"):
        seen |= {hook.replace("on_", f"on_{stage}_"): seen[hook] for hook in shared}
    assert set(HOOK_NAMES) - set(seen) == set()
