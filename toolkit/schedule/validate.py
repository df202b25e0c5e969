"""Check that a schedule's timing, placement and delays fit together."""

from collections.abc import Collection

from toolkit.errors import UserError
from toolkit.schedule import grid
from toolkit.schedule.dependencies import dependencies
from toolkit.schedule.op import Kind, Op
from toolkit.schedule.placement import Assigned, Placement
from toolkit.schedule.random_delay import RandomDelay
from toolkit.schedule.staleness import FRESHEST, Delay, Staleness, freshest
from toolkit.schedule.timing import Timing

MOST = 2**20
"""Forwards of a training step: schedules of more take minutes to make, and gigabytes."""


def check_dependencies(
    timing: Timing, layout: Placement, n_stages: int, n_microbatches: int
) -> None:
    """Check that every op is within the sizes and starts after its inputs are ready.

    Raises:
        UserError: an op is outside, or starts too early.
    """
    starts = timing.starts
    for op, start in starts.items():
        if not (0 <= op.stage < n_stages and 0 <= op.microbatch < n_microbatches):
            raise UserError(
                f"op {op} is outside {n_stages} stages and {n_microbatches} micro-batches: leave"
                " it out, or make room for it"
            )
        for needed in dependencies(op, starts, n_stages):
            if start < timing.end(needed):
                raise UserError(
                    f"{op} starts before {needed}, whose result it needs, has ended: start it"
                    f" {timing.end(needed) - start} ticks later\n"
                    + grid.render(timing, layout, mark=(op, 0))
                )


def check_ranks(timing: Timing, layout: Placement, n_stages: int) -> None:
    """Check that no rank runs two ops at once; a single device may.

    Raises:
        UserError: a rank does.
    """
    if layout.one_device:
        return
    tick, period = timing.ticks_per_slot, timing.period
    for rank, (taken, lap) in _busy(timing, layout, n_stages).items():
        taken.sort()
        after = [*taken[1:], (taken[0][0] + lap, taken[0][1])]
        for (start, op), (following, other) in zip(taken, after, strict=True):
            if following - start < tick:
                longer = f", or a longer period than {period / tick:g} slots"
                ordered = isinstance(layout, Assigned)  # else no period can be given
                raise UserError(
                    f"rank {rank} cannot run {op} and {other} in the same slot of the steady"
                    f" state: choose another placement than {layout.name!r}, or other"
                    f" numbers of stages and micro-batches than {n_stages} and"
                    f" {layout.n_microbatches}{longer if ordered else ''}\n"
                    + grid.render(timing, layout, lap // period + 1, mark=(other, 0))
                )


def check_staleness(timing: Timing, layout: Placement, staleness: Staleness, delay: Delay) -> None:
    """Check that no weights are read before they are made.

    Raises:
        UserError: some weights are.
    """
    possible = freshest(timing, len(staleness), layout.n_microbatches)
    for j, row in enumerate(staleness):
        for m, asked in enumerate(row):
            least = possible[j][m]
            if asked < least:
                remedy = f'ask for delay={least} there, or for delay="{FRESHEST}"'
                if isinstance(delay, RandomDelay):
                    remedy = f"draw delays of least={max(map(max, possible))} or more"
                raise UserError(
                    f"stage {j} on micro-batch {m} cannot read weights {asked} steps late: the"
                    f" timing makes them available {least} step{'s' * (least > 1)} late;"
                    f" {remedy}\n" + grid.render(timing, layout, mark=(Op(Kind.FORWARD, j, m), 0))
                )


def _busy(
    timing: Timing, layout: Placement, n_stages: int
) -> dict[int, tuple[list[tuple[int, Op]], int]]:
    """For each rank, (start, op) modulo its lap, and the lap in ticks."""
    period = timing.period
    turns = [layout.turns(stage) for stage in range(n_stages)]
    in_turn = [
        n > 1 and _first_come_first_served(timing, stage, layout.n_microbatches)
        for stage, n in enumerate(turns)
    ]
    busy: dict[int, tuple[list[tuple[int, Op]], int]] = {}
    for op, start in timing.starts.items():
        if in_turn[op.stage]:
            continue  # a rank is free again when its turn comes
        lap = turns[op.stage] * period
        for step in range(turns[op.stage]):
            rank = layout.rank(op.stage, op.microbatch, step)
            taken, _ = busy.setdefault(rank, ([], lap))
            taken.append(((start + step * period) % lap, op))
    return busy


def _first_come_first_served(timing: Timing, stage: int, n_microbatches: int) -> bool:
    """Whether micro-batches enter and leave ``stage`` in order, from step to step."""
    microbatches = range(n_microbatches)
    enter = [timing.starts[Op(Kind.FORWARD, stage, m)] for m in microbatches]
    leave = [timing.gradient_end(stage, m) for m in microbatches]
    return all(
        times == sorted(times) and times[-1] <= times[0] + timing.period for times in (enter, leave)
    )


def check_forwards(n_stages: int, n_microbatches: int) -> None:
    """Refuse a training step of more than :data:`MOST` forwards.

    Raises:
        UserError: there are more.
    """
    if n_stages * n_microbatches > MOST:
        raise UserError(
            f"a schedule has at most {MOST} forwards, one of each stage for each micro-batch: got"
            f" {n_stages} stages and {n_microbatches} micro-batches; lower either"
        )


def check_complete(ops: Collection[Op], n_stages: int, n_microbatches: int) -> None:
    """Check that every stage has a forward and a whole backward for every micro-batch.

    Raises:
        UserError: an op or an index is missing.
    """
    for what, attribute in (("stage", "stage"), ("micro-batch", "microbatch")):
        present = {getattr(op, attribute) for op in ops}
        absent = next(k for k in range(len(present) + 1) if k not in present)
        beyond = [op for op in ops if getattr(op, attribute) > absent]
        if beyond:
            op = min(beyond)
            raise UserError(
                f"{op} is of {what} {getattr(op, attribute)}, and no op is of {what} {absent}:"
                f" they count from 0, and none is left out; mend {op}, or add what is missing"
            )
    for j in range(n_stages):
        for m in range(n_microbatches):
            kinds = {kind for kind in Kind if Op(kind, j, m) in ops}
            if kinds not in _COMPLETE:
                found = ", ".join(kind.name.lower() for kind in sorted(kinds)) or "nothing"
                raise UserError(
                    f"stage {j} of micro-batch {m} needs a forward and either a backward or both"
                    f" of its halves: found {found}"
                )


_COMPLETE = (
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
)
