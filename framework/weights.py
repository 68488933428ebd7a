"""Weights for a Module from a file of another architecture or another program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import foreign, tensor_files
from .errors import CheckpointError, did_you_mean
from .optimizer_state import clean
from .protocols import Checkpointer
from .saving import checkpointer_for
from .shards import laid_out

Names = Mapping[str, str] | Callable[[str], str | None]
"""Old names, or beginnings of names, to new ones; a function returns None to leave a weight out."""
HOLDERS = ("state_dict", "model", "model_state_dict")
"""The entries of a file that weights are looked for in."""
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What `load_weights` took from a file and what it did not, by the Module's names."""

    path: str
    matched: list[str]
    """Taken from the file."""
    missing: list[str]
    """In the Module, not in the file."""
    unexpected: list[str]
    """In the file, not in the Module; by the names that ``prefix`` and ``rename`` gave them."""
    wrong_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """In both: the shape in the file and the one in the Module."""
    ignored: list[str]
    """Left out on request."""
    hint: str = field(default="", repr=False)
    """What would make more of them match, where that can be guessed."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left over on either side but what was ignored."""
        return not (self.missing or self.unexpected or self.wrong_shape)

    def __str__(self) -> str:
        shapes = [f"{n} ({_by(a)} there, {_by(b)} here)" for n, (a, b) in self.wrong_shape.items()]
        parts = [
            ("missing in the file", self.missing),
            ("unexpected in the file", self.unexpected),
            ("of another shape", shapes),
            ("ignored", self.ignored),
        ]
        lines = [f"  {len(names)} {what}: {_some(names)}" for what, names in parts if names]
        return "\n".join([f"{self.path}: {len(self.matched)} weights match", *lines])


def load_weights(
    module: nn.Module,
    path: str | Path,
    strict: bool = True,
    prefix: str | Mapping[str, str] | None = None,
    rename: Names | None = None,
    ignore: Sequence[str] = (),
) -> WeightsReport:
    """Copy the weights at ``path`` into ``module`` by name, in the module's dtypes.

    Args:
        module: Takes them; whichever of its parts are compiled.
        path: A checkpoint of leyden or Lightning, a file with a state_dict or with one under
            ``"state_dict"`` or ``"model"``, or a ``.safetensors`` file.
        strict: Raise unless every weight of the file and of the module has found its counterpart.
        prefix: Take what the file has below this name, without the prefix. Or old prefixes to new
            ones; weights below none of them keep their names.
        rename: As well: names, or beginnings of them up to a dot, to new ones; or a function of the
            name, which may return None to leave a weight out.
        ignore: Patterns such as ``"head.*"``, of the file's names or the module's, to leave alone.

    Raises:
        CheckpointError: The file cannot be read, nothing in it matches, or not all with ``strict``;
            or the module has no memory yet.
    """
    _require_memory(module)
    saved = read_weights(checkpointer_for(str(path)), str(path))
    named, ignored = _named(saved, str(path), prefix, rename, ignore)
    own = {clean(name): (name, t) for name, t in module.state_dict(keep_vars=True).items()}
    report = _compared(str(path), named, {n: t for n, (_, t) in own.items()}, ignored, ignore)
    if not report.matched or (strict and not report.is_complete):
        part = ", or pass strict=False to load those that match" if report.matched else ""
        raise CheckpointError(
            f"The weights do not fit {type(module).__name__}.\n{report}\n{report.hint}Match them "
            f"with prefix=, rename= or ignore={part}."
        )
    fitting = {
        own[name][0]: laid_out(named[name], own[name][1])
        for name in report.matched
        if name in named
    }
    try:
        module.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{type(module).__name__} refuses the weights: {error}") from error
    return report


def _require_memory(module: nn.Module) -> None:
    """Refuse to copy weights into parameters that are only described."""
    described = [name for name, t in module.state_dict(keep_vars=True).items() if t.is_meta]
    if described:
        raise CheckpointError(
            f"{type(module).__name__} has no memory for {_some(described)} yet: the strategy makes "
            "it after configure_model, each rank that of its part. Call load_weights in "
            "on_fit_start."
        )


def _named(
    saved: Mapping[str, Any],
    path: str,
    prefix: str | Mapping[str, str] | None,
    rename: Names | None,
    ignore: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """Return the weights by the names they are to have, and the names of those left out."""
    named: dict[str, Any] = {}
    origins: dict[str, str] = {}
    ignored: list[str] = []
    for old, tensor in saved.items():
        new = None if _is_ignored(old, ignore) else _new_name(old, prefix, rename)
        if new is None or _is_ignored(new, ignore):
            ignored.append(old if new is None else new)
        elif new in named:
            raise CheckpointError(
                f"Both {origins[new]!r} and {old!r} of {path!r} come to be called {new!r}. Change "
                "prefix or rename, or leave one of them out with ignore."
            )
        else:
            named[new], origins[new] = tensor, old
    return named, ignored


def read_weights(checkpointer: Checkpointer, path: str) -> dict[str, Any]:
    """Return the weights at ``path`` by name, on the CPU, whoever wrote them.

    They stay in the file until they are used where that can be.

    Raises:
        CheckpointError: The file cannot be read, or holds none.
    """
    if path.endswith((tensor_files.ENDING, tensor_files.INDEX)):
        return dict(tensor_files.read(path, getattr(checkpointer, "storage_options", None)))
    try:
        found = getattr(checkpointer, "view", checkpointer.load)(path)
    except CheckpointError as refused:
        found, _ = foreign.without_objects(checkpointer, path, refused)
    weights = weights_in(found)
    if weights is None:
        raise CheckpointError(
            f"{path!r} holds no weights, by themselves or under {', '.join(map(repr, HOLDERS))}. "
            f"It holds: {_some([str(name) for name in found])}."
        )
    return weights


def weights_in(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the weights among what a file holds, or None where there are none."""
    for holder in (found.get(name) for name in HOLDERS):
        if isinstance(holder, dict) and _tensors(holder):
            return {clean(name): value for name, value in holder.items()}
    return {clean(name): value for name, value in _tensors(found).items()} or None


def _tensors(holder: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in holder.items() if isinstance(value, Tensor)}


def _is_ignored(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _new_name(
    name: str, prefix: str | Mapping[str, str] | None, rename: Names | None
) -> str | None:
    if isinstance(prefix, str):
        below = f"{prefix.rstrip('.')}." if prefix else ""
        if not name.startswith(below):
            return None
        name = name.removeprefix(below)
    elif prefix is not None:
        name = _replaced(name, prefix)
    if callable(rename):
        return rename(name)
    return name if rename is None else _replaced(name, rename)


def _replaced(name: str, names: Mapping[str, str]) -> str:
    """Return ``name`` with the longest of its beginnings that is in ``names`` replaced."""
    for old, new in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if name == old:
            return new
        below = f"{old.rstrip('.')}." if old else ""
        if name.startswith(below):
            return f"{new.rstrip('.')}.{name[len(below) :]}".removeprefix(".")
    return name


def _compared(
    path: str,
    named: Mapping[str, Any],
    own: Mapping[str, Any],
    ignored: Sequence[str],
    ignore: Sequence[str],
) -> WeightsReport:
    shapes = {n: (_shape(t), _shape(own[n])) for n, t in named.items() if n in own}
    wrong = {name: pair for name, pair in shapes.items() if None not in pair and pair[0] != pair[1]}
    matched = [name for name in own if name in named and name not in wrong]
    taken = {id(own[name]) for name in matched}
    # A tied weight is in the file under one of its names at least.
    matched += [name for name in own if name not in named and id(own[name]) in taken]
    left = [name for name in own if name not in matched and name not in wrong]
    missing = [name for name in left if not _is_ignored(name, ignore)]
    unexpected = [name for name in named if name not in own]
    return WeightsReport(
        path=path,
        matched=matched,
        missing=missing,
        unexpected=unexpected,
        wrong_shape=wrong,  # type: ignore[arg-type]
        ignored=list(dict.fromkeys([*ignored, *(n for n in left if n not in missing)])),
        hint=_hint(unexpected, missing, bool(matched)),
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of ``value``; None where it has none yet, or is no tensor."""
    return tuple(value.shape) if isinstance(value, Tensor) and not is_lazy(value) else None


def _hint(unexpected: Sequence[str], missing: Sequence[str], any_matched: bool) -> str:
    """Return what to pass so that more match: a prefix that most lack, or a name that is near."""
    endings: dict[str, list[str]] = defaultdict(list)
    for name in missing:
        for prefix, ending in _splits(name):
            endings[ending].append(prefix)
    pairs: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        # An ending that many share, as "weight", says nothing of what stands before it.
        split = next(((p, e) for p, e in _splits(name) if 0 < len(endings.get(e, ())) <= 3), None)
        if split is not None:
            pairs.update((split[0], own) for own in endings[split[1]])
    ((old, new), count), *_ = pairs.most_common(1) or [(("", ""), 0)]
    if 2 * count >= max(len(missing), 1):
        choice = {old: new} if new or any_matched else old
        return f"Did you mean prefix={choice!r}? {count} more would match. "
    near = [(name, did_you_mean(name, missing)) for name in unexpected[:_SHOWN]]
    return "".join(f"{name!r}:{guess} " for name, guess in near if guess)


def _splits(name: str) -> list[tuple[str, str]]:
    """Return the ways to cut ``name`` at a dot, the shortest beginning first."""
    parts = name.split(".")
    cuts = range(len(parts))
    return [("".join(f"{p}." for p in parts[:i]), ".".join(parts[i:])) for i in cuts]


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
