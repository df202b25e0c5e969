"""Divide loads into contiguous parts whose largest one is as small as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any


def balanced(loads: Sequence[int], across: Sequence[int], n_stages: int) -> list[int]:
    """Return cuts that minimise the largest stage, then the bytes across, then unevenness.

    With that largest stage, the smallest stage has at least half of the best possible load.

    Args:
        loads: ``[k]`` non-negative integers between possible cuts.
        across: ``[k - 1]`` bytes that cross each possible cut.
        n_stages: 1 to k.
    """
    load_before = [0, *accumulate(loads)]
    limit = smallest_limit(load_before, n_stages)

    def best(first: Any, min_load: int, cost: Callable[[Any, int, int], Any]) -> Any:
        """Return the lowest cost of stages with loads of ``min_load`` to ``limit``.

        ``first`` is the cost of no stage; ``cost`` adds a stage by its begin and its load.
        """
        # By the end of the stages so far, their lowest cost.
        # Segments 0 .. end-1 are cut into the stages so far; one stage more ends at each later
        # `end`::
        #
        #     | stage | stage | stage from `begin` to `end` |
        #     0               begin                         end
        cost_of_end = {0: first}
        for _ in range(n_stages):
            longer_cost_of_end = {}
            for end, total in enumerate(load_before):
                # From the first begin on, the stage is at most `limit`; before `stop`, at least
                # `min_load`.
                first_begin = bisect_left(load_before, total - limit)
                stop = min(end, bisect_right(load_before, total - min_load))
                costs = []
                for begin in range(first_begin, stop):
                    if begin in cost_of_end:
                        load = total - load_before[begin]
                        costs.append(cost(cost_of_end[begin], begin, load))
                if costs:
                    longer_cost_of_end[end] = min(costs)
            cost_of_end = longer_cost_of_end
        return cost_of_end[len(loads)]

    def minus_smallest_load(so_far: int, begin: int, load: int) -> int:
        return max(so_far, -load)

    def bytes_and_squares(so_far: Any, begin: int, load: int) -> Any:
        n_bytes, squared_loads, begins = so_far
        return n_bytes + sent[begin], squared_loads + load**2, (*begins, begin)

    # 1. The load that the smallest stage can have at best, negated since `best` minimises.
    smallest = -best(-load_before[-1], 0, minus_smallest_load)
    # 2. The cuts, by tuples that compare bytes first, then unevenness. The half leaves room for
    # cuts with fewer bytes.
    sent = [0, *across]
    *_, begins = best((0, 0, ()), (smallest + 1) // 2, bytes_and_squares)
    return list(begins[1:])


def smallest_limit(load_before: list[int], n_stages: int) -> int:
    """Return the load of the largest stage, minimised by bisection."""
    low, limit = 0, load_before[-1]
    while low < limit:
        middle = (low + limit) // 2
        # Fill one stage after another up to `middle`: if all fits, the limit may be lower.
        end = 0
        for _ in range(n_stages):
            end = bisect_right(load_before, load_before[end] + middle) - 1
        if load_before[end] == load_before[-1]:
            limit = middle
        else:
            low = middle + 1
    return limit
