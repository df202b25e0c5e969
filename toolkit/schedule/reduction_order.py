"""The order in which ranks add to the sum of a stage's gradient; the last one updates.

``in_order``
    as they finish. In cyclic timing it is the last rank that makes every update, and it and the
    rank before it send less than the others.
``rotated``
    as they finish, but stage j begins with the j-th rank and goes round: the rank before that one
    updates. New weights travel round the same ring, so that each rank sends to one neighbour only.
    Where the stages are a multiple of the N ranks, every rank sends 2(N-1)/N models a step and
    makes as many updates as any other. In return sums wait for the rank that finishes last in the
    middle of their way, a rank holds gradients longer, at times of all stages, and the messages
    of a stage bunch where its last backward ends, up to N-1 in a row: traffic is even over the
    ranks and no longer over the step.
"""

from toolkit.errors import UserError
from toolkit.schedule import grid
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.placement import Placement
from toolkit.schedule.staleness import Staleness
from toolkit.schedule.timing import Timing

IN_ORDER, ROTATED = "in_order", "rotated"
CHAINS = (IN_ORDER, ROTATED)


def ring_of(timing: Timing, layout: Placement, stage: int) -> tuple[int, ...]:
    """The ranks of a rotated chain: from the first to give its gradient to the one that updates."""
    ends = _ends(timing, layout, stage)
    order = sorted(ends, key=lambda rank: (ends[rank], rank))
    turn = stage % len(order)
    return (*order[turn:], *order[:turn])


def check_rotated(
    timing: Timing, layout: Placement, staleness: Staleness, state: str, n_workers: int
) -> None:
    """Raise UserError if the schedule cannot honour rotated chains."""
    takes, instead = f'chains="{ROTATED}" takes', f'use chains="{IN_ORDER}"'
    if state != "replicated":
        raise UserError(f'{takes} state="replicated": got state={state!r}; {instead}')
    stages, microbatches = range(len(staleness)), range(layout.n_microbatches)
    rows = {tuple(layout.rank(j, m) for m in microbatches) for j in stages}
    fixed = len(rows) == 1 and all(layout.turns(j) == 1 for j in stages)
    if not fixed or len(set(*rows)) != n_workers:
        raise UserError(
            f"{takes} a rank for each micro-batch, the same at every stage: got placement"
            f' {layout.name!r}; choose placement="per_microbatch", or {instead}'
        )
    for j, row in enumerate(staleness):
        ends = _ends(timing, layout, j)
        if len(set(ends.values())) == 1 < len(ends):
            raise UserError(
                f"{takes} micro-batches that end one after another: at stage {j} all {len(ends)}"
                f" end at once, and their gradients meet in an all-reduce; {instead}"
            )
        made = timing.update_ready(j, layout.n_microbatches)
        for m, delay in enumerate(row):
            op = Op(Kind.FORWARD, j, m)
            # New weights need time to go round before a rank reads them.
            if timing.starts[op] + (delay + 1) * timing.period <= made:
                raise UserError(
                    f"{takes} a delay that leaves new weights time to go round the ranks: stage"
                    f" {j} on micro-batch {m} reads them as they are made, {delay} steps late; ask"
                    f" for delay={delay + 1} there, or {instead}\n"
                    + grid.render(timing, layout, mark=(op, 0))
                )


def _ends(timing: Timing, layout: Placement, stage: int) -> dict[int, int]:
    """Tick at which each rank's share of the gradient is complete."""
    ends: dict[int, int] = {}
    for m in range(layout.n_microbatches):
        rank = layout.rank(stage, m)
        ends[rank] = max(ends.get(rank, 0), timing.gradient_end(stage, m))
    return ends
