"""What comes back from ranks that ran a call in processes of their own."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import parts
from .datamodule import DataModule
from .dtensors import is_split
from .metrics import Readings
from .run_folder import RunFolder
from .wiring import Request, assemble

if TYPE_CHECKING:
    from .trainer import Trainer

_INTERNAL = frozenset(vars(nn.Module()))


def of_call(
    trainer: Trainer, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes | None:
    """Call ``method`` on this rank; return rank 0's outcome, packed, and None elsewhere."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    result = getattr(trainer, method.__name__)(*args, **kwargs)
    run = trainer._run
    assert run is not None, "a method that is launched has run"
    weights = run.module.state_dict()
    # Every rank takes part where they lie in parts.
    weights = {name: v.full_tensor() if is_split(v) else v for name, v in weights.items()}
    if trainer.global_rank != 0:
        return None
    found = {
        "result": result,
        "weights": weights,
        "state": trainer.state,
        "ckpt_path": trainer.ckpt_path,
        "metrics": tuple(run.metrics.read()),
        "folder": run.folder.path if run.folder.is_made else None,
        "stage": run.stage,
        "owners": [_plain(owner) for owner in _owners(trainer, run.module, args, kwargs)],
    }
    packed = io.BytesIO()
    torch.save(found, packed)
    return packed.getvalue()


def _owners(trainer: Trainer, module: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return whose attributes come back: the Module, DataModules and callbacks."""
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, DataModule)]
    return [module, *given, *trainer._callbacks]


def _plain(owner: Any) -> dict[str, bytes]:
    """Return what of ``owner``'s own attributes can be pickled, each by itself."""
    kept = {}
    for name, value in vars(owner).items():
        if name not in _INTERNAL and name not in ("_trainer", "trainer"):
            try:
                kept[name] = pickle.dumps(value)
            except Exception:  # a file, a lambda or the like: it stays as it was here
                continue
    return kept


def taken_over(packed: bytes, trainer: Trainer, args: Any, kwargs: Any) -> Any:
    """Take over rank 0's outcome into the objects of this process, and return the call's result."""
    found: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=False)
    model = kwargs.get("model", args[0] if args else None)
    module = trainer._fitted if model is None else parts.unwrapped(model)[0]
    trainer._state, trainer.ckpt_path = found["state"], found["ckpt_path"]
    if found["stage"] == "fit":
        trainer._fitted = module
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
