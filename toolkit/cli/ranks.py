"""The command line in a process that is one of many ranks: one of them speaks, and one writes."""

import atexit
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.runtime.process_group.group import World


def is_rank_zero() -> bool:
    """Whether this process writes and speaks: unless it is another rank than the first."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def restarted() -> bool:
    """Whether torchrun has started the ranks again."""
    return bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def elsewhere() -> list[str]:
    """Options that have another rank than the first leave nothing in the job's folder.

    What Hydra writes nevertheless is in a folder that goes with the process.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return [
        "hydra.output_subdir=null",
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
    ]


def exit_with_error(message: str) -> None:
    """Print a user's mistake, once for all ranks. Does not return where they have met."""
    if (world := _world()) is not None:
        world.watch.give_up(message)
    if is_rank_zero():
        print(f"error: {message}", file=sys.stderr)


def part() -> None:
    """Leave the other ranks, at the end of the program."""
    if _world() is not None:
        from toolkit.runtime.process_group.group import leave

        leave()


def _world() -> "World | None":
    """The ranks that this process has joined, if any; torch is not loaded to find out."""
    module = sys.modules.get("toolkit.runtime.process_group.group")
    return module.joined() if module else None
