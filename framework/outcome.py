"""What comes back from ranks that ran a call in processes of their own."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from . import parts
from .datamodule import DataModule
from .dtensors import is_split
from .metrics import Readings
from .rank_zero import rank_zero_warn
from .resume import Position
from .run_folder import RunFolder
from .wiring import Request, assemble

if TYPE_CHECKING:
    from .trainer import Trainer

_INTERNAL = frozenset(vars(nn.Module())) | {"_trainer", "trainer", "_is_configured"}

SHARED = ("optimizers", "schedulers", "precision")
"""What of a position is the same on every rank."""


def of_call(
    trainer: Trainer, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Call ``method`` on this rank, and return what it came to, packed: most of it on rank 0."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    if trainer.positions:
        trainer.position = trainer.positions[int(os.environ["RANK"])]
    result = getattr(trainer, method.__name__)(*args, **kwargs)
    run = trainer._run
    assert run is not None, "a method that is launched has run"
    # Every rank takes part where they lie in parts.
    weights = _whole(run.module.state_dict())
    position = _whole(_own(trainer.position)) if run.stage == "fit" else None
    if trainer.global_rank != 0:
        return _packed({"position": position and {**position, **dict.fromkeys(SHARED)}})
    found = {
        "position": position,
        "result": result,
        "weights": weights,
        "state": trainer.state,
        "ckpt_path": trainer.ckpt_path,
        "metrics": tuple(run.metrics.read()),
        "folder": run.folder.path if run.folder.is_made else None,
        "stage": run.stage,
        "owners": [_plain(owner) for owner in _owners(trainer, run.module, args, kwargs)],
    }
    return _packed(found)


def _packed(found: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    torch.save(found, packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=False)
    return found


def _whole(values: Any) -> Any:
    """Return ``values`` with the tensors that lie in parts brought together, on every rank."""
    return tree_map(lambda value: value.full_tensor() if is_split(value) else value, values)


def _own(position: Position | None) -> dict[str, Any] | None:
    """Return what the next fit goes on from, but for what cannot travel between processes."""
    if position is None:
        return None
    own = {one.name: getattr(position, one.name) for one in fields(position)}
    try:
        pickle.dumps(own["metrics"])
    except Exception:  # a metric that holds a lambda or the like
        rank_zero_warn(
            "What was logged so far in this epoch cannot be pickled: if this Module is fitted "
            "again, the epoch's values are of the rest of it."
        )
        own["metrics"] = None
    return own


def _owners(trainer: Trainer, module: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return whose attributes come back: the Module, DataModules and callbacks."""
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, DataModule)]
    return [module, *given, *trainer._callbacks]


def _plain(owner: Any) -> dict[str, bytes]:
    """Return what of ``owner``'s own attributes can be pickled, each by itself."""
    kept = {}
    for name, value in vars(owner).items():
        if name not in _INTERNAL and not name.startswith("__"):  # torch's marks of a wrapped module
            try:
                kept[name] = pickle.dumps(value)
            except Exception:  # a file, a lambda or the like: it stays as it was here
                continue
    return kept


def taken_over(packed: Sequence[bytes], trainer: Trainer, args: Any, kwargs: Any) -> Any:
    """Take over the ranks' outcome into the objects of this process; return the call's result."""
    found, *others = map(_unpacked, packed)
    model = kwargs.get("model", args[0] if args else None)
    module = trainer._fitted if model is None else parts.unwrapped(model)[0]
    trainer._state, trainer.ckpt_path = found["state"], found["ckpt_path"]
    if found["stage"] == "fit":
        trainer._fitted = module
        shared = {name: found["position"][name] for name in SHARED}
        trainer.positions = [Position(**one["position"] | shared) for one in (found, *others)]
    for owner, kept in zip(_owners(trainer, module, args, kwargs), found["owners"], strict=True):
        for name, value in kept.items():
            vars(owner)[name] = pickle.loads(value)
    module._configure_once()
    module.load_state_dict(found["weights"])
    if found["folder"] is not None:
        trainer.folder = RunFolder(trainer.default_root_dir, trainer.name, existing=found["folder"])
    run = trainer._run = assemble(trainer, Request(found["stage"], module, {}))
    run.metrics.finished = Readings(*found["metrics"])
    return found["result"]
