"""Slurm: a job that was told its time is running out goes back into the queue."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from .rank_zero import rank_zero_info, rank_zero_warn
from .signals import USR1, reason

if TYPE_CHECKING:
    from .run import Run

SWITCH = "LEYDEN_REQUEUE"
"""In the environment: ``0`` leaves requeueing to the user."""
PATIENCE = 60.0
"""Seconds that Slurm is given to answer."""


def requeue_if_cut(run: Run) -> None:
    """Put this Slurm job back into its queue if SIGUSR1 cut the training that ``run`` was.

    Only once all is saved and closed: Slurm ends the job as it takes it back.
    """
    job = job_id()
    if job is None or run.interrupted_by != USR1 or run.strategy.rank != 0:
        return
    if run.stage != "fit" or run.state.stop != reason(USR1):
        return
    if os.environ.get(SWITCH, "1") == "0":
        rank_zero_info("%s=0: job %s is not put back into the queue.", SWITCH, job)
    elif not any(getattr(callback, "is_saver", False) for callback in run.callbacks):
        rank_zero_warn(
            f"Job {job} is not put back into the queue: nothing saves checkpoints, so it would "
            "begin anew each time. Leave enable_checkpointing on, or pass a ModelCheckpoint."
        )
    else:
        requeue(job)


def job_id() -> str | None:
    """Return what Slurm calls this job, a task of an array included; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or None


def requeue(job: str) -> None:
    """Ask Slurm to put ``job`` back into its queue, and say so if it refuses."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        problem = (done.stderr or done.stdout).strip() if done.returncode else ""
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        problem, failed = str(error), True
    if failed:
        rank_zero_warn(
            f"Job {job} is not back in the queue: {problem}. It is saved: run "
            f"'{' '.join(command)}', or submit it again with the same command."
        )
    else:
        rank_zero_info("Job %s is back in the queue, and goes on where it was.", job)
