"""When ranks may begin the first op of a schedule, so that workers keep their stagger.

Three workers of a cyclic schedule. Their first forwards stand 0, 1/3 and 2/3 of a period after one
another, and so do their first ops in seconds::

    rank 0  |=======|=======|
    rank 1    .  |=======|=======|
    rank 2       .    |=======|=======|
            |- period -|
"""

from collections.abc import Sequence

from toolkit.schedule import Program, Schedule


def rank_starts(
    program: Program,
    schedule: Schedule,
    tick: int,
    op_seconds: Sequence[Sequence[float]],
    speeds: Sequence[float],
) -> list[float]:
    """Return the earliest start of each rank, in seconds after ``schedule`` begins at ``tick``.

    A rank that begins with stage 0 starts as in ``schedule``; any other rank starts when its inputs
    arrive.

    Args:
        program: whose first forwards from ``tick`` on count.
        schedule: the schedule that begins.
        tick: when it begins in ``program``.
        op_seconds: ``[stage][kind]``, seconds of an op at speed 1.
        speeds: of each rank.
    """
    starts = [0.0] * len(program.ranks)
    first_ticks = program.first_forwards(tick)
    # All workers start together, so that none has to wait for a clock.
    if not any(first_ticks.values()):
        return starts
    busy_seconds = [0.0] * len(starts)  # of compute in a training step
    for op in schedule.timing.starts:
        rank = schedule.rank(op.stage, op.microbatch)
        busy_seconds[rank] += op_seconds[op.stage][op.kind] / speeds[rank]
    for rank, first_tick in first_ticks.items():
        # The stagger is a share of the period. In seconds, a period is at least the busiest
        # rank's compute.
        starts[rank] = first_tick / schedule.timing.period * max(busy_seconds)
    return starts
