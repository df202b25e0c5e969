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
from toolkit.plan.runtime_overhead import RuntimeOverhead
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
    """One rule on the user's model: measured here, and predicted of the user's machines.

    Attributes:
        rule: DP, CDP-v1, CDP-v2, or another schedule.
        activations: peak bytes that autograd kept, all workers together.
        seconds: median time of a training step, all micro-batches in one process.
        ratio: of that time to DP's; its quartiles.
        predicted: time and memory of a training step.
        speed: predicted time divided by that of DP: smallest, middle and largest, over the slack.
        without_links: predicted seconds if messages took no time.
        cuda_peak: bytes above those held between steps; None on the CPU.
    """

    rule: str
    activations: int
    seconds: float
    ratio: tuple[float, float, float]
    predicted: Prediction
    speed: tuple[float, float, float]
    without_links: float
    cuda_peak: int | None = None

    @property
    def waiting(self) -> float:
        """Share of the predicted training step that messages cost."""
        return max(0.0, 1 - self.without_links / self.predicted.seconds)


@dataclass(frozen=True)
class TrainingFindings:
    """DP and a rule with late weights, trained from the same weights on the same batches.

    Attributes:
        n_steps: training steps of a run.
        seeds: one for each run of a rule.
        n_tested: images, feature vectors or tokens in the test.
        accuracy: by rule, DP first: ``[run]``, a share.
        difference: accuracy of the rule minus that of DP in points, paired by seed. The interval
            covers 95 %; it is at least as wide as the binomial one of ``n_tested`` answers.
        loss_ratio: the rule's training loss divided by that of DP at the end, the mean over seeds.
        highest: largest mean loss over a tenth of a run, by the loss of its first step.
        chance: accuracy of a guess: 1 by the number of classes.
        frequent: accuracy of always naming the most frequent class.
        learned: whether DP became surely better than both.
        diverged: rules whose loss exploded in a run.
        cosine: of the rule's stale and fresh gradients, mean of a run, smallest of all stages.
        tested: unit of ``n_tested``, such as ``images``.
    """

    n_steps: int
    seeds: tuple[int, ...]
    n_tested: int
    accuracy: Mapping[str, tuple[float, ...]]
    difference: Estimate
    loss_ratio: float
    highest: float
    chance: float
    frequent: float
    learned: bool
    diverged: tuple[str, ...]
    cosine: float
    tested: str = "images"

    @property
    def blind(self) -> str:
        """Why these accuracies could not show a difference; empty if they could."""
        base_accuracies, late_accuracies = self.accuracy.values()
        # A test at its ceiling cannot show a loss.
        if {*late_accuracies, *base_accuracies} == {1.0}:
            return f"both rules have all {self.n_tested} test {self.tested} right: too easy a test"
        differences = {
            # Rounded, since equal differences of shares may differ in their last bits.
            round(late_accuracy - base_accuracy, 9)
            for late_accuracy, base_accuracy in zip(
                late_accuracies, base_accuracies, strict=True
            )
        }
        if len(base_accuracies) > 1 and len(differences) == 1:
            return (
                f"the difference is the same with every seed: {self.n_tested} test {self.tested}"
                " are too few, or too much alike"
            )
        return ""


@dataclass(frozen=True)
class Pilot:
    """What a pilot measured and predicted, and the advice.

    Attributes:
        n_workers: micro-batches of a training step.
        n_stages: 1 if the model cannot be cut.
        batch: samples of a micro-batch.
        placement: of the workers, such as ``per_microbatch``.
        device: that was measured, in words.
        hardware: the user's machines.
        compute: source of the predicted seconds: ``measured`` on the device, or ``roofline``.
        rules: DP first; empty if the model cannot be cut.
        training: a short training; None without one.
        untrained: why there was none.
        command_options: options of a command line: the model, its samples, the optimizer.
        form: inputs and outputs of the model.
        certified: whether late weights have the correction of the larger stable rate.
        slack: smallest and largest factor on the seconds of computing.
        overhead: what the runtime itself takes, which predicted steps include; None: they do not.
        seconds: that the pilot took.
    """

    n_workers: int
    n_stages: int
    batch: int
    placement: str
    device: str
    hardware: Hardware
    compute: str
    rules: tuple[RuleFindings, ...]
    training: TrainingFindings | None = None
    untrained: str = ""
    command_options: str = ""
    form: InputSpec = Images(3, 224, 224, 10)
    certified: bool = False
    slack: tuple[float, float] = (1.0, 1.0)
    overhead: RuntimeOverhead | None = None
    seconds: float = 0.0

    def of(self, rule: str) -> RuleFindings:
        """Return the findings of ``rule``, such as DP or CDP-v2."""
        return next(findings for findings in self.rules if findings.rule == rule)

    @cached_property
    def late(self) -> RuleFindings:
        """The rule compared with DP: the freshest that gains; if none does, the freshest."""
        late_rules = sorted(
            self.rules[1:], key=lambda findings: findings.predicted.staleness
        )
        return next(
            (findings for findings in late_rules if gains(self, findings)),
            late_rules[0],
        )

    @property
    def limited(self) -> bool:
        """Whether the memory of the devices is known."""
        return any(map(isfinite, self._bounds))

    @property
    def room(self) -> str:
        """The least and the most memory of a device, in words."""
        bounds = sorted({min(self._bounds), max(self._bounds)})
        words = [
            size(n_bytes) if isfinite(n_bytes) else "not limited" for n_bytes in bounds
        ]
        return " to ".join(words)

    @property
    def _bounds(self) -> list[float]:
        return [
            self.hardware.memory_of(rank)
            for rank in range(self.rules[0].predicted.ranks)
        ]

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

        columns = {findings.rule: self._cells(findings) for findings in self.rules}
        return pd.DataFrame(columns).dropna(how="all").fillna("-")

    def _cells(self, findings: RuleFindings) -> dict[str, str | None]:
        """Return a rule's column of the table; None: not known."""
        predicted = findings.predicted
        cuda_peak = fits = accuracy = None
        if findings.cuda_peak:
            cuda_peak = size(findings.cuda_peak)
        if self.limited:
            fits = "yes" if predicted.fits else "no"
        if self.training is not None and findings.rule in self.training.accuracy:
            accuracy = f"{mean(self.training.accuracy[findings.rule]):.1%}"
        return {
            "activations of all workers (measured)": size(findings.activations),
            "CUDA peak (measured)": cuda_peak,
            "step in one process (measured)": " ".join(duration(findings.seconds)),
            "divided by that of DP": _range(findings.ratio),
            "step on your machines (predicted)": " ".join(duration(predicted.seconds)),
            "divided by that of DP, predicted": _range(findings.speed),
            "share of messages, predicted": f"{findings.waiting:.0%}",
            "fullest device (predicted)": size(predicted.memory),
            "fits": fits,
            "accuracy (measured)": accuracy,
        }

    def record(self) -> dict[str, Any]:
        """Return the advice and the table as plain values."""
        rules = {}
        if self.rules:
            rules = self.frame().to_dict()
        return vars(self.advice) | {"rules": rules}

    def table(self) -> str:
        """The findings as aligned text."""
        if not self.rules:
            return "the model cannot be cut into stages"
        return self.frame().to_string()

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and with what certainty."""
        if not self.rules:
            return []
        shape = [*self.form.example(1, "meta").shape[1:]]
        source = "of its roofline"
        if self.compute == "measured":
            source = "measured here"
        if self.overhead is not None:
            source += (
                f", and the runtime's own, of an op {self.overhead.op * 1e6:.0f} µs"
            )
        memory = "memory not given"
        if self.limited:
            memory = f"{self.room} a device"
        dp_note = ""
        if self.placement == "per_stage":
            dp_note = " DP runs as GPipe."
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

        table = ""
        if self.rules:
            table = self.frame().to_html()
        page = Environment(autoescape=True).from_string(_HTML)
        return page.render(advice=self.advice, table=table, origin=self.origin())


def _range(ratio: tuple[float, float, float]) -> str:
    lowest, middle, highest = ratio
    return f"{middle:.2f} ({lowest:.2f} to {highest:.2f})"
