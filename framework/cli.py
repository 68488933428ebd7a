"""The command line: ``leyden new``, ``leyden plugins``, and the commands that packages add.

A package adds a command by an entry point of group ``leyden.commands``, which names a function
that takes the arguments after the command and returns an exit code. ``--help`` reads their names
from metadata alone, and nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError, LeydenError, PluginError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .manager import Listed, Registry

OWN = ("new", "plugins")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, by default the process's, and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in OWN:
            return _run_added(argv[0], argv[1:])
        options = parser.parse_args(argv)
        if options.command == "new":
            _new(options)
        else:
            _list_plugins()
    except LeydenError as error:
        print(f"leyden: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    added = "\n".join(f"  {point.name}  (from {_package(point)})" for point in _added_commands())
    parser = argparse.ArgumentParser(
        prog="leyden",
        description="A training framework for PyTorch: a loop one can read, every part a plugin.",
        epilog=f"commands of installed packages:\n{added}" if added else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"leyden {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    new = commands.add_parser("new", help="make a project from a template")
    new.add_argument("name", help="the project's name; its package is called the same, with _")
    new.add_argument(
        "--template", default="minimal", help="minimal (the default), plugin, or an installed one"
    )
    new.add_argument("--yes", action="store_true", help="ask nothing and take the defaults")
    new.add_argument("--dest", type=Path, help="the folder to make it in, by default ./NAME")
    commands.add_parser("plugins", help="list what a Trainer can be asked for by name")
    return parser


def _version() -> str:
    return metadata.version("leyden")


def _added_commands() -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group="leyden.commands"), key=lambda point: point.name)


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _run_added(command: str, argv: list[str]) -> int:
    points = [point for point in _added_commands() if point.name == command]
    if not points:
        raise unknown(
            "command",
            command,
            [*OWN, *(point.name for point in _added_commands())],
            "Install the package that provides it.",
        )
    if len(points) > 1:
        raise ConfigError(
            f"The command {command!r} is provided by {' and '.join(map(_package, points))}. "
            "Uninstall one of them."
        )
    try:
        function = points[0].load()
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"The command {command!r} of package {_package(points[0])!r} cannot be loaded from "
            f"{points[0].value!r}: {error}. Repair or uninstall {_package(points[0])}."
        ) from error
    code: int = function(argv)
    return code


def _new(options: argparse.Namespace) -> None:
    from .templating import render

    registry, _ = _usable_plugins()
    templates = registry.listed("template")
    if options.template not in templates:
        raise unknown("template", options.template, templates)
    destination = options.dest or Path(options.name)
    render(_folder(templates[options.template]), options.name, destination, ask=not options.yes)
    print(f"Made {destination}. Its README.md says what to do next.")


def _folder(template: Listed) -> Path:
    folder = Path(str(template.factory))
    if not folder.is_dir():
        raise PluginError(
            f"The template {template.name!r} of {template.origin} names {str(folder)!r}, "
            "which is no folder. register_templates returns name -> absolute folder."
        )
    return folder


def _list_plugins() -> None:
    from .installed import installed
    from .manager import KINDS

    registry, broken = _usable_plugins()
    rows = [("kind", "name", "from")]
    for kind in KINDS:
        try:
            rows += [(kind, entry.name, entry.origin) for entry in registry.listed(kind).values()]
        except Exception as error:
            broken.append(f"{kind}: {error}")
    rows += [("installed", point.name, package) for point, package in installed()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for kind, name, origin in rows:
        print(f"{kind:{widths[0]}}  {name:{widths[1]}}  {origin}")
    for error_message in broken:
        print(f"broken: {error_message}")


def _usable_plugins() -> tuple[Registry, list[str]]:
    """Return a registry without the installed plugins that cannot be used, and what ails those."""
    from .installed import disabled, installed, load
    from .manager import Registry

    broken = []
    for point, package in installed():
        try:
            load(point, package)
        except PluginError as error:
            broken.append(str(error))
            os.environ["LEYDEN_DISABLE_PLUGINS"] = ",".join({*disabled(), point.name})
    return Registry(), broken


if __name__ == "__main__":
    sys.exit(main())
