"""Where stages run: placements on which ranks are equally busy."""

import random
from bisect import bisect_right
from collections.abc import Sequence

_MAX_LOOKS = 400_000  # at stages, of all random moves together

Places = tuple[int, ...]
"""``[stage]``, its rank."""


def loads(
    placement: Sequence[int], stage_seconds: Sequence[float], speeds: Sequence[float]
) -> list[float]:
    """Return the seconds of each rank's stages on a micro-batch, the busiest first.

    Args:
        placement: ``[stage]``, its rank.
        stage_seconds: ``[stage]``, on a micro-batch at speed 1.
        speeds: ``[rank]``.
    """
    rank_seconds = [0.0] * len(speeds)
    for seconds, rank in zip(stage_seconds, placement, strict=True):
        rank_seconds[rank] += seconds / speeds[rank]
    return sorted(rank_seconds, reverse=True)


def load_bound(stage_seconds: Sequence[float], speeds: Sequence[float]) -> float:
    """Return seconds that the busiest rank takes at least on a micro-batch, on any placement.

    Args:
        stage_seconds: ``[stage]``, on a micro-batch at speed 1.
        speeds: ``[rank]``.
    """
    n_ranks = len(speeds)
    longest = sorted(stage_seconds, reverse=True)
    indivisible = longest[0]
    if len(stage_seconds) > n_ranks:  # a rank runs two of the n_ranks + 1 longest
        indivisible = max(indivisible, longest[n_ranks - 1] + longest[n_ranks])
    return max(sum(stage_seconds) / sum(speeds), indivisible / max(speeds))


def usual_placements(
    stage_seconds: Sequence[float], speeds: Sequence[float]
) -> list[Places]:
    """Return placements to begin with: neighbours, stages in turn, to and fro; then balanced ones.

    Four stages on two ranks: 0 0 1 1, 0 1 0 1 and 0 1 1 0.

    Args:
        stage_seconds: ``[stage]``, on a micro-batch at speed 1.
        speeds: ``[rank]``.
    """
    n_ranks = len(speeds)
    stages = range(len(stage_seconds))
    in_turn = [*range(n_ranks)]
    to_and_fro = in_turn + in_turn[::-1]
    placements = [
        tuple(stage * n_ranks // len(stages) for stage in stages),
        tuple(stage % n_ranks for stage in stages),
        tuple(to_and_fro[stage % (2 * n_ranks)] for stage in stages),
    ]
    # Of two ranks these are 0 1, 0 1 1 0 and 0 1 0 1. Each entry gets a segment of stages, and all
    # segments take about as long.
    for rank_row in (in_turn, to_and_fro, in_turn * 2):
        if len(rank_row) <= len(stages):
            placements.append(_balanced(rank_row, stage_seconds, speeds))
    return [*dict.fromkeys(placements)]


def _balanced(
    rank_row: Sequence[int], stage_seconds: Sequence[float], speeds: Sequence[float]
) -> Places:
    """Cut the stages into segments, one for each entry of ``rank_row``, of nearly equal seconds.

    Random moves of the cuts are kept if the busiest ranks become no busier.
    """
    # A fixed seed: the same stages always have the same placements.
    draw = random.Random(0)
    n_stages = len(stage_seconds)

    def places(cuts: Sequence[int]) -> Places:
        return tuple(rank_row[bisect_right(cuts, stage)] for stage in range(n_stages))

    best_cuts = [
        segment * n_stages // len(rank_row) for segment in range(1, len(rank_row))
    ]
    if not best_cuts:
        return places(best_cuts)
    best_loads = loads(places(best_cuts), stage_seconds, speeds)
    for _ in range(min(100 * len(rank_row), _MAX_LOOKS // n_stages)):
        new_cuts = [*best_cuts]
        for _ in range(draw.choice((1, 1, 2, 3))):
            new_cuts[draw.randrange(len(new_cuts))] += draw.choice((-1, 1))
        edges = [0, *new_cuts, n_stages]
        if edges != sorted({*edges}):  # a segment without stages
            continue
        # Lists compare by the busiest rank, then by the next one. Equal loads are kept, too, so
        # that the cuts move on over plateaus.
        new_loads = loads(places(new_cuts), stage_seconds, speeds)
        if new_loads <= best_loads:
            best_cuts = new_cuts
            best_loads = new_loads
    return places(best_cuts)


def levelled(
    placement: Places,
    stage_seconds: Sequence[float],
    speeds: Sequence[float],
    draw: random.Random,
) -> Places:
    """Return ``placement`` after random changes that make the busiest ranks less busy.

    Args:
        placement: ``[stage]``, its rank.
        stage_seconds: ``[stage]``, on a micro-batch at speed 1.
        speeds: ``[rank]``.
        draw: source of the changes.
    """
    best_placement = placement
    least_loads = loads(placement, stage_seconds, speeds)
    n_stages = len(placement)
    for _ in range(min(200 * n_stages, _MAX_LOOKS // n_stages)):
        stage = draw.randrange(n_stages)
        other_stage = draw.randrange(n_stages)
        # With `other_stage` as the source both run on its rank, with `stage` they change places.
        source = draw.choice((stage, other_stage))
        new_placement = [*best_placement]
        new_placement[stage] = best_placement[other_stage]
        new_placement[other_stage] = best_placement[source]
        if len({*new_placement}) < len(speeds):  # a rank without a stage
            continue
        new_loads = loads(new_placement, stage_seconds, speeds)
        if new_loads < least_loads:
            best_placement = tuple(new_placement)
            least_loads = new_loads
    return best_placement
