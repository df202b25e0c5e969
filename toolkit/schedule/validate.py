"""Check that a schedule's timing, placement and delays fit together."""

from collections.abc import Collection

from toolkit.errors import UserError, whole
from toolkit.schedule import grid
from toolkit.schedule.correction import Correction
from toolkit.schedule.dependencies import dependencies
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.placement import Placement
from toolkit.schedule.reduction_order import IN_ORDER, ROTATED, share_ends
from toolkit.schedule.staleness import FRESHEST, Delay, RandomDelay, Staleness, freshest
from toolkit.schedule.timing import Timing

MOST = 2**17
"""Most forwards of a training step; more take minutes and gigabytes."""

_KINDS = (*Kind,)
_COMPLETE = (
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
)


def check_forwards(n_stages: int, n_microbatches: int) -> None:
    """Raise UserError if a training step has more than :data:`MOST` forwards."""
    if n_stages * n_microbatches > MOST:
        raise UserError(
            f"a schedule has at most {MOST} forwards, one of each stage for each micro-batch: got"
            f" {n_stages} stages and {n_microbatches} micro-batches"
        )


def check_groups(groups: int | None, n_workers: int) -> None:
    """Raise UserError unless the workers divide into so many groups; None: one for each worker."""
    if groups is None:
        return
    if whole(groups, "groups", 1) > n_workers or n_workers % groups:
        divisors = [g for g in range(1, n_workers + 1) if n_workers % g == 0]
        raise UserError(
            f"groups divides the {n_workers} workers: got {groups}; choose one of"
            f" {', '.join(map(str, divisors))}"
        )


def check_complete(ops: Collection[Op], n_stages: int, n_microbatches: int) -> None:
    """Raise UserError unless every stage has a forward and a whole backward of each micro-batch."""
    for op in ops:
        if not (0 <= op.stage < n_stages and 0 <= op.microbatch < n_microbatches):
            raise UserError(
                f"op {op} is outside {n_stages} stages and {n_microbatches} micro-batches"
            )
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            # A plain tuple equals the op, and there are four for each forward of a step.
            kinds = {kind for kind in _KINDS if (kind, stage, microbatch) in ops}
            if kinds not in _COMPLETE:
                kind_names = (
                    ", ".join(kind.name.lower() for kind in sorted(kinds)) or "nothing"
                )
                raise UserError(
                    f"stage {stage} of micro-batch {microbatch} needs a forward and either a"
                    f" backward or both of its halves: found {kind_names}; stages and micro-batches"
                    " count from 0"
                )


def check_dependencies(timing: Timing, layout: Placement, n_stages: int) -> None:
    """Raise UserError if an op starts before its inputs are ready."""
    for op, start in timing.starts.items():
        for needed in dependencies(op, timing.starts, n_stages):
            if start < timing.end(needed):
                raise UserError(
                    f"{op} starts before {needed}, whose result it needs, has ended: start it"
                    f" {timing.end(needed) - start} ticks later\n"
                    + grid.render(timing, layout, mark=(op, 0))
                )


def check_ranks(timing: Timing, layout: Placement, n_stages: int) -> None:
    """Raise UserError if a rank runs two ops at once; a single device may, and pairs do."""
    # One device has all micro-batches in flight at once by definition: its slots are not exclusive.
    if layout.one_device:
        return
    tick = timing.ticks_per_slot
    period = timing.period
    # rank -> (start modulo its lap, op); a lap is the periods until a rank's ops repeat, in ticks
    busy: dict[int, list[tuple[int, Op]]] = {}
    laps: dict[int, int] = {}
    turns = [layout.turns(stage) for stage in range(n_stages)]
    for stage, n_turns in enumerate(turns):
        if n_turns > 1 and _first_come_first_served(
            timing, stage, layout.n_microbatches
        ):
            turns[stage] = 0  # a rank is free again when its turn comes
    for pair in timing.pairs.items():
        if len({layout.rank(op.stage, op.microbatch) for op in pair}) > 1:
            raise UserError(
                f"an overlapped pair runs on one rank: got {pair[0]};{pair[1]}"
            )
    overlapped = {*timing.pairs.values()}  # with a forward, which stands for both
    for op, start in timing.starts.items():
        if op in overlapped:
            continue
        lap = turns[op.stage] * period
        for step in range(turns[op.stage]):
            rank = layout.rank(op.stage, op.microbatch, step)
            busy.setdefault(rank, []).append(((start + step * period) % lap, op))
            laps.setdefault(rank, lap)
    for rank, starts_and_ops in busy.items():
        # Sorted, only neighbours can meet: an op takes one slot.
        starts_and_ops.sort()
        # After its last op comes the first of the next lap.
        first_start, first_op = starts_and_ops[0]
        successors = [*starts_and_ops[1:], (first_start + laps[rank], first_op)]
        for (start, op), (next_start, next_op) in zip(
            starts_and_ops, successors, strict=True
        ):
            if next_start - start < tick:
                raise UserError(
                    f"rank {rank} cannot run {op} and {next_op} in the same slot of the steady"
                    f" state: choose another placement than {layout.name!r}, or other"
                    f" numbers of stages and micro-batches than {n_stages} and"
                    f" {layout.n_microbatches}\n"
                    + grid.render(
                        timing, layout, laps[rank] // period + 1, mark=(next_op, 0)
                    )
                )


def _first_come_first_served(timing: Timing, stage: int, n_microbatches: int) -> bool:
    """Whether micro-batches enter and leave ``stage`` in order, from step to step."""
    microbatches = range(n_microbatches)
    enter = [
        timing.starts[Op(Kind.FORWARD, stage, microbatch)]
        for microbatch in microbatches
    ]
    leave = [timing.gradient_end(stage, microbatch) for microbatch in microbatches]
    # The first micro-batch of the next step comes after the last of this one. Then the rank whose
    # turn comes is the one that has been free for longest.
    two_laps = [[*times, times[0] + timing.period] for times in (enter, leave)]
    return all(times == sorted(times) for times in two_laps)


def check_staleness(
    timing: Timing, layout: Placement, staleness: Staleness, delay: Delay
) -> None:
    """Raise UserError if weights are read before they are made."""
    possible = freshest(timing, len(staleness), layout.n_microbatches)
    for stage, row in enumerate(staleness):
        for microbatch, promised in enumerate(row):
            least_delay = possible[stage][microbatch]
            if promised < least_delay:
                remedy = f'ask for delay={least_delay} there, or for delay="{FRESHEST}"'
                if isinstance(delay, RandomDelay):
                    remedy = f"draw delays of least={max(map(max, possible))} or more"
                steps = "step" if least_delay == 1 else "steps"
                raise UserError(
                    f"stage {stage} on micro-batch {microbatch} cannot read weights {promised}"
                    f" steps late: the timing makes them available {least_delay} {steps} late;"
                    f" {remedy}\n"
                    + grid.render(
                        timing, layout, mark=(Op(Kind.FORWARD, stage, microbatch), 0)
                    )
                )


def check_correction(
    correction: Correction,
    timing: Timing,
    layout: Placement,
    staleness: Staleness,
    state: str,
) -> None:
    """Raise UserError if the schedule cannot correct what it reads late."""
    if correction.kind == "none":
        return
    if state != "replicated":
        raise UserError(
            f'correction={correction.kind} takes state="replicated": got state={state!r}; a rank'
            " keeps a sharded version for one op only"
        )
    if correction.predicts:
        return
    for stage, row in enumerate(staleness):
        # The newest weights of a step are made by the update of the step before, a period earlier.
        update_tick = timing.update_ready(stage, layout.n_microbatches) - timing.period
        for microbatch, delay in enumerate(row):
            read_tick = timing.gradient_end(stage, microbatch) - timing.ticks_per_slot
            if delay and read_tick < update_tick:
                op = Op(Kind.BACKWARD_WEIGHT, stage, microbatch)
                if op not in timing.starts:
                    op = Op(Kind.BACKWARD, stage, microbatch)
                raise UserError(
                    f"correction=compensate reads the newest weights in {op}, before their update"
                    f" is complete: start it {update_tick - read_tick} ticks later, or use"
                    " correction=extrapolate\n"
                    + grid.render(timing, layout, mark=(op, 0))
                )


def check_rotated(
    timing: Timing, layout: Placement, staleness: Staleness, state: str, n_workers: int
) -> None:
    """Raise UserError if the schedule cannot honour rotated chains."""
    takes = f'chains="{ROTATED}" takes'
    instead = f'use chains="{IN_ORDER}"'
    if state != "replicated":
        raise UserError(f'{takes} state="replicated": got state={state!r}; {instead}')
    if not layout.has_whole_models or len(layout.ranks(0)) != n_workers:
        raise UserError(
            f"{takes} a rank for each micro-batch, the same at every stage: got placement"
            f' {layout.name!r}; choose placement="per_microbatch", or {instead}'
        )
    for stage, row in enumerate(staleness):
        ends = share_ends(timing, layout, stage)
        if len(set(ends.values())) == 1 < len(ends):
            raise UserError(
                f"{takes} micro-batches that end one after another: at stage {stage} all"
                f" {len(ends)} end at once, and their gradients meet in an all-reduce; {instead}"
            )
        update_tick = timing.update_ready(stage, layout.n_microbatches)
        for microbatch, delay in enumerate(row):
            op = Op(Kind.FORWARD, stage, microbatch)
            # New weights need time to go round before a rank reads them.
            if timing.starts[op] + (delay + 1) * timing.period <= update_tick:
                raise UserError(
                    f"{takes} a delay that leaves new weights time to go round the ranks: stage"
                    f" {stage} on micro-batch {microbatch} reads them as they are made,"
                    f" {delay} steps late; ask for delay={delay + 1} there, or {instead}\n"
                    + grid.render(timing, layout, mark=(op, 0))
                )
