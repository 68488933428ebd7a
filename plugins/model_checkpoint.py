"""ModelCheckpoint: keeps the best states of a run on disk, and the newest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from math import inf, isnan, nan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from leyden.callback import Callback
from leyden.errors import ConfigError

from .checkpoint_names import COUNTS, checked_template, fill, names_in
from .checkpointing import link, local_path, make_folder
from .monitored import checked_mode, missing
from .timer import is_out_of_time

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.state import State
    from leyden.trainer import Trainer

    At = Literal["step", "epoch", "end"]

log = logging.getLogger(__name__)

INTERVALS = ("every_n_train_steps", "train_time_interval", "every_n_epochs")


class ModelCheckpoint(Callback):
    """Saves checkpoints: the best by a metric, the newest, or all of them.

    Without an interval it saves after each validation, or at the end of each epoch in a run that
    has none; a validation due at the same step always comes first. A run that is interrupted, or
    stopped before its limits, saves once more. A file is deleted only after the one that replaces
    it is complete, and only if this run, or the one it resumes, has written it.

    Args:
        dirpath: Folder of the files; ``checkpoints`` in the run's own if None.
        filename: Template such as ``"{epoch}-{val/loss:.2f}"``; ``"{epoch}-{step}"`` if None.
        monitor: Logged metric to rank by. None ranks by age, the newest first.
        verbose: Say what is saved, and what was not good enough.
        save_last: Keep the newest state as ``last``: True, or ``"link"`` for a symbolic link. Where
            that state is among the best too it takes no space of its own.
        save_top_k: Files to keep: -1 for all, 0 for none but ``last``.
        save_weights_only: Leave out what resuming needs.
        mode: ``"min"`` if lower values of ``monitor`` are better, ``"max"`` if higher ones.
        auto_insert_metric_name: Write ``epoch=3`` rather than ``3`` for ``{epoch}``.
        every_n_train_steps: Save each time this many optimizer steps are done.
        train_time_interval: Save each time training has gone on this long.
        every_n_epochs: Save at the end of every n-th epoch.
        save_on_train_epoch_end: True saves at the end of epochs even in a run with validation,
            False only after validations. None chooses as described above.
        enable_version_counter: Add ``-v1`` to a name that a file of others has; False overwrites.
        max_share: Most of the training time that saves after epochs may take; others wait.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    is_saver = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        max_share: float = 1.0,
    ) -> None:
        self.filename = checked_template(
            f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}" if filename is None else filename
        )
        self.monitor, self.verbose = monitor, verbose
        self.save_last, self.save_top_k = save_last, save_top_k
        self.save_weights_only = save_weights_only
        self.mode = checked_mode(mode)
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.max_share = max_share
        self._check_choices()

        self._own_dirpath = None if dirpath is None else str(local_path(str(dirpath)).absolute())
        self.dirpath = self._own_dirpath
        self.best_k_models: dict[str, Tensor] = {}
        self.last_model_path = ""
        self.current_score: Tensor | None = None
        self._saved_batches = self._saved_step = 0
        self._saved_elapsed = self._took = 0.0
        self._has_said_missing = False
        self._waits = every_n_train_steps is None and train_time_interval is None

    def _check_choices(self) -> None:
        intervals = {n: value for n in INTERVALS if (value := getattr(self, n)) is not None}
        if len(intervals) > 1:
            raise ConfigError(
                f"ModelCheckpoint takes one interval, not {' and '.join(intervals)}. Use a "
                "ModelCheckpoint for each."
            )
        for name, value in intervals.items():
            if value <= (timedelta(0) if name == "train_time_interval" else 0):
                raise ConfigError(f"{name}={value!r} must be positive. Leave it out for none.")
        if self.save_top_k < -1:
            raise ConfigError(
                f"save_top_k={self.save_top_k} must be at least -1. -1 keeps all, 0 none."
            )
        if self.monitor is None and self.save_top_k > 1:
            raise ConfigError(
                f"save_top_k={self.save_top_k} needs a metric to rank by. Pass monitor='...', or "
                "save_top_k=1 for the newest or -1 for all."
            )
        if self.save_last not in (None, True, False, "link"):
            raise ConfigError(
                f"save_last={self.save_last!r} is not a choice. Pass True, False or 'link'."
            )

    @property
    def state_key(self) -> str:
        names = ("monitor", "mode", *INTERVALS, "save_weights_only")
        settings = (f"{name}={getattr(self, name)!r}" for name in names)
        return f"ModelCheckpoint({', '.join(settings)})"

    @property
    def best_model_path(self) -> str:
        """The best complete checkpoint, the newest without a monitor; empty before the first."""
        return next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> Tensor | None:
        """The monitored value of the best checkpoint, shape ``()``."""
        return None if self.monitor is None else self.best_k_models.get(self.best_model_path)

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the checkpoints that are kept; empty before the first."""
        return next(reversed(self.best_k_models), "")

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_k_models = dict(state_dict["best_k_models"])
        self.last_model_path = state_dict["last_model_path"]
        self.current_score = state_dict["current_score"]

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.fast_dev_run:
            return
        if self._own_dirpath is None:
            folder = trainer.run_dir or Path(trainer.default_root_dir)
            self.dirpath = str((folder / "checkpoints").absolute())
        if trainer.is_global_zero:
            make_folder(str(self.dirpath))
        if self.FILE_EXTENSION == ModelCheckpoint.FILE_EXTENSION:
            self.FILE_EXTENSION = trainer.checkpointer.extension
        state = trainer.state
        # What a run begins with needs no saving, unless it is scored: it is new, or was loaded.
        is_scored = state.total_batches == 0 and self.monitor and "start" in trainer.validate_at
        self._saved_batches = -1 if is_scored else state.total_batches
        self._saved_step = state.step
        self._saved_elapsed = state.elapsed
        if state.total_batches == 0:
            self.best_k_models, self.last_model_path, self.current_score = {}, "", None
        else:
            self._forget_absent(trainer)

    def _forget_absent(self, trainer: Trainer) -> None:
        """Keep of the restored paths those that are there, in the folder of this run."""
        folder = Path(self.dirpath or "")
        known = {*self.best_k_models, self.last_model_path} - {""}
        there = {p for p in known if folder in Path(p).parents and trainer.checkpointer.exists(p)}
        kept = trainer.broadcast(there)
        if known - kept and trainer.is_global_zero:
            lost = ", ".join(sorted(known - kept))
            log.warning("ModelCheckpoint no longer tracks %s: not in %s", lost, folder)
        self.best_k_models = {p: s for p, s in self.best_k_models.items() if p in kept}
        self.last_model_path = self.last_model_path if self.last_model_path in kept else ""

    def on_save_point(self, trainer: Trainer, module: Module, at: At) -> None:
        state = trainer.state
        if at == "step" and self._waits and state.validated_batch != state.total_batches:
            return
        if state.total_batches == self._saved_batches or trainer.fast_dev_run:
            return
        if at == "step":
            if self._is_due_after_step(trainer, state):
                self._save(trainer, at)
            return
        # A run cut by a signal or the clock is resumed from here. Clocks differ.
        cut = trainer.interrupted or is_out_of_time(trainer.callbacks)
        must = at == "end" and trainer.broadcast(cut)
        if must or self._is_due_after_epoch(trainer, state, at):
            self._save(trainer, at, must)

    def _is_due_after_step(self, trainer: Trainer, state: State) -> bool:
        if self.every_n_train_steps is not None:
            return state.step != self._saved_step and state.step % self.every_n_train_steps == 0
        if self.train_time_interval is not None:
            waited = timedelta(seconds=state.elapsed - self._saved_elapsed)
            return bool(trainer.broadcast(waited >= self.train_time_interval))
        return (
            state.validated_batch == state.total_batches
            and state.batch < trainer.num_training_batches
            and (state.epoch + 1) % (self.every_n_epochs or 1) == 0
            and self._saves_after_validation(trainer)
        )

    def _is_due_after_epoch(self, trainer: Trainer, state: State, at: At) -> bool:
        if at == "end" and self.save_last:
            return True
        if self.every_n_train_steps is not None or self.train_time_interval is not None:
            return False
        if (_epoch(state) + 1) % (self.every_n_epochs or 1):
            return False
        passed = state.elapsed - self._saved_elapsed
        if at == "epoch" and trainer.broadcast(self._took > self.max_share * passed):
            return False
        has_validated = state.validated_batch == state.total_batches
        return (
            (at == "end" and state.batch > 0)
            or has_validated
            or not self._saves_after_validation(trainer)
        )

    def _saves_after_validation(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return not self.save_on_train_epoch_end
        return self.every_n_epochs is None and sum(trainer.num_val_batches) > 0

    def _save(self, trainer: Trainer, at: At, must: bool = False) -> None:
        """Write the state if it is to be kept, point "last" at it, then delete what it replaces."""
        metrics = trainer.callback_metrics
        names = {*names_in(self.filename), *names_in(self.CHECKPOINT_NAME_LAST)}
        values = {name: self._number(name, trainer, at, metrics) for name in names}
        score = trainer.broadcast(self._score(trainer, at, metrics))
        kept, fallen = self._ranked(score)
        is_kept, last = "" in kept, ""
        if self.save_last or (must and not is_kept):
            last = self._free_path(trainer, values, self.CHECKPOINT_NAME_LAST, self.last_model_path)
        newest = self._free_path(trainer, values, self.filename, *fallen) if is_kept else last
        self._saved_elapsed, began = trainer.state.elapsed, perf_counter()
        if newest:
            fallen.append(self.last_model_path)
            with self._undone_on_failure():
                self.best_k_models = {path or newest: score for path, score in kept.items()}
                self.last_model_path, self.current_score = last, score
                trainer.save_checkpoint(newest, self.save_weights_only)
                if last not in ("", newest):
                    self._point_last_at(trainer, newest)
            self._saved_batches, self._saved_step = trainer.state.total_batches, trainer.global_step
            self._remove(trainer, fallen)
        self._took = perf_counter() - began
        if self.verbose and trainer.is_global_zero and (newest or at != "end"):
            measured = f", {self.monitor} = {float(score):.5g}" if self.monitor else ""
            outcome = f"saved as {newest}" if newest else f"not among the best {self.save_top_k}"
            log.info("Step %d%s: %s.", trainer.global_step, measured, outcome)

    def _ranked(self, score: Tensor) -> tuple[dict[str, Tensor], list[str]]:
        """Return what to keep, best first, the new state under the name ``""``; and the others."""
        ranked = sorted(
            [*self.best_k_models.items(), ("", score)],
            key=lambda entry: float(entry[1]),
            reverse=self._prefers_high,
        )
        k = len(ranked) if self.save_top_k == -1 else self.save_top_k
        return dict(ranked[:k]), [path for path, _ in ranked[k:] if path]

    @property
    def _prefers_high(self) -> bool:
        return self.monitor is None or self.mode == "max"

    def _score(self, trainer: Trainer, at: At, metrics: Mapping[str, Tensor]) -> Tensor:
        """Return what the state is ranked by, shape ``()``: never NaN, infinite if unknown."""
        if self.monitor is None:
            return torch.tensor(trainer.state.total_batches)
        number = self._number(self.monitor, trainer, at, metrics)
        # An interrupted validation has seen a part of its data.
        if isnan(number) or trainer.interrupted:
            return torch.tensor(-inf if self._prefers_high else inf)
        return metrics[self.monitor].detach().cpu().clone()

    def _number(self, name: str, trainer: Trainer, at: At, metrics: Mapping[str, Tensor]) -> float:
        """Return the value called ``name``; NaN while it may still come.

        Raises:
            ConfigError: All that logs has had its turn, and nothing has logged it.
        """
        if name in COUNTS:
            return _epoch(trainer.state) if name == "epoch" else trainer.global_step
        if name in metrics:
            return metrics[name].item()
        validates = sum(trainer.num_val_batches) > 0
        if at != "end" and (trainer.state.validations > 0 or (at == "epoch" and not validates)):
            asked_by = "monitor" if name == self.monitor else "filename"
            raise missing(f"ModelCheckpoint({asked_by}={getattr(self, asked_by)!r})", name, metrics)
        if not self._has_said_missing and trainer.is_global_zero:
            self._has_said_missing = True
            log.warning(
                "ModelCheckpoint saves at step %d, where %r is not known yet: it counts as worst.",
                trainer.global_step,
                name,
            )
        return nan

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Tensor | float],
        filename: str | None = None,
        ver: int | None = None,
    ) -> str:
        """Return the path of a checkpoint.

        Args:
            metrics: What the names in the template stand for, ``epoch`` and ``step`` among them.
            filename: A template instead of the callback's own.
            ver: Version to tell it from others of the name.

        Raises:
            ConfigError: ``metrics`` lacks a name.
        """
        template = filename or self.filename
        for name in names_in(template):
            if name not in metrics:
                raise missing(f"ModelCheckpoint(filename={template!r})", name, metrics)
        values = {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        label = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        version = "" if ver is None else f"{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        name = f"{fill(template, values, label)}{version}{self.FILE_EXTENSION}"
        return name if self.dirpath is None else str(Path(self.dirpath) / name)

    def _free_path(
        self, trainer: Trainer, values: Mapping[str, float], template: str, *own: str
    ) -> str:
        """Return a path that nothing has, or one of ``own``, which may be replaced."""
        path, version = self.format_checkpoint_name(values, template), self.STARTING_VERSION
        while self.enable_version_counter and path not in own and trainer.checkpointer.exists(path):
            path = self.format_checkpoint_name(values, template, version)
            version += 1
        return str(trainer.broadcast(path))

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        # A checkpoint names itself as best and last, so the names are set before it is complete.
        before = self.best_k_models, self.last_model_path, self.current_score
        try:
            yield
        except BaseException:
            self.best_k_models, self.last_model_path, self.current_score = before
            raise

    def _point_last_at(self, trainer: Trainer, newest: str) -> None:
        linked = trainer.is_global_zero and link(
            newest, self.last_model_path, symbolic=self.save_last == "link"
        )
        if not trainer.broadcast(linked):
            trainer.save_checkpoint(self.last_model_path, self.save_weights_only)

    def _remove(self, trainer: Trainer, fallen: list[str]) -> None:
        in_use = {*self.best_k_models, self.last_model_path, ""}
        for path in fallen if trainer.is_global_zero else []:
            if path not in in_use:
                trainer.checkpointer.remove(path)


def _epoch(state: State) -> int:
    """Return the index of the epoch that the last batch was of."""
    return max(0, state.epoch - (state.batch == 0))
