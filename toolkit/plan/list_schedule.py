"""List scheduling: orders of all ranks from one key of each chain."""

from collections.abc import Iterator, Sequence
from math import inf

from toolkit.plan.order_problem import OrderProblem, RankOrder


def list_schedule(problem: OrderProblem, keys: Sequence[float]) -> list[RankOrder]:
    """Order the ops of all ranks: of the ops it can begin soon, a rank runs that of least key.

    A forward waits where the rank's micro-batches could then no longer end, the oldest first.

    Args:
        problem: what to order.
        keys: seconds between micro-batches, seconds for which a rank waits for a lower key, and
            those of each chain's op on micro-batch 0.
    """
    lists = _Lists(problem, keys)
    ranks = range(problem.n_ranks)
    choices = [lists.next_op(rank) for rank in ranks]
    while True:
        # Ops run in the order of their starts over all ranks, as in a simulation of events. So
        # nothing that runs later can change what an op has found.
        start, chain, rank = min((*choices[rank], rank) for rank in ranks)
        if chain < 0:
            return lists.orders
        lists.run(rank, chain, start)
        # The op can change what its rank runs next, and that of ranks which need its result.
        for changed_rank in {rank, *lists.ranks_waiting[chain]}:
            choices[changed_rank] = lists.next_op(changed_rank)


class _Lists:
    """Orders so far, and what ranks can run next."""

    def __init__(self, problem: OrderProblem, keys: Sequence[float]) -> None:
        self.problem = problem
        self.interval = keys[0]
        self.patience = keys[1]
        self.keys = keys[2:]
        self.orders: list[RankOrder] = [[] for _ in problem.room]
        # [chain][microbatch].
        self.ends: list[list[float]] = [[] for _ in problem.seconds]
        self.free_at = [0.0 for _ in problem.room]
        self.free_bytes: list[float] = []
        self.microbatch_bytes: list[float] = []
        for rank, room in enumerate(problem.room):
            workspaces = [
                problem.workspace_bytes[chain] for chain in problem.chains_of_rank[rank]
            ]
            # With room set apart for the largest workspace, only activations have to be counted.
            self.free_bytes.append(room - max(workspaces))
            stages = problem.stages_of_rank[rank]
            self.microbatch_bytes.append(
                sum(problem.kept_bytes[stage] for stage in stages)
            )
        # For each chain.
        self.ranks_waiting: list[set[int]] = [set() for _ in problem.seconds]
        for chain, needs in enumerate(problem.needs):
            for needed_chain, _ in needs:
                rank = problem.placement[chain // problem.n_kinds]
                self.ranks_waiting[needed_chain].add(rank)

    def next_op(self, rank: int) -> tuple[float, int]:
        """Return the start of the rank's next op, and its chain; the chain is -1 without an op."""
        problem = self.problem
        ends = self.ends
        n_kinds = problem.n_kinds
        candidates = []
        earliest_start = inf
        for chain in problem.chains_of_rank[rank]:
            microbatch = len(ends[chain])
            if microbatch == problem.n_microbatches:
                continue
            start = self.free_at[rank]
            for needed_chain, lag in problem.needs[chain]:
                needed_ends = ends[needed_chain]
                if len(needed_ends) <= microbatch:
                    break
                if needed_ends[microbatch] + lag > start:
                    start = needed_ends[microbatch] + lag
            else:
                # All that the op needs has its place, so its start is known.
                # Only a forward keeps more than before, so a backward always fits.
                if chain % n_kinds or self._fits(rank, chain // n_kinds):
                    key = self.keys[chain] + microbatch * self.interval
                    candidates.append((key, start, chain))
                    earliest_start = min(earliest_start, start)
        # A rank may wait this long for an op of a lower key, rather than run another one at once.
        latest_start = earliest_start + self.patience
        _, start, chain = min(
            (candidate for candidate in candidates if candidate[1] <= latest_start),
            default=(0, inf, -1),
        )
        return start, chain

    def run(self, rank: int, chain: int, start: float) -> None:
        """Run the next op of ``chain`` on ``rank``."""
        problem = self.problem
        stage, kind = divmod(chain, problem.n_kinds)
        self.free_at[rank] = start + problem.seconds[chain]
        self.ends[chain].append(self.free_at[rank])
        self.orders[rank].append(chain)
        if kind == 0:
            self.free_bytes[rank] -= problem.kept_bytes[stage]
        elif kind == problem.n_kinds - 1:
            self.free_bytes[rank] += problem.kept_bytes[stage]

    def _fits(self, rank: int, new_stage: int) -> bool:
        """Whether all micro-batches under way can still end after a forward of ``new_stage``.

        They end in turn, the oldest first: each needs room for its remaining stages, and then frees
        all of them. Otherwise the rank would wait for ever.
        """
        kept_bytes = self.problem.kept_bytes
        bytes_left = self.free_bytes[rank] - kept_bytes[new_stage]
        if bytes_left >= self.microbatch_bytes[rank]:
            return True

        stages = self.problem.stages_of_rank[rank]
        n_forwards = {}
        n_backwards = {}
        for stage in stages:
            chains = self.problem.chains(stage)
            n_forwards[stage] = len(self.ends[chains[0]])
            n_backwards[stage] = len(self.ends[chains[-1]])
        n_forwards[new_stage] += 1
        for microbatch in range(min(n_backwards.values()), max(n_forwards.values())):
            remaining_bytes = 0.0
            freed_bytes = 0.0
            for stage in stages:
                if n_forwards[stage] <= microbatch:
                    remaining_bytes += kept_bytes[stage]
                elif n_backwards[stage] <= microbatch:
                    freed_bytes += kept_bytes[stage]
            if remaining_bytes > bytes_left:
                return False
            bytes_left += freed_bytes
        return bytes_left >= 0


def simple_keys(problem: OrderProblem) -> Iterator[tuple[float, ...]]:
    """Yield keys for :func:`list_schedule`: the start of each op of a lone micro-batch.

    They differ in the interval between micro-batches, in whether backwards go before forwards, and
    in how long backwards of weights are put off: not at all, or until a rank would wait.
    """
    start_alone = [0.0] * len(problem.seconds)
    end = 0.0
    for chain in problem.path:
        start_alone[chain] = end
        end += problem.seconds[chain]

    weight_delays = [0.0]
    if problem.n_kinds == 3:
        weight_delays = [0.0, end, 100 * end]
    busiest_seconds = problem.busiest_seconds
    for interval in (busiest_seconds / 2, busiest_seconds, 2 * busiest_seconds):
        for backward_lead in (0.0, end):
            for weight_delay in weight_delays:
                keys = [*start_alone]
                for stage in range(problem.n_stages):
                    forward, backward, *weight_chains = problem.chains(stage)
                    # With the lead, a forward is after all backwards of earlier micro-batches.
                    keys[forward] += backward_lead
                    for chain in weight_chains:
                        keys[chain] = keys[backward] + weight_delay
                yield (interval, 0.0, *keys)
