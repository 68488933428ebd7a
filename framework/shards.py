"""Tensors that lie in parts on several ranks: brought together on one, and filled part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .dtensors import is_split

if TYPE_CHECKING:
    from .protocols import Strategy


class _Piece(NamedTuple):
    """Where the part of a tensor lies that a rank has."""

    memory: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def is_stored(value: Any) -> TypeGuard[Any]:
    """Return whether ``value`` is a tensor that stays in a checkpoint's files until it is used."""
    return isinstance(value, Tensor) and hasattr(value, "read_into")


def laid_out(saved: Any, like: Any) -> Any:
    """Return ``saved``, a whole tensor, as ``like`` lies on the ranks, in its own dtype.

    Each rank reads its part alone. What has another shape than ``like`` is copied to every rank.
    """
    if not isinstance(saved, Tensor) or not is_split(like) or is_split(saved) or not saved.ndim:
        return saved
    laid: Any = like.detach()
    if saved.shape != laid.shape:
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * laid.device_mesh.ndim
        local = saved.to(laid.to_local().device)
        return DTensor.from_local(local, laid.device_mesh, everywhere, run_check=False)
    laid = torch.empty_like(laid, dtype=saved.dtype, requires_grad=False)
    if is_stored(saved):
        saved.read_into(laid)
    else:
        piece, local = _piece(laid), laid.to_local()
        local.copy_(_part(saved, piece)) if local.numel() else None
    return laid


def kept(saved: Any, like: Tensor) -> Any:
    """Return ``saved`` as ``like`` lies on the ranks, in memory of its own if a file has it."""
    laid = laid_out(saved, like)
    if not isinstance(laid, Tensor) or laid is not saved or is_split(laid):
        return laid
    is_in_file = is_stored(laid) or laid.untyped_storage().filename is not None
    return laid.clone() if is_in_file else laid


def together(value: Any, strategy: Strategy) -> Any:
    """Return nested ``value`` with split tensors whole on rank 0's CPU; others get empty shells.

    Every rank calls it with the same split tensors in the same order. One at a time they travel to
    rank 0, and to no other, so that the memory of the others does not grow.
    """
    split = list(_split_in(value))
    if not split:
        return value
    plans: list[list[_Piece]] = strategy.gather([_piece(tensor) for tensor in split])
    group = getattr(strategy, "control", None)
    whole: dict[int, Tensor] = {}
    tied: dict[tuple[_Piece, ...], Tensor] = {}
    for tensor, pieces in zip(split, zip(*plans, strict=True), strict=True):
        if pieces not in tied:
            tied[pieces] = _brought(tensor, pieces, strategy.rank, group)
        whole[id(tensor)] = tied[pieces]
    return _replaced(value, whole)


def _brought(tensor: Any, pieces: Sequence[_Piece], rank: int, group: Any) -> Tensor:
    """Return ``tensor`` whole on rank 0's CPU, and an empty shell of it elsewhere."""
    sources: dict[tuple[int, ...], int] = {}
    for source, piece in enumerate(pieces):
        if all(piece.shape):
            sources.setdefault(piece.offset, source)
    target = "cpu" if rank == 0 else "meta"
    if sum(_size(pieces[source].shape) for source in sources.values()) != tensor.numel():
        # Laid out so that parts are no blocks of the whole; torch itself knows how to join them.
        return tensor.full_tensor().to(target)  # type: ignore[no-any-return]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=target)
    for source in sorted(sources.values()):
        if rank == source == 0:
            _part(whole, pieces[source]).copy_(tensor.to_local())
        elif rank == source:
            _send(tensor.to_local(), group)
        elif rank == 0:
            _receive(_part(whole, pieces[source]), source, group)
    return whole


def _send(local: Tensor, group: Any) -> None:
    data = local.detach().cpu().contiguous()
    torch.distributed.send(data.view(-1).view(torch.uint8), 0, group=group)


def _receive(part: Tensor, source: int, group: Any) -> None:
    data = part if part.is_contiguous() else torch.empty_like(part).contiguous()
    torch.distributed.recv(data.view(-1).view(torch.uint8), source, group=group)
    if data is not part:
        part.copy_(data)


def _piece(tensor: Any) -> _Piece:
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint goes by
    local = tensor.to_local()
    memory = local.data_ptr() if local.numel() else 0
    return _Piece(memory, tuple(chunk.offsets), tuple(chunk.sizes))


def _part(whole: Tensor, piece: _Piece) -> Tensor:
    pairs = zip(piece.offset, piece.shape, strict=True)
    return whole[tuple(slice(start, start + size) for start, size in pairs)]


def _size(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _split_in(value: Any) -> Iterator[Any]:
    if is_split(value):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _split_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _split_in(part)


def _replaced(value: Any, whole: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return whole.get(id(value), value)
    if isinstance(value, dict):
        copy = value.copy()
        for name, part in value.items():
            copy[name] = _replaced(part, whole)
        return copy
    if type(value) in (list, tuple):
        make: Callable[..., Any] = type(value)
        return make(_replaced(part, whole) for part in value)
    return value
