"""Cut a sequence of loads into balanced stages."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

_NONE = -1  # smaller than any load


def balanced(loads: Sequence[int], across: Sequence[int], n_stages: int) -> list[int]:
    """Return cuts that minimise the largest stage, then the bytes across, then unevenness.

    The smallest stage has at least half of the best smallest load under that largest one.

    Args:
        loads: ``[k]`` non-negative integers between possible cuts.
        across: ``[k - 1]`` bytes that cross each possible cut.
        n_stages: 1 to k.

    Returns:
        ``[n_stages - 1]`` numbers of loads before each cut.
    """
    before = [0, *accumulate(loads)]
    limit = _smallest_limit(before, n_stages)
    least = (_largest_least(before, n_stages, limit) + 1) // 2
    return _fewest_bytes(before, across, n_stages, limit, least)


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


def _begins(before: list[int], end: int, limit: int, least: int) -> range:
    """Return where a stage that ends at ``end`` may begin."""
    first = bisect_left(before, before[end] - limit)
    return range(first, min(end, bisect_right(before, before[end] - least)))


def _largest_least(before: list[int], n_stages: int, limit: int) -> int:
    """Return the largest possible smallest stage while none exceeds ``limit``."""
    least = [before[-1], *[_NONE] * (len(before) - 1)]  # least[e] for the first e loads
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
    # best[e], for the first e loads: bytes across, squared stage loads, stage begins
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * (len(before) - 1)]
    for _ in range(n_stages):
        best = [
            min(
                (
                    (so_far[0] + sent[b], so_far[1] + (before[e] - before[b]) ** 2, (*so_far[2], b))
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
