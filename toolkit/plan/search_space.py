"""What a search for pipelines may choose from, its result, and the problem of one placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from toolkit.cost import UNIT, Costs, Hardware, StageCost, Timeline
from toolkit.cost.hardware import check_hardware
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.errors import UserError, check_seconds, is_number, whole
from toolkit.plan.order_problem import OrderProblem
from toolkit.plan.stage_messages import StageMessages
from toolkit.plan.stage_placement import Places, load_bound, usual_placements
from toolkit.schedule import Kind, Schedule

OnSearch = Callable[[str, float, float], object]
"""Called with the activity, the best step time so far and the bound, both in seconds."""

_WHOLE_BACKWARDS = (Kind.FORWARD, Kind.BACKWARD)
_SPLIT_BACKWARDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
# Of a training step: so many are ordered, simulated and verified in time.
_OPS_PER_SECOND = 500
# On which an op takes twice as long, since list scheduling compares all ranks.
_MANY_RANKS = 500
_ROUNDING = 1e-3  # relative difference to a bound in ticks that counts as none


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        schedule: verified, to simulate or run.
        seconds: of a training step, simulated.
        bound: seconds below which no orders fall, on any placement that was allowed, in the room
            that :class:`OrderProblem` counts.
        proven: whether ``seconds`` are the least: equal to the bound, up to a thousandth.
        memory: ``[rank]``, peak bytes, simulated.
        placement: ``[stage]``, its rank.
        n_tried: orders that were timed.
    """

    schedule: Schedule = field(repr=False)
    seconds: float
    bound: float
    proven: bool
    memory: tuple[float, ...]
    placement: tuple[int, ...]
    n_tried: int


@dataclass(frozen=True)
class SearchSpace:
    """The stages, the ranks, and the limits of a search for pipelines.

    Args:
        costs: one entry per stage.
        n_microbatches: of a training step.
        ranks: devices, by default one per stage.
        placement: ``[stage]``, its rank; None: the search chooses it, too.
        hardware: seconds of messages and kernels, and the ranks' speeds and memories.
        memory: bytes of a rank, or ``[rank]``; None: those of the hardware.
        split_backward: whether backwards of inputs and weights are separate ops.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.

    Attributes:
        stage_seconds: ``[stage]``, seconds on a micro-batch at speed 1.
        speeds: ``[rank]``.
        limits: ``[rank]``, bytes.

    Raises:
        UserError: the arguments do not fit together.
    """

    costs: Costs
    n_microbatches: int
    ranks: int | None = None
    placement: Sequence[int] | None = None
    hardware: Hardware = UNIT
    memory: float | Sequence[float] | None = None
    split_backward: bool = True
    optimizer_bytes: Sequence[float] = ()
    stage_seconds: tuple[float, ...] = field(init=False)
    speeds: tuple[float, ...] = field(init=False)
    limits: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        n_microbatches = whole(self.n_microbatches, "the number of micro-batches", 1)
        check_hardware(self.hardware)
        n_ranks = self._check_ranks()
        limits: object = self.memory
        if limits is None:
            limits = [self.hardware.memory_of(rank) for rank in range(n_ranks)]
        elif is_number(limits):
            limits = [limits] * n_ranks
        limits = _checked_bytes("memory", limits, n_ranks, "ranks")
        # Empty means that no optimizer state is counted; anything else must fit the stages.
        has_no_state = (
            isinstance(self.optimizer_bytes, Sequence) and not self.optimizer_bytes
        )
        if not has_no_state:
            _checked_bytes(
                "optimizer_bytes", self.optimizer_bytes, len(self.costs), "stages"
            )
        stage_seconds = tuple(sum(cost.seconds(self.hardware)) for cost in self.costs)
        if not any(stage_seconds):
            raise UserError(
                "all stages take 0 seconds: give costs with flops or seconds"
            )

        derived = {
            "n_microbatches": n_microbatches,
            "stage_seconds": stage_seconds,
            "speeds": tuple(map(self.hardware.speed, range(n_ranks))),
            "limits": limits,
        }
        for name, value in derived.items():
            # The dataclass is frozen, and these values follow from its fields.
            object.__setattr__(self, name, value)

    def _check_ranks(self) -> int:
        """Return the number of ranks."""
        n_stages = len(self.costs)
        ranks = n_stages if self.ranks is None else self.ranks
        n_ranks = whole(ranks, "the number of ranks", 1)
        if self.placement is not None:
            for rank in self.placement:
                whole(rank, "placement: a rank", 0)
            n_ranks = max(self.placement, default=0) + 1
            if len(self.placement) != n_stages or {*self.placement} != {
                *range(n_ranks)
            }:
                raise UserError(
                    f"placement is the rank of each of {n_stages} stages, on ranks 0, 1, ...: got"
                    f" {[*self.placement]}"
                )
        if n_ranks > n_stages:
            raise UserError(
                f"each of {n_ranks} ranks runs a stage: got {n_stages} stages"
            )
        return n_ranks

    def least_seconds(self, seconds: float) -> float:
        """Return seconds that listing and simulating orders may take, in a search of ``seconds``.

        Raises:
            UserError: the seconds are too few for so many ops, or not a number above 0.
        """
        check_seconds("seconds", seconds)
        n_kinds = len(_SPLIT_BACKWARDS if self.split_backward else _WHOLE_BACKWARDS)
        n_ops = n_kinds * len(self.costs) * self.n_microbatches
        least_seconds = n_ops / _OPS_PER_SECOND * (1 + self.n_ranks / _MANY_RANKS)
        if seconds < least_seconds:
            raise UserError(
                f"{seconds:g} seconds are too few to search orders of {n_ops} ops in a training"
                f" step: give {ceil(least_seconds)} or more, or fewer micro-batches or stages"
            )
        return least_seconds

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return len(self.limits)

    @property
    def placement_is_free(self) -> bool:
        """Whether a search changes placements; equal ranks with a stage each have one placement."""
        has_stage_per_rank = self.n_ranks == len(self.costs)
        has_equal_ranks = len({*zip(self.limits, self.speeds, strict=True)}) == 1
        has_equal_links = self.hardware.ranks_per_machine == 1
        has_one_placement = has_stage_per_rank and has_equal_ranks and has_equal_links
        return self.placement is None and not has_one_placement

    def first_placements(self) -> list[Places]:
        """Return the placements that a search begins with."""
        if self.placement:
            return [tuple(self.placement)]
        return usual_placements(self.stage_seconds, self.speeds)

    def load_bound(self) -> float:
        """Return the seconds that a training step takes at least, on any placement."""
        return self.n_microbatches * load_bound(self.stage_seconds, self.speeds)

    def problem(self, placement: Places, room: Sequence[float]) -> OrderProblem:
        """Describe the search for orders on one placement; errors as of :func:`order_problem`.

        Args:
            placement: ``[stage]``, its rank.
            room: ``[rank]``, bytes, which may be less than the limits.
        """
        return order_problem(
            self.costs,
            self.n_microbatches,
            placement,
            self.hardware,
            split_backward=self.split_backward,
            memory=room,
            optimizer_bytes=self.optimizer_bytes,
        )

    def simulate(self, schedule: Schedule) -> Timeline:
        """Simulate verified training steps of a schedule up to its steady state."""
        return simulate_steady_steps(
            schedule, self.costs, self.hardware, self.optimizer_bytes
        )

    def peaks(self, timeline: Timeline) -> tuple[float, ...]:
        """Return the peak bytes of each rank."""
        return tuple(timeline.peak_memory(rank) for rank in range(self.n_ranks))

    def result(
        self,
        schedule: Schedule,
        timeline: Timeline,
        placement: Places,
        bound: float,
        n_tried: int,
    ) -> SearchResult:
        """Return a search's result; ``bound`` is that of any orders, in seconds of a step."""
        # The bound is in ticks, whose rounding may lift it above the simulated seconds.
        seconds = timeline.step_time
        return SearchResult(
            schedule=schedule,
            seconds=seconds,
            bound=min(bound, seconds),
            proven=seconds <= bound * (1 + _ROUNDING),
            memory=self.peaks(timeline),
            placement=placement,
            n_tried=n_tried,
        )


def _checked_bytes(
    name: str, entries: object, n_expected: int, unit: str
) -> tuple[float, ...]:
    """Return ``entries``; raise UserError unless they are so many numbers of bytes."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UserError(
            f"{name} is a number of bytes for each of {n_expected} {unit}: got {entries!r}"
        )
    if len(entries) != n_expected:
        raise UserError(
            f"{name} has an entry for each of {n_expected} {unit}: got {len(entries)}"
        )
    for n_bytes in entries:
        if not (is_number(n_bytes) and n_bytes >= 0):
            raise UserError(f"{name} is a number of bytes, 0 or more: got {n_bytes!r}")
    return tuple(entries)


def order_problem(
    costs: Costs,
    n_microbatches: int,
    placement: Sequence[int],
    hardware: Hardware,
    split_backward: bool = True,
    memory: Sequence[float] = (),
    optimizer_bytes: Sequence[float] = (),
) -> OrderProblem:
    """Describe the problem as the simulator counts time and memory.

    Args:
        costs: one entry per stage.
        n_microbatches: of a training step.
        placement: ``[stage]``, its rank.
        hardware: seconds of messages and kernels, and the ranks' speeds.
        split_backward: whether backwards of inputs and weights are separate ops.
        memory: ``[rank]``, bytes; empty: no limit.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.

    Raises:
        UserError: a rank has no room for one micro-batch; the message names it.
    """
    kinds = _SPLIT_BACKWARDS if split_backward else _WHOLE_BACKWARDS
    n_kinds = len(kinds)
    messages = StageMessages(costs, tuple(placement), hardware)
    state_bytes: Sequence[float | None] = [*optimizer_bytes] or [None] * len(costs)
    seconds: list[float] = []
    update_seconds, kept_bytes = [], []
    workspace_bytes: list[float] = []
    waiting_bytes: list[float] = []
    for stage, cost in enumerate(costs):
        # 1. Seconds of each op, and of an update.
        speed = hardware.speed(placement[stage])
        seconds += _op_seconds(cost, hardware, speed, n_kinds)
        update_bytes = cost.update_bytes(state_bytes[stage])
        update_seconds.append(update_bytes / hardware.memory_bandwidth / speed)

        # 2. Bytes of a micro-batch in flight, of a running op, and of messages that wait.
        kept_bytes.append(cost.kept_bytes + messages.input_bytes_on_rank(stage))
        workspace_bytes += _op_workspace(cost, n_kinds)
        waiting_bytes += messages.waiting_bytes(stage)[:n_kinds]

    # 3. Weights, gradients and optimizer state stay: the room is what they leave of the memory.
    room = [*memory] or [inf] * (max(placement) + 1)
    for rank, cost, n_bytes in zip(placement, costs, state_bytes, strict=True):
        room[rank] -= cost.parameter_bytes + cost.gradient_bytes + (n_bytes or 0.0)
    problem = OrderProblem(
        placement=tuple(placement),
        n_microbatches=n_microbatches,
        kinds=kinds,
        seconds=tuple(seconds),
        needs=tuple(map(tuple, messages.needs(n_kinds))),
        kept_bytes=tuple(kept_bytes),
        workspace_bytes=tuple(workspace_bytes),
        waiting_bytes=tuple(waiting_bytes),
        room=tuple(room),
        update_seconds=tuple(update_seconds),
    )
    _check_room(problem, memory)
    return problem


def _op_seconds(
    cost: StageCost, hardware: Hardware, speed: float, n_kinds: int
) -> list[float]:
    """Return the seconds of a stage's ops on a rank, by kind."""
    forward, backward, input_backward, weight_backward = (
        duration / speed for duration in cost.op_seconds(hardware)
    )
    if n_kinds == 2:
        return [forward, backward]
    return [forward, input_backward, weight_backward]


def _op_workspace(cost: StageCost, n_kinds: int) -> list[float]:
    """Return the bytes that each op of a stage takes while it runs, by kind."""
    forward_bytes, backward_bytes = cost.working_bytes
    if cost.recomputes:
        backward_bytes += cost.activation_bytes
    return [forward_bytes, *[backward_bytes] * (n_kinds - 1)]


def _check_room(problem: OrderProblem, memory: Sequence[float]) -> None:
    """Raise UserError if a rank of ``memory`` bytes has no room for one micro-batch."""
    for rank, memory_bytes in enumerate(memory):
        stages = [*problem.stages_of_rank[rank]]
        workspace_bytes = max(
            problem.workspace_bytes[chain] for chain in problem.chains_of_rank[rank]
        )
        needed_bytes = workspace_bytes + sum(
            problem.kept_bytes[stage] for stage in stages
        )
        room = problem.room[rank]
        if needed_bytes > room:
            total_bytes = needed_bytes + memory_bytes - room
            raise UserError(
                f"stages {stages} with one micro-batch take {total_bytes:.4g}"
                f" bytes of rank {rank}: got a memory of {memory_bytes:.4g}. Place them elsewhere,"
                " or make micro-batches smaller"
            )
