"""One call of a Trainer's method, from wiring its run to taking it down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from . import checkpoints
from .manager import tell_everyone
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
            SIGTERM, so that what the shell would do next is not done.
    """
    run = trainer._run = assemble(trainer, request)
    trainer.is_running, trainer.folder = True, run.folder
    status: Status = "failed"
    try:
        with Signals(run), torch_flags(trainer):
            wire(run, request)
            yield run
        status = "success" if run.interrupted_by is None else "interrupted"
    except GeneratorExit:  # the iterator of a streamed prediction was closed
        status = "success"
        raise
    except BaseException as error:
        tell_everyone(run.hooks.on_exception, trainer, run.module, error, after=error)
        raise
    finally:
        if run.optimizers:
            trainer.position = checkpoints.position(run)
        take_down(run, status)
        trainer.is_running = False
    if run.interrupted_by is not None and not is_interactive():
        raise SystemExit(exit_code(run.interrupted_by))


def take_down(run: Run, status: Status) -> None:
    """End ``run``: tell ``teardown`` to everyone, close loggers and strategy, let the Module go."""
    steps: list[Callable[[], None]] = [
        *(
            (lambda hook=hook: hook(run.trainer, run.module, run.stage))
            for hook in run.hooks.teardown
        ),
        *((lambda logger=logger: logger.close(status)) for logger in run.loggers),
        run.strategy.close,
        lambda: release(run.module),
    ]
    tell_everyone([lambda step=step: step() for step in steps], after=sys.exc_info()[1])


def release(module: Module) -> None:
    """Make ``module`` a plain one again."""
    for name in ("_logged", "log"):
        module.__dict__.pop(name, None)
