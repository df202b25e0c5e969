"""Rank and restarts of this process, from the environment of torchrun, Slurm or ``launch``."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def is_rank_zero() -> bool:
    """Return whether this process prints and writes: the first rank, or the only process."""
    # A stray RANK of another tool must not silence this process: it counts only within a
    # WORLD_SIZE.
    rank = os.environ.get("RANK", "")
    n_ranks = os.environ.get("WORLD_SIZE", "")
    return not (
        rank.isdecimal() and n_ranks.isdecimal() and 0 < int(rank) < int(n_ranks)
    )


def restarted() -> bool:
    """Return whether torchrun has restarted the ranks."""
    return bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def report_error(message: str) -> None:
    """Have torchrun, if it started this process, end its own output with ``message``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": message, "extraInfo": extra}})
            )
