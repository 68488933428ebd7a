"""Several loaders read as one: each batch holds one batch of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..errors import ConfigError, DataError

Mode = Literal["max_size_cycle", "max_size", "min_size"]


class CombinedLoader:
    """Reads loaders side by side and yields batches shaped as they were given.

    Args:
        loaders: A list, tuple or dict of loaders.
        mode: ``"max_size_cycle"`` reads until the longest ends and starts shorter ones again;
            ``"max_size"`` puts None in their place instead; ``"min_size"`` stops at the shortest.
    """

    def __init__(self, loaders: Any, mode: Mode = "max_size_cycle") -> None:
        if mode not in ("max_size_cycle", "max_size", "min_size"):
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}): use 'max_size_cycle', 'max_size' or 'min_size'."
            )
        self.mode = mode
        self.keys = list(loaders) if isinstance(loaders, Mapping) else None
        self.loaders = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
        self._kind = type(loaders)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders]
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        iterators = [iter(loader) for loader in self.loaders]
        ended = [False] * len(iterators)
        while True:
            batch: list[Any] = []
            for index, iterator in enumerate(iterators):
                try:
                    batch.append(None if ended[index] and self.mode == "max_size" else next(iterator))
                except StopIteration:
                    ended[index] = True
                    if self.mode == "min_size" or all(ended):
                        return
                    batch.append(self._again(iterators, index))
            yield self._shaped(batch)

    def _again(self, iterators: list[Any], index: int) -> Any:
        if self.mode == "max_size":
            return None
        iterators[index] = iter(self.loaders[index])
        for batch in iterators[index]:
            return batch
        raise DataError(f"Loader {self.keys[index] if self.keys else index!r} gives no batch.")

    def _shaped(self, batch: list[Any]) -> Any:
        if self.keys is not None:
            return dict(zip(self.keys, batch, strict=True))
        return tuple(batch) if self._kind is tuple else batch
