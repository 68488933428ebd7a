"""What every rank decides alike: when to stop, and what time it is.

Counts are the same everywhere, so what follows from them needs no word. Signals, requests to stop
and clocks are not: they count once all ranks have heard of them, in a small exchange apart from the
gradients. Each exchange agrees on the batch of the next, about a second later.
"""

from __future__ import annotations

from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from .errors import ModuleError
from .signals import reason

if TYPE_CHECKING:
    from .run import Run

PERIOD = 1.0
"""Seconds that exchanges aim at having between them, at least."""


class Agreement(Protocol):
    """Where requests to stop become decisions."""

    signal: int | None
    """The signal that this process was sent, whether the others have heard of it or not."""

    def ask(self, why: str | None) -> None:
        """Ask for the training to stop, or take that back."""

    def note(self, number: int) -> bool:
        """Take down that signal ``number`` came; return False where one had come before."""

    def is_asked(self) -> bool:
        """Return whether somebody here has asked to stop."""

    def skip(self) -> None:
        """Ask for the end of the epoch."""

    backwards: int
    """Losses differentiated here, which are to be as many on every rank."""

    def tick(self) -> None:
        """Count a training batch, at a moment that every rank comes to."""

    def listen(self) -> None:
        """Count a batch of an evaluation, at a moment that every rank comes to."""

    def settle(self) -> None:
        """Decide now, at a moment that every rank comes to."""


class Alone:
    """One process: what is asked for is decided."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.signal: int | None = None
        self.backwards = 0

    def ask(self, why: str | None) -> None:
        self.run.state.stop = why

    def note(self, number: int) -> bool:
        run = self.run
        if self.signal is not None:
            return False
        self.signal = run.interrupted_by = number
        # Who had asked to stop before has ended the training; it is not cut.
        run.state.stop = run.state.stop or reason(number)
        return True

    def is_asked(self) -> bool:
        return self.run.state.stop is not None

    def skip(self) -> None:
        self.run.epoch_is_skipped = True

    def tick(self) -> None:
        self.run.state.elapsed = perf_counter() - self.run.began

    settle = tick

    def listen(self) -> None:
        """What is asked for is known."""


class Together:
    """Several ranks: what one of them asks for is decided at the next exchange.

    ``state.stop``, ``state.elapsed``, ``run.interrupted_by`` and ``run.epoch_is_skipped`` change
    there alone, and are the same on every rank; the time is rank 0's.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.why: str | None = None
        self.skips = False
        # One may have come before the others were found.
        self.signal, run.interrupted_by = run.interrupted_by, None
        self.gap, self.left = 1, 1
        self.backwards = 0
        self._asked_at = perf_counter()

    def ask(self, why: str | None) -> None:
        self.why = why

    def note(self, number: int) -> bool:
        is_first = self.signal is None
        self.signal = number if is_first else self.signal
        return is_first

    def is_asked(self) -> bool:
        return self.why is not None or self.run.state.stop is not None

    def skip(self) -> None:
        self.skips = True

    def tick(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self._exchange(self._next_gap())

    listen = tick

    def settle(self) -> None:
        self._exchange(self.gap)

    def _next_gap(self) -> int:
        """Return after how many batches ranks are to exchange again, by this one's clock."""
        now = perf_counter()
        per_batch = (now - self._asked_at) / self.gap
        # A first batch is slow, and others may follow a validation: it doubles at most.
        return max(1, min(2 * self.gap, ceil(PERIOD / max(per_batch, 1e-9))))

    def _exchange(self, gap: int) -> None:
        run, state = self.run, self.run.state
        why, signal = self.why, self.signal
        first = run.strategy.rank == 0
        mine = [
            float(why is not None or signal is not None),
            perf_counter() - run.began if first else 0.0,
            gap if first else 0,
            self.backwards,
            -self.backwards,
            self.skips,
        ]
        self.skips = False
        heard = run.strategy.exchange(torch.tensor(mine, dtype=torch.float64)).tolist()
        asked, most, least = heard[0], heard[3], -heard[4]
        state.elapsed = heard[1] if run.stage == "fit" else state.elapsed
        self.gap = self.left = int(heard[2])
        self._asked_at = perf_counter()
        run.epoch_is_skipped = run.epoch_is_skipped or bool(heard[5])
        if most != least:
            self._refuse_uneven()
        if asked:
            told = run.strategy.gather((why, signal))
            signals = [number for _, number in told if number is not None]
            reasons = [given for given, _ in told if given is not None]
            if signals and run.interrupted_by is None:
                run.interrupted_by = signals[0]
                reasons.append(reason(signals[0]))
            state.stop = state.stop or next(iter(reasons), None)
            # A signal that came since is told at the next exchange.
            self.why = None if self.why is why else self.why

    def _refuse_uneven(self) -> None:
        """Raise on every rank: their gradients belong to different batches by now."""
        counts = self.run.strategy.gather(self.backwards)
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ModuleError(
            f"Ranks have differentiated different numbers of losses ({shown}), so their gradients "
            "no longer belong together. Return a loss on every rank for every batch: for one to "
            "leave out, return a loss times 0 on all of them, or nonfinite_loss='skip'."
        )
