"""What a pilot has measured and predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from toolkit.cost import Costs, Hardware, StageCost, simulate
from toolkit.cost.hardware import check_hardware
from toolkit.errors import check_choice
from toolkit.results import Estimate
from toolkit.schedule import Schedule
from toolkit.schedule.steady import steps_to_time

PLACEMENTS = ("per_microbatch", "per_stage", "one")


@dataclass(frozen=True)
class Prediction:
    """A training step under one rule.

    Attributes:
        seconds: from step to step.
        ratio: least, middle and largest ratio of that to DP's, with the slack of computing.
        without_links: seconds if messages took no time.
        memories: bytes of each device, at most.
    """

    seconds: float
    ratio: tuple[float, float, float]
    without_links: float
    memories: tuple[float, ...]


def check_placement(placement: str) -> None:
    """Refuse what is no placement of a pilot's workers.

    Raises:
        ValueError: it is another.
    """
    check_choice("placement", placement, PLACEMENTS)


def predict(
    schedules: Sequence[Schedule],
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[int],
    slack: tuple[float, float],
) -> list[Prediction]:
    """A prediction of each schedule, the first of which is DP's.

    Args:
        costs: of the stages; their seconds count, where they were measured.
        hardware: the machines.
        optimizer_bytes: of the optimizer's state, by stage.
        slack: least and largest factor on the seconds of computing.
    """
    check_hardware(hardware)
    free = replace(hardware, link_bandwidth=inf, link_latency=0.0)
    slackened = [_scaled(costs, factor, hardware) for factor in slack]
    found: list[Prediction] = []
    baseline: list[float] = []
    for schedule in schedules:
        program = schedule.lower(steps_to_time(schedule)).verify()
        timeline, *others = (
            simulate(program, version, hardware, optimizer_bytes) for version in (costs, *slackened)
        )
        times = [timeline.step_time, *(other.step_time for other in others)]
        baseline = baseline or times
        ratios = [mine / theirs for mine, theirs in zip(times, baseline, strict=True)]
        found.append(
            Prediction(
                seconds=times[0],
                ratio=(min(ratios), ratios[0], max(ratios)),
                without_links=simulate(program, costs, free, optimizer_bytes).step_time,
                memories=tuple(timeline.peak_memory(rank) for rank in range(timeline.n_ranks)),
            )
        )
    return found


def _scaled(costs: Costs, factor: float, hardware: Hardware) -> tuple[StageCost, ...]:
    """The same stages where computing takes ``factor`` of the time."""
    timed = [(cost, cost.seconds(hardware)) for cost in costs]
    return tuple(
        replace(cost, forward_seconds=factor * forward, backward_seconds=factor * backward)
        for cost, (forward, backward) in timed
    )


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
        seeds: one a run of each rule: of the order of samples, and of weights where every seed
            begins from its own.
        n_tested: images, or tokens, on which accuracy is measured.
        accuracy: by rule and run, the share of them that is right in the end.
        difference: CDP-v2 minus DP in points, paired by seed, with a 95 % interval that is no
            narrower than the binomial one of ``n_tested`` answers.
        loss_ratio: training loss of CDP-v2 by that of DP at the end, the mean over seeds.
        highest: of all runs, the largest mean loss over a tenth of the run, by the loss of its
            first training step.
        chance: accuracy of naming the most frequent class.
        learned: whether DP came to be surely better than that.
        diverged: rules of which a run's loss did not stay finite, or near that of its first step.
        cosine: between the gradient under CDP-v2 and the fresh one, the mean over a run; of the
            stage where it is smallest.
        tested: what ``n_tested`` counts, ``images`` or ``tokens``.
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
        if len(base) > 1 and len(differences) == 1:
            return (
                f"the difference is the same with every seed, so there is no spread to hold it"
                f" against: {self.n_tested} test {self.tested} are too few, or too much alike"
            )
        return ""


@dataclass(frozen=True)
class Findings:
    """What a small trial has measured and predicted, of all rules.

    Attributes:
        n_workers: micro-batches of a training step.
        n_stages: into which the model could be cut; 1: not at all.
        batch: samples of a micro-batch.
        placement: of the workers on the user's machines: ``per_microbatch``, ``per_stage`` or
            ``one``.
        partition: by which measure the stages are equal: FLOPs, or, where the workers were to share
            a device, what they keep.
        device: on which it was measured, in words.
        hardware: the user's machines, for which it was predicted.
        compute: where the predictions have their seconds of computing from: ``measured`` on
            ``device``, or the ``roofline`` of ``hardware``.
        rules: the findings of DP, CDP-v1 and CDP-v2; empty where the model cannot be cut.
        training: what a short training came to; None where there was none.
        untrained: why there was none.
        model: ``package.module.function`` that makes the model; empty where no command line could
            name it.
        shape: of a sample: ``(channels, height, width)`` of an image, ``(tokens,)`` of a sequence.
        samples: what the samples are called, ``images`` or ``sequences``.
        n_classes: classes of an image; of text, how many tokens there are.
        slack: least and largest factor on the seconds of computing that predictions allow for.
        seconds: that the pilot took.
        costs: of the stages.
        optimizer_bytes: bytes of the optimizer's state, by stage.
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
    partition: str = "flops"
    n_classes: int = 0
    slack: tuple[float, float] = (1.0, 1.0)
    seconds: float = 0.0
    costs: Costs = field(default=(), repr=False)
    optimizer_bytes: Sequence[int] = field(default=(), repr=False)

    def of(self, rule: str) -> RuleFindings:
        """What was found of ``rule``."""
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
