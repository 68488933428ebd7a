"""Saving while training goes on: a copy of the state in host memory, and a thread to write it."""

from __future__ import annotations

import copy
import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from leyden.dtensors import is_split, local

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds that an action which is stopped has to end."""


class InBackground(Generic[T]):
    """Does ``action`` in a thread of its own, begun at once."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._future: Future[T] = Future()
        self._thread = Thread(target=self._act, name="leyden-save", daemon=True)
        self._thread.start()

    def _act(self) -> None:
        try:
            self._future.set_result(self._action())
        except BaseException as error:
            self._future.set_exception(error)

    def is_done(self) -> bool:
        """Return whether it has come to an end."""
        return self._future.done()

    def result(self) -> T:
        """Wait for its end and return what it returns, or raise what it raises."""
        return self._future.result()

    def stop(self) -> bool:
        """End it where it stands, and return whether it had come to its own end before.

        A process cannot exit while it writes: torch's writer would abort it.
        """
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        self._thread.join(PATIENCE)
        return self._future.done() and self._future.exception() is None


class HostCopies:
    """Copies checkpoints into host memory that is kept from one to the next.

    To copy into fresh memory takes several times as long. A copy is good until the next is taken.
    What shares memory in a checkpoint, as tied weights and views do, is copied once and shares it
    in the copy.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []
        self._reserved: InBackground[list[torch.UntypedStorage]] | None = None

    def reserve(self, state: Any) -> None:
        """Begin to take memory for ``state``, so that the first copy need not wait for it."""
        sizes = [storage.nbytes() for storage in _storages(state).values()]
        self._reserved = InBackground(lambda: [_memory(size) for size in sizes])

    def take(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``checkpoint``, which nothing that training does will change."""
        if self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            self._buffers = reserved.result()
        storages = _storages(checkpoint)
        free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        for buffer in self._buffers:
            free[buffer.nbytes()].append(buffer)
        wanted: dict[int, list[int]] = defaultdict(list)
        for key, storage in storages.items():
            wanted[storage.nbytes()].append(key)
        self._buffers = []  # what no longer fits goes before more is taken
        copies = {
            key: buffer
            for size, keys in wanted.items()
            for key, buffer in zip(keys, free.pop(size, []), strict=False)
        }
        free.clear()
        for key, storage in storages.items():
            if key not in copies:
                copies[key] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            _bytes(copies[key]).copy_(_bytes(storage), non_blocking=True)
        for device in {storage.device for storage in storages.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._buffers = list(copies.values())
        copied: dict[str, Any] = _copied(checkpoint, copies)
        return copied


def _memory(size: int) -> torch.UntypedStorage:
    """Return memory that is there: merely asked for, it comes as it is first written to."""
    return torch.empty(size, dtype=torch.uint8).zero_().untyped_storage()


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """Return the memory that the tensors in ``value`` take, each part once."""
    return {id_of(tensor): tensor.untyped_storage() for tensor in _plain(value)}


def id_of(tensor: Tensor) -> int:
    """Return what is the same for two tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a view of bytes and nothing more."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _plain(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        part = local(value)
        if _is_plain(part):
            yield part
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _plain(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _plain(entry)


def _copied(value: Any, copies: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor):
        if is_split(value):
            whole: Any = value
            return type(whole).from_local(
                _copied(local(whole), copies), whole.device_mesh, whole.placements,
                run_check=False, shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
        if not _is_plain(value):
            return value.detach().cpu().clone()
        memory = copies[id_of(value)]
        view = torch.empty(0, dtype=value.dtype).set_(
            memory, value.storage_offset(), value.shape, value.stride()
        )
        return view.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        copied = value.copy()
        for name, entry in value.items():
            copied[name] = _copied(entry, copies)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, copies) for entry in value)
    return copy.deepcopy(value)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
