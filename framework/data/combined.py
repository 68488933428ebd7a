"""Several loaders read as one: each batch holds one batch of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import DataLoader

from ..errors import ConfigError, DataError

Mode = Literal["max_size_cycle", "max_size", "min_size"]
Begin = Callable[[int], Iterator[Any]]
END = object()


class CombinedLoader:
    """Reads loaders side by side and yields batches shaped as they were given.

    Args:
        loaders: A list, tuple or dict of loaders.
        mode: ``"max_size_cycle"`` reads until the longest ends and starts shorter ones again;
            ``"max_size"`` puts None in their place instead; ``"min_size"`` stops at the shortest.

    Raises:
        ConfigError: The mode is unknown.
        DataError: There is no loader, or one cannot be iterated.
    """

    def __init__(self, loaders: Any, mode: Mode = "max_size_cycle") -> None:
        if mode not in ("max_size_cycle", "max_size", "min_size"):
            raise ConfigError(
                f"CombinedLoader(mode={mode!r}): use 'max_size_cycle', 'max_size' or 'min_size'. "
                "To evaluate on loaders one after the other, pass them as a list."
            )
        self.mode = mode
        self.keys = list(loaders) if isinstance(loaders, Mapping) else None
        self.loaders = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
        self._kind = type(loaders)
        if not self.loaders:
            raise DataError(f"{loaders!r} holds no loader. Pass at least one.")
        for index, loader in enumerate(self.loaders):
            if not isinstance(loader, Iterable):
                raise DataError(f"Loader {self._name(index)} is {loader!r}, which has no batches.")
            if isinstance(loader, Mapping) or are_loaders(loader):
                raise DataError(
                    f"Loader {self._name(index)} is itself a collection of loaders. Pass them all "
                    "in one list or dict, or wrap the inner ones in a CombinedLoader."
                )

    def _name(self, index: int) -> str:
        return repr(self.keys[index] if self.keys is not None else index)

    def __len__(self) -> int:
        return self.length_of(self.loaders)

    def length_of(self, loaders: Iterable[Any]) -> int:
        """Return how many batches there are where loaders are read as ``loaders`` are."""
        lengths = [len(loader) for loader in loaders]
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        def begin(index: int) -> Iterator[Any]:
            return iter(self.loaders[index])

        return self.read(begin, begin, [False] * len(self.loaders))

    def read(self, begin: Begin, begin_again: Begin, ended: list[bool]) -> Iterator[Any]:
        """Yield batches side by side.

        Args:
            begin: Returns the batches of the loader with an index.
            begin_again: Does so for one that has ended before others.
            ended: Which have ended before, where this goes on in the middle.
        """
        iterators = [begin(index) for index in range(len(self.loaders))]
        while True:
            batches = [next(iterator, END) for iterator in iterators]
            ended = [was or batch is END for was, batch in zip(ended, batches, strict=True)]
            if all(ended) or (self.mode == "min_size" and any(ended)):
                return
            for index, batch in enumerate(batches):
                if batch is END and self.mode == "max_size":
                    batches[index] = None
                elif batch is END:
                    iterators[index] = begin_again(index)
                    batches[index] = self._first_of(iterators[index], index)
            yield self._shaped(batches)

    def _first_of(self, iterator: Iterator[Any], index: int) -> Any:
        for batch in iterator:
            return batch
        raise DataError(
            f"Loader {self._name(index)} gives no batch. Check its data set, and that it can be "
            "iterated more than once."
        )

    def _shaped(self, batches: list[Any]) -> Any:
        if self.keys is not None:
            return dict(zip(self.keys, batches, strict=True))
        return tuple(batches) if self._kind is tuple else batches


def are_loaders(given: Any) -> bool:
    """Say if ``given`` is a list of loaders, and not a list of batches."""
    if not isinstance(given, (list, tuple)) or not given:
        return False
    return any(isinstance(one, DataLoader) for one in given) or all(
        isinstance(one, Iterable)
        and not isinstance(one, (Mapping, list, tuple, str, bytes))
        and not hasattr(one, "dtype")
        for one in given
    )
