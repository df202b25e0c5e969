"""The measurements of a pilot: its data, memory, and time."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import quantiles
from typing import Any

import torch

from toolkit.cost.stage_seconds import synchronized_time
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.runtime import SingleProcess
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.step_options import Loss, StepOptions
from toolkit.schedule import Schedule
from toolkit.training.data import Batch
from toolkit.training.evaluation import evaluated_at_once

OnProgress = Callable[[str, float], object]
"""Called with the present activity, and the share of it that is done."""

_STEPS = 2  # training steps after which a schedule has reached its peak memory


@dataclass(frozen=True)
class Data:
    """Batches of ``samples``, a set of :mod:`toolkit.training.data`, for training and the test.

    Raises:
        UserError: ``samples`` is something else, or has fewer than a training step takes.
    """

    samples: Any
    batch_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the model, and so of images

    def __post_init__(self) -> None:
        if not (hasattr(self.samples, "train") and hasattr(self.samples, "test")):
            raise UserError(
                "samples are a set of toolkit.training.data, such as Datasets(train, test,"
                f" n_classes) of two of torch's Datasets: got a {type(self.samples).__name__}"
            )
        # Raises if there are too few.
        self.samples.train(self.batch_size, 0, 0, self.device)

    def train(self, seed: int) -> Iterator[Batch]:
        """Endless batches, epoch after epoch."""
        for epoch in count():
            yield from self._cast(
                self.samples.train(self.batch_size, seed, epoch, self.device)
            )

    def test(self) -> Iterable[Batch]:
        """Batches of samples that are not trained on."""
        at_once = evaluated_at_once(self.samples.form, self.batch_size)
        return self._cast(self.samples.test(at_once, self.device))

    def _cast(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for inputs, answers in batches:
            yield (
                inputs.to(self.dtype) if inputs.is_floating_point() else inputs,
                answers,
            )


def step_memory(
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
    runtime = SingleProcess(
        stages,
        schedule,
        optimizer,
        loss,
        "scheduled",
        options=StepOptions(checkpoint=checkpoint),
        watching=watching,
    )
    for result in runtime.run([batch] * _STEPS):
        del result  # so that its memory is free before the next step
    if device.type != "cuda":
        return meter.activations.peak_bytes, None
    # The first update creates the optimizers' state. It stays allocated, so the peak above the
    # present allocation does not count it.
    extra_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(
        device
    )
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
    # Rounds -2 and -1 are the warm-up: allocators and caches fill, and nothing is recorded.
    for round_number in range(-2, rounds):
        # Three rounds at least, so that their quartiles mean something.
        if round_number >= 3 and time.perf_counter() - start > budget:
            break
        for name, runtime in runtimes.items():
            begin = synchronized_time(batch[0].device)
            runtime.step(*batch)
            if round_number >= 0:
                seconds[name].append(synchronized_time(batch[0].device) - begin)
        on_progress("timing steps", (round_number + 3) / (rounds + 2))
    return seconds


def ratios(
    seconds: Sequence[float], baseline: Sequence[float]
) -> tuple[float, float, float]:
    """Return the quartiles of the round-by-round ratio of step times."""
    # Round by round, since what disturbs the machine in a round disturbs both.
    by_round = [
        step_seconds / baseline_seconds
        for step_seconds, baseline_seconds in zip(seconds, baseline, strict=True)
    ]
    low, middle, high = quantiles(by_round, n=4)
    return low, middle, high
