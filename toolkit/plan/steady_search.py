"""Search for pipelines that never drain: late weights, and one block for all micro-batches.

Every micro-batch repeats one block of ops, an interval after the one before, as in PipeDream-2BW
and in cyclic data parallelism with a rank for each stage. A step takes as many intervals as it has
micro-batches, so that the interval is at least the time of the busiest rank. How long a micro-batch
is under way decides the memory. The search packs blocks at random, beginning with the shortest
interval and the best balanced placement.
"""

import random
import time
from collections.abc import Sequence
from itertools import product
from math import ceil

from toolkit.errors import UserError
from toolkit.plan.order_problem import OrderProblem
from toolkit.plan.search_space import OnSearch, SearchResult, SearchSpace
from toolkit.plan.stage_placement import levelled
from toolkit.schedule import Assigned, Op, Schedule, Timing
from toolkit.schedule.staleness import Delay

_LONGER = (
    1.0,
    1.01,
    1.02,
    1.05,
    1.1,
    1.2,
    1.35,
    1.5,
    1.75,
    2.0,
    2.5,
    3.0,
    4.0,
    6.0,
    8.0,
)
"""Intervals that are tried, by the time of the busiest rank."""


def search_steady(
    space: SearchSpace,
    *,
    delay: Delay = 1,
    seconds: float = 60.0,
    seed: int = 0,
    progress: OnSearch | None = None,
) -> SearchResult:
    """Find a pipeline on weights one step late or more that never drains.

    Args:
        space: stages, ranks and limits; without a placement, balanced ones are tried.
        delay: as in :class:`Schedule`.
        seconds: of the search, at most.
        seed: of the random blocks.
        progress: called before each interval and placement.

    Raises:
        UserError: a rank has no room for one micro-batch, no block fits into the memory, or
            ``seconds`` are too few for so many ops.
    """
    space.least_seconds(seconds)
    end = time.monotonic() + seconds
    draw = random.Random(seed)
    problems = _problems(space, draw)
    bound = space.n_microbatches * problems[0].busiest_seconds
    if space.placement is None:
        bound = space.load_bound()
    attempts = sorted(
        product(_LONGER, problems), key=lambda pair: pair[0] * pair[1].busiest_seconds
    )
    n_tried = 0
    for index, (stretch, problem) in enumerate(attempts):
        if progress:
            progress(
                "packing",
                stretch * space.n_microbatches * problem.busiest_seconds,
                bound,
            )
        packing = _Packing(problem, stretch, draw)
        # The attempts that are left share the time that is left.
        attempt_end = time.monotonic() + (end - time.monotonic()) / (
            len(attempts) - index
        )
        while True:
            n_tried += 1
            schedule = packing.draw_schedule(delay)
            if schedule is not None:
                # A packing does not count messages that wait. The simulator does, so it decides.
                timeline = space.simulate(schedule)
                limits = zip(space.peaks(timeline), space.limits, strict=True)
                if all(peak <= limit * (1 + 1e-9) for peak, limit in limits):
                    return space.result(
                        schedule, timeline, problem.placement, bound, n_tried
                    )
            if time.monotonic() >= attempt_end:
                break
    raise UserError(
        f"no pipeline with delay {delay} was found in a memory of {[*space.limits]} bytes: give"
        " more, or more micro-batches in a training step"
    )


def _problems(space: SearchSpace, draw: random.Random) -> list[OrderProblem]:
    """Return the problem of each placement on which every rank has room for a micro-batch."""
    placements = space.first_placements()
    if not space.placement and len(space.costs) > space.n_ranks:
        placements += [
            levelled(placement, space.stage_seconds, space.speeds, draw)
            for placement in placements
        ]
    problems = []
    for placement in dict.fromkeys(placements):
        # Ranks keep a second version of the weights, which late ops read.
        version_bytes = [0.0] * space.n_ranks
        for stage, rank in enumerate(placement):
            version_bytes[rank] += space.costs[stage].parameter_bytes
        room = [
            limit - n_bytes
            for limit, n_bytes in zip(space.limits, version_bytes, strict=True)
        ]
        try:
            problems.append(space.problem(placement, room))
        except UserError as error:  # no room for one micro-batch
            room_error = error
    if not problems:
        raise room_error
    return problems


class _Packing:
    """Blocks of a problem that repeat after an interval, packed at random.

    A rank runs the ops of all micro-batches, so that two of its ops must not overlap modulo the
    interval::

        rank 0   |F0 .  B0|F1 .  B1|F2 .  B2|      interval 3, busy in ticks 0 and 2
    """

    def __init__(
        self, problem: OrderProblem, stretch: float, draw: random.Random
    ) -> None:
        self.problem = problem
        self.draw = draw
        tick = problem.tick
        self.op_ticks = [max(1, _ticks(seconds, tick)) for seconds in problem.seconds]
        self.needs: list[list[tuple[int, int]]] = []
        for chain_needs in problem.needs:
            self.needs.append(
                [(chain, _ticks(lag, tick)) for chain, lag in chain_needs]
            )
        busy_ticks = [0] * problem.n_ranks
        for rank, chains in enumerate(problem.chains_of_rank):
            busy_ticks[rank] = sum(self.op_ticks[chain] for chain in chains)
        self.interval = ceil(stretch * max(busy_ticks))

    def draw_schedule(self, delay: Delay) -> Schedule | None:
        """Return the schedule of a random block; None if a rank has no gap, room or time for it."""
        starts = self._draw_block()
        if starts is None or not self._fits(starts):
            return None
        try:
            return self._schedule(starts, delay)
        except UserError:  # a micro-batch takes too long for this delay
            return None

    def _draw_block(self) -> list[int] | None:
        """Place a micro-batch's ops at random; return their starts, or None without a gap.

        Each op starts about as soon as its rank has a gap for it. An op next to another one leaves
        one gap instead of two, which a full rank needs.
        """
        problem = self.problem
        # Backwards of weights come last. Of whole backwards the range has the forwards again,
        # which the cut of the list below drops.
        chains = [*problem.path, *range(2, len(problem.seconds), problem.n_kinds)]
        # Starts and lengths.
        busy: list[list[tuple[int, int]]] = [[] for _ in problem.room]
        starts = [0] * len(problem.seconds)
        patience = self.draw.random()
        for chain in chains[: len(starts)]:
            length = self.op_ticks[chain]
            busy_spans = busy[problem.placement[chain // problem.n_kinds]]
            ready = 0
            for needed_chain, lag in self.needs[chain]:
                ready = max(
                    ready, starts[needed_chain] + self.op_ticks[needed_chain] + lag
                )
            # It starts at once, or next to another op of its rank, in the first interval that
            # allows it. Elsewhere it could leave a gap on each side that is too short for any op:
            #
            #     busy       |FFF|        |BBB|
            #     after          |W|          |W|
            #     before                |W|
            possible_starts = {ready}
            for busy_start, busy_ticks in busy_spans:
                for start in (busy_start + busy_ticks, busy_start - length):
                    # The first tick from `ready` on that is at the same place of an interval.
                    possible_starts.add(ready + (start - ready) % self.interval)
            # Now and then the op does not start at once, but next to another one.
            if busy_spans and self.draw.random() < patience:
                possible_starts.remove(ready)
            for start in sorted(possible_starts):
                if self._is_free(start, length, busy_spans):
                    break
            else:
                return None
            starts[chain] = start
            busy_spans.append((start, length))
        return starts

    def _is_free(
        self, start: int, length: int, busy_spans: Sequence[tuple[int, int]]
    ) -> bool:
        """Whether an op overlaps no other one of its rank, in any interval."""
        return all(
            (start - busy_start) % self.interval >= busy_ticks
            and (busy_start - start) % self.interval >= length
            for busy_start, busy_ticks in busy_spans
        )

    def _fits(self, starts: Sequence[int]) -> bool:
        """Whether ranks have room for the micro-batches under way.

        Memory grows only where an op starts, so it is counted there.
        """
        problem = self.problem
        for rank, stages in enumerate(problem.stages_of_rank):
            for chain in problem.chains_of_rank[rank]:
                live_bytes = problem.workspace_bytes[chain]
                for stage in stages:
                    n_in_flight = self._in_flight(stage, starts, starts[chain])
                    live_bytes += n_in_flight * problem.kept_bytes[stage]
                if live_bytes > problem.room[rank]:
                    return False
        return True

    def _in_flight(self, stage: int, starts: Sequence[int], tick: int) -> int:
        """Return the micro-batches that a stage keeps at ``tick``, in the steady state."""
        chains = self.problem.chains(stage)
        forward_start = starts[chains[0]]
        backward_end = starts[chains[-1]] + self.op_ticks[chains[-1]]
        # The numbers of the last micro-batches that have begun and ended; below 0: of steps before.
        n_begun = (tick - forward_start) // self.interval
        n_ended = (tick - backward_end) // self.interval
        return n_begun - n_ended

    def _schedule(self, starts: Sequence[int], delay: Delay) -> Schedule:
        """Repeat the block for all micro-batches.

        A slot is no longer than any op, and divides the period.
        """
        problem = self.problem
        n_microbatches = problem.n_microbatches
        op_starts = {}
        for chain, start in enumerate(starts):
            stage, kind = divmod(chain, problem.n_kinds)
            for microbatch in range(n_microbatches):
                op = Op(problem.kinds[kind], stage, microbatch)
                op_starts[op] = start + microbatch * self.interval
        period = n_microbatches * self.interval
        slot = max(
            ticks for ticks in range(1, min(self.op_ticks) + 1) if period % ticks == 0
        )
        layout = Assigned(
            [[rank] * n_microbatches for rank in problem.placement], "per_stage"
        )
        timing = Timing(op_starts, period, slot)
        return Schedule(
            "searched", problem.n_stages, n_microbatches, timing, layout, delay
        )


def _ticks(seconds: float, tick: float) -> int:
    """Return whole ticks that last ``seconds``, up to rounding."""
    return ceil(seconds / tick - 1e-6)
