"""What a pilot measured and predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from toolkit.cost import Costs, Hardware, simulate
from toolkit.cost.hardware import check_hardware
from toolkit.results import Estimate
from toolkit.schedule import Schedule
from toolkit.schedule.steady import steps_to_time

PLACEMENTS = ("per_microbatch", "per_stage", "one")


@dataclass(frozen=True)
class Prediction:
    """A training step under one rule.

    Attributes:
        seconds: from step to step.
        ratio: least, middle and largest ratio of that to DP's, over the slack of computing.
        without_links: seconds if messages took no time.
        memories: peak bytes of each device.
    """

    seconds: float
    ratio: tuple[float, float, float]
    without_links: float
    memories: tuple[float, ...]


def predict(
    schedules: Sequence[Schedule],
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[int],
    slack: tuple[float, float],
) -> list[Prediction]:
    """Predict a training step of each schedule; DP's is the first.

    Args:
        schedules: one a rule.
        costs: of the stages; measured seconds count where they are given.
        hardware: the machines.
        optimizer_bytes: bytes of the optimizer's state, by stage.
        slack: least and largest factor on the seconds of computing.
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
    """One rule on the user's model.

    Attributes:
        rule: DP, CDP-v1 or CDP-v2.
        activations: measured: peak bytes that autograd kept, all workers together.
        seconds: measured: median time of a training step, all micro-batches in one process.
        ratio: measured: quartiles of the ratio of that time to DP's, the median in the middle.
        predicted: on the user's machines.
        cuda_peak: measured: peak bytes that CUDA allocated above those held between training
            steps, all workers on one GPU; None on the CPU.
    """

    rule: str
    activations: int
    seconds: float
    ratio: tuple[float, float, float]
    predicted: Prediction
    cuda_peak: int | None = None

    @property
    def waiting(self) -> float:
        """Share of the predicted training step that messages cost."""
        return 1 - self.predicted.without_links / self.predicted.seconds


@dataclass(frozen=True)
class TrainingFindings:
    """DP and CDP-v2 trained from the same weights on the same batches.

    Attributes:
        n_steps: training steps of a run.
        seeds: one for each run of a rule.
        n_tested: images, or tokens, in the test.
        accuracy: by rule and run, the share of them that is right at the end.
        difference: CDP-v2 minus DP in points, paired by seed, with a 95 % interval at least as
            wide as the binomial one of ``n_tested`` answers.
        loss_ratio: CDP-v2's training loss by that of DP at the end, the mean over seeds.
        highest: largest mean loss over a tenth of a run, by the loss of its first step.
        chance: accuracy of always naming the most frequent class.
        learned: whether DP became surely better than that.
        diverged: rules whose loss did not stay finite, or near that of the first step, in a run.
        cosine: between gradients at stale and at fresh weights under CDP-v2, the mean over a run,
            in the stage where it is smallest.
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
class Findings:
    """What a pilot measured and predicted, for all rules.

    Attributes:
        n_workers: micro-batches of a training step.
        n_stages: stages of the model; 1 if it cannot be cut.
        batch: samples of a micro-batch.
        placement: of the workers on the user's machines: ``per_microbatch``, ``per_stage`` or
            ``one``.
        device: name of the device that was measured.
        hardware: the user's machines.
        compute: source of the predicted seconds of computing: ``measured`` on ``device``, or the
            ``roofline`` of ``hardware``.
        rules: DP, CDP-v1 and CDP-v2; empty if the model cannot be cut.
        training: a short training; None if there was none.
        untrained: why there was none.
        model: ``package.module.function`` that makes the model; empty if it has no such name.
        shape: of a sample: ``(channels, height, width)`` of an image, ``(tokens,)`` of a sequence.
        samples: ``images`` or ``sequences``.
        partition: what the stages have equal shares of: ``flops``, or ``activations`` if the
            workers share a device.
        n_classes: classes of an image, or size of the vocabulary.
        slack: least and largest factor on the seconds of computing in predictions.
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
        """Return the findings of ``rule``: DP, CDP-v1 or CDP-v2."""
        return next(found for found in self.rules if found.rule == rule)

    def fits(self, found: RuleFindings) -> bool:
        """Whether every device has the memory that the prediction needs."""
        peak, memory = self.tightest(found)
        return peak <= memory

    def tightest(self, found: RuleFindings) -> tuple[float, float]:
        """Bytes needed and bytes available on the device that the rule fills most."""
        peaks = enumerate(found.predicted.memories)
        pairs = ((peak, self.hardware.memory_of(rank)) for rank, peak in peaks)
        return max(pairs, key=lambda pair: (pair[0] / pair[1], pair[0]))

    @property
    def limited(self) -> bool:
        """Whether the memory of the devices is known."""
        return any(isfinite(self.tightest(found)[1]) for found in self.rules)
