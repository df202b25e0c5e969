"""Peak memory of one GPU that runs the micro-batches of N workers by the slots of a schedule.

Order "scheduled" on one device holds what all workers of the schedule hold together. CUDA's own
allocator measures it. The table compares it with the peak of the lowered program, from the stages'
costs.
"""

import gc
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import profile, recomputing, simulate
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
            f"bench=peak needs a GPU: got device={device}; for a CPU use"
            " experiments/communication.py measured=true"
        )
    check_counts(config, "batch", "image_size", of="bench.")
    options = StepOptions(config.precision, checkpoint=config.checkpoint)
    allow_tf32(options.precision == "tf32")
    rows: list[dict[str, Any]] = []
    settings = [*product(config.models, config.workers)]
    for name, n in tqdm(settings, unit="setting", leave=False):
        torch.manual_seed(seed)
        images = torch.randn(config.batch, 3, config.image_size, config.image_size, device=device)
        for schedule in (
            catalog.data_parallel(n, "one"),
            catalog.cyclic(n, 1, "one"),
            catalog.cyclic(n, "freshest", "one"),
        ):
            measured, asked_for = held(name, schedule, images, options, config.partition)
            predicted = foreseen(name, schedule, images, options, config.partition)
            row = {"model": name, "workers": n, "rule": schedule.name}
            for column, n_bytes in (("measured", measured), ("asked for", asked_for)):
                row[column] = round(n_bytes / GIB, 3)
                row[f"{column} / program"] = round(n_bytes / predicted, 3)
            rows.append(row | {"program": round(predicted / GIB, 3)})
    return rows


def held(
    name: str, schedule: Schedule, images: Tensor, options: StepOptions, by: str = "flops"
) -> tuple[float, float]:
    """Bytes above what stays between training steps: given by the allocator, and asked for."""
    model = build(name, _CLASSES, images.shape[-1]).to(images.device)
    runtime = SingleProcess(
        partition(model, schedule.n_stages, images, by),
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
    peaks = [found[f"{which}_bytes.all.peak"] for which in ("allocated", "requested")]
    rest = [at_rest[f"{which}_bytes.all.current"] for which in ("allocated", "requested")]
    return peaks[0] - rest[0], peaks[1] - rest[1]


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
