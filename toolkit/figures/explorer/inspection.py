"""What a schedule costs: its program, steady state and predicted timeline, all by the toolkit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from toolkit.cost import UNIT, Costs, Hardware, Timeline, affordable_delay, simulate
from toolkit.cost.worker_forms import (
    CUTS,
    CostsOf,
    Cut,
    DataParallelJob,
    Form,
    fastest_form,
    has_forms,
    steady_timeline,
)
from toolkit.errors import UserError, whole
from toolkit.format import count, duration, size
from toolkit.schedule import (
    CHAINS,
    Program,
    Schedule,
    ScheduleSpec,
    SteadyState,
    steady_state,
)
from toolkit.schedule.traffic import units_sent

MAX_DRAWN = 32  # stages or micro-batches in a drawing
_STEPS = 3  # training steps that are simulated where messages take no time
AFFORDABLE = "affordable"
"""The delay of :func:`toolkit.cost.affordable_delay`."""
_SEARCHED = 64  # stages times micro-batches: seconds
FASTEST = "fastest"
"""Chains, or a cut of the model, whose simulated step takes the least time."""
_NOTHING = 2**20  # bytes: less is no saving
# Units of the key numbers, and what these count.
_ALIVE = (
    "micro-batches",
    "in the steady state; 1 is all that a micro-batch keeps of the model",
)
_HELD = "simulated; with the optimizer's momentum, except on the unit machine"
_SENT = (
    "stage-parameters",
    "weights and gradients that all ranks send, in the steady state",
)
_WEIGHTS = "models", "held at once: all versions, and what is predicted from them"
_STALENESS = "steps", "training steps by which the weights read are late"
_IDLE = "of all ranks' time, simulated"
_RATIO = "DistributedDataParallel on as many devices and samples, in buckets of 25 MB, simulated"


class Number(NamedTuple):
    """One key number: its name, value and unit as text, and what it counts."""

    name: str
    value: str
    unit: str
    meaning: str


@dataclass(frozen=True, eq=False)
class Analysis:
    """A schedule, a program of the training steps that are drawn, and the steady state.

    Attributes:
        spec: the schedule as plain values.
        schedule: the schedule.
        drawn: its program for the training steps that are drawn.
        steady: its steady state.
        form: its chains and the cut of the model; None if stages are uniform or given.
        ddp_seconds: of a step of DistributedDataParallel on as many devices; None without a model.
        width: devices of a rank. Timelines are then of one device of each.
    """

    spec: ScheduleSpec
    schedule: Schedule
    drawn: Program
    steady: SteadyState
    form: Form | None = None
    ddp_seconds: float | None = None
    width: int = 1

    @property
    def form_in_words(self) -> str:
        """How the model is cut, chains that the name leaves out, and the devices of a rank.

        Empty for uniform stages.
        """
        words = self.form.words if self.form else ""
        words = words.removeprefix("rotated, ")
        if self.width > 1:
            words += f", {self.width} devices a rank"
        return words

    @property
    def memory_of(self) -> str:
        """What has memory: a device, which is a rank unless ranks are several devices."""
        return "rank" if self.width == 1 else "device"

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """All ranks' activations in each drawn slot, in micro-batches."""
        n_stages = self.schedule.n_stages
        return tuple(live / n_stages for live in self.drawn.total_activations())

    @cached_property
    def traffic(self) -> tuple[float, ...]:
        """What all ranks send in each drawn slot, in stage-parameters."""
        return tuple(map(float, units_sent(self.drawn.traffic())))

    @property
    def peak(self) -> float:
        """Peak activations of all ranks together, in micro-batches, in the steady state."""
        return self.steady.peak_activations / self.schedule.n_stages

    @property
    def most_sent(self) -> float:
        """Most that all ranks send in a slot of the steady state, in stage-parameters."""
        return float(max(self.steady.units_by_slot))

    @cached_property
    def late(self) -> float:
        """Share of the ops that read late weights."""
        n_ops = 0
        n_late = 0
        for stage_staleness in self.schedule.staleness:
            n_ops += len(stage_staleness)
            n_late += sum(staleness > 0 for staleness in stage_staleness)
        return n_late / n_ops

    def numbers(self, timeline: Timeline, *, in_slots: bool) -> list[Number]:
        """Return the key numbers; times are in slots, or else in seconds."""
        schedule = self.schedule
        n_stages = schedule.n_stages
        fullest = max(map(max, self.steady.activations)) / n_stages
        weights = max(self.steady.weights) / n_stages
        units = self.steady.units_by_slot
        mean_sent = float(sum(units)) / len(units)
        time, unit = duration(timeline.step_time)
        if in_slots:
            time = f"{timeline.step_time:.4g}"
            # A slot is a forward or a whole backward, so each half of a split one takes 0.5.
            unit = "slots, half a backward 0.5" if schedule.splits_backward else "slots"
        ratio = []
        if self.ddp_seconds is not None:
            share = f"{timeline.step_time / self.ddp_seconds:.2f}"
            ratio = [Number("step time by DDP's", share, "", _RATIO)]
        memory = []
        if not in_slots:
            total, total_unit = size(self.width * timeline.peak_memory()).split()
            largest, largest_unit = size(fullest_rank(timeline)).split()
            of = self.memory_of
            memory = [
                Number(f"memory of all {of}s", total, total_unit, _HELD),
                Number(f"memory of the fullest {of}", largest, largest_unit, _HELD),
            ]
        ranks = [Number("ranks", str(schedule.n_ranks), "", "devices")]
        if self.width > 1:
            n_devices = str(schedule.n_ranks * self.width)
            ranks = [
                Number("ranks", str(schedule.n_ranks), "", f"of {self.width} devices"),
                Number("devices", n_devices, "", "those of all ranks"),
            ]
        return [
            *ranks,
            Number("peak activations", f"{self.peak:.4g}", *_ALIVE),
            Number("of the fullest rank", f"{fullest:.4g}", *_ALIVE),
            *memory,
            Number("weights of the fullest rank", f"{weights:.4g}", *_WEIGHTS),
            Number("mean staleness", f"{schedule.mean_staleness:.3g}", *_STALENESS),
            Number("largest staleness", str(schedule.max_staleness), *_STALENESS),
            Number("mean sent in a slot", f"{mean_sent:.4g}", *_SENT),
            Number("most sent in a slot", f"{self.most_sent:.4g}", *_SENT),
            Number("step time", time, unit, "of the simulated timeline"),
            *ratio,
            Number("idle", f"{100 * timeline.idle_share:z.1f}", "%", _IDLE),
        ]


def fullest_rank(timeline: Timeline) -> float:
    """Return the peak bytes of the rank that holds the most, or of one of its devices."""
    return max(map(timeline.peak_memory, range(timeline.n_ranks)))


def verdict(
    first: tuple[Analysis, Timeline],
    second: tuple[Analysis, Timeline],
    *,
    in_slots: bool,
) -> str:
    """Return what the first schedule gains and costs compared with the second, as a sentence."""
    first_analysis, first_timeline = first
    second_analysis, second_timeline = second
    first_schedule = first_analysis.schedule
    second_schedule = second_analysis.schedule
    statements = []
    ratio = first_timeline.step_time / second_timeline.step_time
    # Otherwise three digits would say 1 times as long.
    if 0.995 < ratio < 1.005:
        statements.append("a step takes as long")
    else:
        statements.append(f"a step takes {ratio:.3g} times as long")
    if first_schedule.n_ranks != second_schedule.n_ranks:
        statements.append(
            f"{first_schedule.n_ranks} ranks instead of {second_schedule.n_ranks}"
        )
    if in_slots:
        statements.append(
            f"{first_analysis.peak:.4g} micro-batches' activations instead of"
            f" {second_analysis.peak:.4g}"
        )
    else:
        # Above 0 if the first schedule takes less.
        saved_on_fullest = fullest_rank(second_timeline) - fullest_rank(first_timeline)
        saved_in_all = second_timeline.peak_memory() - first_timeline.peak_memory()
        # Both have ranks of as many devices.
        of = first_analysis.memory_of
        statements.append(f"{_saving(saved_on_fullest)} on the fullest {of}")
        statements.append(
            f"{_saving(first_analysis.width * saved_in_all)} on all {of}s together"
        )
    if first_schedule.max_staleness:
        steps = count(first_schedule.max_staleness, "step")
        statements.append(
            f"{first_analysis.late:.0%} of ops read weights up to {steps} late"
        )
    else:
        statements.append("all weights are fresh")
    return f"{first_schedule.name} compared with {second_schedule.name}: {'; '.join(statements)}."


def _saving(saved_bytes: float) -> str:
    if abs(saved_bytes) < _NOTHING:
        return "no memory saved"
    return f"{size(abs(saved_bytes))} {'saved' if saved_bytes > 0 else 'more'}"


def drawable(spec: ScheduleSpec) -> Schedule:
    """Build ``spec``; raise UserError if it is impossible, or too large to draw."""
    check_sizes(spec.stages, spec.microbatches, spec.accumulate)
    schedule = spec.build()
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    return schedule


def check_sizes(stages: int, microbatches: int, accumulate: int | None = None) -> None:
    """Raise UserError unless stages, and the micro-batches of all rounds, are from 1 to 32."""
    total_microbatches = whole(microbatches, "microbatches", 1)
    if accumulate is not None:
        # Each worker runs as many, one after another, and each of them is drawn.
        total_microbatches *= whole(accumulate, "accumulate", 1)
    sizes = {
        "stages": whole(stages, "stages", 1),
        "microbatches x accumulate": total_microbatches,
    }
    for name, value in sizes.items():
        if value > MAX_DRAWN:
            raise UserError(f"{name} is at most {MAX_DRAWN} in a drawing: got {value}")


@lru_cache(maxsize=16)
def analyse(spec: ScheduleSpec, n_steps: int) -> Analysis:
    """Lower ``spec``; raise UserError if it is impossible."""
    schedule = drawable(spec)
    return Analysis(spec, schedule, schedule.lower(n_steps), steady_state(schedule))


@lru_cache(maxsize=256)
def settled(
    spec: ScheduleSpec,
    free_chains: bool,
    cut: str,
    costs_of: CostsOf,
    hardware: Hardware,
) -> tuple[ScheduleSpec, Form | None]:
    """Return a spec with plain values for what depends on costs, and the form that has them.

    Args:
        spec: the delay may be :data:`AFFORDABLE`.
        free_chains: whether to take the fastest chains instead of the spec's.
        cut: a measure, or :data:`FASTEST`.
        costs_of: costs of the stages.
        hardware: the machines.

    Returns:
        The spec, and its form; None where no message takes time, so that all forms are as fast.
    """
    is_affordable = spec.delay == AFFORDABLE
    n_pairs = spec.stages * spec.microbatches
    # Each guess of the search is simulated, so it would take minutes while a user waits.
    if is_affordable and n_pairs > _SEARCHED:
        raise UserError(
            f"the explorer finds the affordable delay of at most {_SEARCHED} stages times"
            f" micro-batches: got {n_pairs}; toolkit.cost.affordable_delay has no limit"
        )
    # Any delay will do to build the schedule: the affordable one follows from its timing.
    schedule = drawable(replace(spec, delay=1) if is_affordable else spec)
    form = None
    cuts: Sequence[Cut] = CUTS if cut == FASTEST else (cut,)
    if hardware != UNIT:
        # With these costs the order in which ranks sum a gradient, and the cut, decide the step
        # time.
        chains = CHAINS if free_chains else ()
        form = fastest_form(schedule, costs_of, hardware, chains=chains, cuts=cuts)
        if has_forms(schedule) and form.schedule.chains != schedule.chains:
            spec = replace(spec, chains=form.schedule.chains)
        schedule, cuts = form.schedule, (form.partition,)
    if is_affordable:
        costs = costs_of(schedule.n_stages, cuts[0])
        spec = replace(spec, delay=affordable_delay(schedule, costs, hardware))
    return spec, form


@lru_cache(maxsize=64)
def ddp_seconds(
    costs_of: CostsOf, hardware: Hardware, n_ranks: int, n_microbatches: int
) -> float | None:
    """Return the seconds of DistributedDataParallel's step on the same samples.

    Args:
        costs_of: costs of the model's stages.
        hardware: the machines.
        n_ranks: workers, a device each; None is returned for one.
        n_microbatches: of a step; None is returned unless workers have equal numbers.
    """
    # DistributedDataParallel gives each worker as many samples, and so whole micro-batches.
    if n_ranks == 1 or n_microbatches % n_ranks:
        return None
    job = DataParallelJob(
        costs_of, hardware, n_ranks, accumulate=n_microbatches // n_ranks
    )
    return job.form().seconds


def predict(analysis: Analysis, costs: Costs, hardware: Hardware) -> Timeline:
    """Simulate a few training steps; more where messages take time, to reach a steady state."""
    if hardware != UNIT:
        return steady_timeline(analysis.schedule, costs, hardware)
    # Where messages take no time, a schedule is in its steady state after a few steps.
    program = analysis.drawn
    if len(program.steps) < _STEPS:
        program = analysis.schedule.lower(_STEPS)
    return simulate(program, costs, hardware)
