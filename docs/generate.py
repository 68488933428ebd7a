"""Write the pages of docs/ that follow from the code: hooks.md, trainer.md and names.md.

``python docs/generate.py`` writes them, and ``--check`` says which of them are out of date instead.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from leyden import Trainer, hookspecs, loop, overrides
from leyden.hook_names import HOOK_NAMES, REGISTRATIONS
from leyden.manager import KINDS, Registry, imported

DOCS = Path(__file__).parent
NOTE = "<!-- docs/generate.py writes this page from {source}: change it there. -->"


def hooks_page() -> str:
    """Return the page of everything that a plugin, a Module or a DataModule may implement."""
    told = [getattr(hookspecs.RunHooks, name) for name in HOOK_NAMES]
    registrations = [getattr(hookspecs, name) for name in REGISTRATIONS]
    own = {"configure_optimizers", *HOOK_NAMES}
    data, training = (
        [f for name, f in vars(kind).items() if inspect.isfunction(f) and name not in own]
        for kind in (overrides.DataHooks, overrides.TrainingHooks)
    )
    outline = str(loop.__doc__).split("\n\n")[1]
    return f"""{NOTE.format(source="hookspecs.py, overrides.py and loop.py")}
# Hooks

How to implement them, and the order of everyone at one hook, is in [plugins.md](plugins.md).

## A run

```
{outline.strip()}
```

## Told

In the order of a run, to every plugin. They return nothing. A Callback is passed these arguments
by position, a Module those after `trainer, module`, and any other object those that it names.

{table(("hook", "arguments", "when it is told"), map(row, told))}

## Asked for names

Once for each Trainer. Each returns a dict of names, each with a factory or with the factory's
`"package.module:attribute"`, which is imported when the name is used.

{table(("hook", "what it does"), ((name, text) for name, _, text in map(row, registrations)))}

## Overridden by a Module or a DataModule

Asked, and the answer is used. Where a DataModule and the Module both override one, the DataModule's
is used; `prepare_data` of both is called.

{table(("method", "arguments", "what it does"), map(row, data))}

## Overridden by a Module

{table(("method", "arguments", "what it does"), map(row, training))}
"""


def trainer_page() -> str:
    """Return the page of the Trainer's arguments."""
    parameters = inspect.signature(Trainer).parameters
    rows = [
        (f"`{name}`", f"`{parameters[name].default!r}`", text)
        for name, text in arguments_of(str(Trainer.__doc__)).items()
    ]
    return f"""{NOTE.format(source="trainer.py")}
# Trainer

`from leyden import Trainer`. Every argument is passed by its name and checked when the Trainer is
made. Where the default is None, leyden chooses.

{table(("argument", "default", "meaning"), rows)}
"""


def names_page() -> str:
    """Return the page of every name that comes with leyden."""
    registry = Registry()
    sections = []
    for kind in KINDS:
        rows = [
            (f"`{entry.name}`", described(kind, entry.factory))
            for entry in sorted(registry.listed(kind).values(), key=lambda entry: entry.name)
        ]
        if rows:
            sections.append(f"## {kind.title()}\n\n{table(('name', 'what it is'), rows)}\n")
    return f"""{NOTE.format(source="the registries")}
# Names

What comes with leyden, as in `Trainer(precision="bf16-mixed", logger="csv")`. `leyden plugins`
lists these together with what installed packages add.

{chr(10).join(sections)}"""


def described(kind: str, factory: Callable[..., Any] | str) -> str:
    """Return the first line on what ``factory`` makes."""
    if kind == "template":
        return f"`leyden new NAME --template {Path(str(factory)).name}`"
    made = imported(factory, f"the docs of a {kind}") if isinstance(factory, str) else factory
    # A partial of a class is described by the class.
    return markdown(str(inspect.getdoc(getattr(made, "func", made))).splitlines()[0])


def row(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the name, the arguments and the docstring of ``function``."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    arguments = ast.unparse(tree.args).replace(
        "trainer: Trainer, module: Module", "trainer, module"
    )
    arguments = arguments.removeprefix("self").removeprefix(", ")
    return f"`{tree.name}`", arguments and f"`{markdown(arguments)}`", markdown(prose(function))


def prose(function: Callable[..., Any]) -> str:
    """Return the docstring of ``function`` without its sections, on one line."""
    text = re.split(r"\n(?:Args|Returns|Raises):\n", str(inspect.getdoc(function)))[0]
    return " ".join(text.split())


def arguments_of(docstring: str) -> dict[str, str]:
    """Return what the ``Args`` section of ``docstring`` says of each argument."""
    section = docstring.split("Args:\n")[1].split("\n\n")[0]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: markdown(" ".join(text.split())) for name, text in found}


def markdown(text: str) -> str:
    """Return a docstring's text as a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: list[str]) -> int:
    """Write the pages, or check them, and return the exit code."""
    # What happens to be installed does not belong in the pages.
    os.environ["LEYDEN_DISABLE_PLUGINS"] = "all"
    pages = {"hooks.md": hooks_page(), "trainer.md": trainer_page(), "names.md": names_page()}
    stale = [
        name
        for name, text in pages.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} does not say what the code does. Run: python docs/generate.py")
        return bool(stale)
    for name in stale:
        (DOCS / name).write_text(pages[name], encoding="utf-8")
        print(f"Wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
