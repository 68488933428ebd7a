"""The loops, top to bottom. To see what a run does, read this file.

setup
fit
    on_fit_start
    on_sanity_check_start, a few batches of validate, on_sanity_check_end
    on_train_start
    at the start, if asked or cut short before: validate, on_save_point("step")
    for each epoch
        on_train_epoch_start
        for each batch
            first of a step: on_before_zero_grad, zero_grad
            on_train_batch_start
            training_step
            on_before_backward, backward, on_after_backward
            last of a step: on_before_optimizer_step, clip, optimizer step, per-step schedules
            on_train_batch_end
            when due: log
            when due: validate
                on_validation_start
                on_validation_model_eval
                on_validation_epoch_start
                for each batch
                    on_validation_batch_start, validation_step, on_validation_batch_end
                on_validation_epoch_end
                on_validation_end
                on_validation_model_train
            last of a step: on_save_point("step")
        on_train_epoch_end
        per-epoch schedules
        on_save_point("epoch")
    at the end, if asked: validate
    on_save_point("end")
    on_train_end
    on_fit_end
test
    on_test_start
    on_test_model_eval
    on_test_epoch_start
    on_test_batch_start, test_step, on_test_batch_end
    on_test_epoch_end
    on_test_end
    on_test_model_train
predict
    on_predict_start
    on_predict_model_eval
    on_predict_epoch_start
    on_predict_batch_start, predict_step, on_predict_batch_end
    on_predict_epoch_end
    on_predict_end
    on_predict_model_train
on_save_checkpoint and on_load_checkpoint when a checkpoint is written or read
on_exception when something is raised
teardown
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import rng
from .inference import forget_inference
from .metrics import Logged, Readings, to_floats
from .pace import in_pace
from .rank_zero import rank_zero_info
from .step import open_window, refuse_standstill, step_schedule, update, warn_of_unheld

if TYPE_CHECKING:
    from .run import Evaluation, Run


def fit(run: Run) -> None:
    """Train until a limit is reached or somebody asks to stop; the reason is in ``state.stop``."""
    state, hooks, trainer, module = run.state, run.hooks, run.trainer, run.module
    for hook in hooks.on_fit_start:
        hook(trainer, module)
    sanity_check(run)
    module.__dict__["_logged"] = run.metrics.train
    for hook in hooks.on_train_start:
        hook(trainer, module)
    go_on_drawing(run)
    run.agreement.settle()
    validate_first(run)

    begun_at, begun_step = state.total_batches, state.step
    idle = 0
    while not is_stopping(run):
        steps_before = state.step
        train_epoch(run)
        idle = idle + 1 if state.step == steps_before else 0
        refuse_standstill(run, idle)
    if state.total_batches == begun_at:
        rank_zero_info("Nothing was trained: %s. A higher limit would train on.", state.stop)
    elif state.step == begun_step and run.optimizers:
        rank_zero_info("No step updated any weights: each loss was None, or was left out.")

    if run.interrupted_by is None:
        send(run, run.metrics.so_far(run.metrics.train))  # of an epoch left in its middle
        if "end" in run.validate_at and state.validated_batch != state.total_batches:
            validate(run)
    module.__dict__["_logged"] = None
    run.losses.read()
    for hook in hooks.on_save_point:
        hook(trainer, module, "end")
    for hook in hooks.on_train_end:
        hook(trainer, module)
    for hook in hooks.on_fit_end:
        hook(trainer, module)


def validate_first(run: Run) -> None:
    """Hold the validation that is due before any batch: one asked for, or one that was cut."""
    state = run.state
    if state.pending_validation or ("start" in run.validate_at and state.total_batches == 0):
        validate(run)
        if not (state.pending_validation or run.window.used):
            for hook in run.hooks.on_save_point:
                hook(run.trainer, run.module, "step")


def go_on_drawing(run: Run) -> None:
    """Let a resumed run's random generators go on from where they were, whatever hooks drew."""
    if run.resumed_rng is not None:
        rng.restore(run.resumed_rng)


def begin_epoch(run: Run) -> Generator[tuple[Any, bool]]:
    """Return the batches of the epoch that begins, or the rest of the one that goes on."""
    run.reload()
    for hook in run.hooks.on_train_epoch_start:
        hook(run.trainer, run.module)
    if run.state.batch:
        go_on_drawing(run)  # the hooks' turn was before the run was saved
    run.resumed_rng = None
    return run.train.batches(run.state.epoch)


def train_epoch(run: Run) -> None:
    """Train on one pass over the data, or on the rest of it."""
    state, hooks, trainer, module = run.state, run.hooks, run.trainer, run.module
    logged, n = run.metrics.train, run.accumulate
    is_last = run.epoch_is_skipped = False
    batches = begin_epoch(run)
    logged.in_batch = True
    for batch, is_last in batches:
        logged.batch, logged.size = batch, None
        run.is_last_batch = is_last
        batch_idx, steps_before = state.batch, state.step
        closes = is_last or (batch_idx + 1) % n == 0
        if not run.window.open:
            open_window(run, batch_idx)
        run.is_in_step = True
        for hook in hooks.on_train_batch_start:
            hook(trainer, module, batch, batch_idx)
        if run.epoch_is_skipped:
            break

        outputs = run.train_batch(run, batch, batch_idx, closes)
        state.batch, state.total_batches = batch_idx + 1, state.total_batches + 1
        run.is_in_step = False

        for hook in hooks.on_train_batch_end:
            hook(trainer, module, outputs, batch, batch_idx)
        del outputs
        run.agreement.tick()
        stepped = state.step != steps_before
        if stepped and state.step % run.log_every_n_steps == 0:
            log_step(run)
        if run.validation_due(state, is_last, stepped):
            validate(run)
            if state.pending_validation:  # it was interrupted, and is to come before all else
                is_last = False
                break
        if closes:
            for hook in hooks.on_save_point:
                hook(trainer, module, "step")
            asked = state.stop is not None or state.step >= run.max_steps
            # The last batch's epoch is counted first: limits are limits of complete epochs.
            if asked and not is_last and is_stopping(run):
                break
        if run.epoch_is_skipped:
            break
    else:
        if not is_last:
            is_last = True
            end_early(run)
    batches.close()

    logged.in_batch = run.is_in_step = False
    if state.pending_validation:
        return
    if run.window.used:
        update(run)  # the epoch was left inside a step
    run.window.open = False
    if is_last or run.epoch_is_skipped:
        end_epoch(run)


def end_early(run: Run) -> None:
    """Do what a last batch does, where the loader gave fewer batches than its ``len()``."""
    state, stepped = run.state, run.window.used > 0
    if stepped:
        update(run)
        if state.step % run.log_every_n_steps == 0:
            log_step(run)
    if state.validated_batch != state.total_batches and run.validation_due(state, True, stepped):
        validate(run)


def end_epoch(run: Run) -> None:
    """End a complete pass: its metrics, per-epoch schedules, and the count."""
    state, hooks, trainer, module = run.state, run.hooks, run.trainer, run.module
    warn_of_unheld(run)
    run.is_in_step = True  # an error from here on leaves the end of the epoch half done
    run.metrics.share(run.metrics.train)
    for hook in hooks.on_train_epoch_end:
        hook(trainer, module)
    send(run, run.metrics.finish(run.metrics.train))
    if module.automatic_optimization and state.step:  # a schedule follows updates
        for config in run.schedulers:
            if config.interval == "epoch" and (state.epoch + 1) % config.frequency == 0:
                step_schedule(run, config)
    state.epoch, state.batch, run.is_in_step = state.epoch + 1, 0, False
    run.agreement.settle()
    for hook in hooks.on_save_point:
        hook(trainer, module, "epoch")


def is_stopping(run: Run) -> bool:
    """Decide whether training ends here, and leave the reason in ``state.stop``."""
    state = run.state
    if state.step >= run.max_steps:
        state.stop = f"max_steps={run.max_steps} reached"
    elif state.epoch >= run.max_epochs:
        state.stop = f"max_epochs={run.max_epochs} reached"
    elif run.train.length == 0:
        state.stop = "limit_train_batches=0 leaves nothing to train on"
    elif run.interrupted_by is None and (
        state.step < run.min_steps or state.epoch < run.min_epochs
    ):
        # Whoever asked to stop will ask again at their next check if the reason still holds.
        state.stop = None
    return state.stop is not None


def log_step(run: Run) -> None:
    """Send the values logged in this step to the loggers; this waits for the device."""
    run.losses.read()
    if run.state.step == run.log_every_n_steps:
        warn_of_unheld(run)
    send(run, run.metrics.train.unsent_values())


def send(run: Run, values: dict[str, Any]) -> None:
    """Send ``values`` to the loggers at the current step."""
    if values and run.loggers and run.strategy.rank == 0 and run.phase != "sanity":
        numbers = {"epoch": run.state.epoch, **to_floats(values)}
        for logger in run.loggers:
            logger.log_metrics(numbers, run.state.step)


def sanity_check(run: Run) -> None:
    """Try a few validation batches, so that a mistake there shows before hours of training."""
    evaluation = run.evaluations.get("validate")
    if not run.sanity_batches or evaluation is None or run.state.total_batches:
        return
    if any(isinstance(source.loader, Iterator) for source in evaluation.sources):
        return  # what can be read once is for the validation
    run.phase = "sanity"
    kept, run.metrics.finished = run.metrics.finished, Readings({}, {}, {})
    for hook in run.hooks.on_sanity_check_start:
        hook(run.trainer, run.module)
    with rng.isolated():
        evaluate(run, evaluation, run.sanity_batches)
    run.metrics.finished = kept
    for hook in run.hooks.on_sanity_check_end:
        hook(run.trainer, run.module)
    run.phase = "train"


def validate(run: Run) -> None:
    """Validate during training, which goes on as if nothing had been drawn or kept."""
    state = run.state
    run.phase = "validate"
    before = state.validations, state.validated_batch
    state.pending_validation = True
    try:
        with rng.isolated():
            state.validations, state.validated_batch = before[0] + 1, state.total_batches
            state.pending_validation = not evaluate(run, run.evaluations["validate"])
    finally:
        if state.pending_validation:
            state.validations, state.validated_batch = before
    run.agreement.settle()
    # From its end on: one that takes longer than the interval would follow itself at once.
    state.validated_at = state.elapsed
    run.phase = "train"
    run.module.__dict__["_logged"] = run.metrics.train


def evaluate(run: Run, evaluation: Evaluation, limit: int | None = None) -> bool:
    """Run every batch of every loader through the evaluation's step, without gradients.

    Returns:
        Whether it came to its end: a part of an evaluation is no result.
    """
    trainer, module = run.trainer, run.module
    with evaluation_mode(run, evaluation) as logged:
        for dataloader_idx in range(len(evaluation.sources)):
            logged.begin_loader(dataloader_idx, len(evaluation.sources))
            logged.in_batch = True
            for batch_idx, batch in in_pace(run, evaluation, dataloader_idx, limit):
                if run.interrupted_by is not None:
                    return False
                logged.batch, logged.size = batch, None
                # Batches are fetched outside of it: a loader may keep and train on them later.
                with evaluation.no_grad():
                    evaluate_batch(run, evaluation, batch, batch_idx, dataloader_idx)
            logged.in_batch = False
            run.metrics.end_loader(logged)
        run.metrics.share(logged)
        with evaluation.no_grad():
            for hook in evaluation.on_epoch_end:
                hook(trainer, module)
        send(run, run.metrics.finish(logged))
        module.__dict__["_logged"] = None
        run.metrics.evaluation = None
        for hook in evaluation.on_end:
            hook(trainer, module)
    return True


def evaluate_batch(
    run: Run, evaluation: Evaluation, batch: Any, batch_idx: int, dataloader_idx: int
) -> Any:
    """Return what the evaluation's step returns for one batch."""
    trainer, module = run.trainer, run.module
    for hook in evaluation.on_batch_start:
        hook(trainer, module, batch, batch_idx, dataloader_idx)
    place = (batch_idx, dataloader_idx) if evaluation.takes_index else (batch_idx,)
    outputs = evaluation.step(batch, *place)
    for hook in evaluation.on_batch_end:
        hook(trainer, module, outputs, batch, batch_idx, dataloader_idx)
    return outputs


def predict(run: Run) -> Generator[tuple[int, Any]]:
    """Yield the index of the loader and the prediction of each batch, in order."""
    trainer, module = run.trainer, run.module
    evaluation = run.evaluations["predict"]
    with evaluation_mode(run, evaluation):
        module.__dict__["_logged"] = None
        for dataloader_idx in range(len(evaluation.sources)):
            for batch_idx, batch in in_pace(run, evaluation, dataloader_idx):
                if run.interrupted_by is not None:
                    return
                # The mode ends before the value leaves: the caller's code runs as it is written.
                with evaluation.no_grad():
                    outputs = evaluate_batch(run, evaluation, batch, batch_idx, dataloader_idx)
                yield dataloader_idx, outputs
                del outputs
        with evaluation.no_grad():
            for hook in evaluation.on_epoch_end:
                hook(trainer, module)
        for hook in evaluation.on_end:
            hook(trainer, module)


@contextmanager
def evaluation_mode(run: Run, evaluation: Evaluation) -> Iterator[Logged]:
    """Put the module in eval mode inside, and every part of it back in its own mode after."""
    trainer, module = run.trainer, run.module
    logged = run.metrics.begin_evaluation()
    module.__dict__["_logged"] = logged
    for hook in evaluation.on_start:
        hook(trainer, module)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        for hook in evaluation.on_model_eval:
            hook(trainer, module)
        with evaluation.no_grad():
            for hook in evaluation.on_epoch_start:
                hook(trainer, module)
        yield logged
    finally:
        for part, mode in modes:
            part.training = mode
        run.metrics.evaluation = None
        forget_inference(module)
    for hook in evaluation.on_model_train:
        hook(trainer, module)
