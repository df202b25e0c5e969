"""What a pilot measured and predicted, and how it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import mean
from typing import TYPE_CHECKING, Any

from toolkit.cost import Hardware
from toolkit.format import duration, size
from toolkit.model import Images, InputSpec
from toolkit.plan.advice import Advice, advise, gains
from toolkit.plan.predictions import Prediction
from toolkit.results import Estimate

if TYPE_CHECKING:
    import pandas as pd


_HTML = """
{% macro listed(lines) %}<ul>{% for x in lines %}<li>{{ x }}</li>{% endfor %}</ul>{% endmacro %}
<h3>{{ advice.verdict }}</h3>{{ listed(advice.reasons) }}
{% if advice.watch %}<b>Watch</b>{{ listed(advice.watch) }}
<b>Roll back</b>{{ listed(advice.roll_back) }}{% endif %}
<b>Next command</b><pre style="white-space:pre-wrap">{{ advice.command }}</pre>
{{ table|safe }}{{ listed(origin) }}"""
PILOT_PLACEMENTS = ("per_microbatch", "per_stage", "per_stage_and_microbatch", "one")


@dataclass(frozen=True)
class RuleFindings:
    """One rule on the user's model: measured here, and predicted of the user's machines."""

    rule: str  # DP, CDP-v1, CDP-v2, or another schedule
    activations: int  # peak bytes that autograd kept, all workers together
    seconds: float  # median time of a training step, all micro-batches in one process
    ratio: tuple[float, float, float]  # of that time to DP's: quartiles
    predicted: Prediction  # of a training step
    speed: tuple[float, float, float]  # predicted time by DP's: least, middle, most, over the slack
    without_links: float  # predicted seconds if messages took no time
    cuda_peak: int | None = None  # bytes above those held between steps; None on the CPU

    @property
    def waiting(self) -> float:
        """Share of the predicted training step that messages cost."""
        return max(0.0, 1 - self.without_links / self.predicted.seconds)


@dataclass(frozen=True)
class TrainingFindings:
    """DP and a rule with late weights, trained from the same weights on the same batches.

    The interval of ``difference``, the rule minus DP in points, is paired by seed and covers 95 %;
    it is at least as wide as the binomial one of ``n_tested`` answers.
    """

    n_steps: int  # training steps of a run
    seeds: tuple[int, ...]  # one for each run of a rule
    n_tested: int  # images, or tokens, in the test
    accuracy: Mapping[str, tuple[float, ...]]  # by rule and run, a share; DP first
    difference: Estimate
    loss_ratio: float  # the rule's training loss by that of DP at the end, the mean over seeds
    highest: float  # largest mean loss over a tenth of a run, by the loss of its first step
    chance: float  # accuracy of a guess: 1 by the number of classes
    frequent: float  # accuracy of always naming the most frequent class
    learned: bool  # whether DP became surely better than both
    diverged: tuple[str, ...]  # rules whose loss exploded in a run
    cosine: float  # of the rule's stale and fresh gradients, mean of a run, smallest of all stages
    tested: str = "images"  # what n_tested counts; or tokens

    @property
    def blind(self) -> str:
        """Why these accuracies could not show a difference; empty if they could."""
        base_accuracies, late_accuracies = self.accuracy.values()
        if {*late_accuracies, *base_accuracies} == {1.0}:
            return f"both rules have all {self.n_tested} test {self.tested} right: too easy a test"
        differences = {
            round(late_accuracy - base_accuracy, 9)
            for late_accuracy, base_accuracy in zip(late_accuracies, base_accuracies, strict=True)
        }
        if len(base_accuracies) > 1 and len(differences) == 1:
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
    placement: str  # of the workers
    device: str  # that was measured
    hardware: Hardware  # the user's machines
    compute: str  # source of the predicted seconds: measured on the device, or roofline
    rules: tuple[RuleFindings, ...]  # DP first; empty if the model cannot be cut
    training: TrainingFindings | None = None  # a short training
    untrained: str = ""  # why there was none
    given: str = ""  # options of a command line: the model, its samples, the optimizer
    form: InputSpec = Images(3, 224, 224, 10)  # what the model takes and returns
    certified: bool = False  # whether late weights have the correction of the larger stable rate
    slack: tuple[float, float] = (1.0, 1.0)  # on the seconds of computing: least and largest factor
    seconds: float = 0.0  # that the pilot took

    def of(self, rule: str) -> RuleFindings:
        """Return the findings of ``rule``, such as DP or CDP-v2."""
        return next(findings for findings in self.rules if findings.rule == rule)

    @cached_property
    def late(self) -> RuleFindings:
        """The rule compared with DP: the freshest that gains; if none does, the freshest."""
        late_rules = sorted(self.rules[1:], key=lambda findings: findings.predicted.staleness)
        return next((findings for findings in late_rules if gains(self, findings)), late_rules[0])

    @property
    def limited(self) -> bool:
        """Whether the memory of the devices is known."""
        return any(map(isfinite, self._bounds))

    @property
    def room(self) -> str:
        """The least and the most memory of a device, in words."""
        memory_range = sorted({min(self._bounds), max(self._bounds)})
        return " to ".join(
            size(n_bytes) if isfinite(n_bytes) else "not limited" for n_bytes in memory_range
        )

    @property
    def _bounds(self) -> list[float]:
        return [self.hardware.memory_of(rank) for rank in range(self.rules[0].predicted.ranks)]

    @cached_property
    def advice(self) -> Advice:
        """What follows from the findings."""
        return advise(self)

    @property
    def recommendation(self) -> str:
        """The advice as text."""
        return self.advice.text()

    def frame(self) -> "pd.DataFrame":
        """One row for each quantity that is known, one column for each rule, formatted."""
        import pandas as pd

        accuracy = self.training.accuracy if self.training else {}
        columns = {
            findings.rule: {
                "activations of all workers (measured)": size(findings.activations),
                "CUDA peak (measured)": size(findings.cuda_peak) if findings.cuda_peak else None,
                "step in one process (measured)": " ".join(duration(findings.seconds)),
                "by that of DP": _range(findings.ratio),
                "step on your machines (predicted)": " ".join(duration(findings.predicted.seconds)),
                "by that of DP, predicted": _range(findings.speed),
                "share of messages, predicted": f"{findings.waiting:.0%}",
                "fullest device (predicted)": size(findings.predicted.memory),
                "fits": ("yes" if findings.predicted.fits else "no") if self.limited else None,
                "accuracy (measured)": (
                    f"{mean(accuracy[findings.rule]):.1%}" if findings.rule in accuracy else None
                ),
            }
            for findings in self.rules
        }
        return pd.DataFrame(columns).dropna(how="all").fillna("-")

    def record(self) -> dict[str, Any]:
        """Return the advice and the table as plain values."""
        return vars(self.advice) | {"rules": self.frame().to_dict() if self.rules else {}}

    def table(self) -> str:
        """The findings as aligned text."""
        return self.frame().to_string() if self.rules else "the model cannot be cut into stages"

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and with what certainty."""
        if not self.rules:
            return []
        shape = [*self.form.example(1, "meta").shape[1:]]
        source = "measured here" if self.compute == "measured" else "of its roofline"
        memory = f"{self.room} a device" if self.limited else "memory not given"
        dp_note = " DP runs as GPipe." if self.placement == "per_stage" else ""
        lines = [
            f"Measured on {self.device}: {self.n_workers} micro-batches of {self.batch}"
            f" {self.form.samples} of shape {shape}, {self.n_stages} stages, in"
            f" {self.seconds:.0f} s.",
            f"Predicted for {self.hardware.name}: {self.hardware.link_bandwidth * 8e-9:g} Gbit/s"
            f" links (not measured), {memory}; computing takes the time {source}. Simulated, not"
            f" run there: disturbances of a real machine are not included.{dp_note}",
            "Ranges of measured ratios are quartiles over rounds; those of predicted ratios are for"
            f" computing that takes {self.slack[0]:.2f} to {self.slack[1]:.2f} of that time.",
        ]
        if self.training is None:
            return [*lines, f"Accuracy was not measured: {self.untrained}."]
        training = self.training
        if self.certified:
            correction = self.late.predicted.schedule.corrected.kind
            lines.append(
                f"Trained by SGD with Nesterov momentum, and {self.late.rule} with"
                f" schedule.correction={correction}, which is stable up to the larger learning rate"
                " on a quadratic loss."
            )
        return [
            *lines,
            f"Accuracy: of {training.n_tested} {training.tested} after {training.n_steps} training"
            f" steps, {len(training.seeds)} seeds; the interval is that of the seeds, and at least"
            f" that of so few {training.tested}. So short a training shows large losses, no small"
            " ones, and nothing about the end of a long one.",
        ]

    def __str__(self) -> str:
        return "\n\n".join([self.recommendation, self.table(), *self.origin()])

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
    lowest, middle, highest = ratio
    return f"{middle:.2f} ({lowest:.2f} to {highest:.2f})"
