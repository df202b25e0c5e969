"""List scheduling: orders of all ranks from one key of each chain."""

from collections.abc import Iterator, Sequence
from math import inf

from toolkit.plan.order_problem import OrderProblem, Word


def list_schedule(problem: OrderProblem, keys: Sequence[float]) -> list[Word]:
    """Order the ops of all ranks: of the ops it can begin soon, a rank runs that of least key.

    A forward waits where the rank's micro-batches could then no longer end, the oldest first.

    Args:
        problem: what to order.
        keys: seconds between micro-batches, seconds for which a rank waits for a lower key, and
            those of each chain's op on micro-batch 0.
    """
    interval, patience, *offsets = keys
    n_microbatches, n_kinds, needs, held_bytes = (
        problem.n_microbatches,
        len(problem.kinds),
        problem.needs,
        problem.held,
    )
    ranks = range(problem.n_ranks)
    ends: list[list[float]] = [[] for _ in offsets]
    rank_orders: list[Word] = [[] for _ in ranks]
    free_at = [0.0 for _ in ranks]
    stages_of_rank = [
        [chain // n_kinds for chain in chains if chain % n_kinds == 0] for chains in problem.of_rank
    ]
    whole_model = [sum(held_bytes[stage] for stage in stages) for stages in stages_of_rank]
    workspace_bytes = [max(problem.work[chain] for chain in chains) for chains in problem.of_rank]
    free_bytes = [
        room - workspace for room, workspace in zip(problem.room, workspace_bytes, strict=True)
    ]

    # A forward fits only if the micro-batches under way can still end, the oldest first: it
    # needs room for all their remaining stages. Otherwise the rank would wait for ever.
    def fits(rank: int, stage: int) -> bool:
        bytes_left = free_bytes[rank] - held_bytes[stage]
        if bytes_left >= whole_model[rank]:
            return True
        n_forwards = {
            rank_stage: len(ends[rank_stage * n_kinds]) + (rank_stage == stage)
            for rank_stage in stages_of_rank[rank]
        }
        n_backwards = {
            rank_stage: len(ends[rank_stage * n_kinds + n_kinds - 1])
            for rank_stage in stages_of_rank[rank]
        }
        for microbatch in range(min(n_backwards.values()), max(n_forwards.values())):
            if (
                sum(
                    held_bytes[rank_stage]
                    for rank_stage in stages_of_rank[rank]
                    if n_forwards[rank_stage] <= microbatch
                )
                > bytes_left
            ):
                return False
            bytes_left += sum(
                held_bytes[rank_stage]
                for rank_stage in stages_of_rank[rank]
                if n_backwards[rank_stage] <= microbatch < n_forwards[rank_stage]
            )
        return bytes_left >= 0

    def choose(rank: int) -> tuple[float, int]:
        """Return the start of the rank's next op, and its chain; the chain is -1 without an op."""
        candidates, earliest_start, now = [], inf, free_at[rank]
        for chain in problem.of_rank[rank]:
            microbatch = len(ends[chain])
            if microbatch == n_microbatches:
                continue
            start = now
            for needed_chain, lag in needs[chain]:
                needed_ends = ends[needed_chain]
                if len(needed_ends) <= microbatch:
                    break
                if needed_ends[microbatch] + lag > start:
                    start = needed_ends[microbatch] + lag
            else:
                if chain % n_kinds or fits(rank, chain // n_kinds):
                    candidates.append((offsets[chain] + microbatch * interval, start, chain))
                    earliest_start = min(earliest_start, start)
        return min(
            (candidate for candidate in candidates if candidate[1] <= earliest_start + patience),
            default=(0, inf, -1),
        )[1:]

    choices = [choose(rank) for rank in ranks]
    while choices_of_ranks := [(*choices[rank], rank) for rank in ranks if choices[rank][1] >= 0]:
        start, chain, rank = min(choices_of_ranks)
        free_at[rank] = start + problem.seconds[chain]
        ends[chain].append(free_at[rank])
        rank_orders[rank].append(chain)
        if chain % n_kinds in (0, n_kinds - 1):
            free_bytes[rank] += (
                held_bytes[chain // n_kinds] if chain % n_kinds else -held_bytes[chain // n_kinds]
            )
        for waiting_rank in problem.users[chain]:
            choices[waiting_rank] = choose(waiting_rank)
    return rank_orders


def simple_keys(problem: OrderProblem) -> Iterator[tuple[float, ...]]:
    """Yield keys for :func:`list_schedule`: the start of each op of a lone micro-batch.

    They differ in the interval between micro-batches, in whether backwards go before forwards, and
    in how long backwards of weights are put off: not at all, or until a rank would wait.
    """
    n_kinds, n_stages = len(problem.kinds), len(problem.held)
    start_alone, now = [0.0] * len(problem.seconds), 0.0
    for chain in (
        *range(0, n_kinds * n_stages, n_kinds),
        *range(n_kinds * (n_stages - 1) + 1, 0, -n_kinds),
    ):
        start_alone[chain] = now
        now += problem.seconds[chain]
    busiest_seconds = max(map(problem.load, range(problem.n_ranks))) / problem.n_microbatches
    for interval in (busiest_seconds / 2, busiest_seconds, 2 * busiest_seconds):
        for backward_lead in (0.0, now):  # of the backwards
            for weight_delay in (0.0, now, 100 * now) if n_kinds == 3 else (0.0,):
                keys = [
                    start + (0 if chain % n_kinds else backward_lead)
                    for chain, start in enumerate(start_alone)
                ]
                for chain in range(2, len(keys), 3) if n_kinds == 3 else ():
                    keys[chain] = keys[chain - 1] + weight_delay
                yield (interval, 0.0, *keys)
