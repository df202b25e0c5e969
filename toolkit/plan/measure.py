"""The measurements of a pilot: memory, time, and a short training."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from math import inf, isfinite, nan
from statistics import mean, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from toolkit.cost.stage_costs import synchronized_time
from toolkit.errors import UserError
from toolkit.model import Images, Stages
from toolkit.plan.findings import TrainingFindings
from toolkit.results import Estimate, binomial_half_width, paired_difference
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.step_options import Loss, StepOptions
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule
from toolkit.training.data import Batch, SampleSet
from toolkit.training.data.batches import Chosen, Source
from toolkit.training.loop import evaluate, evaluated_at_once

OnProgress = Callable[[str, float], object]
"""Called with the present activity, and the share of it that is done."""

NORM_BATCHES = 4  # batches for the running statistics before the test
_MOST = 2048  # samples read from a user's data set
_TESTED = 5  # one sample in so many is kept for the test
_STEPS = 2  # training steps after which a schedule has reached its peak memory
_DIVERGED = 10.0  # times the first loss
_SURE = 3.0  # standard errors above a guess from which on DP has learned


@dataclass(frozen=True)
class Data:
    """Batches of ``samples``, a set of :mod:`toolkit.training.data`, for training and the test."""

    samples: Any
    batch_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32  # of images
    labelled: bool = True  # whether the classes are the user's

    def train(self, seed: int) -> Iterator[Batch]:
        """Endless batches, epoch after epoch."""
        for epoch in count():
            yield from self._cast(self.samples.train(self.batch_size, seed, epoch, self.device))

    def test(self) -> Iterable[Batch]:
        """Batches of samples that are not trained on."""
        at_once = evaluated_at_once(self.samples.form, self.batch_size)
        return self._cast(self.samples.test(at_once, self.device))

    def _cast(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for inputs, answers in batches:
            yield inputs.to(self.dtype) if inputs.is_floating_point() else inputs, answers


def read_measurements(
    images: Any, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Data:
    """Read the user's data as batches of ``batch_size`` on ``device``.

    Args:
        images: see :func:`toolkit.plan.pilot`; of a data set at most 2048 random images are read.
        batch_size: samples of a training step.
        device: where the batches are.
        dtype: type of the model, and so of images.

    Raises:
        UserError: another kind of data, or fewer images than a training step takes.
    """
    labelled = True
    samples = images
    if not (hasattr(images, "train") and hasattr(images, "test")):
        inputs, classes = _tensors(images)
        labelled = classes is not None
        samples = _divided(inputs.to(device, dtype), classes, batch_size)
    samples.train(batch_size, 0, 0, device)  # raises if there are too few
    return Data(samples, batch_size, device, dtype, labelled)


@dataclass(frozen=True)
class _Tensors(Source):
    """Images and classes on the training device."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        for numbers, _ in batches:
            rows = numbers.to(device)
            yield self.inputs[rows], self.labels[rows]


_TEXT = "text is given as a set of toolkit.training.data: text(), token_files() or Tokens"


def _divided(inputs: Tensor, classes: Tensor | None, batch_size: int) -> SampleSet:
    """Keep some of the images for the test, at random."""
    n_images = len(inputs)
    labels = torch.zeros(n_images, dtype=torch.long) if classes is None else classes
    if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.min() < 0:
        raise UserError(
            f"classes are whole numbers from 0, one an image: got {labels.dtype} of shape"
            f" {list(labels.shape)}, least {labels.min():g}, for {n_images} images; {_TEXT}"
        )
    n_tested = max(0, min(n_images // _TESTED, n_images - batch_size))
    order = torch.randperm(n_images, generator=torch.Generator().manual_seed(0)).to(inputs.device)
    labels = labels.long().to(inputs.device)
    test_set, training_set = (
        _Tensors(inputs[rows], labels[rows]) for rows in (order[:n_tested], order[n_tested:])
    )
    channels, height, width = (1, 1, *inputs.shape[1:])[-3:]
    return SampleSet(training_set, test_set, Images(channels, height, width, int(labels.max()) + 1))


def _tensors(images: Any) -> tuple[Tensor, Tensor | None]:
    """Return the images as one tensor of floats, and their classes if there are any."""
    pixels = images
    labels = None
    if not isinstance(images, Tensor):
        try:
            if len(images) == 2 and all(isinstance(tensor, Tensor) for tensor in images):
                pixels, labels = images
            else:
                # The first images of a folder may all be of one class.
                image_numbers = random.Random(0).sample(range(len(images)), min(_MOST, len(images)))
                pixels, labels = default_collate(
                    [images[number] for number in sorted(image_numbers)]
                )
        except (TypeError, ValueError, RuntimeError, KeyError):
            pixels = None
    if isinstance(pixels, Tensor) and pixels.dim() > 1 and isinstance(labels, Tensor | None):
        if pixels.is_floating_point():
            return pixels, labels
        if pixels.dtype == torch.uint8:
            return pixels / 255.0, labels
    received = f" of {pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, Tensor) else ""
    raise UserError(
        "images are floats or bytes [n, channels, height, width], with their classes [n] or"
        " without, a data set of such (image, class), or a set of toolkit.training.data: got a"
        f" {type(images).__name__}{received}; {_TEXT}"
    )


def held(
    stages: Stages,
    schedule: Schedule,
    batch: Batch,
    optimizer: MakeOptimizer,
    loss: Loss,
    checkpoint: str = "none",
) -> tuple[int, int | None]:
    """Run a one-device program slot by slot and measure its memory.

    Args:
        stages: the model's stages, which are trained.
        schedule: a schedule on one device.
        batch: inputs and targets of a training step.
        optimizer: makes an optimizer from a list of parameters.
        loss: mean loss of a micro-batch.
        checkpoint: stages that compute their forward again: ``none`` or ``all``.

    Returns:
        peak bytes that autograd keeps; and peak bytes that CUDA allocates above those held
        between training steps, None on the CPU.
    """
    device = batch[0].device
    meter = Meter(0, device, 0.0)
    watching = meter.activations.watch
    options: dict[str, Any] = {"order": "scheduled", "options": StepOptions(checkpoint=checkpoint)}
    runtime = SingleProcess(stages, schedule, optimizer, loss, watching=watching, **options)
    for result in runtime.run([batch] * _STEPS):
        del result  # so that its memory is free before the next step
    if device.type != "cuda":
        return meter.activations.peak_bytes, None
    # The first update creates the optimizers' state. It stays allocated, so the peak above the
    # present allocation does not count it.
    extra_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return meter.activations.peak_bytes, extra_bytes


def step_times(
    runtimes: Mapping[str, SingleProcess],
    batch: Batch,
    rounds: int,
    budget: float,
    on_progress: OnProgress,
) -> dict[str, list[float]]:
    """Measure seconds of training steps in turns, after two steps of warm-up.

    After three rounds it stops once they have taken ``budget`` seconds. In a round each runtime
    takes one step, so that slow changes of the machine's speed affect all of them.

    Args:
        runtimes: runtimes by name.
        batch: inputs and targets of a training step.
        rounds: largest number of timed steps of each runtime.
        budget: seconds after which no further round begins.
        on_progress: called after each round.

    Returns:
        Seconds of each timed step, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    start = time.perf_counter()
    for round_number in range(-2, rounds):
        if round_number >= 3 and time.perf_counter() - start > budget:
            break
        for name, runtime in runtimes.items():
            begin = synchronized_time(batch[0].device)
            runtime.step(*batch)
            if round_number >= 0:
                seconds[name].append(synchronized_time(batch[0].device) - begin)
        on_progress("timing steps", (round_number + 3) / (rounds + 2))
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the round-by-round ratio of step times."""
    by_round = [
        step_seconds / baseline_seconds
        for step_seconds, baseline_seconds in zip(seconds, baseline, strict=True)
    ]
    low, middle, high = quantiles(by_round, n=4)
    return low, middle, high


def train_by(
    make: Callable[[int, Schedule, int], SingleProcess],
    rules: Mapping[str, Schedule],
    data: Data,
    n_steps: int,
    seeds: Sequence[int],
    on_progress: OnProgress,
) -> TrainingFindings:
    """Train under two ``rules`` by name, DP first, from the same weights and on the same batches.

    Args:
        make: makes a runtime from a seed, a schedule, and the steps between two diagnostics.
        rules: schedules by name: DP, and the rule to compare with it.
        data: batches for training and the test.
        n_steps: training steps of a run.
        seeds: one for each run of a rule.
        on_progress: called before each run.
    """
    runs: dict[str, list[_Run]] = {rule: [] for rule in rules}
    for seed_index, seed in enumerate(seeds):
        for rule_index, (rule, schedule) in enumerate(rules.items()):
            done_share = (seed_index * len(rules) + rule_index) / (len(rules) * len(seeds))
            on_progress(f"training {rule}, seed {seed}", done_share)
            # Diagnostics cost time, so only the first run of the second rule measures how far
            # delayed gradients are from fresh ones.
            diagnostics_interval = max(1, n_steps // 4) if (seed_index, rule_index) == (0, 1) else 0
            runs[rule].append(_run(make(seed, schedule, diagnostics_interval), data, n_steps, seed))
    on_progress("training", 1.0)
    base_runs, late_runs = runs.values()
    late_rule = [*rules][-1]
    labels = torch.cat([labels.flatten() for _, labels in data.test()])
    chance, frequent = 1 / data.samples.form.n_classes, float(labels.bincount().max() / len(labels))
    # The accuracy that a guess reaches without looking at the sample.
    guess_accuracy = max(chance, frequent)
    standard_error = (guess_accuracy * (1 - guess_accuracy) / len(labels)) ** 0.5
    accuracies = {
        rule: tuple(run.accuracy for run in rule_runs) for rule, rule_runs in runs.items()
    }
    run_pairs = zip(late_runs, base_runs, strict=True)
    return TrainingFindings(
        n_steps=n_steps,
        seeds=tuple(seeds),
        n_tested=len(labels),
        tested="tokens" if data.samples.form.samples == "sequences" else "images",
        accuracy=accuracies,
        difference=_difference(accuracies[late_rule], accuracies["DP"], len(labels)),
        loss_ratio=mean(
            _ratio(late_run.tenths[-1], base_run.tenths[-1]) for late_run, base_run in run_pairs
        ),
        highest=max(_ratio(max(run.tenths), run.first) for run in [*base_runs, *late_runs]),
        chance=chance,
        frequent=frequent,
        learned=mean(accuracies["DP"]) > guess_accuracy + _SURE * standard_error,
        diverged=tuple(
            rule for rule, rule_runs in runs.items() if any(run.diverged for run in rule_runs)
        ),
        cosine=min((cosine for run in late_runs for cosine in run.cosines), default=nan),
    )


def _ratio(loss: float, base_loss: float) -> float:
    """Return the ratio of two losses; float32 may round a loss to 0."""
    if base_loss:
        return loss / base_loss
    return inf if loss else 1.0


def _difference(
    late_shares: Sequence[float], base_shares: Sequence[float], n_tested: int
) -> Estimate:
    """Return the difference of accuracies in points, paired by seed.

    All seeds share a test set, whose error their spread does not show. The interval is at least the
    binomial one of the mean accuracy, which is that of the difference if the rules' mistakes
    correlate by 1/2: its variance is 2 (1 - correlation) p (1 - p) / n_tested.
    """
    difference = paired_difference(
        [100 * share for share in late_shares], [100 * share for share in base_shares]
    )
    least_half_width = 100 * binomial_half_width(mean([*late_shares, *base_shares]), n_tested)
    if len(late_shares) == 1 or difference.half_width >= least_half_width:
        return difference
    return replace(difference, half_width=least_half_width)


class _Run(NamedTuple):
    """A training."""

    first: float  # loss
    tenths: list[float]  # mean loss of each
    cosines: list[float]  # mean of each stage
    diverged: bool
    accuracy: float  # 0 if the training diverged


def _run(runtime: SingleProcess, data: Data, n_steps: int, seed: int) -> _Run:
    step_losses: list[Tensor] = []
    stage_cosines: list[list[float]] = []
    for result in runtime.run(islice(data.train(seed), n_steps)):
        step_losses.append(result.loss)
        if result.delays and result.step:  # at step 0 nothing is late
            stage_cosines.append([delay.cosine for delay in result.delays])
    losses = torch.stack(step_losses).double().tolist()
    tenth_size = max(1, len(losses) // 10)
    tenths = [
        mean(losses[start : start + tenth_size])
        for start in range(0, len(losses) - tenth_size + 1, tenth_size)
    ]
    diverged = not all(map(isfinite, losses)) or max(tenths) > _DIVERGED * losses[0]
    accuracy = 0.0
    if not diverged:
        model = runtime.module()
        settle_norms(model, islice(data.train(seed), NORM_BATCHES))
        accuracy = evaluate(model, data.test()).top1
    cosines = [mean(cosines_of_stage) for cosines_of_stage in zip(*stage_cosines, strict=True)]
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
