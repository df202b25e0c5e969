"""A step with a worker per rank: of torch's DistributedDataParallel, and of CDP's fastest form.

Two choices change no result that a rule promises, and decide how long its step takes on slow
links: the order of the ranks that sum a gradient (``chains``), and whether stages share the
arithmetic or the parameters equally (``partition``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.cost.hardware import Hardware
from toolkit.cost.profiling import profile
from toolkit.cost.stage_costs import Costs, recomputing
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.cost.timeline import Timeline
from toolkit.errors import UserError
from toolkit.model.partition import Traced
from toolkit.schedule import CHAINS, FRESHEST, Schedule, catalog

if TYPE_CHECKING:
    from toolkit.cost.tensor_width import Width

BUCKETS = "buckets"
"""The cut of a model into the buckets of DistributedDataParallel."""
LEAST_STAGES = 8
"""Stages of a model, or a few more: as many for each worker."""
CUTS = ("flops", "parameters")
"""Measures that the fastest form chooses from."""
TIMED_STEPS = 16
"""Steady training steps whose mean time counts: those of contended links differ."""

Cut = str | Sequence[str]
"""A measure, :data:`BUCKETS`, or the names of the modules that begin the later stages."""
STALENESS_PRICE = 0.1
"""Share of a step's time that a step of staleness is worth."""
NEGLIGIBLE = 0.03
"""Share of a step, or of memory, that makes no difference to a choice."""
CostsOf = Callable[[int, Cut], Costs]
"""Returns the costs of a number of stages of a cut; for :data:`BUCKETS` the number is ignored."""


class ModelCosts:
    """Costs of a model's stages by their number and cut; it is traced once, each cut costed once.

    Args:
        model: any module that :func:`toolkit.model.partition` cuts.
        example: a micro-batch; seconds are measured unless it is on the meta device.
        precision: as for :func:`toolkit.cost.profile`.
        checkpoint: stages that compute their forward twice.
        width: devices of a rank, if several; the example is on the meta device then.

    Raises:
        UserError: several devices cannot share the model.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        precision: str = "fp32",
        checkpoint: str | Sequence[int] = "none",
        width: "Width | None" = None,
    ) -> None:
        self._profile = partial(profile, precision=precision)
        if width is not None and width.devices > 1:
            # Imported where it is used: DTensor, which it needs, takes seconds to import.
            from toolkit.cost.tensor_width import profile_width
            from toolkit.model.tensor_parallel import default_parallelize

            self._profile = partial(
                profile_width,
                parallelize=default_parallelize(model, width.devices, share_loss=True),
                width=width,
                precision=precision,
            )
        self._traced = Traced.of(model, example)
        self._example = example
        self._checkpoint = checkpoint
        self._costs: dict[tuple[int, str], Costs] = {}

    def __call__(self, n_stages: int, cut: Cut) -> Costs:
        """Return the costs of ``n_stages``; see :data:`CostsOf`."""
        # The buckets are the same for every number of stages, so they are costed once.
        key = (0 if cut == BUCKETS else n_stages, str(cut))
        if key not in self._costs:
            traced = self._traced
            in_buckets = cut == BUCKETS
            stages = (
                traced.cut_in_buckets() if in_buckets else traced.cut(n_stages, cut)
            )
            costs = self._profile(stages, self._example)
            # A list of stages names those of the other cut: buckets have none.
            checkpoint = (
                "none" if in_buckets and self._checkpoint != "all" else self._checkpoint
            )
            self._costs[key] = recomputing(costs, checkpoint)
        return self._costs[key]


@dataclass(frozen=True)
class Form:
    """A schedule on stages that are cut in one way, and what its step takes.

    Attributes:
        schedule: with the chains that were chosen.
        partition: measure that the stages share equally.
        timeline: simulated, until enough steps are steady.
    """

    schedule: Schedule
    partition: Cut
    timeline: Timeline = field(repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of a training step."""
        return self.timeline.step_time

    @property
    def words(self) -> str:
        """How it is cut and summed, for a table's cell."""
        if self.partition == BUCKETS:
            return "buckets of 25 MB"
        by = f"by {self.partition}" if isinstance(self.partition, str) else "as named"
        if has_forms(self.schedule) and self.schedule.max_staleness:
            return f"{self.schedule.chains.replace('_', ' ')}, {by}"
        return by


def steady_timeline(
    schedule: Schedule,
    costs: Costs,
    hardware: Hardware,
    optimizer_words: float = 1.0,
) -> Timeline:
    """Simulate a schedule until enough steps are steady.

    Args:
        schedule: what runs.
        costs: one entry per stage.
        hardware: the machines.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """
    optimizer_bytes = [optimizer_words * cost.parameter_bytes for cost in costs]
    return simulate_steady_steps(
        schedule, costs, hardware, optimizer_bytes, TIMED_STEPS
    )


def ddp_schedule(n_workers: int, n_buckets: int, accumulate: int = 1) -> Schedule:
    """Return data parallelism that sends a message per bucket, each as soon as it is full.

    Args:
        n_workers: ranks.
        n_buckets: stages of :meth:`toolkit.model.partition.Traced.cut_in_buckets`.
        accumulate: micro-batches of each worker in a step; only the last one's backward sends.
    """
    schedule = catalog.data_parallel(
        n_workers, n_stages=n_buckets, accumulate=accumulate
    )
    # Buckets are stages here: all of a step's sums are ready bucket by bucket during the backward.
    return replace(schedule, name=schedule.name.replace("DP", "DDP", 1))


@dataclass(frozen=True)
class DataParallelJob:
    """Training by workers that each have the whole model, as DistributedDataParallel runs it.

    Attributes:
        costs_of: of the model.
        hardware: the machines.
        n_workers: ranks.
        accumulate: micro-batches of each worker in a step.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """

    costs_of: CostsOf = field(repr=False)
    hardware: Hardware
    n_workers: int
    accumulate: int = 1
    optimizer_words: float = 1.0

    @property
    def bucket_costs(self) -> Costs:
        """Costs of the model, one entry per bucket."""
        return self.costs_of(1, BUCKETS)

    @property
    def link_ratio(self) -> float:
        """M/C: time in which all parameters cross a link once, by a step's computing time."""
        costs = self.bucket_costs
        parameter_bytes = sum(cost.parameter_bytes for cost in costs)
        compute_seconds = sum(sum(cost.seconds(self.hardware)) for cost in costs)
        return parameter_bytes / self.hardware.link_bandwidth / compute_seconds

    def form(
        self, costs: Costs | None = None, hardware: Hardware | None = None
    ) -> Form:
        """Simulate the job: the baseline of every comparison, and what differs in its messages.

        Args:
            costs: one entry per bucket; None: :attr:`bucket_costs`, whose messages are whole.
            hardware: machines that carry other messages; None: :attr:`hardware`.
        """
        if costs is None:
            costs = self.bucket_costs
        if hardware is None:
            hardware = self.hardware
        schedule = ddp_schedule(self.n_workers, len(costs), self.accumulate)
        timeline = steady_timeline(schedule, costs, hardware, self.optimizer_words)
        return Form(schedule, BUCKETS, timeline)


def has_forms(schedule: Schedule) -> bool:
    """Whether chains or the cut of the model are free: each rank has the whole model."""
    return (
        schedule.layout.has_whole_models
        and schedule.n_ranks > 1
        and schedule.final is schedule
    )


def fastest_form(
    schedule: Schedule,
    costs_of: CostsOf,
    hardware: Hardware,
    *,
    chains: Sequence[str] = CHAINS,
    cuts: Sequence[Cut] = CUTS,
    optimizer_words: float = 1.0,
) -> Form:
    """Return the form of a schedule whose step takes the least time.

    Args:
        schedule: its timing, placement and delay stay.
        costs_of: of the model.
        hardware: the machines.
        chains: orders of the ranks that sum a gradient, to choose from; the schedule's own as well.
        cuts: measures to choose from; the first also cuts what has one form only.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """
    # All forms are simulated: which one is the fastest depends on costs and links together.
    forms = []
    for candidate, partition in _candidates(schedule, chains, cuts):
        costs = costs_of(candidate.n_stages, partition)
        timeline = steady_timeline(candidate, costs, hardware, optimizer_words)
        forms.append(Form(candidate, partition, timeline))
    return min(forms, key=lambda form: form.seconds)


def fastest_cdp(
    costs_of: CostsOf, hardware: Hardware, workers: int, delay: Any
) -> Form:
    """Return the fastest form of CDP with a worker per rank.

    Args:
        costs_of: of the model.
        hardware: the machines.
        workers: ranks; as many stages, or a few more if there are few.
        delay: as of :func:`toolkit.schedule.catalog.cyclic`.
    """
    n_stages = workers * -(-LEAST_STAGES // workers)
    schedule = catalog.cyclic(workers, delay, n_stages=n_stages)
    return fastest_form(schedule, costs_of, hardware)


def _candidates(
    schedule: Schedule, chains: Sequence[str], cuts: Sequence[Cut]
) -> Iterator[tuple[Schedule, Cut]]:
    """Yield the forms of a schedule: its own chains first."""
    if not has_forms(schedule):
        yield schedule, cuts[0]
        return
    is_late = schedule.max_staleness > 0
    # Without late weights gradients are summed by collectives, which have no order of ranks.
    orders = dict.fromkeys([schedule.chains, *chains]) if is_late else [schedule.chains]
    for order in orders:
        try:
            other_schedule = replace(schedule, chains=order)
        except UserError:  # rotated chains need time to go round
            continue
        for partition in cuts:
            yield other_schedule, partition


def priced_seconds(seconds: float, staleness: float) -> float:
    """Return the seconds of a step, and those that its mean staleness counts as."""
    return seconds * (1 + STALENESS_PRICE * staleness)


def best_rule(
    costs_of: CostsOf, hardware: Hardware, n_workers: int, accumulate: int = 1
) -> Form:
    """Return the form of DP, CDP-v1 or CDP-v2 that a plan would take; DP if it is nearly as good.

    Args:
        costs_of: of the model.
        hardware: the machines.
        n_workers: ranks, and stages.
        accumulate: micro-batches of each worker in a step.
    """
    dp_schedule = catalog.data_parallel(n_workers, accumulate=accumulate)
    schedules = [dp_schedule]
    for delay in (1, FRESHEST):
        schedules.append(catalog.cyclic(n_workers, delay, accumulate=accumulate))
    forms = [fastest_form(schedule, costs_of, hardware) for schedule in schedules]
    values = [
        priced_seconds(form.seconds, form.schedule.mean_staleness) for form in forms
    ]
    # DP trains exactly, so late weights have to gain something before they are chosen.
    if values[0] <= (1 + NEGLIGIBLE) * min(values):
        return forms[0]
    return forms[values.index(min(values))]
