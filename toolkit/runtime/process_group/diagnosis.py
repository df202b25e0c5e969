"""Find the rank to blame when a job is stuck, from what each rank does and waits for.

Nothing here talks to a process: :mod:`toolkit.runtime.process_group.watch` collects the facts.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class RankStatus(IntEnum):
    """State of a rank. It reports the first four itself; others observe the last three."""

    RUNNING = 0
    DONE = 1  # it has left in the normal way
    TERMINATED = 2  # it leaves because of a signal
    FAILED = 3  # it leaves because of a diagnosis
    DEAD = 4  # its process is gone
    STOPPED = 5  # its process is stopped, as by SIGSTOP
    SILENT = 6  # its record is old


class Position(NamedTuple):
    """Where a rank's program is, and the ranks ``peers`` that it waits for there."""

    what: object
    step: int | None = None
    peers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.what) if self.step is None else f"in step {self.step} at {self.what}"


class Record(NamedTuple):
    """What a rank reports about itself, or what another rank sees of it.

    Attributes:
        position: where it is.
        seconds: for how long.
        status: its state.
        error: the backend's error in the connection it waited on, the diagnosis if it has failed;
            otherwise empty.
        beat: number of its watch's looks so far.
        host: name of its machine; empty if that is the reader's own.
    """

    position: Position
    seconds: float = 0.0
    status: RankStatus = RankStatus.RUNNING
    error: str = ""
    beat: int = 0
    host: str = ""

    def encode(self) -> str:
        """Return the record as JSON."""
        (what, step, peers), *rest = self
        return json.dumps([str(what)[:2000], step, peers, *rest])

    @classmethod
    def decode(cls, text: str | bytes) -> "Record":
        """Return the record that :meth:`encode` wrote as ``text``."""
        what, step, peers, seconds, status, *rest = json.loads(text)
        return cls(Position(what, step, tuple(peers)), seconds, RankStatus(status), *rest)

    @property
    def place(self) -> str:
        """The position, in words; for another machine, where it was last seen."""
        return f"{'last seen ' if self.host else ''}{self.position}"


class Diagnosis(NamedTuple):
    """Reason why the job ends.

    Attributes:
        blamed: the rank at fault; None if no single rank is.
        message: the reason, for the user.
    """

    blamed: int | None
    message: str


Ranks = Mapping[int, Record]


def diagnose(ranks: Ranks, me: int, timeout: float, patience: float) -> Diagnosis | None:
    """Find the rank that keeps rank ``me`` waiting; None while there is no reason to end.

    Args:
        ranks: every rank, including ``me``.
        me: the rank that asks.
        timeout: seconds for which a rank may stand still while another waits for it.
        patience: seconds left in which a better reason than a lost connection may appear.
    """
    mine = ranks[me]
    late, lost = mine.seconds >= timeout, bool(mine.error) and not patience
    queue = [me]  # then the ranks that it waits for, directly or not; nearest first
    for waiter in queue:
        if ranks[waiter].status in (RankStatus.RUNNING, RankStatus.FAILED):
            queue += (r for r in ranks[waiter].position.peers if r in ranks and r not in queue)
    waited = queue[1:]
    everyone = [*waited, *(r for r in ranks if r not in queue)]
    stuck = [r for r in waited if not ranks[r].position.peers and ranks[r].seconds >= timeout]
    stalled = f"has stalled: for {timeout:g} s it has not "
    # The best reason first: a dead rank explains all that others show.
    for status, among, enough, how in (
        (RankStatus.DEAD, everyone, True, "has died (its process is gone)"),
        (RankStatus.DONE, waited, late or lost, "has finished"),
        (RankStatus.TERMINATED, waited, late or lost, "was ended by a signal"),
        (RankStatus.STOPPED, everyone, late, f"{stalled}answered (its process is stopped)"),
        (RankStatus.SILENT, everyone, late, f"{stalled}answered (its process or network hangs)"),
        (RankStatus.RUNNING, stuck, late, f"{stalled}moved (it runs; if slow, raise timeout)"),
    ):
        for rank in among if enough else ():
            if ranks[rank].status == status:
                waiter = next((r for r in queue if rank in ranks[r].position.peers), me)
                waits = " waited for it" if rank in ranks[waiter].position.peers else " was"
                on = f" (on {ranks[rank].host})" if ranks[rank].host else ""
                what = f"rank {rank}{on} {how}, {ranks[rank].place}"
                return Diagnosis(rank, f"{what}; rank {waiter}{waits} {ranks[waiter].place}")
    return _lost_connection(ranks, me) if lost else None


def _lost_connection(ranks: Ranks, me: int) -> Diagnosis:
    mine = ranks[me]
    peers = [r for r in mine.position.peers if r != me and r in ranks]
    ends = [r for r in peers if ranks[r].error and me in ranks[r].position.peers] or peers
    if not ends:
        return Diagnosis(me, f"rank {me} cannot continue, {mine.place}: {mine.error}")
    whom = "rank " if len(ends) == 1 else "one of ranks "
    places = "".join(f"; rank {r} was {ranks[r].place}" for r in ends)
    return Diagnosis(
        None,
        f"the connection between rank {me} and {whom}{', '.join(map(str, ends))} is lost:"
        f" rank {me} was {mine.place}{places} ({mine.error})",
    )
