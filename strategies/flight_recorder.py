"""Torch's flight recorder: the last collectives of each rank, written to a file when they hang."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d

from leyden.errors import ConfigError

ENTRIES = 2000
"""Collectives that are remembered where no number is given."""
SIZE = "TORCH_FR_BUFFER_SIZE"
PATH = "TORCH_FR_DUMP_TEMP_FILE"
FOLDER = "flight_recorder"
"""In the run's folder; its files are ``rank_0``, ``rank_1`` …"""


class FlightRecorder:
    """Remembers the last ``entries`` collectives of this rank.

    NCCL's watchdog writes them when one of them takes too long, and `dump` whenever it is called.
    They are pickled; ``torchfrtrace`` compares those that NCCL writes.

    Args:
        entries: How many; True for 2000.

    Raises:
        ConfigError: It is no number, or the process groups are made already.
    """

    def __init__(self, entries: bool | int) -> None:
        if not isinstance(entries, int) or entries < 1:
            raise ConfigError(
                f"flight_recorder={entries!r} must be True, False, or how many collectives to "
                "remember, 1 or more."
            )
        self.entries = ENTRIES if entries is True else entries
        self.path: str | None = None

    def begin(self) -> None:
        """Set what torch reads when it makes process groups.

        Raises:
            ConfigError: They are made already.
        """
        if dist.is_initialized() and os.environ.get(SIZE) != str(self.entries):
            raise ConfigError(
                "flight_recorder= comes too late: torch.distributed is initialised here already. "
                f"Set {SIZE}={self.entries} in the environment that it is started with."
            )
        os.environ[SIZE] = str(self.entries)
        os.environ.update(TORCH_NCCL_DUMP_ON_TIMEOUT="1", TORCH_NCCL_ENABLE_MONITORING="1")

    def write_to(self, folder: str) -> str:
        """Choose where the files go, which is read when they are written; return their prefix."""
        path = Path(folder, FOLDER)
        path.mkdir(parents=True, exist_ok=True)
        self.path = str(path / "rank_")
        os.environ[PATH] = self.path
        return self.path

    def dump(self, rank: int, backend: str) -> None:
        """Write what is remembered now."""
        if self.path is not None:
            # NCCL keeps its own.
            name = "_dump_nccl_trace" if "nccl" in backend else "_dump_fr_trace"
            Path(f"{self.path}{rank}").write_bytes(getattr(_distributed_c10d, name)())
