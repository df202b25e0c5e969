"""The order of the ranks that sum a stage's gradient, and the rank that updates the stage."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

from toolkit.schedule.placement import Placement
from toolkit.schedule.timing import Timing

IN_ORDER, ROTATED = CHAINS = ("in_order", "rotated")
"""The order in which ranks add to the sum of a stage's gradient; the last one updates.

``in_order``
    as they finish. In cyclic timing the last rank makes every update.
``rotated``
    as they finish, but beginning with the j-th rank for stage j. New weights travel round the same
    ring, so that each rank sends to one neighbour only. If the stages are a multiple of the N
    ranks, every rank sends 2(N-1)/N models a step and makes the same number of updates. In return
    ranks hold gradients longer, and up to N-1 messages of a stage follow its last backward; where
    links are slow, stages should therefore have equal parameters. Of g groups that finish together
    the j-th begins, and each sends 2(g-1)/g models to the next one. It needs replicated state, a
    rank for each micro-batch, and a delay that leaves weights time.

    Not the default, though it saves most where links bind, since alone it can cost time: CDP-v1 of
    ResNet-50 in 8 stages on ``ethernet_10`` takes 0.89 of the time in order on 4 ranks but 1.25 on
    8; with ``partition=parameters`` it takes 0.74 and 0.80. ``experiments/simulate.py`` prints it.
"""

Ring = tuple[tuple[int, ...], ...]
"""``[group]``, the ranks of a rotated chain; the last of all updates."""

_T = TypeVar("_T")


def share_ends(timing: Timing, layout: Placement, stage: int) -> dict[int, int]:
    """Return the tick at which each rank's share of a stage's gradient is complete."""
    ends: dict[int, int] = {}
    for microbatch in range(layout.n_microbatches):
        rank = layout.rank(stage, microbatch)
        ends[rank] = max(ends.get(rank, 0), timing.gradient_end(stage, microbatch))
    return ends


def ring_of(timing: Timing, layout: Placement, stage: int) -> Ring:
    """Return the ranks of a rotated chain, from the first that gives to the one that updates.

    Those that finish together are a group: the chain passes through one after another. Rings of
    four ranks that finish in two groups, (0 1) and (2 3)::

        stage 0   (0 1) (2 3)
        stage 1   (2 3) (0 1)        begins with the next group
        stage 2   (1 0) (3 2)        after a lap, with the next rank of each group
        stage 3   (3 2) (1 0)
    """
    ends = share_ends(timing, layout, stage)
    order = sorted(ends, key=lambda rank: (ends[rank], rank))
    # Without groups of workers each group is one rank. Ranks that finish at one tick have no order
    # in time; their own is that of their numbers, turned by one rank a lap.
    groups = [tuple(ranks) for _, ranks in groupby(order, key=ends.__getitem__)]
    laps, first_group = divmod(stage, len(groups))
    return tuple(_rotated(group, laps) for group in _rotated(groups, first_group))


def owners_of(
    timing: Timing, layout: Placement, state: str, rings: Sequence[Ring]
) -> tuple[int, ...]:
    """Return the rank that updates each stage and keeps its optimizer state.

    Replicated: the last rank of the stage's chain of gradients. Otherwise, in data parallelism,
    stages are dealt out evenly, the last to the first rank, which cyclic timing updates first.

    Args:
        timing: when gradients are complete.
        layout: the ranks of each stage.
        state: as in :class:`Schedule`.
        rings: ``[stage]``, rotated chains; empty if chains are in order.
    """
    n_stages = len(layout.cycles)
    if state != "replicated" and layout.has_whole_models:
        # Six stages on three ranks: the owners are 2 2 1 1 0 0. Stages may be no multiple.
        last_rank = layout.n_ranks - 1
        return tuple(
            last_rank - stage * layout.n_ranks // n_stages for stage in range(n_stages)
        )
    if rings:
        return tuple(ring[-1][-1] for ring in rings)
    # The chain ends at the rank that finishes last: it has the whole sum without a further message.
    owners = []
    for stage in range(n_stages):
        gradient_end = partial(timing.gradient_end, stage)
        last_microbatch = max(range(layout.n_microbatches), key=gradient_end)
        owners.append(layout.rank(stage, last_microbatch))
    return tuple(owners)


def _rotated(items: Sequence[_T], by: int) -> tuple[_T, ...]:
    """Return ``items`` rotated: they begin with the item at ``by``."""
    by %= len(items)
    return (*items[by:], *items[:by])
