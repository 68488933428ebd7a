"""The index of a sharded checkpoint, read without running any code from it.

torch.distributed.checkpoint keeps the index as a pickle, and reads it with ``pickle.load``. Here
only the classes that describe tensors are made from one; anything else is refused, pickled items
among them, since torch would run what they hold.
"""

from __future__ import annotations

import pickle
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from leyden.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("pathlib", name): PurePosixPath
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{("torch", n): v for n, v in vars(torch).items() if isinstance(v, torch.dtype)},
}
"""What an index may be made of, by module and name."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f"The index of the sharded checkpoint names {module}.{name}, which is no "
                "description of a tensor: loading it could run code. Do not use this checkpoint, "
                "or save its tensors again with plain torch.distributed.checkpoint.save."
            )
        return _ALLOWED[module, name]


def read_index(file: IO[bytes]) -> metadata.Metadata:
    """Return the index in ``file``.

    Raises:
        CheckpointError: It is damaged, or describes something else than tensors in files beside.
    """
    try:
        index = _Reader(file).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The index of the sharded checkpoint cannot be read: {type(error).__name__}: {error}."
            " Use an older checkpoint."
        ) from error
    if not isinstance(index, metadata.Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError("The index of the sharded checkpoint is none. Use an older one.")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise CheckpointError(f"{name!r} in the sharded checkpoint is no tensor.")
    for stored in index.storage_data.values():
        if PurePosixPath(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(
                f"The sharded checkpoint names the file {stored.relative_path!r}, which is not "
                "beside its index."
            )
    return index
