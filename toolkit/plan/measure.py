"""The measurements of a pilot: memory, time, and a short training."""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from math import inf, isfinite, nan
from statistics import mean, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
from toolkit.training.data.batches import shuffled
from toolkit.training.loop import evaluate, evaluated_at_once

_MOST = 2048  # images of a data set of the user's own that are read
_TESTED = 5  # one image in so many is kept for the test


@dataclass(frozen=True)
class Data:
    """Batches for training and for the test.

    Attributes:
        epoch: the batches of one epoch, by seed and epoch; all of the same size.
        test: the samples that are not trained on.
        labelled: whether their classes are known, and not made up.
        n_tested: how many samples the test has.
        n_classes: how many classes the labels name.
        samples: what they are called.
    """

    epoch: Callable[[int, int], Iterable[Batch]]
    test: Callable[[], Iterable[Batch]]
    labelled: bool
    n_tested: int
    n_classes: int
    samples: str = "images"

    def train(self, seed: int) -> Iterator[Batch]:
        """Batches for ever, epoch after epoch."""
        for epoch in count():
            yield from self.epoch(seed, epoch)


def read(
    images: Any, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Data:
    """The user's data as batches of ``batch_size`` on ``device``, images in ``dtype``.

    Args:
        images: a set of :mod:`toolkit.training.data`, of text, too; images and their classes,
            ``(Tensor [n, channels, height, width], Tensor [n])``; images alone; or a data set
            that gives one such pair an index, of which 2048 drawn at random are taken.

    Raises:
        ValueError: it is something else, or has fewer images than a training step takes.
    """
    if hasattr(images, "train") and hasattr(images, "test"):
        first = images.train(batch_size, 0, 0, device)
        n_tested = sum(len(labels) for _, labels in images.test(batch_size, device))
        if len(first) == 0:
            raise UserError(_too_few(batch_size, "fewer"))
        return Data(
            lambda seed, epoch: _cast(images.train(batch_size, seed, epoch, device), dtype),
            lambda: _cast(images.test(evaluated_at_once(images.form, batch_size), device), dtype),
            True,
            n_tested,
            images.form.n_classes,
            images.form.samples,
        )
    pixels, labels = _tensors(images)
    if len(pixels) < batch_size:
        raise UserError(_too_few(batch_size, f"{len(pixels)}"))
    labelled = labels is not None
    if labels is None:
        labels = torch.zeros(len(pixels), dtype=torch.long)
    return _split(pixels.to(device, dtype), labels.to(device), labelled, batch_size)


def _cast(batches: Iterable[Batch], dtype: torch.dtype) -> Iterator[Batch]:
    for inputs, labels in batches:
        yield inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def _too_few(batch_size: int, n: str) -> str:
    return (
        f"a training step takes {batch_size} images (n_workers times batch) and there are {n}:"
        " give more images, or make batch smaller"
    )


def _split(pixels: Tensor, labels: Tensor, labelled: bool, batch_size: int) -> Data:
    """A fifth of the images for the test, if that leaves enough to train on."""
    n_tested = min(len(pixels) // _TESTED, len(pixels) - batch_size)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    held, kept = order[:n_tested].to(pixels.device), order[n_tested:]

    def epoch(seed: int, number: int) -> list[Batch]:
        mixed, _ = shuffled(len(kept), batch_size, seed, number, "images")
        chosen = kept[mixed].to(pixels.device)
        parts = chosen[: len(kept) // batch_size * batch_size].split(batch_size)
        return [(pixels[part], labels[part]) for part in parts]

    def test() -> list[Batch]:
        return [(pixels[part], labels[part]) for part in held.split(256) if len(part)]

    return Data(epoch, test, labelled, n_tested, int(labels.max()) + 1)


def _tensors(images: Any) -> tuple[Tensor, Tensor | None]:
    """Pixels as floats, and classes where there are any."""
    if isinstance(images, Tensor):
        return _pixels(images), None
    if isinstance(images, tuple | list) and len(images) == 2 and _are_tensors(images):
        pixels, labels = images
        if labels.dim() != 1 or len(labels) != len(pixels) or labels.is_floating_point():
            raise UserError(
                f"classes are whole numbers, one an image: got shape {list(labels.shape)} and"
                f" {labels.dtype} for {len(pixels)} images; {_TEXT}"
            )
        if len(labels) and labels.min() < 0:
            raise UserError(f"classes are numbered from 0: got {int(labels.min())}")
        return _pixels(pixels), labels.long()
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not _are_tensors(images):
        pairs = [_pair(images[k]) for k in _some(len(images))]
        if pairs:
            if len({pixels.shape for pixels, _ in pairs}) > 1:
                raise UserError("images of one size are needed: resize them in the data set")
            return _tensors(
                (torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))
            )
    raise UserError(
        f"images are a tensor [n, channels, height, width], such a tensor with its classes [n], a"
        f" data set of (image, class), or a set of toolkit.training.data: got a"
        f" {type(images).__name__}"
    )


def _some(n: int) -> list[int]:
    """Which images are read: of a folder of classes the first ones would be of one class."""
    return sorted(random.Random(0).sample(range(n), min(_MOST, n)))


def _are_tensors(images: Any) -> bool:
    return isinstance(images, tuple | list) and all(isinstance(x, Tensor) for x in images)


def _pixels(images: Tensor) -> Tensor:
    if images.dim() < 2:
        raise UserError(f"images have shape [n, channels, height, width]: got {list(images.shape)}")
    if images.dtype not in (torch.uint8, *_FLOATS):
        raise UserError(f"images are floats or bytes: got {images.dtype}; {_TEXT}")
    return images if images.is_floating_point() else images.float() / 255


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TEXT = "text is given as a set of toolkit.training.data: text(), token_files() or Tokens"


def _pair(item: Any) -> tuple[Tensor, int]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor):
        if isinstance(item[1], Tensor) and item[1].numel() != 1:
            raise UserError(f"a class is one number: got shape {list(item[1].shape)}; {_TEXT}")
        return item[0], int(item[1])
    raise UserError(
        f"a data set gives (image as a tensor, class): got a {type(item).__name__}; add a transform"
        " such as torchvision.transforms.ToTensor()"
    )


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
