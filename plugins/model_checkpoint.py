"""ModelCheckpoint: keeps the best states of a run, and the newest, where you say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from leyden.callback import Callback
from leyden.errors import CheckpointError
from leyden.locations import absolute, join
from leyden.rank_zero import on_first, rank_zero_warn

from .checkpoint_choices import INTERVALS, check_choices
from .checkpoint_folder import is_in, own_folder
from .checkpoint_names import checked_template, fill, free, names_in
from .checkpoint_numbers import Numbers
from .checkpoint_schedule import NOTHING, Schedule
from .checkpoint_writer import Outcome, Writer
from .monitored import checked_mode, missing
from .retention import Files, Rules, Save, Saved, arranged
from .timer import is_out_of_time

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.protocols import Checkpointer
    from leyden.trainer import Trainer

    from .checkpoint_schedule import At

log = logging.getLogger(__name__)


class ModelCheckpoint(Callback):
    """Saves checkpoints: the best by a metric, the newest, or all of them.

    Without an interval it saves after each validation, or at the end of each epoch in a run that
    has none; a validation due at the same step always comes first. A run that is interrupted, or
    stopped before its limits, saves once more.

    What is saved stays for any of the reasons that ``save_top_k`` and the ``keep_…`` arguments
    name. A file is deleted only after a newer one is complete, and only if this run, or the one it
    resumes, has written it. The names (best, last) point at complete files alone. With several
    ranks, rank 0 decides and all are told, by its own value of a metric that differs.

    Args:
        dirpath: Folder of the files, or its URL; ``checkpoints`` in the run's own if None.
        filename: Template such as ``"{epoch}-{val/loss:.2f}"``; ``"{epoch}-{step}"`` if None.
        monitor: Logged metric to rank by. None ranks by age, the newest first.
        verbose: Say what is saved, and what was not good enough.
        save_last: Keep the newest state as ``last``: True, or ``"link"`` for a symbolic link. Where
            that state is kept as another file too it takes no space of its own.
        save_top_k: How many of the best to keep: -1 for all, 0 for none.
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
        keep_newest: How many of the newest to keep.
        keep_every_n_train_steps: Keep, for good, the first state that is saved at or after each
            multiple of this many optimizer steps.
        keep_for: Keep each state at least this long.
        asynchronous: Save while training goes on: the state is copied to host memory, which takes
            as much of it as a checkpoint, and written in the background. Names change, files are
            deleted and errors are raised when it is complete; fit does not return before.
        when_busy: What a save does that is due while the one before is still written in the
            background: ``"wait"`` for it, or ``"skip"`` this one.
        when_failed: What a save does that fails, as on a full disk: ``"raise"`` ends training,
            ``"warn"`` goes on, and tries again when the next is due. Older files stay.
        save_on_exception: Save once more when an error ends training.
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
        keep_newest: int = 0,
        keep_every_n_train_steps: int | None = None,
        keep_for: timedelta | None = None,
        asynchronous: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        when_failed: Literal["raise", "warn"] = "raise",
        save_on_exception: bool = True,
    ) -> None:
        check_choices({name: value for name, value in locals().items() if name != "self"})
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
        self.enable_version_counter = enable_version_counter
        self.asynchronous, self.when_busy = asynchronous, when_busy
        self.when_failed, self.save_on_exception = when_failed, save_on_exception

        self._own_dirpath = None if dirpath is None else absolute(dirpath)
        self.dirpath = self._own_dirpath
        prefers_high = monitor is None or self.mode == "max"
        self._rules = Rules(
            save_top_k, keep_newest, keep_every_n_train_steps, keep_for, prefers_high
        )
        self._numbers = Numbers(monitor, prefers_high)
        intervals = (every_n_train_steps, train_time_interval, every_n_epochs)
        self._schedule = Schedule(*intervals, save_on_train_epoch_end, bool(save_last), max_share)
        self._writer = Writer(asynchronous, symbolic=save_last == "link")
        self._files, self._restored_dirpath = Files(), ""
        self._is_fitting = self._has_skipped = False
        self._raised: Exception | None = None

    @property
    def state_key(self) -> str:
        names = ("monitor", "mode", *INTERVALS, "save_weights_only")
        settings = (f"{name}={getattr(self, name)!r}" for name in names)
        return f"ModelCheckpoint({', '.join(settings)})"

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The best checkpoints and their scores, the very best first."""
        return {one.path: one.score for one in self._rules.best_of(self._files.kept)}

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
        """The worst of the best checkpoints; empty before the first."""
        return next(reversed(self.best_k_models), "")

    @property
    def last_model_path(self) -> str:
        """The complete checkpoint that stands for the newest state; empty where there is none."""
        return self._files.last

    @property
    def current_score(self) -> Tensor | None:
        """The monitored value of the newest checkpoint, shape ``()``."""
        return self._files.score

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": self.best_k_models,
            "kth_best_model_path": self.kth_best_model_path,
            "last_model_path": self.last_model_path,
            "kept": self._files.as_state(),
            "doomed": list(self._files.doomed),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._files = Files.from_state(state_dict)
        self._restored_dirpath = state_dict["dirpath"] or ""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.fast_dev_run:
            return
        self.dirpath = self._own_dirpath or own_folder(trainer, self._restored_dirpath)
        on_first(trainer.strategy, partial(trainer.checkpointer.prepare, self.dirpath))
        if self.FILE_EXTENSION == ModelCheckpoint.FILE_EXTENSION:
            self.FILE_EXTENSION = trainer.checkpointer.extension
        is_new = trainer.state.total_batches == 0
        is_scored = is_new and self.monitor is not None and "start" in trainer.validate_at
        self._schedule.begin(trainer.state, is_scored)
        self._writer.prepare()
        self._is_fitting, self._raised = True, None
        self._has_skipped = False
        if is_new:
            self._files = Files()
        else:
            self._forget_absent(trainer)

    def _forget_absent(self, trainer: Trainer) -> None:
        """Keep of the restored paths those that are there, in the folder of this run."""
        folder, exists = str(self.dirpath), trainer.checkpointer.exists
        known = {*self._files.paths, *self._files.doomed}
        kept = on_first(
            trainer.strategy, lambda: {p for p in known if is_in(folder, p) and exists(p)}
        )
        if (lost := self._files.paths - kept) and trainer.is_global_zero:
            log.warning(
                "ModelCheckpoint no longer tracks %s: not in %s", ", ".join(sorted(lost)), folder
            )
        self._files = self._files.only(kept)

    def on_save_point(self, trainer: Trainer, module: Module, at: At) -> None:
        state, schedule = trainer.state, self._schedule
        if self._writer.wants_memory:
            self._writer.reserve(trainer, module)
        if self._writer.save is not None and (at == "end" or self._writer.is_seen_done(trainer)):
            self._finish(trainer)
        is_validated = state.validated_batch == state.total_batches
        if at == "step" and schedule.waits_for_validation and not is_validated:
            return
        if state.total_batches == schedule.saved_batches or trainer.fast_dev_run:
            return
        # A run cut by a signal or the clock is resumed from here. Clocks differ.
        must = at == "end" and trainer.broadcast(
            trainer.interrupted or is_out_of_time(trainer.callbacks)
        )
        if must or (at == "end" and self._has_skipped) or schedule.is_due(trainer, at):
            self._save(trainer, at, must)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        if not self._is_fitting:
            return
        if trainer.interrupted and not isinstance(exception, Exception):
            self._writer.stop()  # a second signal ends everything at once
        if self._writer.save is not None:
            self._attempt(self._finish_alone)
        if (
            self.save_on_exception
            and isinstance(exception, Exception)
            and exception is not self._raised
            and self._schedule.has_unsaved(trainer.state)
            and trainer.world_size == 1  # the others may never come to this point
        ):
            self._attempt(partial(self._save, trainer, "end", must=True))

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._is_fitting = False
        try:
            if self._writer.save is not None:
                self._finish_alone()
        finally:
            self._writer.free()

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do what must not hide an error that came first."""
        try:
            action()
        except Exception as error:
            log.error("ModelCheckpoint could not save the run as it ended: %s", error)

    def _save(self, trainer: Trainer, at: At, must: bool = False) -> None:
        """Write the state if it is to be kept, or begin to."""
        if self._writer.save is not None:
            if self.when_busy == "skip" and not trainer.broadcast(self._writer.is_done()):
                log.info(
                    "Step %d is not saved: that of step %d is not complete yet.",
                    trainer.global_step,
                    self._writer.save.step,
                )
                self._has_skipped = True
                return
            self._finish(trainer)
        self._schedule.saved_elapsed, began = trainer.state.elapsed, perf_counter()
        save, error = self._planned(trainer, at, must)
        if error is not None:
            self._conclude(save, Outcome(save.before, False, error))
        elif save.path:
            self._begin(trainer, save)
            if at == "end" or not self.asynchronous:
                self._finish(trainer)
        elif self.verbose and trainer.is_global_zero and at != "end":
            self._say(save, f"not among the best {self.save_top_k}")
        self._schedule.took = perf_counter() - began

    def _planned(self, trainer: Trainer, at: At, must: bool) -> tuple[Save, Exception | None]:
        """Return where the state goes and what is kept with it, or why this cannot be known."""
        metrics = trainer.callback_metrics  # to read a metric object may take every rank
        names = {*names_in(self.filename), *names_in(self.CHECKPOINT_NAME_LAST)}
        before, with_last = self._files, bool(self.save_last)

        def plan() -> tuple[Save, Exception | None]:
            values = self._numbers.named(names, self.filename, metrics, trainer, at)
            score = self._numbers.score(metrics, trainer, at, is_cut=must)
            new = Saved("", score, trainer.global_step, time())
            path = partial(self._free_path, trainer.checkpointer, values)
            named, last = partial(path, self.filename), partial(path, self.CHECKPOINT_NAME_LAST)
            try:
                return arranged(before, new, self._rules, named, last, with_last, must), None
            except CheckpointError as failure:
                return Save("", new.step, before, before), failure

        return on_first(trainer.strategy, plan)

    def _begin(self, trainer: Trainer, save: Save) -> None:
        # A checkpoint names itself as best and last, so it is made as if it were complete.
        self._files = save.after
        try:
            checkpoint = trainer.dump_checkpoint(self.save_weights_only)
        finally:
            self._files = save.before
        self._writer.begin(trainer, checkpoint, save)
        self._schedule.mark(trainer.state)
        self._has_skipped = False

    def _finish(self, trainer: Trainer) -> None:
        """Wait until the save that was begun is complete, and take over what there is then."""
        save, outcome = self._writer.finish(trainer)
        if self.verbose and trainer.is_global_zero and outcome.is_saved:
            self._say(save, f"saved as {save.path}")
        self._conclude(save, outcome)

    def _finish_alone(self) -> None:
        self._conclude(*self._writer.finish_alone())

    def _conclude(self, save: Save, outcome: Outcome) -> None:
        self._files, error = outcome.files, outcome.error
        if not outcome.is_saved:
            self._schedule.saved_batches = NOTHING
        if error is None:
            return
        if self.when_failed == "raise":
            self._raised = error
            raise error
        going_on = f"Training goes on from step {save.step}, and the next due save tries again."
        rank_zero_warn(f"{str(error).rstrip('.') or repr(error)}. {going_on}")

    def _say(self, save: Save, outcome: str) -> None:
        score, measured = save.after.score, ""
        if self.monitor and score is not None:
            measured = f", {self.monitor} = {float(score):.5g}"
        log.info("Step %d%s: %s.", save.step, measured, outcome)

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
        return name if self.dirpath is None else join(self.dirpath, name)

    def _free_path(
        self, checkpointer: Checkpointer, values: Mapping[str, float], template: str, *own: str
    ) -> str:
        """Return a path that nothing has, or one of ``own``, which may be replaced."""

        def is_taken(path: str) -> bool:
            return self.enable_version_counter and path not in own and checkpointer.exists(path)

        path_of = partial(self.format_checkpoint_name, values, template)
        return free(path_of, is_taken, self.STARTING_VERSION)
