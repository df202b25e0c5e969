"""Who is to blame when a job gets stuck: from what each rank is seen to do, and who waits for whom.

Nothing here talks to a process: :mod:`toolkit.runtime.process_group.watch` gathers what is seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class RankStatus(IntEnum):
    """What has become of a rank."""

    RUNNING = 0
    DONE = 1  # it has left in the normal way
    TERMINATED = 2  # it leaves because of a signal that asked it to
    FAILED = 3  # it leaves because of a diagnosis
    DEAD = 4  # its process is gone
    STOPPED = 5  # its process is stopped, as by SIGSTOP
    SILENT = 6  # nothing has been heard of it for long


class Position(NamedTuple):
    """Where the program of a rank is; ``peers`` are the ranks that it waits for there."""

    what: object
    step: int | None
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.what) if self.step is None else f"in step {self.step} at {self.what}"


@dataclass(frozen=True)
class Seen:
    """A rank as another one sees it.

    Attributes:
        position: where it is.
        seconds: for how long.
        status: what has become of it.
        error: what its backend says of the connection it waited on; empty if nothing.
        host: the machine it runs on.
        exact: whether the position is that of now, not that of the last message.
    """

    position: Position
    seconds: float = 0.0
    status: RankStatus = RankStatus.RUNNING
    error: str = ""
    host: str = ""
    exact: bool = True


class Diagnosis(NamedTuple):
    """Why the job ends; ``blamed`` is None if no single rank is to blame."""

    blamed: int | None
    message: str


Table = Mapping[int, Seen]


def diagnose(table: Table, me: int, timeout: float, patience: float) -> Diagnosis | None:
    """Who is to blame that rank ``me`` does not get on; None as long as nobody is.

    Args:
        table: every rank, ``me`` too.
        timeout: seconds for which a rank may stand still while another waits for it.
        patience: seconds for which another culprit is looked for when a connection fails; 0 if
            that time is over.
    """
    mine = table[me]
    waiters = _waiters(table, me)
    late = mine.seconds >= timeout
    near = [*waiters, *(r for r in table if r not in waiters and r != me)]  # nearest first

    def first(*statuses: RankStatus, among: list[int]) -> int | None:
        return next((r for status in statuses for r in among if table[r].status == status), None)

    if (dead := first(RankStatus.DEAD, among=near)) is not None:
        return _blame(table, dead, waiters.get(dead, me), "has died (its process is gone)")
    reached = list(waiters)
    hurt = bool(mine.error)
    for status, enough in (
        (RankStatus.DONE, late or hurt),
        (RankStatus.TERMINATED, late or (hurt and not patience)),
    ):
        if enough and (gone := first(status, among=reached)) is not None:
            how = "has finished" if status == RankStatus.DONE else "was told to end by a signal"
            return _blame(table, gone, waiters[gone], how)
    if late:
        asked = f"has stalled: for {timeout:g} s it has not answered"
        if (gone := first(RankStatus.STOPPED, RankStatus.SILENT, among=near)) is not None:
            stopped = table[gone].status == RankStatus.STOPPED
            why = "its process is stopped" if stopped else "its process or its connection hangs"
            return _blame(table, gone, waiters.get(gone, me), f"{asked} ({why})")
        for rank in reached:
            if not table[rank].position.peers and table[rank].seconds >= timeout:
                seconds = table[rank].seconds
                how = f"has stalled: for {seconds:.0f} s it has not got on (its process is running)"
                end = "; if it only takes long, raise timeout"
                return _blame(table, rank, waiters[rank], how, end)
    if hurt and not patience:
        return _lost_connection(table, me)
    circle = [me, *(r for r in reached if r != me)]
    # All at one place may only take long there; if a message is lost, the backend will say so.
    together = len({(str(p.what), *p[1:]) for p in (table[r].position for r in circle)}) == 1
    if late and reached and not together and all(_waits(table[r], timeout) for r in circle):
        seats = "; ".join(f"rank {r} {_where(table[r])}" for r in circle)
        return Diagnosis(None, f"ranks wait for each other for more than {timeout:g} s: {seats}")
    return None


def lost_store(table: Table, me: int, address: str) -> Diagnosis:
    """What to say when the ranks can no longer ask about each other."""
    return Diagnosis(
        None,
        f"rank {me} has lost the others: the store at {address}, through which ranks meet, does not"
        f" answer (rank 0 or the launcher holds it); rank {me} was {_where(table[me])}",
    )


def _waits(seen: Seen, timeout: float) -> bool:
    return bool(seen.position.peers) and seen.seconds >= timeout


def _waiters(table: Table, me: int) -> dict[int, int]:
    """The ranks that ``me`` waits for, directly or not, nearest first: and who waits for each."""
    found: dict[int, int] = {}
    queue = [me]
    for waiter in queue:
        if table[waiter].status not in (RankStatus.RUNNING, RankStatus.FAILED):
            continue
        for rank in table[waiter].position.peers:
            if rank not in found and rank not in (me, waiter) and rank in table:
                found[rank] = waiter
                queue.append(rank)
    return found


def _blame(table: Table, rank: int, waiter: int, how: str, end: str = "") -> Diagnosis:
    waits = rank in table[waiter].position.peers
    return Diagnosis(
        rank,
        f"rank {rank}{_host(table, rank)} {how}, {_where(table[rank])};"
        f" rank {waiter} {'waited for it' if waits else 'was then'} {_where(table[waiter])}{end}",
    )


def _lost_connection(table: Table, me: int) -> Diagnosis:
    mine = table[me]
    peers = [r for r in mine.position.peers if r != me and r in table]
    hurt = [r for r in peers if table[r].error and me in table[r].position.peers]
    ends = hurt if len(hurt) == 1 else peers
    if not ends:
        return Diagnosis(me, f"rank {me} cannot go on, {_where(mine)}: {mine.error}")
    whom = ("rank " if len(ends) == 1 else "one of ranks ") + ", ".join(map(str, ends))
    seats = "".join(f"; rank {r} was {_where(table[r])}" for r in ends)
    run = "both" if len(ends) == 1 else "all"
    return Diagnosis(
        None,
        f"the connection between rank {me} and {whom} is lost, and {run} run: rank {me} was"
        f" {_where(mine)}{seats} ({mine.error})",
    )


def _where(seen: Seen) -> str:
    return f"{'' if seen.exact else 'last seen '}{seen.position}"


def _host(table: Table, rank: int) -> str:
    host = table[rank].host
    return f" (on {host})" if host and any(s.host not in ("", host) for s in table.values()) else ""
