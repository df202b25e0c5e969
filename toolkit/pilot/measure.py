"""The measurements of a pilot: memory, time, and a short training."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, repeat
from math import inf, isfinite, nan
from statistics import mean, quantiles

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.comparison import Estimate, binomial_half_width, paired_difference
from toolkit.cost.stage_costs import synchronized_time
from toolkit.model import Stages
from toolkit.pilot.data import Data
from toolkit.pilot.findings import TrainingFindings
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.microbatches import MicrobatchQueue
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule
from toolkit.training.data import Batch
from toolkit.training.loop import evaluate

Loss = Callable[[Tensor, Tensor], Tensor]
Say = Callable[[str, float], object]
"""Called with what is under way, and the share of it that is done."""

_STEPS = 2  # training steps in which each schedule comes to hold the most
_DIVERGED = 10.0  # times the first loss
NORMS = 4  # batches of which running statistics are taken before the test
_SURE = 3.0  # standard errors of chance by which learning is told from it


def held(
    stages: Stages, schedule: Schedule, batch: Batch, optimizer: MakeOptimizer, loss: Loss
) -> tuple[int, int | None]:
    """The most bytes that autograd keeps at once when one device runs a program, by its slots.

    Returns:
        that; and the most that CUDA allocated above what stays between training steps, None on
        the CPU.
    """
    device = batch[0].device
    runners = dict(enumerate(StageRunner(s, j, optimizer, None, 0) for j, s in enumerate(stages)))
    versions = {j: {0: runner.newest()} for j, runner in runners.items()}
    share = (batch[0],), batch[1]
    feed = MicrobatchQueue(repeat(share), 0, lambda _: range(schedule.n_microbatches))
    meter = Meter(0, device, 0.0)
    watching = meter.activations.watch
    program = schedule.lower(_STEPS).verify()
    rank = Rank(program, runners, runners, versions, loss, feed, watching)
    rank.weights |= {(j, 0): weights[0] for j, weights in versions.items()}
    (instructions,) = program.ranks
    most = 0
    for i in instructions:
        rank.execute(i)
        most = max(most, meter.activations.bytes)
        if i.step is not None and feed.n_finished(i.step) == schedule.n_microbatches:
            feed.result(i.step)  # whoever trains takes it then
    if device.type != "cuda":
        return most, None
    stays = torch.cuda.memory_allocated(device)  # the states of optimizers among it
    return most, torch.cuda.max_memory_allocated(device) - stays


def step_times(
    runtimes: Mapping[str, SingleProcess], batch: Batch, rounds: int, budget: float, say: Say
) -> dict[str, list[float]]:
    """Seconds of training steps, the runtimes taking turns, after two uncounted ones of each.

    Of ``rounds`` at least three, and no more once they have taken ``budget`` seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    begun = time.perf_counter()
    for k in range(-2, rounds):
        if k >= 3 and time.perf_counter() - begun > budget:
            break
        for name, runtime in runtimes.items():
            begin = synchronized_time(batch[0].device)
            runtime.step(*batch)
            if k >= 0:
                seconds[name].append(synchronized_time(batch[0].device) - begin)
        say("timing steps", (k + 3) / (rounds + 2))
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the ratio, round by round."""
    low, middle, high = quantiles(
        [mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)], n=4
    )
    return low, middle, high


def train(
    make: Callable[[int, Schedule, int], SingleProcess],
    rules: Sequence[Schedule],
    data: Data,
    n_steps: int,
    seeds: Sequence[int],
    say: Say,
) -> TrainingFindings:
    """Train under DP and CDP-v2, from the same weights and on the same batches.

    Args:
        make: a runtime from a seed, a schedule, and the steps between two looks at the delay.
        rules: DP, then the other.
    """
    runs: dict[str, list[_Run]] = {schedule.name: [] for schedule in rules}
    for k, seed in enumerate(seeds):
        for j, schedule in enumerate(rules):
            done = (k * len(rules) + j) / (len(rules) * len(seeds))
            say(f"training {schedule.name}, seed {seed}", done)
            looks = max(1, n_steps // 4) if (k, j) == (0, 1) else 0  # one run shows the delay
            runs[schedule.name].append(_run(make(seed, schedule, looks), data, n_steps, seed))
    base, late = runs.values()
    labels = torch.cat([labels.flatten() for _, labels in data.test()])
    chance = float(labels.bincount().max() / len(labels))
    error = (chance * (1 - chance) / len(labels)) ** 0.5
    right = {rule: tuple(run.accuracy for run in found) for rule, found in runs.items()}
    losses = [(mine.tenths[-1], theirs.tenths[-1]) for mine, theirs in zip(late, base, strict=True)]
    cosines = [cosine for run in late for cosine in run.cosines]
    say("training", 1.0)
    return TrainingFindings(
        n_steps=n_steps,
        seeds=tuple(seeds),
        n_tested=len(labels),
        tested="tokens" if data.samples == "sequences" else data.samples,
        accuracy=right,
        difference=_difference(right[rules[1].name], right[rules[0].name], len(labels)),
        loss_ratio=mean(_ratio(mine, theirs) for mine, theirs in losses),
        highest=max(_ratio(max(run.tenths), run.first) for found in runs.values() for run in found),
        chance=chance,
        learned=mean(right[rules[0].name]) > chance + _SURE * error,
        diverged=tuple(rule for rule, found in runs.items() if any(run.diverged for run in found)),
        cosine=min(cosines, default=nan),
    )


def _ratio(loss: float, other: float) -> float:
    """Of losses, which 32 bits round to 0 where a model is sure of itself."""
    if other:
        return loss / other
    return inf if loss else 1.0


def _difference(late: Sequence[float], base: Sequence[float], n_tested: int) -> Estimate:
    """Between accuracies in points, with an interval that is as wide as so few images make it.

    Seeds show what training leaves to chance, and not that another test set would be answered
    otherwise: all of them are tested on the same images. So the interval of the pairs is widened
    to the binomial one of their mean accuracy. That is the error of the difference where the two
    rules' mistakes correlate by 1/2, for its variance is 2 (1 - correlation) p (1 - p) / n_tested.
    """
    found = paired_difference([100 * share for share in late], [100 * share for share in base])
    least = 100 * binomial_half_width(mean([*late, *base]), n_tested)
    if len(late) == 1:
        return found
    return found if found.half_width >= least else replace(found, half_width=least)


class _Run:
    """What a training came to.

    Attributes:
        first: loss of its first training step.
        tenths: mean loss of each tenth of it.
        diverged: whether a loss was not finite, or far above the first.
        cosines: of delayed and fresh gradients, the mean of each stage over the looks.
        accuracy: share of the test that is right; 0 where the training diverged.
    """

    def __init__(self, losses: list[float], looks: list[list[float]]) -> None:
        self.first = losses[0]
        size = max(1, len(losses) // 10)
        self.tenths = [mean(losses[k : k + size]) for k in range(0, len(losses) - size + 1, size)]
        self.diverged = not all(map(isfinite, losses)) or max(self.tenths) > _DIVERGED * self.first
        self.cosines = [mean(of_stage) for of_stage in zip(*looks, strict=True)]
        self.accuracy = 0.0


def _run(runtime: SingleProcess, data: Data, n_steps: int, seed: int) -> _Run:
    losses: list[Tensor] = []
    looks: list[list[float]] = []
    for result in runtime.run(islice(data.train(seed), n_steps)):
        losses.append(result.loss)
        if result.delays and result.step:  # nothing is late at the first
            looks.append([delay.cosine for delay in result.delays])
    run = _Run(torch.stack(losses).double().tolist(), looks)
    if not run.diverged:
        with settled_norms(runtime.module(), islice(data.train(seed), NORMS)):
            run.accuracy = evaluate(runtime.module(), data.test()).top1  # type: ignore[arg-type]
    return run


@contextmanager
def settled_norms(model: nn.Module, batches: Iterator[Batch]) -> Iterator[None]:
    """Within, batch norms know the statistics of ``batches`` under the weights as they are.

    After a few training steps their running statistics are still those of the beginning. Norms that
    stay in evaluation mode while the model is trained keep theirs.
    """
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    kept = [(copy.deepcopy(norm.state_dict()), norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        if norms:
            with torch.no_grad():
                for inputs, _ in batches:
                    model(inputs)
        yield
    finally:
        for norm, (state, momentum) in zip(norms, kept, strict=True):
            norm.load_state_dict(state)
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
