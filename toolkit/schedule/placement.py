"""On which rank each op runs.

``one``
    a single device runs everything.
``per_microbatch``
    data parallelism: rank m runs micro-batch m; where n workers accumulate gradients, rank m mod n.
``per_stage``
    a pipeline: rank j runs stage j.
``per_stage_and_microbatch``
    data parallelism times model parallelism. Micro-batches that are never in flight together at
    a stage share its ranks in turn: S*M ranks for simultaneous timing, N(N+1)/2 for cyclic timing
    with S = M = N (arXiv 2403.08837, section 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

from toolkit.errors import UserError, check_choice, whole
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.timing import Timing

PLACEMENTS = ("one", "per_microbatch", "per_stage", "per_stage_and_microbatch")
# A step has at most as many forwards (validate.MOST): further ranks could only be idle. The limit
# catches typos such as rank 10**9, which would ask for a list each.
MOST_RANKS = 2**17
"""Most ranks of a placement."""


@dataclass(frozen=True)
class Placement:
    """The rank of each op: micro-batches take a stage's ranks in turn, from step to step.

    Args:
        name: one of :data:`PLACEMENTS`, or another name in tables.
        n_microbatches: micro-batches of a training step.
        cycles: ``[stage]``, the ranks that its micro-batches take in turn.
    """

    name: str
    n_microbatches: int
    cycles: tuple[Sequence[int], ...]

    @property
    def one_device(self) -> bool:
        """Whether a single device runs everything."""
        return self.name == "one"

    @property
    def n_ranks(self) -> int:
        """Number of devices."""
        return max(map(max, self.cycles)) + 1

    @property
    def has_whole_models(self) -> bool:
        """Whether a rank runs every stage of its micro-batches, the same ones at every step."""
        for stage in range(len(self.cycles)):
            if self.turns(stage) > 1:
                return False
            for microbatch in range(self.n_microbatches):
                if self.rank(stage, microbatch) != self.rank(0, microbatch):
                    return False
        return True

    @property
    def sends_activations(self) -> bool:
        """Whether an activation goes from a rank to another, at any step."""
        for stage, cycles in enumerate(pairwise(self.cycles)):
            if cycles[0] == cycles[1]:
                continue
            for step in range(lcm(self.turns(stage), self.turns(stage + 1))):
                for microbatch in range(self.n_microbatches):
                    sender = self.rank(stage, microbatch, step)
                    if sender != self.rank(stage + 1, microbatch, step):
                        return True
        return False

    def turns(self, stage: int) -> int:
        """Steps after which a micro-batch meets the same rank again."""
        length = len(self.cycles[stage])
        # A step moves each micro-batch on by n_microbatches places of the cycle, so that after t
        # steps it is back where t n_microbatches is a multiple of the length.
        return length // gcd(self.n_microbatches, length)

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        """Return the rank that runs ``stage`` on ``microbatch`` at ``step``."""
        cycle = self.cycles[stage]
        # Micro-batches are counted over all steps, so that turns continue from one step to the
        # next.
        return cycle[(step * self.n_microbatches + microbatch) % len(cycle)]

    def ranks(self, stage: int) -> Sequence[int]:
        """Return the ranks that run ``stage``."""
        return sorted(set(self.cycles[stage]))


class Assigned(Placement):
    """A placement that a table gives, the same at every step.

    Args:
        table: ``[stage][microbatch]``, the rank that runs it, from 0.
        name: name in tables.

    Raises:
        UserError: it is no such table, or a rank is out of range.
    """

    def __init__(self, table: Sequence[Sequence[int]], name: str = "assigned") -> None:
        is_table = isinstance(table, Sequence) and not isinstance(table, str)
        if (
            not is_table
            or not table
            or not all(isinstance(row, Sequence) and row for row in table)
        ):
            raise UserError(f"a placement has the ranks of every stage: got {table!r}")
        cycles = []
        for ranks in table:
            cycles.append(tuple(whole(rank, "a rank", 0) for rank in ranks))
        largest_rank = max(map(max, cycles))
        if largest_rank >= MOST_RANKS:
            raise UserError(
                f"a placement has at most {MOST_RANKS} ranks: got rank {largest_rank}"
            )
        super().__init__(name, len(cycles[0]), tuple(cycles))

    def check_sizes(self, n_stages: int, n_microbatches: int) -> None:
        """Raise UserError unless the table has a rank for each stage and micro-batch."""
        if [*map(len, self.cycles)] != [n_microbatches] * n_stages:
            raise UserError(
                f"a placement is [stage][microbatch], here {n_stages} of {n_microbatches} each: got"
                f" {self.cycles}"
            )


def layout_of(
    placement: str | Placement,
    timing: Timing,
    n_stages: int,
    n_microbatches: int,
    n_workers: int,
) -> Placement:
    """Return ``placement``, or the one that it names; UserError if it does not fit the sizes."""
    if not isinstance(placement, Placement):
        return _place(placement, timing, n_stages, n_microbatches, n_workers)
    if isinstance(placement, Assigned):
        placement.check_sizes(n_stages, n_microbatches)
    return placement


def _place(
    name: str, timing: Timing, n_stages: int, n_microbatches: int, n_workers: int
) -> Placement:
    """Return the placement called ``name`` for ops timed by ``timing``."""
    check_choice("placement", name, PLACEMENTS)
    cycles: list[range] = []
    for stage in range(n_stages):
        if name == "one":
            cycles.append(range(1))
        elif name == "per_microbatch":
            cycles.append(range(n_workers))
        elif name == "per_stage":
            cycles.append(range(stage, stage + 1))
        else:
            # Ranks are numbered stage by stage, as many for each as it has micro-batches in flight.
            # These take them in turn, and validate.check_ranks proves that they never meet on one.
            first_rank = cycles[-1].stop if cycles else 0
            n_replicas = _most_in_flight(timing, stage, n_microbatches)
            cycles.append(range(first_rank, first_rank + n_replicas))
    return Placement(name, n_microbatches, tuple(cycles))


def _most_in_flight(timing: Timing, stage: int, n_microbatches: int) -> int:
    """Return the most micro-batches in flight at ``stage`` at once, in the steady state.

    Of micro-batches that follow one another without end, one period is counted: those that are
    under way as it begins, and then who enters and leaves::

        m=0  ---F=====B--------F=====B---
        m=1  =B--------F=====B--------F==
                |<- period ->|
    """
    period = timing.period
    in_flight = 0
    changes = []  # (tick of the period, 1 or -1); who leaves at a tick leaves first
    for microbatch in range(n_microbatches):
        start = timing.starts[Op(Kind.FORWARD, stage, microbatch)]
        end = timing.gradient_end(stage, microbatch)
        # Steps before this period whose micro-batch has entered but not left.
        # Step k has entered by tick -1 if start + k period <= -1, so k <= (-1 - start) // period;
        # and it has left likewise. What leaves at tick 0 still counts, and is the first change
        # below.
        in_flight += (-1 - start) // period - (-1 - end) // period
        changes.append((start % period, 1))
        changes.append((end % period, -1))
    peak = in_flight
    for _, change in sorted(changes):
        in_flight += change
        peak = max(peak, in_flight)
    return peak
