"""Peak memory of one GPU that runs the micro-batches of N workers by the slots of a schedule.

Order "scheduled" on one device holds what all workers of the schedule hold together. CUDA's own
allocator measures it; beside it stand the peak of the lowered program, from the stages' costs, and,
unless stages compute their forward twice, that of experiments/memory.py, which shifts one worker's
memory curve operation by operation. Workers shifted by stages hold more: where stages keep equally
much, (N + 1) / 2N of what all hold together.
"""

import gc
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from toolkit.cli.validate import check_counts
from toolkit.cost import memory_curve, profile, recomputing, simulate
from toolkit.cost.hardware import UNIT
from toolkit.cost.timeline import WEIGHTS
from toolkit.errors import UserError
from toolkit.format import GIB
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.step_options import allow_tf32
from toolkit.schedule import Schedule, catalog

_STEPS = 3
_CLASSES = 1000


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a model, number of workers and rule; sizes in GiB, at rest excluded.

    *asked for*: without what the allocator adds to fill its blocks.
    """
    if device.type != "cuda":
        raise UserError(
            f"a GPU's peak is measured on a GPU: got device={device}; what ranks hold on a CPU is"
            " counted by experiments/communication.py measured=true"
        )
    check_counts(config, "batch", "image_size", of="bench.")
    options = StepOptions(config.precision, checkpoint=config.checkpoint)
    allow_tf32(options.precision == "tf32")
    rows = []
    settings = [*product(config.models, config.workers)]
    for name, n in tqdm(settings, unit="setting", leave=False):
        torch.manual_seed(seed)
        images = torch.randn(config.batch, 3, config.image_size, config.image_size, device=device)
        again = options.checkpoint != "none"
        by_curve = None if again else curve_peaks(name, n, images, options.precision)
        for schedule in (
            catalog.data_parallel(n, "one"),
            catalog.cyclic(n, 1, "one"),
            catalog.cyclic(n, "freshest", "one"),
        ):
            measured, asked_for = held(name, schedule, images, options, config.partition)
            predicted = foreseen(name, schedule, images, options, config.partition)
            rows.append(
                {
                    "model": name,
                    "workers": n,
                    "rule": schedule.name,
                    "measured": round(measured / GIB, 3),
                    "program": round(predicted / GIB, 3),
                    "/ program": round(measured / predicted, 3),
                    "asked for": round(asked_for / GIB, 3),
                    "asked for / program": round(asked_for / predicted, 3),
                }
            )
            if by_curve:
                together, shifted = by_curve
                expected = together if schedule.name == "DP" else shifted
                rows[-1] |= {
                    "curve": round(expected / GIB, 3),
                    "/ curve": round(measured / expected, 3),
                }
    return rows


def curve_peaks(name: str, n: int, images: Tensor, precision: str) -> tuple[float, float]:
    """Bytes of ``n`` workers by the memory curve of one: together, and shifted."""
    model = build(name, _CLASSES, images.shape[-1]).to(images.device)
    curve = memory_curve(model, images, "measured", precision=precision)
    return n * curve.peak, float(curve.shifted(n)[1].max())


def held(
    name: str, schedule: Schedule, images: Tensor, options: StepOptions, by: str = "flops"
) -> tuple[float, float]:
    """Bytes that the allocator's peak is above what stays between training steps.

    Returns:
        those that it gave, and those that it was asked for.
    """
    model = build(name, _CLASSES, images.shape[-1]).to(images.device)
    stages = partition(model, schedule.n_stages, images, by)
    runtime = SingleProcess(
        stages,
        schedule,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        F.cross_entropy,
        "scheduled",
        options=options,
    )
    inputs = images.repeat(schedule.n_microbatches, 1, 1, 1)
    targets = torch.zeros(len(inputs), dtype=torch.long, device=images.device)
    runtime.step(inputs, targets)
    gc.collect()
    at_rest = torch.cuda.memory_stats(images.device)
    torch.cuda.reset_peak_memory_stats(images.device)
    for result in runtime.run([(inputs, targets)] * _STEPS):
        del result
    found = torch.cuda.memory_stats(images.device)
    gave, asked_for = (
        found[f"{which}_bytes.all.peak"] - at_rest[f"{which}_bytes.all.current"]
        for which in ("allocated", "requested")
    )
    return gave, asked_for


def foreseen(
    name: str, schedule: Schedule, images: Tensor, options: StepOptions, by: str = "flops"
) -> float:
    """Bytes that the program holds at most above the weights that stay between training steps."""
    with torch.device("meta"):
        model = build(name, _CLASSES, images.shape[-1])
    example = images.to("meta")
    stages = partition(model, schedule.n_stages, example, by)
    costs = recomputing(profile(stages, example, precision=options.precision), options.checkpoint)
    timeline = simulate(schedule.lower(_STEPS, 1), costs, UNIT)
    (_, at_rest), *_ = timeline.memory(kind=WEIGHTS)
    return timeline.peak_memory() - at_rest
