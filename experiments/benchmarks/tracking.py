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
from tqdm.auto import tqdm

from benchmarks.timing import ratio_cells
from toolkit.cli.check_options import check_counts
from toolkit.cost.stage_costs import synchronized_time
from toolkit.errors import UserError
from toolkit.model import build, partition
from toolkit.results import Curves, describe, track
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog
from toolkit.training import Step
from toolkit.training.data import synthetic

_MODES = ("disabled", "offline")
_OPTIONS: dict[str, Any] = dict.fromkeys(("entity", "group", "name"))


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a mode: median seconds of a step, and its ratio to the other round by round.

    The modes take turns with ``steps`` training steps of CDP-v2, each time as a separate run,
    whose beginning and end are timed apart: ``around`` is their median, in seconds.
    """
    check_counts(config, "image_size", "stages", "batch", "rounds", "steps", "every", of="bench.")
    torch.manual_seed(seed)
    n_images, size = config.stages * config.batch, config.image_size
    images, epochs = synthetic(n_images * config.steps, 1, 10, size), count()
    model = build(config.model, 10, size).to(device)
    runtime = SingleProcess(
        partition(model, config.stages, torch.empty(config.batch, 3, size, size)),
        catalog.cyclic(config.stages),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        F.cross_entropy,
    )

    def train(curves: Curves) -> float:
        batches = images.train(n_images, seed, next(epochs), device)
        start = time.perf_counter()
        for k, result in enumerate(runtime.run(batches)):
            curves.trained(Step(k + 1, config.steps, result, 0.01, n_images))
        return synchronized_time(device) - start

    trained: dict[str, list[float]] = {mode: [] for mode in _MODES}
    around: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with tempfile.TemporaryDirectory() as folder:
        for k in tqdm(range(config.rounds + 1), unit="round", leave=False):
            for mode in _MODES if k % 2 else reversed(_MODES):
                options = {"project": "bench", "tags": [], "mode": mode, "every": config.every}
                single = OmegaConf.create({"seed": seed, "tracking": _OPTIONS | options})
                start, where = time.perf_counter(), describe(device)
                with track(single, Path(folder), device=where, name=mode) as tracker:
                    seconds = train(Curves(tracker, config.every))
                if tracker.notes:
                    raise UserError(f"nothing can be timed: {tracker.notes[0]}")
                if k:  # the first round warms up
                    trained[mode].append(seconds)
                    around[mode].append(time.perf_counter() - start - seconds)
    rows = []
    for mode in _MODES:
        ratios = ratio_cells(trained[mode], trained["disabled"], digits=4)
        row = {"tracking": mode, "step": round(median(trained[mode]) / config.steps, 5)} | ratios
        failed = ratios["ratio"] > 1 + config.most
        rows.append(row | {"around": round(median(around[mode]), 3), "failed": failed})
    return rows
