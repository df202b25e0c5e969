"""Data parallelism in which faster ranks run more micro-batches."""

from collections.abc import Sequence

from toolkit.errors import UserError, whole
from toolkit.schedule import Schedule


def assign_by_speed(n_stages: int, n_microbatches: int, speeds: Sequence[float]) -> Schedule:
    """Return data parallelism in which a faster rank accumulates more micro-batches.

    Each micro-batch goes to the rank that would end it first. The update is that of any other
    placement, since it averages over micro-batches. For stages instead of micro-batches see
    :func:`toolkit.plan.search`.

    Args:
        n_stages: parts of the model, all of them on each rank.
        n_microbatches: of a training step.
        speeds: ``[rank]``, such as the measured ones of :meth:`toolkit.runtime.Runtime.costs`.

    Raises:
        UserError: a speed is not above 0, or a rank would get no micro-batch.
    """
    stages = range(whole(n_stages, "n_stages", 1))
    n_microbatches = whole(n_microbatches, "n_microbatches", 1)
    if not speeds or not min(speeds) > 0:
        raise UserError(f"speeds: got {[*speeds]}; expected numbers above 0, one per rank")

    microbatches_of_rank: list[list[int]] = [[] for _ in speeds]
    for microbatch in range(n_microbatches):
        ends = [
            (len(microbatches) + 1) / speed
            for microbatches, speed in zip(microbatches_of_rank, speeds, strict=True)
        ]
        microbatches_of_rank[ends.index(min(ends))].append(microbatch)
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
