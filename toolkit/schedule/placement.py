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
from itertools import accumulate
from math import gcd

from toolkit.errors import UserError, check_choice, whole
from toolkit.schedule.op import Kind, Op
from toolkit.schedule.timing import Timing

PLACEMENTS = ("one", "per_microbatch", "per_stage", "per_stage_and_microbatch")


@dataclass(frozen=True)
class Turns:
    """Stage j has ``replicas[j]`` ranks from ``first[j]`` on, which micro-batches take in turn.

    The turn continues from step to step, so a micro-batch may meet another rank in the next step
    where the number of micro-batches is not a multiple of the replicas.
    """

    name: str
    n_microbatches: int
    first: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def one_device(self) -> bool:
        """Whether a single device runs everything."""
        return self.name == "one"

    @property
    def n_ranks(self) -> int:
        return max(f + r for f, r in zip(self.first, self.replicas, strict=True))

    def turns(self, stage: int) -> int:
        """Steps after which a micro-batch meets the same rank again."""
        return self.replicas[stage] // gcd(self.n_microbatches, self.replicas[stage])

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        turn = step * self.n_microbatches + microbatch
        return self.first[stage] + turn % self.replicas[stage]

    def ranks(self, stage: int) -> Sequence[int]:
        """The ranks that run ``stage``."""
        return range(self.first[stage], self.first[stage] + self.replicas[stage])


@dataclass(frozen=True)
class Assigned:
    """``table[stage][microbatch]`` is the rank, at every step.

    Raises:
        UserError: it is no table of whole numbers, 0 or more.
    """

    table: tuple[tuple[int, ...], ...]
    name: str = "assigned"

    def __post_init__(self) -> None:
        if isinstance(self.table, str) or not all(self.table):
            raise UserError(f"a placement has the ranks of every stage: got {self.table!r}")
        table = tuple(tuple(whole(rank, "a rank", 0) for rank in ranks) for ranks in self.table)
        object.__setattr__(self, "table", table)

    def fits(self, n_stages: int, n_microbatches: int) -> bool:
        """Whether it has a rank for each stage and micro-batch, and no more."""
        return [*map(len, self.table)] == [n_microbatches] * n_stages

    @property
    def n_microbatches(self) -> int:
        return len(self.table[0])

    @property
    def one_device(self) -> bool:
        """Whether a single device runs everything."""
        return self.name == "one"

    @property
    def n_ranks(self) -> int:
        return max(map(max, self.table)) + 1

    def turns(self, stage: int) -> int:
        """Steps after which a micro-batch meets the same rank again."""
        return 1

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        return self.table[stage][microbatch]

    def ranks(self, stage: int) -> Sequence[int]:
        """The ranks that run ``stage``."""
        return sorted(set(self.table[stage]))


Placement = Turns | Assigned


def place(name: str, timing: Timing, n_stages: int, n_microbatches: int, n_workers: int) -> Turns:
    """The placement called ``name`` for ops timed by ``timing``."""
    check_choice("placement", name, PLACEMENTS)
    if name == "one":
        first, replicas = [0] * n_stages, [1] * n_stages
    elif name == "per_microbatch":
        first, replicas = [0] * n_stages, [n_workers] * n_stages
    elif name == "per_stage":
        first, replicas = list(range(n_stages)), [1] * n_stages
    else:
        replicas = [_most_in_flight(timing, j, n_microbatches) for j in range(n_stages)]
        first = [0, *accumulate(replicas[:-1])]
    return Turns(name, n_microbatches, tuple(first), tuple(replicas))


def _most_in_flight(timing: Timing, stage: int, n_microbatches: int) -> int:
    """Micro-batches whose activations at ``stage`` are alive at once, in the steady state."""
    spans = [
        (timing.starts[Op(Kind.FORWARD, stage, m)], timing.gradient_end(stage, m))
        for m in range(n_microbatches)
    ]
    period = timing.period
    alive = sum((-1 - start) // period - (-1 - end) // period for start, end in spans)
    changes = [(start % period, 1) for start, _ in spans] + [(end % period, -1) for _, end in spans]
    most = alive
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most
