"""The measurements of a pilot: memory, time, and a short training."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from math import inf, isfinite, nan
from statistics import mean, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from toolkit.cost.stage_costs import synchronized_time
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.plan.findings import TrainingFindings
from toolkit.results import Estimate, binomial_half_width, paired_difference
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.microbatches import MicrobatchQueue
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule
from toolkit.training.data import Batch
from toolkit.training.loop import evaluate, evaluated_at_once

Loss = Callable[[Tensor, Tensor], Tensor]
OnProgress = Callable[[str, float], object]
"""Called with the present activity, and the share of it that is done."""

NORM_BATCHES = 4  # batches for the running statistics before the test
_MOST = 2048  # samples read from a user's data set
_TESTED = 5  # one sample in so many is kept for the test
_STEPS = 2  # training steps after which a schedule has reached its peak memory
_DIVERGED = 10.0  # times the first loss
_SURE = 3.0  # standard errors above chance from which on DP has learned


@dataclass(frozen=True)
class Data:
    """Batches for training and for the test."""

    epoch: Callable[[int, int], Iterable[Batch]]  # by seed and epoch; all batches of one size
    test: Callable[[], Iterable[Batch]]  # of samples that are not trained on
    labelled: bool  # whether the classes are the user's
    n_tested: int
    n_classes: int
    samples: str = "images"  # or sequences

    def train(self, seed: int) -> Iterator[Batch]:
        """Endless batches, epoch after epoch."""
        for epoch in count():
            yield from self.epoch(seed, epoch)


def read(
    images: Any, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Data:
    """Read the user's data as batches of ``batch_size`` on ``device``, images in ``dtype``.

    Args:
        images: a set of :mod:`toolkit.training.data`; images and their classes,
            ``(Tensor [n, channels, height, width], Tensor [n])``; images alone; or a data set
            that returns one such pair by index; at most 2048 random ones are read.
        batch_size: samples of a training step.
        device: where the batches are.
        dtype: floating-point type of the model.

    Raises:
        UserError: another kind of data, or fewer images than a training step takes.
    """
    if hasattr(images, "train") and hasattr(images, "test"):
        _check_enough(batch_size, batch_size * len(images.train(batch_size, 0, 0, device)))
        at_once = evaluated_at_once(images.form, batch_size)
        return Data(
            lambda seed, epoch: _cast(images.train(batch_size, seed, epoch, device), dtype),
            lambda: _cast(images.test(at_once, device), dtype),
            True,
            sum(len(labels) for _, labels in images.test(at_once, device)),
            images.form.n_classes,
            images.form.samples,
        )
    inputs, classes = _tensors(images)
    _check_enough(batch_size, len(inputs))
    labels = torch.zeros(len(inputs), dtype=torch.long) if classes is None else classes
    if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.min() < 0:
        raise UserError(
            f"classes are whole numbers from 0, one an image: got {labels.dtype} of shape"
            f" {list(labels.shape)}, least {labels.min():g}, for {len(inputs)} images; {_TEXT}"
        )
    scale = 1.0 if inputs.is_floating_point() else 255.0  # bytes become 0 to 1
    inputs, labels = (inputs / scale).to(device, dtype), labels.long().to(device)
    n_tested = min(len(inputs) // _TESTED, len(inputs) - batch_size)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:n_tested], order[n_tested:]

    def batches(rows: Tensor, size: int) -> list[Batch]:
        return [(inputs[part], labels[part]) for part in rows.to(device).split(size) if len(part)]

    def epoch(seed: int, number: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(hash((seed, number)))
        mixed = trained[torch.randperm(len(trained), generator=generator)]
        return batches(mixed[: len(mixed) // batch_size * batch_size], batch_size)

    test, n_classes = batches(tested, 256), int(labels.max()) + 1
    return Data(epoch, lambda: test, classes is not None, n_tested, n_classes)


_TEXT = "text is given as a set of toolkit.training.data: text(), token_files() or Tokens"


def _check_enough(batch_size: int, n: int) -> None:
    if n < batch_size:
        raise UserError(
            f"a training step takes n_workers x batch = {batch_size} images: got {n}; give more"
            " images, or lower batch"
        )


def _cast(batches: Iterable[Batch], dtype: torch.dtype) -> Iterator[Batch]:
    for inputs, labels in batches:
        yield inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def _tensors(images: Any) -> tuple[Tensor, Tensor | None]:
    """Images as one tensor of floats or bytes, and their classes if there are any."""
    pixels, labels = images, None
    if not isinstance(images, Tensor):
        try:
            if len(images) == 2 and all(isinstance(x, Tensor) for x in images):
                pixels, labels = images
            else:
                # The first images of a folder may all be of one class.
                chosen = random.Random(0).sample(range(len(images)), min(_MOST, len(images)))
                pixels, labels = default_collate([images[k] for k in sorted(chosen)])
        except (TypeError, ValueError, RuntimeError, KeyError):
            pixels = None
    if (
        not isinstance(pixels, Tensor)
        or pixels.dim() < 2
        or not (pixels.is_floating_point() or pixels.dtype == torch.uint8)
        or not isinstance(labels, Tensor | None)
    ):
        got = f" of {pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, Tensor) else ""
        raise UserError(
            "images are floats or bytes [n, channels, height, width], with their classes [n] or"
            " without, a data set of such (image, class), or a set of toolkit.training.data: got a"
            f" {type(images).__name__}{got}; {_TEXT}"
        )
    return pixels, labels


def held(
    stages: Stages, schedule: Schedule, batch: Batch, optimizer: MakeOptimizer, loss: Loss
) -> tuple[int, int | None]:
    """Run a one-device program slot by slot and measure its memory.

    Returns:
        peak bytes that autograd keeps; and peak bytes that CUDA allocates above those held
        between training steps, None on the CPU.
    """
    device = batch[0].device
    runners = dict(enumerate(StageRunner(s, j, optimizer, None, 0) for j, s in enumerate(stages)))
    versions = {j: {0: runner.newest()} for j, runner in runners.items()}
    shares = repeat(((batch[0],), batch[1]))
    feed = MicrobatchQueue(shares, 0, lambda _: range(schedule.n_microbatches))
    meter = Meter(0, device, 0.0)
    program = schedule.lower(_STEPS).verify()
    rank = Rank(program, runners, runners, versions, loss, feed, meter.activations.watch)
    rank.weights |= {(j, 0): weights[0] for j, weights in versions.items()}
    most = 0
    for i in program.ranks[0]:
        rank.execute(i)
        most = max(most, meter.activations.bytes)
        if i.step is not None and feed.n_finished(i.step) == schedule.n_microbatches:
            feed.result(i.step)  # a runtime takes the result here, which frees it
    if device.type != "cuda":
        return most, None
    # What stays allocated contains the optimizers' state, which the first update creates.
    return most, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def step_times(
    runtimes: Mapping[str, SingleProcess],
    batch: Batch,
    rounds: int,
    budget: float,
    on_progress: OnProgress,
) -> dict[str, list[float]]:
    """Measure seconds of training steps in turns, after two steps of warm-up.

    After three rounds it stops once they have taken ``budget`` seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    start = time.perf_counter()
    for k in range(-2, rounds):
        if k >= 3 and time.perf_counter() - start > budget:
            break
        for name, runtime in runtimes.items():
            begin = synchronized_time(batch[0].device)
            runtime.step(*batch)
            if k >= 0:
                seconds[name].append(synchronized_time(batch[0].device) - begin)
        on_progress("timing steps", (k + 3) / (rounds + 2))
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the ratio, round by round."""
    by_round = [mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)]
    low, middle, high = quantiles(by_round, n=4)
    return low, middle, high


def train(
    make: Callable[[int, Schedule, int], SingleProcess],
    rules: Sequence[Schedule],
    data: Data,
    n_steps: int,
    seeds: Sequence[int],
    on_progress: OnProgress,
) -> TrainingFindings:
    """Train under DP and CDP-v2, from the same weights and on the same batches.

    Args:
        make: makes a runtime from a seed, a schedule, and the steps between two diagnostics.
        rules: DP, then the other.
        data: to train and test on.
        n_steps: training steps of a run.
        seeds: one for each run of a rule.
        on_progress: see :data:`OnProgress`.
    """
    runs: dict[str, list[_Run]] = {schedule.name: [] for schedule in rules}
    for k, seed in enumerate(seeds):
        for j, schedule in enumerate(rules):
            done = (k * len(rules) + j) / (len(rules) * len(seeds))
            on_progress(f"training {schedule.name}, seed {seed}", done)
            every = max(1, n_steps // 4) if (k, j) == (0, 1) else 0  # one run shows the delay
            runs[schedule.name].append(_run(make(seed, schedule, every), data, n_steps, seed))
    on_progress("training", 1.0)
    base, late = runs.values()
    labels = torch.cat([labels.flatten() for _, labels in data.test()])
    chance = float(labels.bincount().max() / len(labels))
    error = (chance * (1 - chance) / len(labels)) ** 0.5
    right = {rule: tuple(run.accuracy for run in found) for rule, found in runs.items()}
    pairs = zip(late, base, strict=True)
    return TrainingFindings(
        n_steps=n_steps,
        seeds=tuple(seeds),
        n_tested=len(labels),
        tested="tokens" if data.samples == "sequences" else data.samples,
        accuracy=right,
        difference=_difference(right[rules[1].name], right[rules[0].name], len(labels)),
        loss_ratio=mean(_ratio(mine.tenths[-1], theirs.tenths[-1]) for mine, theirs in pairs),
        highest=max(_ratio(max(run.tenths), run.first) for run in [*base, *late]),
        chance=chance,
        learned=mean(right[rules[0].name]) > chance + _SURE * error,
        diverged=tuple(rule for rule, found in runs.items() if any(run.diverged for run in found)),
        cosine=min((cosine for run in late for cosine in run.cosines), default=nan),
    )


def _ratio(loss: float, other: float) -> float:
    """Ratio of two losses; float32 may round a loss to 0."""
    if other:
        return loss / other
    return inf if loss else 1.0


def _difference(late: Sequence[float], base: Sequence[float], n_tested: int) -> Estimate:
    """Difference of accuracies in points, paired by seed.

    All seeds are tested on the same images, so their spread does not show the error of a small
    test set. The interval is at least the binomial one of the mean accuracy, which is the error of
    the difference if the rules' mistakes correlate by 1/2: its variance is
    2 (1 - correlation) p (1 - p) / n_tested.
    """
    found = paired_difference([100 * share for share in late], [100 * share for share in base])
    least = 100 * binomial_half_width(mean([*late, *base]), n_tested)
    if len(late) == 1 or found.half_width >= least:
        return found
    return replace(found, half_width=least)


class _Run(NamedTuple):
    """A training."""

    first: float  # loss
    tenths: list[float]  # mean loss of each
    cosines: list[float]  # mean of each stage
    diverged: bool
    accuracy: float  # 0 if the training diverged


def _run(runtime: SingleProcess, data: Data, n_steps: int, seed: int) -> _Run:
    found: list[Tensor] = []
    looks: list[list[float]] = []
    for result in runtime.run(islice(data.train(seed), n_steps)):
        found.append(result.loss)
        if result.delays and result.step:  # at step 0 nothing is late
            looks.append([delay.cosine for delay in result.delays])
    losses = torch.stack(found).double().tolist()
    size = max(1, len(losses) // 10)
    tenths = [mean(losses[k : k + size]) for k in range(0, len(losses) - size + 1, size)]
    diverged = not all(map(isfinite, losses)) or max(tenths) > _DIVERGED * losses[0]
    accuracy = 0.0
    if not diverged:
        model = runtime.module()
        settle_norms(model, islice(data.train(seed), NORM_BATCHES))
        accuracy = evaluate(model, data.test()).top1
    cosines = [mean(of_stage) for of_stage in zip(*looks, strict=True)]
    return _Run(losses[0], tenths, cosines, diverged, accuracy)


def settle_norms(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Set the batch norms' running statistics to those of ``batches`` under the present weights.

    After a few training steps they are still those of the beginning. Norms that stay in evaluation
    mode while the model trains keep theirs, unlike those of torch.optim.swa_utils.update_bn.
    """
    model.train()
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
