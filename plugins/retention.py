"""Which of the checkpoints a run has saved are kept, and which make room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A checkpoint that was saved: what decides whether it is kept.

    Attributes:
        path: Where it is; empty while that is not decided.
        score: What it is ranked by, shape ``()``.
        step: Optimizer steps it was saved after.
        time: When, in Unix seconds.
    """

    path: str
    score: Tensor
    step: int
    time: float


@dataclass(frozen=True, slots=True)
class Rules:
    """Reasons to keep a checkpoint; one that holds is enough.

    Attributes:
        best: How many of the best; -1 for all.
        newest: How many of the newest.
        every_n_steps: Keeps the first of each this many steps, the first of them left out.
        at_least: Keeps each this long.
        prefers_high: Whether the best has the highest score.
    """

    best: int
    newest: int
    every_n_steps: int | None
    at_least: timedelta | None
    prefers_high: bool

    def best_of(self, saved: Sequence[Saved]) -> list[Saved]:
        """Return the best, the very best first; of equal ones the earlier."""
        ranked = sorted(saved, key=lambda one: float(one.score), reverse=self.prefers_high)
        return ranked if self.best == -1 else ranked[: self.best]

    def kept(self, saved: Sequence[Saved], now: float) -> list[Saved]:
        """Return what is to be kept of ``saved``, both in the order of saving."""
        reasons = {*self.best_of(saved), *(saved[-self.newest :] if self.newest else [])}
        if self.at_least is not None:
            oldest = now - self.at_least.total_seconds()
            reasons.update(one for one in saved if one.time >= oldest)
        if self.every_n_steps is not None:
            first_of: dict[int, Saved] = {}
            for one in saved:
                first_of.setdefault(one.step // self.every_n_steps, one)
            reasons.update(one for period, one in first_of.items() if period)
        return [one for one in saved if one in reasons]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run that are complete.

    Attributes:
        kept: Those that are kept, in the order of saving.
        last: The one that stands for the newest state; empty where there is none.
        score: Of the newest state.
        doomed: Those that are to be deleted once a newer one is complete.
    """

    kept: tuple[Saved, ...] = ()
    last: str = ""
    score: Tensor | None = None
    doomed: tuple[str, ...] = ()

    @property
    def paths(self) -> set[str]:
        """All of them but the doomed."""
        return {*(one.path for one in self.kept), self.last} - {""}

    def only(self, there: set[str]) -> Files:
        """Return those that are ``there``."""
        return replace(
            self,
            kept=tuple(one for one in self.kept if one.path in there),
            last=self.last if self.last in there else "",
            doomed=tuple(path for path in self.doomed if path in there),
        )

    def as_state(self) -> list[dict[str, Any]]:
        """Return what is kept in plain values, for `from_state`."""
        return [
            {"path": one.path, "score": one.score, "step": one.step, "time": one.time}
            for one in self.kept
        ]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Files:
        """Return the files that a ModelCheckpoint's state names."""
        return cls(
            tuple(Saved(**one) for one in state["kept"]),
            state["last_model_path"],
            state["current_score"],
            tuple(state["doomed"]),
        )


@dataclass(frozen=True, slots=True)
class Save:
    """One save.

    Attributes:
        path: Where the state goes; empty where it is not worth keeping.
        step: Optimizer steps it is saved after.
        before: The files there were.
        after: The files there are to be.
    """

    path: str
    step: int
    before: Files
    after: Files


def arranged(
    before: Files,
    new: Saved,
    rules: Rules,
    named: Callable[..., str],
    last_named: Callable[..., str],
    with_last: bool,
    must: bool,
) -> Save:
    """Return the save of ``new``, where it goes and what is kept with it.

    Args:
        before: The files there are.
        new: The newest state, without a path.
        rules: What is kept.
        named: Returns a free path, or one of the given ones.
        last_named: Does so for the file that stands for the newest state.
        with_last: Whether there is to be such a file.
        must: Whether there is to be one if the state is not kept otherwise.
    """
    kept = rules.kept([*before.kept, new], new.time)
    stay = {one.path for one in kept}
    fallen = [*(one.path for one in before.kept if one.path not in stay), *before.doomed]
    is_kept = new in kept
    last = last_named(before.last) if with_last or (must and not is_kept) else ""
    path = named(*fallen) if is_kept else last
    after = Files(tuple(replace(one, path=one.path or path) for one in kept), last, new.score)
    doomed = dict.fromkeys([*fallen, before.last])
    left = tuple(one for one in doomed if one and one not in after.paths)
    return Save(path, new.step, before, replace(after, doomed=left))
