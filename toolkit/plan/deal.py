"""Micro-batches dealt to ranks of unequal speed."""

from collections.abc import Sequence

from toolkit.errors import UserError, whole
from toolkit.schedule import Schedule


def deal(n_stages: int, n_microbatches: int, speeds: Sequence[float]) -> Schedule:
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
    n_stages, microbatches_per_step = (
        whole(n_stages, "n_stages", 1),
        whole(n_microbatches, "n_microbatches", 1),
    )
    if not speeds or not min(speeds) > 0:
        raise UserError(f"speeds: got {[*speeds]}; expected numbers above 0, one a rank")
    shares: list[list[int]] = [[] for _ in speeds]
    for microbatch in range(microbatches_per_step):
        ends = [(len(share) + 1) / speed for share, speed in zip(shares, speeds, strict=True)]
        shares[ends.index(min(ends))].append(microbatch)
    if [] in shares:
        raise UserError(
            f"rank {shares.index([])} would get none of {microbatches_per_step} micro-batches at"
            f" speeds {[*speeds]}: use more micro-batches, or leave that rank out"
        )
    stages = range(n_stages)
    passes = (("F", stages), ("B", stages[::-1]))
    orders = [
        [
            f"{stage}{letter}{microbatch}"
            for microbatch in share
            for letter, stage_order in passes
            for stage in stage_order
        ]
        for share in shares
    ]
    return Schedule.from_rank_orders(orders, name="dealt")
