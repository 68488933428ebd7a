"""Checkpoints that pytorch-lightning wrote, and how objects in a file are kept from coming alive.

Lightning's files hold objects of any class, chiefly as hyperparameters. Each class and function
that a file names is read as a stand-in that does nothing, so nothing is imported or run. What the
stand-ins leave is data; the objects that are no data are left out, and named.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO, cast

import torch

from . import locations
from .encoding import TAG
from .errors import CheckpointError
from .protocols import Checkpointer
from .rank_zero import rank_zero_info, rank_zero_warn

VERSION = "pytorch-lightning_version"
"""The entry by which Lightning's files are known."""
_ATTACK = re.compile(
    # Pickles of protocol 2 know subprocess as commands.
    r"(os|posix|nt|sys|subprocess|commands|pty|shutil|socket|ctypes|importlib|runpy|pickle)(\.\w+)+"
    r"|builtins\.(eval|exec|compile|open|getattr|setattr|__import__|breakpoint)"
)
"""What no training leaves in a file. Nothing rests on this list, which names a danger as such."""
_PATH = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path")
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_LOST = object()


class _StandIn:
    """Stands for what a class or function of the file would have made; it runs nothing."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DictStandIn(_StandIn):
    """Stands for a class of dicts, which the safe loader fills only where they are plain ones."""

    def __new__(cls, *args: Any) -> Any:
        return OrderedDict()


class _ListStandIn(_StandIn):
    """Stands for a class of lists."""

    def __new__(cls, *args: Any) -> Any:
        return []


def load(
    checkpointer: Checkpointer, path: str, read: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the checkpoint at ``path``; one of Lightning's with its entries as leyden has them.

    Args:
        checkpointer: What wrote it.
        path: Where it is.
        read: What reads it.

    Raises:
        CheckpointError: There is none, it is damaged, or another program left objects in it.
    """
    lost: dict[str, str] = {}
    try:
        found = read(path)
    except CheckpointError as refused:
        found, lost = without_objects(checkpointer, path, refused)
        if VERSION not in found:
            raise
    return _adopted(found, lost, path) if VERSION in found else found


def without_objects(
    checkpointer: Checkpointer, path: str, refused: CheckpointError
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is data in a file that was refused for objects, and the objects left out.

    Args:
        checkpointer: What has refused it.
        path: The file.
        refused: Raised again where the file was refused for something else.

    Returns:
        The checkpoint, and the class or function by the dotted name of what is left out.

    Raises:
        CheckpointError: The file is made to run code, or cannot be read for another reason.
    """
    names = _names(checkpointer, path)
    if not names:
        raise refused
    if attack := sorted(filter(_ATTACK.fullmatch, names)):
        raise CheckpointError(
            f"{path!r} holds {', '.join(attack)}: it is made to run code on whoever loads it. None "
            "was run. Do not use this file."
        ) from refused
    kinds = [_DictStandIn if name.lower().endswith("dict") else _StandIn for name in names]
    for _ in range(2 * len(names)):
        stand_ins = [
            (type(f"StandIn{index}", (kinds[index],), {"name": name}), name)
            for index, name in enumerate(names)
        ]
        try:
            with torch.serialization.safe_globals(cast(Any, stand_ins)):
                found = checkpointer.load(path)
        except CheckpointError as error:
            filled = re.search(
                r"Can only (SETITEM|append|extend).*StandIn(\d+)'", f"{error.__cause__}"
            )
            if filled is None:
                raise
            kinds[int(filled[2])] = _DictStandIn if filled[1] == "SETITEM" else _ListStandIn
        else:
            return _without_stand_ins(found, path)
    raise refused


def _without_stand_ins(found: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, str]]:
    lost: dict[str, str] = {}
    try:
        return _plain(found, (), lost), lost
    except RecursionError as error:
        raise CheckpointError(
            f"{path!r} is nested too deep to be read. Save it again with plain values."
        ) from error


def _names(checkpointer: Checkpointer, path: str) -> list[str]:
    """Return the classes and functions the file names that the safe loader does not know."""
    try:
        with _opened(checkpointer, path) as file:
            return torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file))
    except Exception:  # a damaged file can fail in any way
        return []


def _opened(checkpointer: Checkpointer, path: str) -> BinaryIO:
    if not locations.is_remote(path):
        return locations.local(path).open("rb")
    import fsspec

    options = getattr(checkpointer, "storage_options", None) or {}
    return cast(BinaryIO, fsspec.open(path, "rb", **options).open())


def _plain(value: Any, path: tuple[Any, ...], lost: dict[str, str]) -> Any:
    """Return ``value`` without stand-ins; ``lost`` learns what is left out, and what it was."""
    if isinstance(value, _StandIn):
        return _known(value, path, lost)
    if isinstance(value, type) and issubclass(value, _StandIn):
        return _left_out(value.name, path, lost)
    if isinstance(value, dict):
        parts = {key: _plain(part, (*path, key), lost) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not _LOST}
    if isinstance(value, (list, tuple, set)):
        items = [_plain(part, (*path, index), lost) for index, part in enumerate(value)]
        return _LOST if any(item is _LOST for item in items) else type(value)(items)
    return value


def _known(value: _StandIn, path: tuple[Any, ...], lost: dict[str, str]) -> Any:
    if value.name in _NAMESPACES and isinstance(value.state, dict):
        return _plain(value.state, path, lost)
    if _PATH.fullmatch(value.name) and all(isinstance(part, str) for part in value.args):
        return (PureWindowsPath if "Windows" in value.name else Path)(*value.args)
    return _left_out(value.name, path, lost)


def _left_out(name: str, path: tuple[Any, ...], lost: dict[str, str]) -> Any:
    lost[".".join(map(str, path))] = name
    return _LOST


def _adopted(found: dict[str, Any], lost: dict[str, str], path: str) -> dict[str, Any]:
    """Return Lightning's checkpoint with its entries as leyden has them."""
    writer = f"pytorch-lightning {found[VERSION]}"
    checkpoint = {name: value for name, value in found.items() if name != "callbacks"}
    state = _counters(found)
    if state:
        checkpoint["state"] = state
    checkpoint["leyden"] = {
        "kind": "training" if "optimizer_states" in found else "weights",
        "epoch": state.get("epoch", found.get("epoch")),
        "global_step": found.get("global_step"),
        "written_by": writer,
    }
    if isinstance(found.get("MixedPrecision"), dict):
        checkpoint["precision"] = found["MixedPrecision"]
    argument = found.get("hparams_name")
    if "hyper_parameters" in found and isinstance(argument, str) and argument != "kwargs":
        # save_hyperparameters(config): the class takes all of them in this one argument.
        data = found["hyper_parameters"]
        given = {argument: {TAG: "HyperParameters", "value": data}}
        checkpoint["hyper_parameters"] = {TAG: "HyperParameters", "value": data, "given": given}
    _tell(found, lost, path, writer)
    return checkpoint


def _counters(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return where Lightning's training was, as a State has it; nothing where it is not told."""
    try:
        loop = found["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        epochs, ended = loop["epoch_progress"]["current"]["started"], batches["is_last_batch"]
        return {
            "epoch": epochs if ended else max(0, epochs - 1),
            "batch": 0 if ended else batches["current"]["processed"],
            "total_batches": batches["total"]["processed"],
            "step": found["global_step"],
        }
    except (KeyError, TypeError):
        return {}


def _tell(found: Mapping[str, Any], lost: Mapping[str, str], path: str, writer: str) -> None:
    objects = [
        f"{name} ({what})" for name, what in lost.items() if name.partition(".")[0] != "callbacks"
    ]
    left = list(objects)
    if isinstance(found.get("callbacks"), dict) and found["callbacks"]:
        keys = [str(key).partition("{")[0] for key in found["callbacks"]]
        left.append(f"the state of callbacks ({', '.join(keys)})")
    if "loops" in found:
        left.append("random generators and the order of the data, which it does not hold")
    message = f"{path} was written by {writer}. Not taken over: {'; '.join(left) or 'nothing'}."
    if objects:
        rank_zero_warn(f"{message} Pass hyperparameters that are left out as arguments.")
    else:
        rank_zero_info("%s", message)
