"""Cut a sequence of loads into balanced stages."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


def balanced(loads: Sequence[int], across: Sequence[int], n_stages: int) -> list[int]:
    """Return cuts that minimise the largest stage, then the bytes across, then unevenness.

    The smallest stage has at least half of the best smallest load under that largest one.

    Args:
        loads: ``[k]`` non-negative integers between possible cuts.
        across: ``[k - 1]`` bytes that cross each possible cut.
        n_stages: 1 to k.
    """
    before = [0, *accumulate(loads)]
    limit = _smallest_limit(before, n_stages)

    def begins(end: int, least: int) -> range:
        """Where a stage that ends at ``end`` may begin."""
        first = bisect_left(before, before[end] - limit)
        return range(first, min(end, bisect_right(before, before[end] - least)))

    ends = range(len(before))
    smallest = [before[-1], *[-1] * len(loads)]  # the best smallest stage of the first e loads
    for _ in range(n_stages):
        smallest = [
            max((min(smallest[b], before[e] - before[b]) for b in begins(e, 0)), default=-1)
            for e in ends
        ]
    least = (smallest[-1] + 1) // 2
    sent = [0, *across]
    # best[e], for the first e loads: bytes across, squared stage loads, stage begins
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * len(loads)]
    for _ in range(n_stages):
        best = [
            min(
                (
                    (so_far[0] + sent[b], so_far[1] + (before[e] - before[b]) ** 2, (*so_far[2], b))
                    for b in begins(e, least)
                    if (so_far := best[b]) is not None
                ),
                default=None,
            )
            for e in ends
        ]
    chosen = best[-1]
    assert chosen is not None
    return list(chosen[2][1:])


def _smallest_limit(before: list[int], n_stages: int) -> int:
    """Return the smallest possible largest stage, by bisection."""
    low, limit = 0, before[-1]
    while low < limit:
        middle = (low + limit) // 2
        reached = 0
        for _ in range(n_stages):
            reached = bisect_right(before, before[reached] + middle) - 1
        if before[reached] == before[-1]:
            limit = middle
        else:
            low = middle + 1
    return limit
