"""One call of a Trainer's method, from wiring its run to taking it down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from . import resume
from .compiled import compiled_once
from .errors import ConfigError
from .manager import tell_everyone
from .requeue import requeue_if_cut
from .signals import Signals, exit_code, is_interactive
from .torch_flags import torch_flags
from .wiring import Request, assemble, wire

if TYPE_CHECKING:
    from .module import Module
    from .run import Run
    from .trainer import Trainer

Status = Literal["success", "failed", "interrupted"]


@contextmanager
def session(trainer: Trainer, request: Request) -> Iterator[Run]:
    """Wire a run, hand it out, and take it down whatever happens inside.

    Raises:
        SystemExit: A signal ended the run, and nobody sits at a prompt: 130 for SIGINT, 143 for
            SIGTERM, 138 for SIGUSR1, so that what the shell would do next is not done.
    """
    refuse_nested(trainer, request.module)
    run = trainer._run = assemble(trainer, request)
    trainer.is_running = True
    status: Status = "failed"
    if request.stage == "fit":
        run.state.stop = None
    try:
        with Signals(run), torch_flags(trainer), lent_log(run.callbacks, run.module):
            wire(run, request)
            with compiled_once(run):
                yield run
        status = "success" if run.interrupted_by is None else "interrupted"
    except GeneratorExit:  # the iterator of a streamed prediction was closed
        status = "success"
        raise
    except BaseException as error:
        # A worker that has died is told of by a signal, which would break off a save just as well.
        tell_everyone([source.close for source in run.sources()], after=error)
        tell_everyone(run.hooks.on_exception, trainer, run.module, error, after=error)
        raise
    finally:
        try:
            take_down(run, status)
        finally:
            trainer.is_running = False
    # One that came after the last batch has changed nothing, and is answered all the same.
    run.interrupted_by = run.interrupted_by or run.agreement.signal
    if run.interrupted_by is not None and not is_interactive():
        requeue_if_cut(run)
        raise SystemExit(exit_code(run.interrupted_by))


def refuse_nested(trainer: Trainer, module: Module) -> None:
    """Refuse a run inside of another one of the same Trainer or Module, which would undo it.

    Raises:
        ConfigError: There is one.
    """
    for owner, whose in (
        (trainer, "This Trainer"),
        (module._trainer, "The Trainer of this Module"),
    ):
        if owner is not None and owner.is_running:
            raise ConfigError(
                f"{whose} is in the middle of its {owner.stage}, and one run cannot begin inside "
                "another. Wait for it to end, close() its stream of predictions, or use another "
                "Trainer and a copy.deepcopy of the Module."
            )


def take_down(run: Run, status: Status) -> None:
    """End ``run``: tell ``teardown`` to everyone, close loggers and strategy, let the Module go."""
    steps: list[Callable[[], None]] = [
        lambda: leave_position(run, status),
        *(
            (lambda hook=hook: hook(run.trainer, run.module, run.stage))
            for hook in run.hooks.teardown
        ),
        *((lambda logger=logger: logger.close(status)) for logger in run.loggers),
        *((lambda source=source: source.close()) for source in run.sources()),
        run.strategy.close,
        *run.undo,
        lambda: release(run.module),
    ]
    error = sys.exc_info()[1]
    # A stream that is closed is no error, so one of theirs is raised where it is closed.
    after = None if isinstance(error, GeneratorExit) else error
    tell_everyone([lambda step=step: step() for step in steps], after=after)


def leave_position(run: Run, status: Status) -> None:
    """Leave in memory what the next fit of the same Module goes on from."""
    if run.optimizers:
        if run.window.used and status != "failed":
            run.strategy.share_gradients()
        run.trainer.position = resume.position(run)


@contextmanager
def lent_log(callbacks: Sequence[Any], module: Module) -> Iterator[None]:
    """Let callbacks log as Lightning's do inside: their ``self.log`` is the Module's.

    One that has something of its own under that name keeps it.
    """
    lent = [
        (callback, name)
        for callback in callbacks
        for name in ("log", "log_dict")
        if not hasattr(callback, name)
    ]
    for callback, name in lent:
        setattr(callback, name, getattr(module, name))
    try:
        yield
    finally:
        for callback, name in lent:
            callback.__dict__.pop(name, None)


def release(module: Module) -> None:
    """Make ``module`` a plain one again."""
    module.untoggle_optimizer()
    module.__dict__.pop("_logged", None)
