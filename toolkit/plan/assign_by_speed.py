"""Data parallelism in which faster ranks run more micro-batches."""

import heapq
from collections.abc import Sequence
from math import inf

from toolkit.errors import UserError, is_number, whole
from toolkit.schedule import Schedule

_MAX_OPS = 1_000_000  # of a training step, as on the command line


def assign_by_speed(
    n_stages: int, n_microbatches: int, speeds: Sequence[float]
) -> Schedule:
    """Return data parallelism in which a faster rank accumulates more micro-batches.

    Each micro-batch goes to the rank that would end it first. The update is that of any other
    placement, since it averages over micro-batches. For stages instead of micro-batches see
    :func:`toolkit.plan.search`.

    Args:
        n_stages: parts of the model, all of them on each rank.
        n_microbatches: of a training step.
        speeds: ``[rank]``, such as the measured ones of :meth:`toolkit.runtime.Runtime.costs`.

    Raises:
        UserError: a speed is not above 0, a rank would get no micro-batch, or there are more than
            a million ops.
    """
    stages = range(whole(n_stages, "n_stages", 1))
    n_microbatches = whole(n_microbatches, "n_microbatches", 1)
    if not speeds or not all(is_number(speed) and 0 < speed < inf for speed in speeds):
        raise UserError(
            f"speeds: got {[*speeds]}; expected numbers above 0, one per rank"
        )
    n_ops = 2 * len(stages) * n_microbatches
    if n_ops > _MAX_OPS:
        raise UserError(
            f"{n_stages} stages and {n_microbatches} micro-batches are {n_ops} ops a training step:"
            f" use {_MAX_OPS} at most"
        )

    microbatches_of_rank: list[list[int]] = [[] for _ in speeds]
    # When each rank would end one more micro-batch; of equal ends, that of the first rank.
    ends = [(1 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for microbatch in range(n_microbatches):
        _, rank = ends[0]
        microbatches_of_rank[rank].append(microbatch)
        # Computed anew rather than added up, so that no rounding decides between equal ranks.
        next_end = (len(microbatches_of_rank[rank]) + 1) / speeds[rank]
        heapq.heapreplace(ends, (next_end, rank))
    if [] in microbatches_of_rank:
        raise UserError(
            f"rank {microbatches_of_rank.index([])} would get none of {n_microbatches}"
            f" micro-batches at speeds {[*speeds]}: use more micro-batches, or leave that rank out"
        )

    orders = []
    for microbatches in microbatches_of_rank:
        order = []
        for microbatch in microbatches:
            order += [f"{stage}F{microbatch}" for stage in stages]
            order += [f"{stage}B{microbatch}" for stage in reversed(stages)]
        orders.append(order)
    return Schedule.from_rank_orders(orders, name="dealt")
