"""What tracking a run with W&B, offline, adds to its training steps."""

import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.timing import ratios
from toolkit.cli.validate import check_counts
from toolkit.errors import UserError
from toolkit.model import build, partition
from toolkit.results import Curves, describe, track
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog
from toolkit.training import Step
from toolkit.training.data import synthetic

_MODES = ("disabled", "offline")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a mode: median seconds of a step, and its ratio to the other round by round.

    The modes take turns with ``steps`` training steps of CDP-v2, each time as a run of its own,
    whose beginning and end are timed apart: ``around`` is their median, in seconds.
    """
    check_counts(config, "image_size", "stages", "batch", "rounds", "steps", "every", of="bench.")
    torch.manual_seed(seed)
    n_images = config.stages * config.batch
    images = synthetic(n_images * config.steps, 1, 10, config.image_size)
    example = torch.empty(config.batch, 3, config.image_size, config.image_size)
    stages = partition(
        build(config.model, 10, config.image_size).to(device), config.stages, example
    )
    runtime = SingleProcess(
        stages,
        catalog.cyclic(config.stages),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        F.cross_entropy,
    )
    epochs = count()

    def train(curves: Curves) -> float:
        batches = images.train(n_images, seed, next(epochs), device)
        start = time.perf_counter()
        for k, result in enumerate(runtime.run(batches)):
            curves.trained(Step(k + 1, config.steps, result, 0.01, n_images))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    trained: dict[str, list[float]] = {mode: [] for mode in _MODES}
    around: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with tempfile.TemporaryDirectory() as folder:
        for k in tqdm(range(config.rounds + 1), unit="round", leave=False):
            for mode in _MODES if k % 2 else reversed(_MODES):
                asked = {"mode": mode, "every": config.every, **_OPTIONS}
                single = OmegaConf.create({"seed": seed, "tracking": asked})
                start = time.perf_counter()
                with track(
                    single, Path(folder), device=describe(device), name=mode, alone=False
                ) as tracker:
                    seconds = train(Curves(tracker, config.every))
                if tracker.notes:
                    raise UserError(f"nothing can be timed: {tracker.notes[0]}")
                if k:  # the first round warms up
                    trained[mode].append(seconds)
                    around[mode].append(time.perf_counter() - start - seconds)
    return [_row(mode, trained, around, config) for mode in _MODES]


_OPTIONS: dict[str, Any] = {
    "project": "bench",
    "entity": None,
    "group": None,
    "name": None,
    "tags": [],
}


def _row(
    mode: str, trained: dict[str, list[float]], around: dict[str, list[float]], config: DictConfig
) -> dict[str, Any]:
    low, middle, high = ratios(trained[mode], trained["disabled"])
    return {
        "tracking": mode,
        "step": round(median(trained[mode]) / config.steps, 5),
        "ratio": round(middle, 4),
        "ratio_min": round(low, 4),
        "ratio_max": round(high, 4),
        "around": round(median(around[mode]), 3),
        "failed": middle > 1 + config.most,
    }
