"""Find the rank to blame when a job is stuck, from what each rank does and waits for.

Nothing here talks to a process: :mod:`toolkit.runtime.process_group.watch` collects the facts.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class RankStatus(IntEnum):
    """State of a rank. It reports the first three itself; others observe the last two."""

    RUNNING = 0
    ENDED = 1  # it has finished, or was asked to end by a signal
    FAILED = 2  # it has a diagnosis
    DEAD = 3  # its process is gone
    SILENT = 4  # its record is old


class Record(NamedTuple):
    """What a rank reports about itself, or what another rank sees of it."""

    what: object = "start"  # instruction that it is at, or words
    step: int | None = None
    peers: tuple[int, ...] = ()  # ranks that it waits for there
    since: float = 0.0  # when it came there, in seconds of its own clock
    now: float = 0.0  # its clock when it wrote this
    status: int = RankStatus.RUNNING
    error: str = ""  # of the backend where it waited; the diagnosis if it has failed
    host: str = ""  # its machine, if that is not the reader's own

    def encode(self) -> str:
        """Return the record as JSON."""
        return json.dumps(self._replace(what=str(self.what)[:2000]))

    @classmethod
    def decode(cls, text: str | bytes) -> "Record":
        """Return the record that :meth:`encode` wrote."""
        what, step, peers, *rest = json.loads(text)
        return cls(what, step, tuple(peers), *rest)

    @property
    def seconds(self) -> float:
        """Seconds for which the rank has been there."""
        return self.now - self.since

    @property
    def position(self) -> str:
        """Step and instruction; on another machine, where it was last seen."""
        place = f"{self.what}" if self.step is None else f"in step {self.step} at {self.what}"
        return f"last seen {place}" if self.host else place


class Diagnosis(NamedTuple):
    """Reason why the job ends: the rank at fault, None if no single one is, and a sentence."""

    blamed: int | None
    message: str


def diagnose(
    ranks: Mapping[int, Record], me: int, timeout: float, patience: float
) -> Diagnosis | None:
    """Find the rank that keeps rank ``me`` waiting; None while there is no reason to end.

    ``patience`` is the time left in which a better reason than a lost connection may appear.
    """
    mine = ranks[me]
    late, lost = mine.seconds >= timeout, bool(mine.error) and not patience
    queue = [me]  # then the ranks that it waits for, directly or not; nearest first
    for waiter in queue:
        if ranks[waiter].status == RankStatus.RUNNING:
            queue += (r for r in ranks[waiter].peers if r in ranks and r not in queue)
    waited = queue[1:]
    everyone = [*waited, *(r for r in ranks if r not in queue)]
    stuck = [r for r in waited if not ranks[r].peers and ranks[r].seconds >= timeout]
    stalled = f"has stalled: for {timeout:g} s it has not"
    # The best reason first: a dead rank explains all that others show.
    for status, among, enough, how in (
        (RankStatus.DEAD, everyone, True, "has died (its process is gone)"),
        (RankStatus.ENDED, waited, late or lost, "has ended (it finished, or by a signal)"),
        (RankStatus.SILENT, everyone, late, f"{stalled} answered (stopped, or its network hangs)"),
        (RankStatus.RUNNING, stuck, late, f"{stalled} moved (it runs; if slow, raise timeout)"),
    ):
        for rank in among if enough else ():
            if ranks[rank].status == status:
                waiter = next((r for r in queue if rank in ranks[r].peers), me)
                waits = "waited for it" if rank in ranks[waiter].peers else "was"
                on = f" (on {ranks[rank].host})" if ranks[rank].host else ""
                what = f"rank {rank}{on} {how}, {ranks[rank].position}"
                return Diagnosis(rank, f"{what}; rank {waiter} {waits} {ranks[waiter].position}")
    if not lost:
        return None
    peers = [r for r in mine.peers if r != me and r in ranks]
    ends = [r for r in peers if ranks[r].error and me in ranks[r].peers] or peers
    if not ends:
        return Diagnosis(None, f"rank {me} cannot continue, {mine.position}: {mine.error}")
    whom = "rank " if len(ends) == 1 else "one of ranks "
    places = "".join(f"; rank {r} was {ranks[r].position}" for r in ends)
    return Diagnosis(
        None,
        f"the connection between rank {me} and {whom}{', '.join(map(str, ends))} is lost:"
        f" rank {me} was {mine.position}{places} ({mine.error})",
    )
