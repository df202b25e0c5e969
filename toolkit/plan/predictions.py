"""Predict what candidates of a plan take, and keep those that no other one beats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

from torch import nn

from toolkit.cost import Costs, Hardware, affordable_delay, profile
from toolkit.cost.compression import accuracy_class, coarseness
from toolkit.cost.steady_steps import SteadySimulator
from toolkit.cost.tensor_width import Width, profile_width
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError
from toolkit.model import InputSpec
from toolkit.model.partition import Traced
from toolkit.model.tensor_parallel import default_parallelize
from toolkit.plan.candidates import Candidate
from toolkit.schedule import Schedule
from toolkit.schedule.instruction import collector_paused


@dataclass(frozen=True)
class Limits:
    """What a candidate may take.

    Attributes:
        memory: bytes of each rank; the hardware's own limits hold as well.
        staleness: steps by which weights may be late on average.
        seconds: of a training step.
    """

    memory: float = inf
    staleness: float = inf
    seconds: float = inf

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_fresh = name == "staleness" and value == 0
            if not (isinstance(value, int | float) and (value > 0 or is_fresh)):
                raise UserError(f"{name} is a number above 0: got {value!r}")


@dataclass(frozen=True)
class Prediction:
    """What a candidate takes in its steady state.

    Five criteria count, and less is better in each: ``seconds``, ``memory``, ``staleness``,
    ``devices`` and ``coarseness``. For :meth:`dominates` and :func:`front` none of them is above
    another; :func:`toolkit.plan.choice.choose_prediction` weighs them.

    Attributes:
        candidate: what is simulated.
        seconds: of a training step.
        memory: peak bytes of the fullest rank, on each of its devices.
        ranks: ranks of the schedule.
        staleness: steps by which weights are late on average.
        traffic: bytes that a device of the busiest rank sends in a step.
        fits: whether it keeps all limits.
    """

    candidate: Candidate
    seconds: float
    memory: float
    ranks: int
    staleness: float
    traffic: float = 0.0
    fits: bool = True

    @property
    def schedule(self) -> Schedule:
        """The schedule, to explore, save or train."""
        return self.candidate.schedule

    @property
    def devices(self) -> int:
        """Devices of all ranks."""
        return self.ranks * self.candidate.width

    @property
    def coarseness(self) -> int:
        """How coarsely messages are rounded; see :func:`toolkit.cost.compression.coarseness`."""
        return coarseness(self.candidate.compression)

    @property
    def accuracy(self) -> str:
        """How training differs from plain data parallelism, in words."""
        schedule = self.schedule
        return accuracy_class(
            self.candidate.compression,
            is_late=schedule.max_staleness > 0,
            state=schedule.state,
        )

    def dominates(self, rival: "Prediction") -> bool:
        """Whether it is nowhere worse in time, memory, staleness, devices and rounding."""
        return (
            self.seconds <= rival.seconds
            and self.memory <= rival.memory
            and self.staleness <= rival.staleness
            and self.devices <= rival.devices
            and self.coarseness <= rival.coarseness
        )


@dataclass(frozen=True)
class Predictor:
    """Predicts candidates, all on the same machines, with the same optimizer and limits.

    Attributes:
        hardware: the machines: seconds of kernels and messages, memory of each device.
        limits: what a candidate may take.
        optimizer_words: numbers that the optimizer keeps of each parameter.
        width_efficiency: as for :class:`toolkit.cost.tensor_width.Width`.
    """

    hardware: Hardware
    limits: Limits
    optimizer_words: float
    width_efficiency: float = 1.0

    def width(self, devices: int) -> Width:
        """Return the width of ranks of ``devices``; raise UserError if they cannot share."""
        return Width(devices, self.hardware, self.width_efficiency)

    def hardware_of(self, candidate: Candidate) -> Hardware:
        """Return the machines as one device of every rank sees them."""
        return self.width(candidate.width).hardware_of_ranks

    def predict(
        self, candidates: Sequence[Candidate], costs: Sequence[Costs], timed: int = 2
    ) -> list[Prediction]:
        """Simulate candidates of one schedule, each with its own costs.

        Args:
            candidates: all of the same schedule, which is lowered once.
            costs: of each candidate's stages.
            timed: as of :class:`toolkit.cost.steady_steps.SteadySimulator`.
        """
        schedule = candidates[0].schedule
        predictions = []
        # Programs and timelines make no reference cycles, so they are gone before the pause ends.
        with collector_paused():
            simulator = SteadySimulator(schedule, timed)
            for candidate, candidate_costs in zip(candidates, costs, strict=True):
                timeline = simulator.timeline(
                    candidate_costs,
                    self.hardware_of(candidate),
                    self.optimizer_bytes(candidate_costs),
                )
                peaks = [timeline.peak_memory(rank) for rank in range(schedule.n_ranks)]
                sent_bytes = max(timeline.bytes_a_step())
                seconds = timeline.step_time
                predictions.append(
                    self._prediction(candidate, seconds, peaks, sent_bytes)
                )
            del simulator, timeline
        return predictions

    def bound(self, candidate: Candidate, costs: Costs) -> Prediction:
        """Return a bound that no simulation falls below, without one.

        No messages, no optimizer state, and one micro-batch at a time. Activations count where a
        rank has whole models: elsewhere a rank may hold none.
        """
        schedule = candidate.schedule
        n_ranks = candidate.schedule.n_ranks
        kept_bytes = [cost.kept_bytes for cost in costs]
        activation_bytes = 0.0
        if schedule.layout.has_whole_models:
            activation_bytes = sum(kept_bytes)
        # Of the weights one version counts: that is the least that a rank holds of them.
        rank_bytes = [activation_bytes] * n_ranks
        busy_seconds = 0.0
        for stage, cost in enumerate(costs):
            for rank in schedule.first_holders(stage):
                rank_bytes[rank] += cost.parameter_bytes
            forward, backward = cost.seconds(self.hardware)
            busy_seconds += (1 + cost.recomputes) * forward + backward
        # No order of ops can use more than all of the ranks' speed together.
        total_speed = sum(map(self.hardware.speed, range(n_ranks)))
        return self._prediction(
            candidate,
            busy_seconds * schedule.n_microbatches / total_speed,
            rank_bytes,
            0.0,
        )

    def find_affordable_delay(
        self, candidate: Candidate, costs: Costs, within: float
    ) -> Prediction:
        """Predict a candidate with the freshest delay that costs a share ``within`` more time.

        No single weight could be fresher in that time.
        """
        state_bytes = self.optimizer_bytes(costs)
        hardware = self.hardware_of(candidate)
        with collector_paused():  # of many simulations, which make no reference cycles
            delay = affordable_delay(
                candidate.schedule,
                costs,
                hardware,
                within=within,
                optimizer_bytes=state_bytes,
            )
        fresher = replace(
            candidate, spec=replace(candidate.spec, delay=delay), within=within
        )
        return self.predict([fresher], [costs])[0]

    def memory_of(self, rank: int) -> float:
        """Bytes that a rank may hold."""
        return min(self.limits.memory, self.hardware.memory_of(rank))

    def optimizer_bytes(self, costs: Costs) -> list[float]:
        """Bytes of the optimizer's state, by stage."""
        return [self.optimizer_words * cost.parameter_bytes for cost in costs]

    def _prediction(
        self,
        candidate: Candidate,
        seconds: float,
        rank_bytes: Sequence[float],
        sent_bytes: float,
    ) -> Prediction:
        staleness = candidate.schedule.mean_staleness
        # Ranks may have memories of their own: the fullest rank may fit where a smaller one does
        # not.
        fits = seconds <= self.limits.seconds and staleness <= self.limits.staleness
        for rank, n_bytes in enumerate(rank_bytes):
            fits &= n_bytes <= self.memory_of(rank)
        return Prediction(
            candidate=candidate,
            seconds=seconds,
            memory=max(rank_bytes),
            ranks=len(rank_bytes),
            staleness=staleness,
            traffic=sent_bytes,
            fits=fits,
        )


def stage_costs(
    model: nn.Module,
    form: InputSpec,
    precision: str,
    candidates: Sequence[Candidate],
    predictor: Predictor | None = None,
) -> list[Costs | UserError]:
    """Return the costs of stages without recomputation, or why the model cannot be cut so.

    Precondition: the candidates have equal micro-batches, so that one trace serves all of them.

    Args:
        model: on the meta device.
        form: its samples.
        precision: as for :func:`toolkit.cost.profile`.
        candidates: those whose stages are analysed.
        predictor: knows the links of a rank's devices; None if all ranks have one device.
    """
    example = form.example(candidates[0].batch, "meta")
    try:
        # Tracing takes far longer than a cut, so all candidates share one trace.
        traced = Traced.of(model, example)
    except UserError as error:
        return [error] * len(candidates)
    costs_or_errors: list[Costs | UserError] = []
    for candidate in candidates:
        try:
            if candidate.partition == BUCKETS:
                stages = traced.cut_in_buckets()
            else:
                stages = traced.cut(candidate.schedule.n_stages, candidate.partition)
            if predictor is not None and candidate.width > 1:
                parallelize = default_parallelize(
                    model, candidate.width, share_loss=True
                )
                width = predictor.width(candidate.width)
                costs = profile_width(stages, example, parallelize, width, precision)
            else:
                costs = profile(stages, example, precision=precision)
            costs_or_errors.append(costs)
        except UserError as error:
            costs_or_errors.append(error)
    return costs_or_errors


def front(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the Pareto front: predictions within the limits that no other dominates.

    The fastest is first.
    """
    # In this order no prediction dominates one before it, unless all five criteria are equal. So a
    # prediction is compared only with those before it, and of equal ones the first stays.
    front_predictions: list[Prediction] = []
    for prediction in sorted(
        predictions,
        key=attrgetter("seconds", "memory", "staleness", "devices", "coarseness"),
    ):
        if prediction.fits and not any(
            front_prediction.dominates(prediction)
            for front_prediction in front_predictions
        ):
            front_predictions.append(prediction)
    return front_predictions
