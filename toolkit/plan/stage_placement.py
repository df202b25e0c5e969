"""Where stages run: the limits of the ranks, and placements on which they are equally busy."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.cost import Costs, Hardware
from toolkit.errors import UserError, whole

Places = tuple[int, ...]
"""``[stage]``, its rank."""


@dataclass(frozen=True)
class Room:
    """What stages need and ranks have.

    Attributes:
        work: ``[stage]``, seconds on a micro-batch at speed 1.
        speeds: ``[rank]``.
        limits: ``[rank]``, bytes.
    """

    work: tuple[float, ...]
    speeds: tuple[float, ...]
    limits: tuple[float, ...]


def room_of(
    costs: Costs,
    ranks: int | None,
    placement: Sequence[int] | None,
    hardware: Hardware,
    memory: float | Sequence[float] | None,
) -> Room:
    """Return the room of a search; arguments and errors as of :func:`toolkit.plan.search`."""
    s = len(costs)
    if ranks is None:
        ranks = s
    p = whole(ranks, "the number of ranks", 1)
    if placement is not None:
        p = max(placement, default=0) + 1
        if len(placement) != s or {*placement} != {*range(p)}:
            raise UserError(
                f"placement is the rank of each of {s} stages, on ranks 0, 1, ...: got"
                f" {[*placement]}"
            )
    if p > s:
        raise UserError(f"each of {p} ranks runs a stage: got {s} stages")
    if memory is None:
        memory = [hardware.memory_of(rank) for rank in range(p)]
    limits = [memory] * p if isinstance(memory, int | float) else memory
    if len(limits) != p:
        raise UserError(f"memory has an entry for each of {p} ranks: got {len(limits)}")
    work = tuple(sum(cost.seconds(hardware)) for cost in costs)
    return Room(work, tuple(map(hardware.speed, range(p))), tuple(limits))


def loads(where: Sequence[int], work: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Return the seconds of each rank's stages on a micro-batch, the busiest first."""
    found = [0.0] * len(speeds)
    for seconds, rank in zip(work, where, strict=True):
        found[rank] += seconds / speeds[rank]
    return sorted(found, reverse=True)


def busiest(work: Sequence[float], speeds: Sequence[float]) -> float:
    """Seconds of the busiest rank, at least, wherever stages of ``work`` seconds are placed."""
    p, largest = len(speeds), sorted(work, reverse=True)
    two = sum(largest[p - 1 : p + 1]) if len(work) > p else 0.0  # of p + 1, a rank runs two
    return max(sum(work) / sum(speeds), max(two, largest[0]) / max(speeds))


def shapes(work: Sequence[float], speeds: Sequence[float]) -> list[Places]:
    """Neighbours on a rank, stages in turn, and to and fro; then the same, balanced."""
    p, s = len(speeds), len(work)
    there = [*range(p), *reversed(range(p))]
    ranks = ((j * p // s, j % p, there[j % (2 * p)]) for j in range(s))
    rows = ([*range(p)], there, [*range(p)] * 2, there[::-1])
    balanced = (_balanced(row, work, speeds) for row in rows if len(row) <= s)
    return [*dict.fromkeys((*zip(*ranks, strict=True), *balanced))]


def _balanced(row: Sequence[int], work: Sequence[float], speeds: Sequence[float]) -> Places:
    """Ranks of stages, of neighbours in the order of ``row``, where the busiest is least busy."""
    draw, s = random.Random(0), len(work)

    def places(cuts: Sequence[int]) -> Places:
        return tuple(row[bisect_right(cuts, j)] for j in range(s))

    def held(cuts: Sequence[int]) -> list[float]:
        return loads(places(cuts), work, speeds)

    best = [k * s // len(row) for k in range(1, len(row))]
    for _ in range(100 * len(row)):
        tried = [*best]
        for _ in range(draw.choice((1, 1, 2, 3))):
            tried[draw.randrange(len(tried))] += draw.choice((-1, 1))
        if [0, *tried, s] == sorted({0, *tried, s}) and held(tried) <= held(best):
            best = tried
    return places(best)


def levelled(
    where: tuple[int, ...], work: Sequence[float], speeds: Sequence[float], draw: random.Random
) -> tuple[int, ...]:
    """``where`` after changes that make the busiest ranks less busy."""
    best, least = where, loads(where, work, speeds)
    for _ in range(200 * len(where)):
        tried = [*best]
        i, j = draw.randrange(len(tried)), draw.randrange(len(tried))
        tried[i], tried[j] = tried[j], tried[draw.choice((i, j))]
        if len({*tried}) == len(speeds) and (new := loads(tried, work, speeds)) < least:
            best, least = tuple(tried), new
    return best
