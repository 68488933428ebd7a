"""Tensors that stay in a checkpoint's files until they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class StoredTensor(Tensor):
    """A tensor of a checkpoint that is read anew from its files each time something uses it.

    It has shape and dtype like any other, and whatever computes with it gets a plain one. A
    `DTensor` is filled with this rank's part of it alone by ``read_into``.
    """

    read_into: Callable[[Any], None]
    """Reads it into another of its shape and dtype, plain or in parts on several ranks."""

    @staticmethod
    def __new__(
        cls: type[StoredTensor],
        shape: torch.Size,
        dtype: torch.dtype,
        read_into: Callable[[Any], None],
    ) -> StoredTensor:
        made: StoredTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.read_into = read_into
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def whole(self) -> Tensor:
        """Return it as a plain tensor on the CPU."""
        found = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(found)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is not typed as it is called
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]  # looked at, not used
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredTensor({[*self.shape]}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return it as an array of NumPy's."""
        return self.whole().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Return it as nested lists."""
        return self.whole().tolist()
