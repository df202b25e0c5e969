"""Order "grouped" against plain PyTorch: single steps, and whole training loops.

All compute with the same precision, memory format and compilation. On a GPU plain PyTorch is also
captured in a CUDA graph, whole steps with their updates.
"""

from collections.abc import Callable, Iterable
from itertools import count
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from benchmarks.step_times import alternate, ratios
from benchmarks.training_steps import N_CLASSES, WARM_UP, Setting, Step
from toolkit.cli.check_options import check_counts
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.operations import count_operations
from toolkit.training.data import Batches, synthetic

_CAPTURED = "plain PyTorch captured, step"
_COUNTS = ("image_size", "microbatches", "stages", "batch", "rounds", "steps")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each method: median seconds, images/s, and the ratio to plain PyTorch.

    *to captured*: the median ratio to plain PyTorch in a CUDA graph.

    A step's images are on the device already; those of a loop of ``steps`` steps are read,
    augmented and moved there, and the loop's losses are collected. On a GPU, which works while the
    next step begins, ``steps`` steps are timed at once. *operations*: torch's, of a step.
    """
    check_counts(config, *_COUNTS, of="bench.")
    setting = Setting.of(config, device, seed)
    inputs, targets = setting.inputs, setting.targets
    n_images = len(inputs)
    plain = setting.plain()
    cyclic = setting.cyclic()
    parallel = setting.data_parallel()
    images = synthetic(n_images * config.steps, 1, N_CLASSES, config.image_size)
    epochs = count()
    n_timed = config.steps if device.type == "cuda" else 1

    def timed(step: Step) -> Callable[[], object]:
        return lambda: [step(inputs, targets) for _ in range(n_timed)]

    def loop(train: Callable[[Batches], Iterable[Tensor]]) -> Callable[[], object]:
        def epoch() -> Tensor:
            batches = images.train(n_images, seed, next(epochs), device)
            # Waits for the device, as a loop does that prints its losses.
            return torch.stack(list(train(batches))).cpu()

        return epoch

    def grouped(runtime: SingleProcess) -> Callable[[], object]:
        return loop(lambda batches: (result.loss for result in runtime.run(batches)))

    single_steps: dict[str, Step] = {
        "plain PyTorch, step": plain.step,
        "DP grouped, step": parallel.step,
        "CDP-v2 grouped, step": cyclic.step,
    }
    if device.type == "cuda" and not setting.options.in_cuda_graphs:
        single_steps[_CAPTURED] = setting.plain().capture(inputs, targets)
    steps = {name: timed(step) for name, step in single_steps.items()}
    loops = {
        "plain PyTorch, loop": loop(
            lambda batches: (plain.step(*batch) for batch in batches)
        ),
        "DP grouped, loop": grouped(parallel),
        "CDP-v2 grouped, loop": grouped(cyclic),
    }
    rows = [
        *_rows(alternate(steps, config.rounds, device, WARM_UP), n_images, n_timed),
        *_rows(alternate(loops, config.rounds, device), n_images, config.steps),
    ]
    # Compiled code does not call torch's operations one by one, so they cannot be counted.
    if config.compile == "none":
        # The rows of single steps come first; those of loops have no count.
        for row, step in zip(rows, single_steps.values(), strict=False):
            row["operations"] = count_operations(lambda: step(inputs, targets)).total()  # noqa: B023
    return rows


def _rows(
    seconds: dict[str, list[float]], n_images: int, n_steps: int
) -> list[dict[str, Any]]:
    """Return rows of methods that have run ``n_steps`` at a time; the first is the baseline."""
    baseline = next(iter(seconds.values()))
    rows = []
    for name, method_seconds in seconds.items():
        to_plain = ratios(method_seconds, baseline)
        captured = None
        if _CAPTURED in seconds:
            captured = round(median(ratios(method_seconds, seconds[_CAPTURED])), 3)
        rows.append(
            {
                "method": name,
                "seconds": round(median(method_seconds) / n_steps, 5),
                "images/s": round(n_steps * n_images / median(method_seconds), 1),
                "ratio": round(median(to_plain), 3),
                "ratio_min": round(min(to_plain), 3),
                "ratio_max": round(max(to_plain), 3),
                "to captured": captured,
                "operations": None,
            }
        )
    return rows
