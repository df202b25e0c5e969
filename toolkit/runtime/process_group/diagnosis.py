"""Find the rank at fault, from what each rank shows of itself."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from toolkit.runtime.process_group.shared_status import RankStatus, Record


class Diagnosis(NamedTuple):
    """Reason why the job ends: the rank at fault, None if no single one is, and a sentence."""

    blamed: int | None
    message: str


def diagnose(
    ranks: Mapping[int, Record],
    me: int,
    timeout: float,
    patience: float,
    width: int = 1,
) -> Diagnosis | None:
    """Find the rank that keeps rank ``me`` waiting; None while there is no reason to end.

    The best reason counts, not the first: where rank 1 is dead, rank 2 waits for it, and rank 3 for
    rank 2, all three are late and two have lost a connection.

    Args:
        ranks: latest record of each rank.
        me: the rank that looks.
        timeout: seconds after which a rank that does not move has stalled.
        patience: seconds left in which a better reason than a lost connection may appear.
        width: devices of a rank, each of them one of ``ranks``.
    """
    is_late = ranks[me].seconds >= timeout
    is_lost = bool(ranks[me].error) and not patience
    chain = _waiting_chain(ranks, me)
    awaited = chain[1:]
    everyone = [*awaited, *(rank for rank in ranks if rank not in chain)]
    stuck_ranks = [
        r for r in awaited if not ranks[r].peers and ranks[r].seconds >= timeout
    ]

    # A dead rank explains all that others show. Only ranks that this one waits for may have ended,
    # since the others may be done; and only they may be stuck, since the others may compute.
    faults = [(RankStatus.DEAD, everyone, "has died (its process is gone)")]
    if is_late or is_lost:
        faults.append(
            (RankStatus.ENDED, awaited, "has ended (it finished, or by a signal)")
        )
    if is_late:
        stalled = f"has stalled: for {timeout:g} s it has not"
        silent = f"{stalled} answered (stopped, or its network hangs)"
        stuck = f"{stalled} moved (it runs; if slow, raise timeout)"
        faults.append((RankStatus.SILENT, everyone, silent))
        faults.append((RankStatus.RUNNING, stuck_ranks, stuck))
    for status, candidates, fault in faults:
        for rank in candidates:
            if ranks[rank].status == status:
                return _blame(rank, fault, ranks, chain, width)

    if is_lost:
        return _lost_connection(ranks, me, width)
    jammed = all(ranks[r].peers and ranks[r].seconds >= timeout for r in chain)
    # At one place they wait for a sum of all, or compute meanwhile, as torch's wrappers do.
    places_differ = len({(str(ranks[r].activity), ranks[r].step) for r in chain}) > 1
    if not jammed or not places_differ:
        return None
    positions = "; ".join(
        f"{_name(r, width)} {ranks[r].position}" for r in sorted(chain)
    )
    return Diagnosis(
        None,
        f"for {timeout:g} s these ranks have waited for each other: {positions}. Make the same"
        " calls on every rank, or raise timeout if the links are slow",
    )


def _waiting_chain(ranks: Mapping[int, Record], me: int) -> list[int]:
    """Return ``me``, then the ranks that it waits for, directly or not; nearest first."""
    chain = [me]
    for waiter in chain:  # which grows within
        if ranks[waiter].status == RankStatus.RUNNING:
            chain += (r for r in ranks[waiter].peers if r in ranks and r not in chain)
    return chain


def _name(process: int, width: int) -> str:
    """Return the name of a process: its rank and, if a rank has several, its device."""
    if width == 1:
        return f"rank {process}"
    rank, device = divmod(process, width)
    return f"rank {rank}, device {device}"


def _blame(
    blamed: int,
    fault: str,
    ranks: Mapping[int, Record],
    chain: Sequence[int],
    width: int,
) -> Diagnosis:
    """Return the diagnosis of a rank's ``fault``, with the first of ``chain`` that waits for it."""
    waiter = next((rank for rank in chain if blamed in ranks[rank].peers), chain[0])
    waits = "was"
    if blamed in ranks[waiter].peers:
        waits = "waited for it"
    on_host = ""
    if ranks[blamed].host:
        on_host = f" (on {ranks[blamed].host})"
    return Diagnosis(
        blamed,
        f"{_name(blamed, width)}{on_host} {fault}, {ranks[blamed].position};"
        f" {_name(waiter, width)} {waits} {ranks[waiter].position}",
    )


def _lost_connection(ranks: Mapping[int, Record], me: int, width: int) -> Diagnosis:
    """Return the diagnosis of a lost connection of ``me`` that no rank's end explains."""
    own_record = ranks[me]
    peers = [rank for rank in own_record.peers if rank != me and rank in ranks]
    # The other end has an error, too, and waited for this rank.
    ends = [
        rank for rank in peers if ranks[rank].error and me in ranks[rank].peers
    ] or peers
    if not ends:
        return Diagnosis(
            None,
            f"{_name(me, width)} cannot continue, {own_record.position}: {own_record.error}",
        )
    names = "; or ".join(_name(rank, width) for rank in ends)
    if width == 1 and len(ends) > 1:
        names = f"one of ranks {', '.join(map(str, ends))}"
    places = "".join(
        f"; {_name(rank, width)} was {ranks[rank].position}" for rank in ends
    )
    return Diagnosis(
        None,
        f"the connection between {_name(me, width)} and {names} is lost:"
        f" {_name(me, width)} was {own_record.position}{places} ({own_record.error})",
    )
