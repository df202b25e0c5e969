"""What a pilot has measured and predicted, and how it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import inf, isfinite
from typing import TYPE_CHECKING

from toolkit.cost import Costs, Hardware
from toolkit.files import table
from toolkit.pilot.predict import Prediction, predict, schedule_of
from toolkit.tracking import Estimate
from toolkit.units import TIMES, digits, size, unit_for

if TYPE_CHECKING:
    from toolkit.pilot.advice import Advice


@dataclass(frozen=True)
class RuleFindings:
    """One rule on the user's model.

    Attributes:
        rule: DP, CDP-v1 or CDP-v2.
        activations: measured: the most bytes that autograd kept, all workers together.
        cuda_peak: measured: the most bytes that CUDA allocated above those between training
            steps, all workers on one GPU; None on the CPU.
        seconds: measured: median time of a training step, all micro-batches in one process.
        ratio: measured: quartiles of the ratio of that time to DP's, the median in the middle.
        predicted: on the user's machines.
    """

    rule: str
    activations: int
    seconds: float
    ratio: tuple[float, float, float]
    predicted: Prediction
    cuda_peak: int | None = None

    @property
    def waiting(self) -> float:
        """The share of the predicted training step that messages cost."""
        return 1 - self.predicted.without_links / self.predicted.seconds


@dataclass(frozen=True)
class TrainingFindings:
    """DP and CDP-v2 trained from the same weights on the same batches.

    Attributes:
        n_steps: training steps of a run.
        seeds: of the order of images, and of weights where they are drawn anew.
        n_tested: images, or tokens, on which accuracy is measured.
        tested: what these are called.
        accuracy: by rule, the share that is right after each run.
        difference: CDP-v2 minus DP in points, paired by seed, with a 95 % interval that is no
            narrower than the binomial one of ``n_tested`` answers.
        loss_ratio: training loss of CDP-v2 by that of DP at the end, the mean over seeds.
        highest: the largest mean loss over a tenth of any run, by that of its first training step.
        chance: accuracy of naming the most frequent class.
        learned: whether DP came to be surely better than that.
        diverged: rules of which a run did not stay finite, or near its first loss.
        cosine: the smallest mean over the run, of all stages, between the gradient under CDP-v2
            and the fresh one.
    """

    n_steps: int
    seeds: tuple[int, ...]
    n_tested: int
    accuracy: Mapping[str, tuple[float, ...]]
    difference: Estimate
    loss_ratio: float
    highest: float
    chance: float
    learned: bool
    diverged: tuple[str, ...]
    cosine: float
    tested: str = "images"

    @property
    def blind(self) -> str:
        """Why the accuracies could not show a difference if there were one; empty: they could."""
        late, base = self.accuracy["CDP-v2"], self.accuracy["DP"]
        if {*late, *base} == {1.0}:
            return (
                f"both rules name all {self.n_tested} test {self.tested} right, so these are too"
                " easy to tell them apart"
            )
        differences = {round(x - y, 9) for x, y in zip(late, base, strict=True)}
        if len(base) > len(differences) == 1:
            return (
                f"the difference is the same with every seed, so there is no spread to hold it"
                f" against: {self.n_tested} test {self.tested} are too few, or too much alike"
            )
        return ""


@dataclass(frozen=True)
class Pilot:
    """What a small trial came to.

    Attributes:
        n_workers: micro-batches of a training step.
        n_stages: into which the model could be cut; 1: not at all.
        batch: samples of a micro-batch.
        samples: what they are called.
        n_classes: how many answers to them there are.
        placement: ``per_microbatch``, ``per_stage`` or ``one``.
        device: on which it was measured, in words.
        hardware: for which it was predicted.
        compute: where the predictions have their seconds of computing from: ``measured`` on
            ``device``, or the ``roofline`` of ``hardware``.
        rules: by rule; empty where the model cannot be cut.
        training: None where it was not measured.
        untrained: why it was not.
        model: how the command line names the model; empty: it cannot.
        shape: of one.
        slack: least and largest factor on the seconds of computing that predictions allow for.
        seconds: that the pilot took.
        costs: of the stages.
        optimizer_bytes: of the optimizer's state, by stage.
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
    model: str = ""
    shape: tuple[int, ...] = (3, 224, 224)
    samples: str = "images"
    n_classes: int = 0
    slack: tuple[float, float] = (1.0, 1.0)
    seconds: float = 0.0
    costs: Costs = field(default=(), repr=False)
    optimizer_bytes: Sequence[int] = field(default=(), repr=False)

    @cached_property
    def advice(self) -> "Advice":
        """What follows from the findings."""
        from toolkit.pilot.advice import advise

        return advise(self)

    @property
    def recommendation(self) -> str:
        """The advice as text."""
        return self.advice.text()

    def elsewhere(self, hardware: Hardware | None = None, placement: str | None = None) -> "Pilot":
        """The same measurements, predicted for other machines or another placement."""
        hardware, placement = hardware or self.hardware, placement or self.placement
        schedules = [
            schedule_of(rule.rule, self.n_workers, self.n_stages, placement) for rule in self.rules
        ]
        predictions = predict(schedules, self.costs, hardware, self.optimizer_bytes, self.slack)
        rules = tuple(
            replace(rule, predicted=prediction)
            for rule, prediction in zip(self.rules, predictions, strict=True)
        )
        return replace(self, hardware=hardware, placement=placement, rules=rules)

    def of(self, rule: str) -> RuleFindings:
        return next(found for found in self.rules if found.rule == rule)

    def fits(self, found: RuleFindings) -> bool:
        """Whether every device has the memory, as predicted."""
        peak, memory = self.tightest(found)
        return peak <= memory

    def tightest(self, found: RuleFindings) -> tuple[float, float]:
        """Bytes needed, and there, on the device that the rule fills the most."""
        peaks = enumerate(found.predicted.memories)
        pairs = ((peak, self.hardware.memory_of(rank)) for rank, peak in peaks)
        return max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))

    @property
    def limited(self) -> bool:
        """Whether the memory of the devices is known."""
        return any(isfinite(self.tightest(found)[1]) for found in self.rules)

    def rows(self) -> list[dict[str, str]]:
        """A row a rule, as it is read."""
        rows = []
        for found in self.rules:
            row = {
                "rule": found.rule,
                "activations of all workers (measured)": _size(found.activations),
            }
            if found.cuda_peak is not None:
                row["CUDA peak (measured)"] = _size(found.cuda_peak)
            row |= {
                "step in one process (measured)": _time(found.seconds),
                "by that of DP": _range(found.ratio),
                "step on your machines (predicted)": _time(found.predicted.seconds),
                "by that of DP, predicted": _range(found.predicted.ratio),
                "of which messages": f"{found.waiting:.0%}",
                "fullest device (predicted)": _size(self.tightest(found)[0]),
            }
            if self.limited:
                row["fits"] = "yes" if self.fits(found) else "no"
            if self.training is not None and found.rule in self.training.accuracy:
                found_shares = self.training.accuracy[found.rule]
                row["accuracy (measured)"] = f"{sum(found_shares) / len(found_shares):.1%}"
            elif self.training is not None:
                row["accuracy (measured)"] = "-"
            rows.append(row)
        return rows

    def table(self) -> str:
        """The findings as aligned text."""
        if not self.rules:
            return "nothing was measured: the model cannot be cut into stages"
        turned = [
            {"": name, **{row["rule"]: row[name] for row in self.rows()}}
            for name in self.rows()[0]
            if name != "rule"
        ]
        return table(turned)

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and how sure it is."""
        if not self.rules:
            return []
        compute = "was measured here" if self.compute == "measured" else "its roofline has"
        n_devices = len(self.rules[0].predicted.memories)
        memories = [self.hardware.memory_of(rank) for rank in range(n_devices)]
        room = " to ".join(_size(memory) for memory in sorted({min(memories), max(memories)}))
        room = f", {room} a device" if self.limited else ", memory not given"
        lines = [
            f"Measured on {self.device}: {self.n_workers} micro-batches of {self.batch}"
            f" {self.samples} of shape {list(self.shape)}, {self.n_stages} stages, in"
            f" {self.seconds:.0f} s.",
            f"Predicted for {self.hardware.name}: {self.hardware.link_bandwidth * 8e-9:g} Gbit/s"
            f" links{room}; computing takes the time that {compute}. Simulated, not run there:"
            " what disturbs a real machine is not in it.",
            "Ranges of measured ratios are quartiles over rounds; those of predicted ones come of"
            f" computing that takes {self.slack[0]:.2f} to {self.slack[1]:.2f} of the time"
            f" {'seen' if self.compute == 'measured' else 'of the roofline'}.",
        ]
        if self.training is not None:
            trained, n = self.training, len(self.training.seeds)
            lines.append(
                f"Accuracy: of {trained.n_tested} {trained.tested} after {trained.n_steps} training"
                f" steps, {n} seeds; an interval is that of the seeds, and no narrower than so few"
                f" {trained.tested} make it. So short a training shows large losses and no small"
                " ones, and nothing about the end of a long one."
            )
        else:
            lines.append(f"Accuracy was not measured: {self.untrained}.")
        return lines

    def __str__(self) -> str:
        return "\n\n".join([self.table(), *self.origin(), self.recommendation])

    def _repr_html_(self) -> str:
        advice = self.advice
        parts = [f"<h3>{escape(advice.verdict)}</h3>", _list(advice.reasons)]
        if self.rules:
            names = [name for name in self.rows()[0] if name != "rule"]
            heads = "".join(f"<th>{escape(row['rule'])}</th>" for row in self.rows())
            body = "".join(
                f'<tr><td style="text-align:left">{escape(name)}</td>'
                + "".join(f"<td>{escape(row[name])}</td>" for row in self.rows())
                + "</tr>"
                for name in names
            )
            parts.append(f"<table><thead><tr><th></th>{heads}</tr></thead>{body}</table>")
        parts.append(_list(self.origin()))
        for title, lines in (("Watch", advice.watch), ("Roll back", advice.roll_back)):
            if lines:
                parts.append(f"<b>{title}</b>{_list(lines)}")
        shown = escape(advice.command)
        parts.append(f'<b>Go on with</b><pre style="white-space:pre-wrap">{shown}</pre>')
        return "\n".join(parts)


def _list(lines: tuple[str, ...] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _range(ratio: tuple[float, float, float]) -> str:
    least, middle, most = ratio
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def _size(n_bytes: float) -> str:
    return "not limited" if n_bytes == inf else size(n_bytes)


def _time(seconds: float) -> str:
    unit, name = unit_for(seconds, TIMES[:2])
    return f"{seconds:.2f} s" if name == "s" else f"{digits(seconds / unit)} ms"
