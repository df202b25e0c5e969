"""The command line in a process that is one of many ranks: one of them speaks, and one writes."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.runtime.processes.world import World


def leads() -> bool:
    """Whether this process writes and speaks: unless it is another rank than the first."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def refuse(message: str) -> None:
    """Print a user's mistake, once for all ranks. Does not return where they have met."""
    if (world := _world()) is not None:
        world.watch.give_up(message)
    if leads():
        print(f"error: {message}", file=sys.stderr)


def part() -> None:
    """Leave the other ranks, at the end of the program."""
    if _world() is not None:
        from toolkit.runtime.processes.world import leave

        leave()


def _world() -> "World | None":
    """The ranks that this process has joined, if any; torch is not loaded to find out."""
    module = sys.modules.get("toolkit.runtime.processes.world")
    return module.joined() if module else None
