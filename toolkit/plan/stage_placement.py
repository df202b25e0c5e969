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
    n_stages = len(costs)
    if ranks is None:
        ranks = n_stages
    n_ranks = whole(ranks, "the number of ranks", 1)
    if placement is not None:
        n_ranks = max(placement, default=0) + 1
        if len(placement) != n_stages or {*placement} != {*range(n_ranks)}:
            raise UserError(
                f"placement is the rank of each of {n_stages} stages, on ranks 0, 1, ...: got"
                f" {[*placement]}"
            )
    if n_ranks > n_stages:
        raise UserError(f"each of {n_ranks} ranks runs a stage: got {n_stages} stages")
    if memory is None:
        memory = [hardware.memory_of(rank) for rank in range(n_ranks)]
    limits = [memory] * n_ranks if isinstance(memory, int | float) else memory
    if len(limits) != n_ranks:
        raise UserError(f"memory has an entry for each of {n_ranks} ranks: got {len(limits)}")
    work = tuple(sum(cost.seconds(hardware)) for cost in costs)
    return Room(work, tuple(map(hardware.speed, range(n_ranks))), tuple(limits))


def loads(where: Sequence[int], work: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Return the seconds of each rank's stages on a micro-batch, the busiest first.

    Args:
        where: ``[stage]``, its rank.
        work: ``[stage]``, seconds on a micro-batch at speed 1.
        speeds: ``[rank]``.
    """
    rank_seconds = [0.0] * len(speeds)
    for seconds, rank in zip(work, where, strict=True):
        rank_seconds[rank] += seconds / speeds[rank]
    return sorted(rank_seconds, reverse=True)


def busiest(work: Sequence[float], speeds: Sequence[float]) -> float:
    """Return seconds that the busiest rank takes at least, on any placement.

    Args:
        work: ``[stage]``, seconds on a micro-batch at speed 1.
        speeds: ``[rank]``.
    """
    n_ranks, largest = len(speeds), sorted(work, reverse=True)
    # With more stages than ranks, a rank runs two of the n_ranks + 1 largest.
    two_stages = sum(largest[n_ranks - 1 : n_ranks + 1]) if len(work) > n_ranks else 0.0
    return max(sum(work) / sum(speeds), max(two_stages, largest[0]) / max(speeds))


def shapes(work: Sequence[float], speeds: Sequence[float]) -> list[Places]:
    """Return placements to begin with: neighbours, stages in turn, to and fro; then balanced ones.

    Four stages on two ranks: 0 0 1 1, 0 1 0 1 and 0 1 1 0.
    """
    n_ranks, n_stages = len(speeds), len(work)
    to_and_fro = [*range(n_ranks), *reversed(range(n_ranks))]
    ranks = (
        (stage * n_ranks // n_stages, stage % n_ranks, to_and_fro[stage % (2 * n_ranks)])
        for stage in range(n_stages)
    )
    rank_rows = ([*range(n_ranks)], to_and_fro, [*range(n_ranks)] * 2, to_and_fro[::-1])
    balanced = (
        _balanced(rank_row, work, speeds) for rank_row in rank_rows if len(rank_row) <= n_stages
    )
    return [*dict.fromkeys((*zip(*ranks, strict=True), *balanced))]


def _balanced(rank_row: Sequence[int], work: Sequence[float], speeds: Sequence[float]) -> Places:
    """Cut the stages into segments, one for each entry of ``rank_row``, of nearly equal seconds.

    Random moves of the cuts are kept if the busiest ranks become no busier.
    """
    draw, n_stages = random.Random(0), len(work)

    def places(cuts: Sequence[int]) -> Places:
        return tuple(rank_row[bisect_right(cuts, stage)] for stage in range(n_stages))

    def rank_seconds(cuts: Sequence[int]) -> list[float]:
        return loads(places(cuts), work, speeds)

    best_cuts = [segment * n_stages // len(rank_row) for segment in range(1, len(rank_row))]
    for _ in range(100 * len(rank_row)):
        new_cuts = [*best_cuts]
        for _ in range(draw.choice((1, 1, 2, 3))):
            new_cuts[draw.randrange(len(new_cuts))] += draw.choice((-1, 1))
        if [0, *new_cuts, n_stages] == sorted({0, *new_cuts, n_stages}) and rank_seconds(
            new_cuts
        ) <= rank_seconds(best_cuts):
            best_cuts = new_cuts
    return places(best_cuts)


def levelled(
    where: tuple[int, ...], work: Sequence[float], speeds: Sequence[float], draw: random.Random
) -> tuple[int, ...]:
    """Return ``where`` after random changes that make the busiest ranks less busy."""
    best_placement, least_loads = where, loads(where, work, speeds)
    for _ in range(200 * len(where)):
        new_placement = [*best_placement]
        stage, other_stage = draw.randrange(len(new_placement)), draw.randrange(len(new_placement))
        new_placement[stage], new_placement[other_stage] = (
            new_placement[other_stage],
            new_placement[draw.choice((stage, other_stage))],
        )
        if (
            len({*new_placement}) == len(speeds)
            and (new_loads := loads(new_placement, work, speeds)) < least_loads
        ):
            best_placement, least_loads = tuple(new_placement), new_loads
    return best_placement
