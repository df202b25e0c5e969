"""Values that papers publish about schedules, and what this toolkit makes of the same settings.

A paper is a file of conf/papers: its settings, and its values by method. Nothing is fitted: stage
times and latencies are those that the paper gives.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.cost.hardware import Hardware
from toolkit.cost.published_training import RATE, Training
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import StageCost
from toolkit.cost.timeline import COMPUTE, Timeline
from toolkit.errors import UserError
from toolkit.files import conf
from toolkit.schedule import Schedule, ScheduleSpec
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.method_sizes import pipeline_sizes
from toolkit.schedule.steady_state import footprint

_FAST = 1e30  # arithmetic and links that take no time


@dataclass(frozen=True)
class Setting:
    """Where a value was published: a pipeline of equal ranks, or workers.

    Attributes:
        ranks: devices of a pipeline.
        microbatches: of a training step.
        workers: of a method that is no pipeline, in place of both.
        placement: of workers.
        forward: time of a forward of a rank's whole share of the model, in any unit.
        inputs: time of its backward for gradients of inputs.
        weights: time of its backward for gradients of weights.
        latency: time of a message between ranks.
        overlapped: time of a forward and a backward that a rank overlaps; None: their sum.
        stages_per_rank: that the rank's share is cut into; None: as the method has it.
    """

    ranks: int = 1
    microbatches: int = 1
    workers: int | None = None
    placement: str = "per_microbatch"
    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    latency: float = 0.0
    overlapped: float | None = None
    stages_per_rank: int | None = None

    @property
    def in_words(self) -> str:
        """The sizes, for a table."""
        if self.workers is not None:
            return f"N = {self.workers}, {self.placement.replace('_', ' ')}"
        return f"p = {self.ranks}, m = {self.microbatches}"

    def schedule(self, method_name: str) -> Schedule:
        """Build a method in these sizes."""
        if self.workers is not None:
            sizes: dict[str, Any] = {
                "stages": self.workers,
                "microbatches": self.workers,
            }
            return ScheduleSpec(method_name, **sizes, placement=self.placement).build()
        sizes = pipeline_sizes(METHODS[method_name], self.ranks, self.microbatches)
        if self.stages_per_rank is not None:
            sizes["stages"] = self.ranks * self.stages_per_rank
        return ScheduleSpec(method_name, **sizes).build()

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate one training step."""
        # The paper's times are of a rank's share of the model, whichever number of stages it has.
        stages_per_rank = schedule.n_stages // self.ranks if self.workers is None else 1
        backward = self.inputs + self.weights
        cost = StageCost(
            flops=1.0,
            backward_flops=1.0,
            forward_seconds=self.forward / stages_per_rank,
            backward_seconds=backward / stages_per_rank,
            weight_share=self.weights / backward,
        )
        overlap_time = 1.0
        if self.overlapped is not None:
            # The hardware takes a ratio, since pairs of all stages then take the same share.
            overlap_time = self.overlapped / (self.forward + backward)
        machines = Hardware(
            "as published",
            flops=_FAST,
            memory_bandwidth=_FAST,
            link_bandwidth=_FAST,
            link_latency=self.latency,
            overlap_time=overlap_time,
        )
        # One step, filled and drained, as papers draw it.
        costs = (cost,) * schedule.n_stages
        return simulate(schedule.lower(1).verify(), costs, machines)


@dataclass(frozen=True)
class PublishedValue:
    """One value of a paper.

    Attributes:
        paper: its title.
        source: where the value is printed.
        quantity: a key of :data:`QUANTITIES`, or the rate of a training.
        method: a method of the catalogue.
        setting: where it was measured or derived.
        value: as published.
        ours: from the same setting.
        note: why they differ, if they do.
    """

    paper: str
    source: str
    quantity: str
    method: str
    setting: Setting | Training
    value: float
    ours: float
    note: str = ""

    @property
    def difference(self) -> float:
        """Ours less the published value."""
        return self.ours - self.value


def _spans_of_ranks(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return when each rank's ops start and end, sorted."""
    spans_of_ranks: list[list[tuple[float, float]]] = [
        [] for _ in range(timeline.n_ranks)
    ]
    for span in timeline.spans:
        if span.lane == COMPUTE:
            spans_of_ranks[span.rank].append((span.start, span.end))
    return [sorted(spans) for spans in spans_of_ranks]


def _busy_time(spans: list[tuple[float, float]]) -> float:
    """Return the time in which a rank computes; ops that it overlaps count once."""
    busy = 0.0
    computed_until = float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, computed_until))
        computed_until = max(computed_until, end)
    return busy


def _bubble_rate(schedule: Schedule, setting: Setting) -> float:
    """Return the idle share of the rank whose ops span the longest time."""
    spans = max(
        _spans_of_ranks(setting.timeline(schedule)),
        key=lambda spans: spans[-1][1] - spans[0][0],
    )
    return 1 - _busy_time(spans) / (spans[-1][1] - spans[0][0])


def _idle_share(schedule: Schedule, setting: Setting) -> float:
    """Return the idle share of a rank from the first op of any rank to the last."""
    timeline = setting.timeline(schedule)
    busiest = max(map(_busy_time, _spans_of_ranks(timeline)))
    return 1 - busiest / _makespan(timeline)


def _idle_to_ideal(schedule: Schedule, setting: Setting) -> float:
    """Return the idle time of a step by the time of its computation."""
    timeline = setting.timeline(schedule)
    busiest = max(map(_busy_time, _spans_of_ranks(timeline)))
    return _makespan(timeline) / busiest - 1


def _bubble_time(schedule: Schedule, setting: Setting) -> float:
    """Return the longest time from a rank's first op to its last, less that of the least work.

    Ranks have unequal work where they overlap different numbers of pairs.
    """
    spans_of_ranks = _spans_of_ranks(setting.timeline(schedule))
    longest = max(spans[-1][1] - spans[0][0] for spans in spans_of_ranks)
    return longest - min(map(_busy_time, spans_of_ranks))


def _step_time(schedule: Schedule, setting: Setting) -> float:
    """Return the time of one step with its pipeline filled and drained."""
    return _makespan(setting.timeline(schedule))


def _makespan(timeline: Timeline) -> float:
    spans_of_ranks = _spans_of_ranks(timeline)
    first_start = min(spans[0][0] for spans in spans_of_ranks)
    return max(spans[-1][1] for spans in spans_of_ranks) - first_start


# Each paper has its own definition of a bubble, so there are several.
QUANTITIES: Mapping[str, tuple[str, Callable[[Schedule, Setting], float]]] = {
    "bubble rate": ("bubble", _bubble_rate),
    "idle share": ("bubble", _idle_share),
    "idle by ideal time": ("bubble", _idle_to_ideal),
    "bubble time": ("bubble", _bubble_time),
    "step time": ("time", _step_time),
    "activations, fullest rank": (
        "memory",
        lambda schedule, _: float(footprint(schedule).activations),
    ),
    "activations, all ranks": (
        "memory",
        lambda schedule, _: float(footprint(schedule).total_activations),
    ),
    # One more exists while an update writes it: no micro-batch reads that one yet.
    "weight versions that are read": (
        "memory",
        lambda schedule, _: float(footprint(schedule).weights * schedule.n_stages - 1),
    ),
    "devices": ("devices", lambda schedule, _: float(schedule.n_ranks)),
    "sent by a rank": (
        "messages",
        lambda schedule, _: float(footprint(schedule).traffic),
    ),
}
"""What is compared, by name: the group of the table, and a function of a schedule and a setting.

Activations are in micro-batches over the whole model. What is sent is in models.
"""


def papers() -> list[Path]:
    """Return the files of the papers."""
    return sorted((conf() / "papers").glob("*.yaml"))


def published_values(path: Path) -> Iterator[PublishedValue]:
    """Yield a paper's values, each next to ours.

    Args:
        path: a file of conf/papers, or another one like it.

    Raises:
        UserError: it is incomplete, or names an unknown quantity or method.
    """
    paper = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        title, source, cases = paper["title"], paper["source"], paper["cases"]
        for case in cases:
            setting, quantity_of = _read_case(case)
            for method, value in case["published"].items():
                yield PublishedValue(
                    paper=title,
                    source=case.get("source", source),
                    quantity=case["quantity"],
                    method=METHODS[method].label,
                    setting=setting,
                    value=value,
                    ours=quantity_of(setting.schedule(method), setting),
                    note=case.get("note", ""),
                )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a complete paper: {error}") from error


def _read_case(
    case: dict[str, Any],
) -> tuple[Setting | Training, Callable[[Schedule, Any], float]]:
    """Return the setting of a case and the function that gives its quantity."""
    quantity = case["quantity"]
    if quantity == RATE:
        return Training.of(case["training"]), lambda schedule, training: training.rate(
            schedule
        )
    _, quantity_of = QUANTITIES[quantity]
    return Setting(**case["setting"]), quantity_of
