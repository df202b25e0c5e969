"""Where to cut a row of loads into stages."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

_NONE = -1  # smaller than any load


def balanced(loads: Sequence[int], across: Sequence[int], n_stages: int) -> list[int]:
    """The cuts with the smallest largest stage, no tiny one, then the fewest bytes across.

    The smallest stage is at least half as large as it could be beside that largest one. Where
    the bytes are equal, the stages are as even as can be.

    Args:
        loads: of what is between two cuts that are possible, whole numbers from 0.
        across: bytes that cross each of these cuts, one fewer than loads.
        n_stages: 1 to the number of loads.

    Returns:
        of each cut, how many loads are before it.
    """
    before = [0, *accumulate(loads)]
    limit = _smallest_limit(before, n_stages)
    least = (_largest_least(before, n_stages, limit) + 1) // 2
    return _fewest_bytes(before, across, n_stages, limit, least)


def _smallest_limit(before: list[int], n_stages: int) -> int:
    """The largest stage, where it is as small as it can be."""
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


def _begins(before: list[int], end: int, limit: int, least: int) -> range:
    """Where a stage may begin that ends at ``end``, for its load to be within the two."""
    first = bisect_left(before, before[end] - limit)
    return range(first, min(end, bisect_right(before, before[end] - least)))


def _largest_least(before: list[int], n_stages: int, limit: int) -> int:
    """The smallest stage, where it is as large as it can be while none exceeds ``limit``."""
    least = [before[-1], *[_NONE] * (len(before) - 1)]  # of the loads before each place
    for _ in range(n_stages):
        least = [
            max(
                (min(least[b], before[e] - before[b]) for b in _begins(before, e, limit, 0)),
                default=_NONE,
            )
            for e in range(len(before))
        ]
    return least[-1]


def _fewest_bytes(
    before: list[int], across: Sequence[int], n_stages: int, limit: int, least: int
) -> list[int]:
    sent = [0, *across]
    # Of the loads before each place: bytes across, squares of the stages' loads, where they begin.
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * (len(before) - 1)]
    for _ in range(n_stages):
        best = [
            min(
                (
                    (
                        so_far[0] + sent[b],
                        so_far[1] + (before[e] - before[b]) ** 2,
                        (*so_far[2], b),
                    )
                    for b in _begins(before, e, limit, least)
                    if (so_far := best[b]) is not None
                ),
                default=None,
            )
            for e in range(len(before))
        ]
    chosen = best[-1]
    assert chosen is not None
    return list(chosen[2][1:])
