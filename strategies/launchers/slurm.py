"""Slurm: the processes that ``srun`` has started find each other by its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from leyden.errors import ConfigError


class Slurm:
    """Reads a step's variables. It starts nothing: ``srun`` does, one task for each device."""

    max_nodes = 0

    def joins(self) -> bool:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2 or "SLURM_PROCID" not in os.environ:
            return False
        take = os.environ
        node = int(take.get("SLURM_NODEID", "0"))
        tasks = _tasks(take.get("SLURM_STEP_TASKS_PER_NODE", take["SLURM_STEP_NUM_TASKS"]))
        job, step = (int(take.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        found = {
            "RANK": take["SLURM_PROCID"],
            "LOCAL_RANK": take.get("SLURM_LOCALID", "0"),
            "WORLD_SIZE": take["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(tasks[node]),
            "MASTER_ADDR": first_host(take.get("SLURM_STEP_NODELIST", "localhost")),
            "MASTER_PORT": str(15000 + (job * 7 + step) % 20000),
        }
        for name, value in found.items():
            os.environ.setdefault(name, value)
        return True

    def launch(self, call: Callable[[], Any] | None, count: int) -> Any:
        raise ConfigError(
            f"Slurm's srun starts the {count} processes. Run: srun --ntasks={count} python …"
        )


def _tasks(text: str) -> list[int]:
    """Return the tasks of each node, which Slurm writes as ``2(x3),1``."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not as Slurm writes it, such as '2(x3),1'. "
                "Start the run with srun."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a list that Slurm writes as ``gpu[003-007,9],login``."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        return "localhost"
    return found[1] + (found[2] or "") + (found[3] or "")
