"""What a pilot measured and predicted, and how it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, isfinite
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.cost import Costs, Hardware, affordable_schedule, simulate
from toolkit.cost.affordable_delay import step_seconds
from toolkit.cost.hardware import check_hardware
from toolkit.errors import check_choice
from toolkit.format import duration, size
from toolkit.model import Images, InputSpec
from toolkit.plan.advice import WITHIN, Advice, advise
from toolkit.results import Estimate
from toolkit.schedule import FRESHEST, Schedule, catalog
from toolkit.schedule.paper_table import schedule_of
from toolkit.schedule.steady_state import steps_to_time

if TYPE_CHECKING:
    import pandas as pd


_HTML = """
{% macro listed(lines) %}<ul>{% for x in lines %}<li>{{ x }}</li>{% endfor %}</ul>{% endmacro %}
<h3>{{ advice.verdict }}</h3>{{ listed(advice.reasons) }}
{{ table|safe }}{{ listed(origin) }}
{% if advice.watch %}<b>Watch</b>{{ listed(advice.watch) }}
<b>Roll back</b>{{ listed(advice.roll_back) }}{% endif %}
<b>Next command</b><pre style="white-space:pre-wrap">{{ advice.command }}</pre>"""
_SEARCHED = 64  # stages times workers: seconds
PLACEMENTS = ("per_microbatch", "per_stage", "one")


@dataclass(frozen=True)
class Prediction:
    """A training step under one rule."""

    seconds: float  # from step to step
    ratio: tuple[float, float, float]  # to DP's: least, middle and largest, over the slack
    without_links: float  # seconds if messages took no time
    memories: tuple[float, ...]  # peak bytes of each device


def predict(
    schedules: Sequence[Schedule],
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[int],
    slack: tuple[float, float],
) -> list[Prediction]:
    """Predict a training step of each schedule, DP's first; measured seconds count where given.

    ``slack``: least and largest factor on the seconds of computing.
    """
    check_hardware(hardware)
    free = replace(hardware, link_bandwidth=inf, link_latency=0.0)
    seconds = [cost.seconds(hardware) for cost in costs]
    versions = [costs] + [
        tuple(
            replace(cost, forward_seconds=factor * forward, backward_seconds=factor * backward)
            for cost, (forward, backward) in zip(costs, seconds, strict=True)
        )
        for factor in slack
    ]
    found: list[Prediction] = []
    baseline: list[float] = []
    for schedule in schedules:
        program = schedule.lower(steps_to_time(schedule)).verify()
        timelines = [simulate(program, version, hardware, optimizer_bytes) for version in versions]
        times = [timeline.step_time for timeline in timelines]
        baseline = baseline or times
        ratios = [mine / theirs for mine, theirs in zip(times, baseline, strict=True)]
        memories = tuple(map(timelines[0].peak_memory, range(timelines[0].n_ranks)))
        without_links = simulate(program, costs, free, optimizer_bytes).step_time
        bounds = min(ratios), ratios[0], max(ratios)
        found.append(Prediction(times[0], bounds, without_links, memories))
    return found


@dataclass(frozen=True)
class RuleFindings:
    """One rule on the user's model; all but ``predicted`` is measured."""

    rule: str  # DP, CDP-v1 or CDP-v2
    activations: int  # peak bytes that autograd kept, all workers together
    seconds: float  # median time of a training step, all micro-batches in one process
    ratio: tuple[float, float, float]  # of that time to DP's: quartiles
    predicted: Prediction  # on the user's machines
    cuda_peak: int | None = None  # bytes above those held between steps; None on the CPU

    @property
    def waiting(self) -> float:
        """Share of the predicted training step that messages cost."""
        return 1 - self.predicted.without_links / self.predicted.seconds


@dataclass(frozen=True)
class TrainingFindings:
    """DP and CDP-v2 trained from the same weights on the same batches.

    The interval of ``difference``, CDP-v2 minus DP in points, is paired by seed and covers 95 %; it
    is at least as wide as the binomial one of ``n_tested`` answers.
    """

    n_steps: int  # training steps of a run
    seeds: tuple[int, ...]  # one for each run of a rule
    n_tested: int  # images, or tokens, in the test
    accuracy: Mapping[str, tuple[float, ...]]  # by rule and run, a share
    difference: Estimate
    loss_ratio: float  # CDP-v2's training loss by that of DP at the end, the mean over seeds
    highest: float  # largest mean loss over a tenth of a run, by the loss of its first step
    chance: float  # accuracy of always naming the most frequent class
    learned: bool  # whether DP became surely better than that
    diverged: tuple[str, ...]  # rules whose loss exploded in a run
    cosine: float  # of CDP-v2's stale and fresh gradients, mean over a run, smallest of all stages
    tested: str = "images"  # what n_tested counts; or tokens

    @property
    def blind(self) -> str:
        """Why these accuracies could not show a difference; empty if they could."""
        late, base = self.accuracy["CDP-v2"], self.accuracy["DP"]
        if {*late, *base} == {1.0}:
            return f"both rules have all {self.n_tested} test {self.tested} right: too easy a test"
        differences = {round(x - y, 9) for x, y in zip(late, base, strict=True)}
        if len(base) > 1 and len(differences) == 1:
            return (
                f"the difference is the same with every seed: {self.n_tested} test {self.tested}"
                " are too few, or too much alike"
            )
        return ""


@dataclass(frozen=True)
class Pilot:
    """What a pilot measured and predicted, and the advice."""

    n_workers: int  # micro-batches of a training step
    n_stages: int  # 1 if the model cannot be cut
    batch: int  # samples of a micro-batch
    placement: str  # of the workers: per_microbatch, per_stage or one
    device: str  # that was measured
    hardware: Hardware  # the user's machines
    compute: str  # source of the predicted seconds: measured on the device, or roofline
    rules: tuple[RuleFindings, ...]  # DP, CDP-v1 and CDP-v2; empty if the model cannot be cut
    training: TrainingFindings | None = None  # a short training
    untrained: str = ""  # why there was none
    model: str = ""  # package.module.function that makes the model, if it has such a name
    form: InputSpec = Images(3, 224, 224, 10)  # what the model takes and returns
    partition: str = "flops"  # of which the stages have equal shares; or activations
    slack: tuple[float, float] = (1.0, 1.0)  # on the seconds of computing: least and largest factor
    seconds: float = 0.0  # that the pilot took
    costs: Costs = field(default=(), repr=False)  # of the stages
    optimizer_bytes: Sequence[int] = field(default=(), repr=False)  # by stage

    def of(self, rule: str) -> RuleFindings:
        """Return the findings of ``rule``: DP, CDP-v1 or CDP-v2."""
        return next(found for found in self.rules if found.rule == rule)

    def tightest(self, found: RuleFindings) -> tuple[float, float]:
        """Bytes needed and bytes available on the device that the rule fills most."""
        peaks = enumerate(found.predicted.memories)
        pairs = ((peak, self.hardware.memory_of(rank)) for rank, peak in peaks)
        return max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))

    def fits(self, found: RuleFindings) -> bool:
        """Whether every device has the memory that the prediction needs."""
        peak, memory = self.tightest(found)
        return peak <= memory

    @property
    def limited(self) -> bool:
        """Whether the memory of the devices is known."""
        return any(isfinite(self.tightest(found)[1]) for found in self.rules)

    @cached_property
    def affordable(self) -> tuple[Schedule, float] | None:
        """A schedule with the delay that the links afford, and its step time by that of DP.

        None where CDP-v2 is it, workers share devices or run pipelines, or the search is too long.
        """
        entries = self.n_workers * self.n_stages
        if not self.costs or self.placement != "per_microbatch" or entries > _SEARCHED:
            return None
        make = partial(catalog.cyclic, self.n_workers, n_stages=self.n_stages)
        found = affordable_schedule(make, self.costs, self.hardware, within=WITHIN)
        if found.delay == FRESHEST:
            return None
        seconds = step_seconds(found, self.costs, self.hardware, self.optimizer_bytes)
        return found, seconds / self.of("DP").predicted.seconds

    @cached_property
    def advice(self) -> Advice:
        """What follows from the findings."""
        return advise(self)

    @property
    def recommendation(self) -> str:
        """The advice as text."""
        return self.advice.text()

    def elsewhere(self, hardware: Hardware | None = None, placement: str | None = None) -> "Pilot":
        """Predict other machines, or another placement, from the same measurements.

        Args:
            hardware: machines; the same unless given.
            placement: ``per_microbatch``, ``per_stage`` or ``one``; the same unless given.

        Raises:
            UserError: an unknown placement, or not a Hardware.
        """
        hardware, placement = hardware or self.hardware, placement or self.placement
        check_choice("placement", placement, PLACEMENTS)
        schedules = [
            schedule_of(found.rule, self.n_workers, placement, n_stages=self.n_stages)
            for found in self.rules
        ]
        predictions = predict(schedules, self.costs, hardware, self.optimizer_bytes, self.slack)
        pairs = zip(self.rules, predictions, strict=True)
        rules = tuple(replace(rule, predicted=prediction) for rule, prediction in pairs)
        return replace(self, hardware=hardware, placement=placement, rules=rules)

    def frame(self) -> "pd.DataFrame":
        """One row for each quantity that is known, one column for each rule, formatted."""
        import pandas as pd

        accuracy = self.training.accuracy if self.training else {}
        columns = {
            found.rule: {
                "activations of all workers (measured)": size(found.activations),
                "CUDA peak (measured)": size(found.cuda_peak) if found.cuda_peak else None,
                "step in one process (measured)": " ".join(duration(found.seconds)),
                "by that of DP": _range(found.ratio),
                "step on your machines (predicted)": " ".join(duration(found.predicted.seconds)),
                "by that of DP, predicted": _range(found.predicted.ratio),
                "share of messages, predicted": f"{found.waiting:.0%}",
                "fullest device (predicted)": size(self.tightest(found)[0]),
                "fits": ("yes" if self.fits(found) else "no") if self.limited else None,
                "accuracy (measured)": (
                    f"{mean(accuracy[found.rule]):.1%}" if found.rule in accuracy else None
                ),
            }
            for found in self.rules
        }
        return pd.DataFrame(columns).dropna(how="all").fillna("-")

    def table(self) -> str:
        """The findings as aligned text."""
        return self.frame().to_string() if self.rules else "the model cannot be cut into stages"

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and with what certainty."""
        if not self.rules:
            return []
        bounds = [self.hardware.memory_of(k) for k in range(len(self.rules[0].predicted.memories))]
        room = " to ".join(
            "not limited" if x == inf else size(x) for x in sorted({min(bounds), max(bounds)})
        )
        shape = [*self.form.example(1, "meta").shape[1:]]
        source = "measured here" if self.compute == "measured" else "of its roofline"
        lines = [
            f"Measured on {self.device}: {self.n_workers} micro-batches of {self.batch}"
            f" {self.form.samples} of shape {shape}, {self.n_stages} stages, in"
            f" {self.seconds:.0f} s.",
            f"Predicted for {self.hardware.name}: {self.hardware.link_bandwidth * 8e-9:g} Gbit/s"
            f" links, {f'{room} a device' if self.limited else 'memory not given'}; computing takes"
            f" the time {source}. Simulated, not run there: disturbances of a real machine are not"
            " included.",
            "Ranges of measured ratios are quartiles over rounds; those of predicted ratios are for"
            f" computing that takes {self.slack[0]:.2f} to {self.slack[1]:.2f} of that time.",
        ]
        if self.training is None:
            return [*lines, f"Accuracy was not measured: {self.untrained}."]
        trained = self.training
        return [
            *lines,
            f"Accuracy: of {trained.n_tested} {trained.tested} after {trained.n_steps} training"
            f" steps, {len(trained.seeds)} seeds; the interval is that of the seeds, and at least"
            f" that of so few {trained.tested}. So short a training shows large losses, no small"
            " ones, and nothing about the end of a long one.",
        ]

    def __str__(self) -> str:
        return "\n\n".join([self.table(), *self.origin(), self.recommendation])

    def _repr_html_(self) -> str:
        from jinja2 import Environment

        return (
            Environment(autoescape=True)
            .from_string(_HTML)
            .render(
                advice=self.advice,
                table=self.frame().to_html() if self.rules else "",
                origin=self.origin(),
            )
        )


def _range(ratio: tuple[float, float, float]) -> str:
    least, middle, most = ratio
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"
