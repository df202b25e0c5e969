"""Rank and restarts of this process, from the environment of torchrun, Slurm or ``launch``."""

import os


def is_rank_zero() -> bool:
    """Whether this process prints and writes: the first rank, or the only process."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def restarted() -> bool:
    """Whether torchrun has restarted the ranks."""
    return bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
