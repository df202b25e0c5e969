"""What a search for pipelines may choose from, its result, and the problem of one placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from toolkit.cost import UNIT, Costs, Hardware, Timeline, simulate
from toolkit.errors import UserError, whole
from toolkit.plan.order_problem import OrderProblem
from toolkit.plan.stage_placement import Places
from toolkit.schedule import Kind, Schedule
from toolkit.schedule.steady_state import steps_to_time

OnSearch = Callable[[str, float, float], object]
"""Called with the activity, the best step time so far and the bound, both in seconds."""

_WHOLE_BACKWARDS = (Kind.FORWARD, Kind.BACKWARD)
_SPLIT_BACKWARDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
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
        ranks: devices, by default one a stage.
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
        n_ranks = self._check_ranks()
        limits = self.memory
        if limits is None:
            limits = [self.hardware.memory_of(rank) for rank in range(n_ranks)]
        elif isinstance(limits, int | float):
            limits = [limits] * n_ranks
        if len(limits) != n_ranks:
            raise UserError(f"memory has an entry for each of {n_ranks} ranks: got {len(limits)}")

        derived = {
            "n_microbatches": n_microbatches,
            "stage_seconds": tuple(sum(cost.seconds(self.hardware)) for cost in self.costs),
            "speeds": tuple(map(self.hardware.speed, range(n_ranks))),
            "limits": tuple(limits),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_ranks(self) -> int:
        """Return the number of ranks."""
        n_stages = len(self.costs)
        ranks = n_stages if self.ranks is None else self.ranks
        n_ranks = whole(ranks, "the number of ranks", 1)
        if self.placement is not None:
            n_ranks = max(self.placement, default=0) + 1
            if len(self.placement) != n_stages or {*self.placement} != {*range(n_ranks)}:
                raise UserError(
                    f"placement is the rank of each of {n_stages} stages, on ranks 0, 1, ...: got"
                    f" {[*self.placement]}"
                )
        if n_ranks > n_stages:
            raise UserError(f"each of {n_ranks} ranks runs a stage: got {n_stages} stages")
        return n_ranks

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return len(self.limits)

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
            self.split_backward,
            room,
            self.optimizer_bytes,
        )

    def simulate(self, schedule: Schedule) -> Timeline:
        """Simulate verified training steps of a schedule up to its steady state."""
        program = schedule.lower(steps_to_time(schedule)).verify()
        return simulate(program, self.costs, self.hardware, self.optimizer_bytes)

    def peaks(self, timeline: Timeline) -> tuple[float, ...]:
        """Return the peak bytes of each rank."""
        return tuple(timeline.peak_memory(rank) for rank in range(self.n_ranks))

    def result(
        self, schedule: Schedule, timeline: Timeline, placement: Places, bound: float, n_tried: int
    ) -> SearchResult:
        """Return a search's result; ``bound`` is that of any orders, in seconds of a step."""
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
    n_ranks = max(placement) + 1
    state_bytes: Sequence[float | None] = [*optimizer_bytes] or [None] * len(costs)
    seconds: list[float] = []
    needs: list[list[tuple[int, float]]] = []
    kept_bytes: list[float] = []
    workspace_bytes: list[float] = []
    waiting_bytes: list[float] = []
    update_seconds: list[float] = []

    def message(n_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of a message between two stages."""
        if placement[sender] == placement[receiver]:
            return 0.0
        machines = {hardware.machine(placement[stage]) for stage in (sender, receiver)}
        return hardware.message(n_bytes, local=len(machines) == 1)

    for stage, cost in enumerate(costs):
        # 1. Seconds of each op. A recomputing stage runs its forward in its first backward.
        speed = hardware.speed(placement[stage])
        forward, backward = (duration / speed for duration in cost.seconds(hardware))
        op_seconds = [forward, backward / (n_kinds - 1), backward / 2]
        if cost.recomputes:
            op_seconds = [forward, forward + backward, 0.0]
        seconds += op_seconds[:n_kinds]
        update_bytes = cost.update_bytes(state_bytes[stage])
        update_seconds.append(update_bytes / hardware.memory_bandwidth / speed)

        # 2. Each op needs the one before it on this stage, and a message of a neighbour.
        first_chain = len(needs)
        needs.append([])
        needs += [[(first_chain + kind, 0.0)] for kind in range(n_kinds - 1)]
        input_bytes = gradient_bytes = 0.0  # that wait on the receiving rank until the op starts
        input_on_rank = cost.extra_input_bytes
        if stage > 0:
            lag = message(costs[stage - 1].output_bytes, stage - 1, stage)
            needs[first_chain].append((first_chain - n_kinds, lag))
            if placement[stage - 1] != placement[stage]:
                input_bytes = input_on_rank = cost.input_bytes
        if stage < len(costs) - 1:
            message_bytes = costs[stage + 1].input_gradient_bytes
            lag = message(message_bytes, stage + 1, stage)
            needs[first_chain + 1].append((first_chain + n_kinds + 1, lag))
            if placement[stage + 1] != placement[stage]:
                gradient_bytes = message_bytes
        waiting_bytes += [input_bytes, gradient_bytes, 0.0][:n_kinds]

        # 3. Bytes of a micro-batch in flight, and of a running op.
        kept_bytes.append(cost.kept_bytes + input_on_rank)
        forward_bytes, backward_bytes = cost.working_bytes
        if cost.recomputes:
            backward_bytes += cost.activation_bytes
        workspace_bytes += [forward_bytes, *[backward_bytes] * (n_kinds - 1)]

    # Weights, gradients and optimizer state stay: the room is what they leave of the memory.
    room = [*memory] or [inf] * n_ranks
    for stage, (rank, cost) in enumerate(zip(placement, costs, strict=True)):
        room[rank] -= cost.parameter_bytes + cost.gradient_bytes + (state_bytes[stage] or 0.0)
    problem = OrderProblem(
        placement=tuple(placement),
        n_microbatches=n_microbatches,
        kinds=kinds,
        seconds=tuple(seconds),
        needs=tuple(map(tuple, needs)),
        kept_bytes=tuple(kept_bytes),
        workspace_bytes=tuple(workspace_bytes),
        waiting_bytes=tuple(waiting_bytes),
        room=tuple(room),
        update_seconds=tuple(update_seconds),
    )
    _check_room(problem, memory)
    return problem


def _check_room(problem: OrderProblem, memory: Sequence[float]) -> None:
    """Raise UserError if a rank of ``memory`` bytes has no room for one micro-batch."""
    for rank, memory_bytes in enumerate(memory):
        stages = [*problem.stages_of_rank[rank]]
        workspace_bytes = max(
            problem.workspace_bytes[chain] for chain in problem.chains_of_rank[rank]
        )
        least_bytes = workspace_bytes + sum(problem.kept_bytes[stage] for stage in stages)
        room = problem.room[rank]
        if least_bytes > room:
            raise UserError(
                f"stages {stages} with one micro-batch take {least_bytes + memory_bytes - room:.4g}"
                f" bytes of rank {rank}: got a memory of {memory_bytes:.4g}. Place them elsewhere,"
                " or make micro-batches smaller"
            )
