"""A schedule: timing, placement, weights and state, checked to fit together."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, check_choice, whole
from toolkit.schedule import csv_format, validate
from toolkit.schedule import grid as _grid
from toolkit.schedule.correction import Correction, correction_of
from toolkit.schedule.instruction import Buffer, Kind, Op
from toolkit.schedule.lower import lower
from toolkit.schedule.pipeline_orders import Item, as_early_as_possible
from toolkit.schedule.placement import Assigned, Placement, layout_of
from toolkit.schedule.rank_orders import parse_orders
from toolkit.schedule.reduction_order import CHAINS, IN_ORDER, Ring, owners_of, ring_of
from toolkit.schedule.staleness import (
    Delay,
    RandomDelay,
    Staleness,
    draws,
    plain,
    staleness_bounds,
)
from toolkit.schedule.timing import Timing

if TYPE_CHECKING:
    from toolkit.schedule.program import Program
    from toolkit.schedule.spec import ScheduleSpec

STATES = ("replicated", "sharded", "circulating")


@dataclass(frozen=True)
class Schedule:
    """One point of the algebra: when, where, on which weights, and who keeps the state.

    Args:
        name: name in tables and figures.
        n_stages: contiguous parts of the model, S.
        n_microbatches: micro-batches of one training step, M.
        timing: start of every op of a training step, and the period.
        placement: one of :data:`PLACEMENTS`, or a rank :class:`Assigned` to each stage and
            micro-batch.
        delay: steps by which every weight version read is late; a list ``[stage]`` or a matrix
            ``[stage][microbatch]`` of them; ``"freshest"``, the least that the timing allows; or a
            :class:`RandomDelay`, drawn anew at every step.
        state: ``replicated``; ``sharded`` (each stage's parameters, gradients and optimizer state
            have one owner); or ``circulating``, as sharded, but a stage's weights go from forward
            to forward and from backward to backward, and its sum is handed on after each one.
        chains: ``in_order``, or ``rotated``, which balances bytes and updates over the ranks; see
            :data:`toolkit.schedule.reduction_order.CHAINS`.
        accumulate: micro-batches that each worker of data parallelism runs in a training step, k;
            the worker sums their gradients before they travel. Worker w of M/k runs micro-batches
            w, w + M/k, w + 2M/k, ...
        correction: what is done about late weights: ``none``, ``extrapolate``, ``optimizer_step``,
            ``compensate``, or a :class:`Correction`, which has their equations.
        first_versions: ``[stage]``, the oldest weight version that exists; by default 0 of each.
            Later where the schedule follows another: see :mod:`toolkit.schedule.phases`.

    Attributes:
        staleness: ``[stage][microbatch]``, steps by which the weights read are late; the most, if
            delays are random.
        least_staleness: ``[stage][microbatch]``, the least; differs only if delays are random.
        layout: the ranks of each stage.
        spec: the plain values that make it; None unless the catalogue built it. It is None
            in a copy by ``dataclasses.replace``.

    Raises:
        UserError: the choices contradict each other. If an op is to blame, the message shows the
            grid, with brackets around that op.
    """

    name: str
    n_stages: int
    n_microbatches: int
    timing: Timing = field(repr=False)
    placement: str | Placement = "one"
    delay: Delay = 0
    state: str = "replicated"
    chains: str = IN_ORDER
    accumulate: int = 1
    correction: str | Correction = "none"
    first_versions: tuple[int, ...] = field(default=(), repr=False)
    staleness: Staleness = field(init=False, repr=False, compare=False)
    least_staleness: Staleness = field(init=False, repr=False, compare=False)
    layout: Placement = field(init=False, repr=False, compare=False)
    spec: "ScheduleSpec | None" = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        # Each check relies on those before it: a timing must be complete to ask for what its ops
        # need, and its ranks must be known to draw the grid of an error.
        check_choice("state", self.state, STATES)
        check_choice("chains", self.chains, CHAINS)
        n_stages = whole(self.n_stages, "the number of stages", 1)
        n_microbatches = whole(self.n_microbatches, "the number of micro-batches", 1)
        accumulate = whole(self.accumulate, "accumulate", 1)
        if n_microbatches % accumulate:
            raise UserError(
                f"accumulate divides the {n_microbatches} micro-batches of a step: got {accumulate}"
            )
        validate.check_forwards(n_stages, n_microbatches)
        # Python's own numbers and tuples compare and hash; NumPy's do not.
        self._set(
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            accumulate=accumulate,
            delay=plain(self.delay),
        )
        # Of usual strength: equal by name.
        if self.corrected == Correction(self.corrected.kind):
            self._set(correction=self.corrected.kind)
        validate.check_complete(self.timing.starts, n_stages, n_microbatches)
        layout = layout_of(
            self.placement, self.timing, n_stages, n_microbatches, self.n_workers
        )
        validate.check_dependencies(self.timing, layout, n_stages)
        validate.check_ranks(self.timing, layout, n_stages)
        least_staleness, staleness = staleness_bounds(
            self.delay, self.timing, n_stages, n_microbatches
        )
        self._set(layout=layout, least_staleness=least_staleness, staleness=staleness)
        validate.check_staleness(self.timing, layout, least_staleness, self.delay)
        if self.chains != IN_ORDER:
            validate.check_rotated(
                self.timing, layout, least_staleness, self.state, self.n_workers
            )
        validate.check_correction(
            self.corrected, self.timing, layout, staleness, self.state
        )

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def with_spec(self, spec: "ScheduleSpec") -> "Schedule":
        """Return the same schedule, which carries the plain values that make it."""
        schedule = copy(self)
        schedule._set(spec=spec)
        return schedule

    def __repr__(self) -> str:
        delay = (
            self.delay
            if isinstance(self.delay, int | str | RandomDelay)
            else "by stage"
        )
        return (
            f"Schedule({self.name!r}, stages={self.n_stages}, microbatches={self.n_microbatches},"
            f" ranks={self.n_ranks}, period={self.period:g}, placement={self.layout.name!r},"
            f" delay={delay!r}, state={self.state!r})"
        )

    @property
    def n_ranks(self) -> int:
        """Devices on which it runs."""
        return self.layout.n_ranks

    @property
    def period(self) -> float:
        """Slots between the starts of consecutive training steps; an int if they are whole."""
        slots, remainder = divmod(self.timing.period, self.timing.ticks_per_slot)
        return slots + remainder / self.timing.ticks_per_slot if remainder else slots

    @property
    def n_workers(self) -> int:
        """Workers of data parallelism, which run micro-batches at the same time."""
        return self.n_microbatches // self.accumulate

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is two ops, of the input and of the weights."""
        return any(op.kind == Kind.BACKWARD_INPUT for op in self.timing.starts)

    @property
    def lookahead(self) -> int:
        """Ticks by which a message may start before its place in its ranks' programs."""
        # Two micro-batch lifetimes: each kind of message has two buffers. Unless the state is
        # replicated, two slots: a rank then holds its share of the weights and little more.
        slots = 4 * self.n_stages if self.state == "replicated" else 2
        return slots * self.timing.ticks_per_slot

    @property
    def max_staleness(self) -> int:
        """The most training steps by which any weights read are late."""
        return max(map(max, self.staleness))

    @property
    def mean_staleness(self) -> float:
        """The mean over stages and micro-batches; the expected value of a random delay."""
        if isinstance(self.delay, RandomDelay):
            return self.delay.expected
        return sum(map(sum, self.staleness)) / (self.n_stages * self.n_microbatches)

    @cached_property
    def corrected(self) -> Correction:
        """The correction."""
        return correction_of(self.correction)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that updates each stage and keeps its optimizer state."""
        return owners_of(self.timing, self.layout, self.state, self.rings)

    @cached_property
    def rings(self) -> tuple[Ring, ...]:
        """``[stage][group]``, ranks of its rotated chain, the owner last; empty if in order."""
        if self.chains == IN_ORDER:
            return ()
        return tuple(
            ring_of(self.timing, self.layout, stage) for stage in range(self.n_stages)
        )

    def oldest_version(self, stage: int, step: int) -> int:
        """Return the oldest weight version of ``stage`` that is used at ``step`` or later."""
        most_stale = max(self.staleness[stage])
        oldest = step - most_stale
        if self.corrected.predicts and most_stale > 0:
            oldest -= 1  # a prediction also reads the version before
        return max(self.first_version(stage), oldest)

    def first_version(self, stage: int) -> int:
        """Return the oldest weight version of ``stage`` that exists."""
        return self.first_versions[stage] if self.first_versions else 0

    def at(self, step: int) -> "Schedule":
        """Return the schedule of a training step: this one, unless it has phases."""
        return self

    def next_change(self, step: int) -> int | None:
        """Return the first step after ``step`` of another schedule; None if none follows."""
        return None

    @property
    def final(self) -> "Schedule":
        """The last schedule of a training."""
        return self

    def changes(self, steps: range) -> list[int]:
        """Return the steps, after the first of ``steps``, that begin with another schedule."""
        changes = []
        change = self.next_change(steps.start)
        while change is not None and change < steps.stop:
            changes.append(change)
            change = self.next_change(change)
        return changes

    def in_steps(self, steps_per_epoch: int) -> "Schedule":
        """Return the same with all lengths in training steps."""
        return self

    def versions(self, stage: int, step: int) -> range:
        """Return the weight versions of ``stage`` that are held as ``step`` begins."""
        return range(self.oldest_version(stage, step), step + 1)

    def first_holders(self, stage: int, step: int = 0) -> tuple[int, ...]:
        """Return the ranks that hold the weights of ``stage`` as a program begins with ``step``."""
        if self.state != "replicated":
            # Other ranks get the weights when they need them, and keep them for one op only.
            return (self.owners[stage],)
        return tuple(self.layout.ranks(stage))

    def delays(self, step: int) -> Staleness:
        """Return the staleness of the weights read at ``step``: ``[stage][microbatch]``."""
        if isinstance(self.delay, RandomDelay):
            return draws(self.delay, self.n_stages, self.n_microbatches, step)
        return self.staleness

    def version(self, stage: int, microbatch: int, step: int) -> int:
        """Return the weight version that ``stage`` reads for ``microbatch`` at ``step``."""
        return max(
            self.first_version(stage), step - self.delays(step)[stage][microbatch]
        )

    def predicts(self, stage: int, version: int, step: int) -> bool:
        """Whether what reads ``version`` at ``step`` reads a prediction made from it instead."""
        return self.corrected.predicts and self.first_version(stage) < version < step

    def compensates(self, version: int, step: int) -> bool:
        """Whether gradients on ``version`` at ``step`` are corrected by the newest weights."""
        return self.corrected.kind == "compensate" and version < step

    def read_by(self, op: Op, version: int, step: int) -> Buffer | None:
        """Return what ``op`` reads in place of ``version``, or besides it; None: only that."""
        if self.predicts(op.stage, version, step):
            return Buffer.PREDICTION
        makes_gradient = op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        if makes_gradient and self.compensates(version, step):
            return Buffer.COMPENSATED
        return None

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        """Return the rank that runs ``stage`` on ``microbatch`` at ``step``."""
        return self.layout.rank(stage, microbatch, step)

    @classmethod
    def from_rank_orders(  # noqa: PLR0913 - options, by keyword
        cls,
        orders: Sequence[str | Sequence[Item | str]],
        *,
        name: str = "rank orders",
        delay: Delay = 0,
        state: str = "replicated",
        correction: str | Correction = "none",
        period: int | None = None,
        not_before: Mapping[Op, int] | None = None,
        unfold: bool = False,
    ) -> "Schedule":
        """Make a schedule from the order of each rank's ops, each as early as it can start.

        Args:
            orders: ``orders[rank]``: ops, or text such as ``"0F0 0F1 0B0 0B1"``; a forward and a
                backward that the rank overlaps are one item, ``"0F1;1B0"``.
            name: name in tables and figures.
            delay: as in :class:`Schedule`.
            state: as in :class:`Schedule`.
            correction: as in :class:`Schedule`.
            period: slots between the starts of training steps; fewer than a step takes make steps
                overlap. None: the least at which no rank has two steps at once and weights are
                ready.
            not_before: slots before which an op does not start.
            unfold: run overlapped pairs one after the other, the forward first.

        Raises:
            UserError: an op is missing, unknown, repeated or apart from its forward; a rank has
                nothing to do, or more ops than the period has slots; ranks wait for each other.
        """
        parsed = parse_orders(orders)
        if period is not None:
            period = whole(period, "a period in slots", 1)
        pairs = {} if unfold else parsed.pairs
        timing = as_early_as_possible(parsed.orders, delay, period, not_before, pairs)
        return cls(
            name,
            n_stages=len(parsed.rank_table),
            n_microbatches=len(parsed.rank_table[0]),
            timing=timing,
            placement=Assigned(parsed.rank_table, "per_stage"),
            delay=delay,
            state=state,
            correction=correction,
        )

    @classmethod
    def from_csv(
        cls, source: str | Path, *, period: int | None = None, **options: Any
    ) -> "Schedule":
        """:meth:`from_rank_orders` from CSV, in the format of :mod:`toolkit.schedule.csv_format`.

        Args:
            source: a path, or the text of a file.
            period: as in :meth:`from_rank_orders`, unless the file has one.
            options: other options of :meth:`from_rank_orders`.

        Raises:
            UserError: as :meth:`from_rank_orders`, with row and column if a cell is to blame; or
                the file has another period, or communication other than what is inferred.
        """
        file = csv_format.read_csv(source)
        if None not in (period, file.period) and period != file.period:
            raise UserError(
                f"the file has period={file.period}: got period={period}; leave one out"
            )
        if period is None:
            period = file.period
        not_before = None if period is None else file.slots
        schedule = cls.from_rank_orders(
            file.orders, period=period, not_before=not_before, **options
        )
        file.check_messages(schedule.layout, schedule.n_stages)
        return schedule

    def to_csv(self) -> str:
        """Return one training step in the compute format of torch.distributed.pipelining.

        It has timing and placement only: delay, state and correction are options of
        :meth:`from_csv`. Raises UserError if the schedule is not a pipeline.
        """
        return csv_format.write_csv(self.name, self.timing, self.layout)

    def grid(self, n_steps: int = 1) -> str:
        """Return ``n_steps`` training steps (1 or more) as text: ranks down, slots across."""
        return _grid.render(self.timing, self.layout, n_steps)

    def lower(self, n_steps: int, first_step: int = 0) -> "Program":
        """Return each rank's instructions; all communication is inferred.

        Args:
            n_steps: training steps, 1 or more.
            first_step: the first of them; ranks begin with the older versions that it reads.
        """
        return lower(self, n_steps, first_step)
