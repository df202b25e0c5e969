"""List scheduling: orders of all ranks from one key of each chain."""

from collections.abc import Iterator, Sequence
from math import inf

from toolkit.plan.order_problem import OrderProblem, Word


def list_schedule(problem: OrderProblem, keys: Sequence[float]) -> list[Word]:
    """Each rank runs next, of what it can begin soon, the op with the least key.

    A forward waits where the rank's micro-batches could then no longer end, the oldest first.

    Args:
        problem: what to order.
        keys: seconds between micro-batches, seconds for which a rank waits for a lower key, and
            those of each chain's op on micro-batch 0.
    """
    interval, patience, *offsets = keys
    m, n, needs, sizes = problem.n_microbatches, len(problem.kinds), problem.needs, problem.held
    ranks = range(problem.n_ranks)
    ends: list[list[float]] = [[] for _ in offsets]
    words: list[Word] = [[] for _ in ranks]
    free = [0.0 for _ in ranks]
    own = [[c // n for c in chains if c % n == 0] for chains in problem.of_rank]
    whole_model = [sum(sizes[j] for j in stages) for stages in own]
    most = [max(problem.work[c] for c in chains) for chains in problem.of_rank]
    space = [room - work for room, work in zip(problem.room, most, strict=True)]

    def fits(rank: int, stage: int) -> bool:
        left = space[rank] - sizes[stage]
        if left >= whole_model[rank]:
            return True
        made = {j: len(ends[j * n]) + (j == stage) for j in own[rank]}
        ended = {j: len(ends[j * n + n - 1]) for j in own[rank]}
        for k in range(min(ended.values()), max(made.values())):
            if sum(sizes[j] for j in own[rank] if made[j] <= k) > left:
                return False
            left += sum(sizes[j] for j in own[rank] if ended[j] <= k < made[j])
        return left >= 0

    def choose(rank: int) -> tuple[float, int]:
        """When the rank begins its next op, and the op's chain; -1 if it has none."""
        able, soonest, now = [], inf, free[rank]
        for c in problem.of_rank[rank]:
            k = len(ends[c])
            if k == m:
                continue
            start = now
            for d, lag in needs[c]:
                found = ends[d]
                if len(found) <= k:
                    break
                if found[k] + lag > start:
                    start = found[k] + lag
            else:
                if c % n or fits(rank, c // n):
                    able.append((offsets[c] + k * interval, start, c))
                    soonest = min(soonest, start)
        return min((ch for ch in able if ch[1] <= soonest + patience), default=(0, inf, -1))[1:]

    choices = [choose(rank) for rank in ranks]
    while able := [(*choices[rank], rank) for rank in ranks if choices[rank][1] >= 0]:
        start, c, rank = min(able)
        free[rank] = start + problem.seconds[c]
        ends[c].append(free[rank])
        words[rank].append(c)
        if c % n in (0, n - 1):
            space[rank] += sizes[c // n] if c % n else -sizes[c // n]
        for user in problem.users[c]:
            choices[user] = choose(user)
    return words


def simple_keys(problem: OrderProblem) -> Iterator[tuple[float, ...]]:
    """Keys by the times of a lone micro-batch; weights at once, or when a rank would wait."""
    n, s = len(problem.kinds), len(problem.held)
    alone, now = [0.0] * len(problem.seconds), 0.0
    for c in (*range(0, n * s, n), *range(n * (s - 1) + 1, 0, -n)):
        alone[c] = now
        now += problem.seconds[c]
    busy = max(map(problem.load, range(problem.n_ranks))) / problem.n_microbatches
    for interval in (busy / 2, busy, 2 * busy):
        for ahead in (0.0, now):  # of the backwards
            for late in (0.0, now, 100 * now) if n == 3 else (0.0,):
                keys = [at + (0 if c % n else ahead) for c, at in enumerate(alone)]
                for c in range(2, len(keys), 3) if n == 3 else ():
                    keys[c] = keys[c - 1] + late
                yield (interval, 0.0, *keys)
