"""A bound on the training step of any rank orders, from the load of each rank and its waits.

A rank runs all its ops. Before its first backward it waits for the ranks behind it; until then it
runs no more forwards than it has room for::

    rank r   F F F . . . . . . B ...     forwards in its room, idle, then its first gradient
    rank r+1   F F . . . . B B           from the way of a micro-batch to the last stage and back

If it has one stage and less room than micro-batches, it waits likewise after its last forward.
"""

from math import inf

from toolkit.plan.order_problem import OrderProblem


def step_bound(problem: OrderProblem) -> float:
    """Return seconds that a training step takes at least, in any order."""
    return max(_bound_of_rank(problem, rank) for rank in range(problem.n_ranks))


def _bound_of_rank(problem: OrderProblem, rank: int) -> float:
    stages = problem.stages_of_rank[rank]
    if not stages:
        return 0.0
    busy_seconds = problem.load(rank)
    if len(stages) == 1:  # with more, ops of others may run during an update
        busy_seconds += problem.update_seconds[stages[0]]

    # The first op is a forward of the first stage, the first gradient that of the last stage.
    first_forward = problem.chains(stages[0])[0]
    last_backward = problem.chains(stages[-1])[1]
    gradient_arrival = (
        _path_seconds(problem, first_forward, last_backward)
        - problem.seconds[last_backward]
    )
    idle_seconds = max(0.0, gradient_arrival - _forward_seconds_in_room(problem, rank))
    if len(stages) == 1:
        idle_seconds += _idle_after_last_forward(problem, rank, stages[0])
    return busy_seconds + idle_seconds


def _forward_seconds_in_room(problem: OrderProblem, rank: int) -> float:
    """Return the most seconds of forwards that fit into the room before the first backward."""

    # A knapsack: the most seconds of forwards in this room, if forwards could be cut.
    # Forwards that need least room for their time come first.
    def bytes_a_second(stage: int) -> float:
        forward_seconds = problem.seconds[problem.chains(stage)[0]]
        return problem.kept_bytes[stage] / max(forward_seconds, 1e-30)

    room = problem.room[rank]
    total_seconds = 0.0
    for stage in sorted(problem.stages_of_rank[rank], key=bytes_a_second):
        kept_bytes = problem.kept_bytes[stage]
        n_forwards: float = problem.n_microbatches
        # Parts of a forward count, too: no choice of whole ones takes more seconds in this room.
        if kept_bytes > 0:
            n_forwards = min(n_forwards, room / kept_bytes)
        total_seconds += n_forwards * problem.seconds[problem.chains(stage)[0]]
        room -= n_forwards * kept_bytes
    return total_seconds


def _idle_after_last_forward(problem: OrderProblem, rank: int, stage: int) -> float:
    """Return the seconds for which the rank of a lone stage waits for its last gradients."""
    kept_bytes = problem.kept_bytes[stage]
    if kept_bytes * problem.n_microbatches <= problem.room[rank]:
        return 0.0
    chains = problem.chains(stage)
    forward, *backwards = (problem.seconds[chain] for chain in chains)
    n_in_flight = problem.room[rank] // kept_bytes
    # After the last forward begins, the rank has that one to run, and the backwards of the
    # micro-batches in flight. It is idle for the rest of the last one's round trip.
    round_trip = _path_seconds(problem, chains[0], chains[1]) + sum(backwards[1:])
    return max(0.0, round_trip - forward - n_in_flight * sum(backwards))


def _path_seconds(problem: OrderProblem, begin: int, end: int) -> float:
    """Return seconds from the start of one chain's op to the end of another's, without waiting."""
    # The path has every chain after those that it needs, so one pass is enough. Chains that cannot
    # be reached from `begin` stay at minus infinity.
    path_seconds = [-inf] * len(problem.seconds)
    path_seconds[begin] = problem.seconds[begin]
    for chain in problem.path:
        for needed_chain, lag in problem.needs[chain]:
            arrival = path_seconds[needed_chain] + lag
            path_seconds[chain] = max(
                path_seconds[chain], arrival + problem.seconds[chain]
            )
    return path_seconds[end]
