"""A schedule: timing, placement, weights and state, checked to fit together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from toolkit.schedule import grid as _grid
from toolkit.schedule.op import Kind, Op
from toolkit.schedule.placement import Placement, place
from toolkit.schedule.staleness import FRESHEST, Delay, Staleness, freshest, requested
from toolkit.schedule.timing import Timing

if TYPE_CHECKING:
    from toolkit.schedule.program import Program

STATES = ("replicated", "sharded")


@dataclass(frozen=True)
class Schedule:
    """One point of the algebra: when, where, on which weights, and who keeps the state.

    Args:
        name: what tables and figures call it.
        n_stages: contiguous parts of the model, S.
        n_microbatches: micro-batches of one training step, M.
        timing: start of every op of a training step, and the period.
        placement: ``one``, ``per_microbatch``, ``per_stage`` or ``per_stage_and_microbatch``.
        delay: steps by which every weight version read is late; a matrix
            ``[stage][microbatch]`` of them; or ``"freshest"``, the least that the timing allows.
        state: ``replicated``, or ``sharded`` (each stage's parameters, gradients and optimizer
            state have one owner).

    Raises:
        ValueError: the four choices contradict each other; where an op is to blame, the message
            shows the grid with that op in brackets.
    """

    name: str
    n_stages: int
    n_microbatches: int
    timing: Timing = field(repr=False)
    placement: str | Placement = "one"
    delay: Delay = 0
    state: str = "replicated"
    staleness: Staleness = field(init=False, repr=False, compare=False)
    layout: Placement = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"unknown state {self.state!r}: choose one of {', '.join(STATES)}")
        layout = self.placement
        if isinstance(layout, str):
            layout = place(layout, self.timing, self.n_stages, self.n_microbatches)
        object.__setattr__(self, "layout", layout)
        self._check_dependencies()
        self._check_ranks()
        staleness = requested(self.delay, self.timing, self.n_stages, self.n_microbatches)
        object.__setattr__(self, "staleness", staleness)
        self._check_staleness()

    @property
    def n_ranks(self) -> int:
        return self.layout.n_ranks

    @property
    def period(self) -> float:
        """Slots between the starts of consecutive training steps."""
        return self.timing.period / self.timing.ticks_per_slot

    @property
    def max_staleness(self) -> int:
        return max(map(max, self.staleness))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that updates each stage and keeps its optimizer state.

        Replicated: the rank that completes the gradient. Sharded among the ranks of data
        parallelism: the stages are dealt out evenly, the last stage to the first rank, which in
        cyclic timing is the first to read new weights.
        """
        if self.state == "sharded" and self.layout.name == "per_microbatch":
            last = self.n_ranks - 1
            return tuple(last - j * self.n_ranks // self.n_stages for j in range(self.n_stages))
        microbatches = range(self.n_microbatches)
        return tuple(
            self.rank(j, max(microbatches, key=partial(self.timing.gradient_end, j)))
            for j in range(self.n_stages)
        )

    def oldest_version(self, stage: int, step: int) -> int:
        """The oldest weight version of ``stage`` that is read at ``step`` or later."""
        return max(0, step - max(self.staleness[stage]))

    def first_holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold the weights of ``stage`` before the first step."""
        if self.state == "sharded":
            return (self.owners[stage],)
        return tuple(self.layout.ranks(stage))

    def version(self, stage: int, microbatch: int, step: int) -> int:
        """The weight version that ``stage`` reads for ``microbatch`` at ``step``."""
        return max(0, step - self.staleness[stage][microbatch])

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        """The rank that runs ``stage`` on ``microbatch`` at ``step``."""
        return self.layout.rank(stage, microbatch, step)

    def grid(self, n_steps: int = 1) -> str:
        """The schedule as text: ranks down, slots across."""
        return _grid.render(self, n_steps)

    def lower(self, n_steps: int, first_step: int = 0) -> "Program":
        """Each rank's instructions for ``n_steps`` training steps, all communication inferred.

        A program that begins at a later step finds the older weight versions that it reads
        where version 0 would be.
        """
        from toolkit.schedule.lower import lower

        return lower(self, n_steps, first_step)

    def dependencies(self, op: Op) -> Iterator[Op]:
        """The ops of the same step whose results ``op`` needs."""
        kind, j, m = op
        if kind == Kind.FORWARD:
            if j > 0:
                yield Op(Kind.FORWARD, j - 1, m)
        elif kind == Kind.BACKWARD_WEIGHT:
            yield Op(Kind.BACKWARD_INPUT, j, m)
        else:
            yield Op(Kind.FORWARD, j, m)
            if j < self.n_stages - 1:
                later = Op(Kind.BACKWARD, j + 1, m)
                split = Op(Kind.BACKWARD_INPUT, j + 1, m)
                yield split if split in self.timing.starts else later

    def _check_dependencies(self) -> None:
        starts = self.timing.starts
        for j in range(self.n_stages):
            for m in range(self.n_microbatches):
                kinds = {kind for kind in Kind if Op(kind, j, m) in starts}
                if kinds not in _COMPLETE:
                    found = ", ".join(kind.name.lower() for kind in sorted(kinds)) or "nothing"
                    raise ValueError(
                        f"stage {j} of micro-batch {m} needs a forward and either a backward or"
                        f" both of its halves: the timing has {found}"
                    )
        for op, start in starts.items():
            if not (0 <= op.stage < self.n_stages and 0 <= op.microbatch < self.n_microbatches):
                raise ValueError(
                    f"op {op} is outside {self.n_stages} stages and"
                    f" {self.n_microbatches} micro-batches"
                )
            for needed in self.dependencies(op):
                if start < self.timing.end(needed):
                    raise ValueError(
                        f"{op} starts before {needed}, whose result it needs, has ended\n"
                        + _grid.render(self, mark=(op, 0))
                    )

    def _check_ranks(self) -> None:
        """No two ops at once on a rank, but for the single device, which runs them all."""
        if self.layout.name == "one":
            return
        tick, period = self.timing.ticks_per_slot, self.timing.period
        busy: dict[int, list[tuple[int, Op]]] = {}
        for op, start in self.timing.starts.items():
            if self.n_microbatches % self.layout.replicas[op.stage] == 0:  # else: in turn, alone
                rank = self.rank(op.stage, op.microbatch)
                busy.setdefault(rank, []).append((start % period, op))
        for rank, taken in busy.items():
            taken.sort()
            after = [*taken[1:], (taken[0][0] + period, taken[0][1])]
            for (start, op), (following, other) in zip(taken, after, strict=True):
                if following - start < tick:
                    raise ValueError(
                        f"rank {rank} cannot run {op} and {other} in the same slot of the steady"
                        f" state: choose another placement than {self.layout.name!r}, or other"
                        f" numbers of stages and micro-batches than {self.n_stages} and"
                        f" {self.n_microbatches}\n" + _grid.render(self, 2, mark=(other, 0))
                    )

    def _check_staleness(self) -> None:
        least = freshest(self.timing, self.n_stages, self.n_microbatches)
        for j in range(self.n_stages):
            for m in range(self.n_microbatches):
                if self.staleness[j][m] < least[j][m]:
                    raise ValueError(
                        f"stage {j} on micro-batch {m} cannot read weights"
                        f" {self.staleness[j][m]} steps late: the timing makes them available"
                        f" {least[j][m]} steps late; ask for delay={least[j][m]} there, or for"
                        f' delay="{FRESHEST}"\n'
                        + _grid.render(self, mark=(Op(Kind.FORWARD, j, m), 0))
                    )


_COMPLETE = (
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
)
