"""Which rank is to blame when a job is stuck: from what each rank does and waits for.

Nothing here talks to a process: :mod:`toolkit.runtime.process_group.watch` collects the facts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class RankStatus(IntEnum):
    """What has become of a rank."""

    RUNNING = 0
    DONE = 1  # it has left in the normal way
    TERMINATED = 2  # it leaves because of a signal
    FAILED = 3  # it leaves because of a diagnosis
    DEAD = 4  # its process is gone
    STOPPED = 5  # its process is stopped, as by SIGSTOP
    SILENT = 6  # its beats have stopped for long


class Position(NamedTuple):
    """Where a rank's program is, and the ranks ``peers`` that it waits for there."""

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


Ranks = Mapping[int, Seen]


def diagnose(ranks: Ranks, me: int, timeout: float, patience: float) -> Diagnosis | None:
    """Find the rank to blame that rank ``me`` stands still; None while there is no reason.

    Args:
        ranks: every rank, including ``me``.
        timeout: seconds for which a rank may stand still while another waits for it.
        patience: seconds left in which a better reason than a lost connection may appear.
    """
    mine = ranks[me]
    waiters = _waiters(ranks, me)
    late, hurt = mine.seconds >= timeout, bool(mine.error)
    near = [*waiters, *(r for r in ranks if r not in waiters and r != me)]  # nearest first

    def first(status: RankStatus, among: Iterable[int]) -> int | None:
        return next((r for r in among if ranks[r].status == status), None)

    # The best reason first: a dead rank explains all that others show.
    if (dead := first(RankStatus.DEAD, near)) is not None:
        return _blame(ranks, dead, waiters.get(dead, me), "has died (its process is gone)")
    for status, enough, how in (
        (RankStatus.DONE, late or hurt, "has finished"),
        (RankStatus.TERMINATED, late or (hurt and not patience), "was ended by a signal"),
    ):
        if enough and (gone := first(status, waiters)) is not None:
            return _blame(ranks, gone, waiters[gone], how)
    for status, why in (
        (RankStatus.STOPPED, "its process is stopped"),
        (RankStatus.SILENT, "its process or its connection hangs"),
    ):
        if late and (gone := first(status, near)) is not None:
            how = f"has stalled: for {timeout:g} s it has not answered ({why})"
            return _blame(ranks, gone, waiters.get(gone, me), how)
    for rank in waiters if late else ():
        if not ranks[rank].position.peers and (seconds := ranks[rank].seconds) >= timeout:
            how = f"has stalled: for {seconds:.0f} s it has not got on (its process is running)"
            end = "; if it only takes long, raise timeout"
            return _blame(ranks, rank, waiters[rank], how, end)
    if hurt and not patience:
        return _lost_connection(ranks, me)
    circle = [me, *waiters]
    # Ranks at one place may only take long there: a lost message becomes a backend's error.
    together = len({(str(p.what), *p[1:]) for p in (ranks[r].position for r in circle)}) == 1
    if late and waiters and not together and all(_waits(ranks[r], timeout) for r in circle):
        places = "; ".join(f"rank {r} {_where(ranks[r])}" for r in circle)
        return Diagnosis(None, f"ranks wait for each other for more than {timeout:g} s: {places}")
    return None


def lost_store(ranks: Ranks, me: int, address: str) -> Diagnosis:
    """Return the diagnosis for ranks that cannot reach their store any more."""
    return Diagnosis(
        None,
        f"rank {me} has lost the others: the store at {address}, through which ranks meet, does not"
        f" answer (rank 0 or the launcher holds it); rank {me} was {_where(ranks[me])}",
    )


def _waits(seen: Seen, timeout: float) -> bool:
    return bool(seen.position.peers) and seen.seconds >= timeout


def _waiters(ranks: Ranks, me: int) -> dict[int, int]:
    """Map the ranks that ``me`` waits for, directly or not, to their waiters; nearest first."""
    found: dict[int, int] = {}
    queue = [me]
    for waiter in queue:
        if ranks[waiter].status not in (RankStatus.RUNNING, RankStatus.FAILED):
            continue
        for rank in ranks[waiter].position.peers:
            if rank not in found and rank not in (me, waiter) and rank in ranks:
                found[rank] = waiter
                queue.append(rank)
    return found


def _blame(ranks: Ranks, rank: int, waiter: int, how: str, end: str = "") -> Diagnosis:
    waits = rank in ranks[waiter].position.peers
    return Diagnosis(
        rank,
        f"rank {rank}{_host(ranks, rank)} {how}, {_where(ranks[rank])};"
        f" rank {waiter} {'waited for it' if waits else 'was then'} {_where(ranks[waiter])}{end}",
    )


def _lost_connection(ranks: Ranks, me: int) -> Diagnosis:
    mine = ranks[me]
    peers = [r for r in mine.position.peers if r != me and r in ranks]
    hurt = [r for r in peers if ranks[r].error and me in ranks[r].position.peers]
    ends = hurt if len(hurt) == 1 else peers
    if not ends:
        return Diagnosis(me, f"rank {me} cannot go on, {_where(mine)}: {mine.error}")
    whom = ("rank " if len(ends) == 1 else "one of ranks ") + ", ".join(map(str, ends))
    places = "".join(f"; rank {r} was {_where(ranks[r])}" for r in ends)
    run = "both" if len(ends) == 1 else "all"
    return Diagnosis(
        None,
        f"the connection between rank {me} and {whom} is lost, and {run} run: rank {me} was"
        f" {_where(mine)}{places} ({mine.error})",
    )


def _where(seen: Seen) -> str:
    return f"{'' if seen.exact else 'last seen '}{seen.position}"


def _host(ranks: Ranks, rank: int) -> str:
    host = ranks[rank].host
    return f" (on {host})" if host and any(s.host not in ("", host) for s in ranks.values()) else ""
