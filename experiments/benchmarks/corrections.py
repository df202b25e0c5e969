"""What each correction of late weights costs: the time of a step, and the weights that are held."""

from functools import partial
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from benchmarks.step_times import alternate, ratios
from benchmarks.training_steps import WARM_UP, momentum_sgd, random_images
from toolkit.cli.check_options import check_counts
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess
from toolkit.schedule import CORRECTIONS, catalog
from toolkit.schedule.steady_state import footprint


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each rule and correction.

    *seconds*: of a step in order "grouped", the median; *ratio*: to the rule without a correction,
    round by round. *weights*: the most that a rank holds, by the program of a worker per rank.
    """
    check_counts(
        config, "image_size", "workers", "stages", "batch", "rounds", of="bench."
    )
    n, size = config.workers, config.image_size
    torch.manual_seed(seed)
    inputs, targets = random_images(n * config.batch, size, device)
    optimizer = partial(momentum_sgd, weight_decay=5e-4)
    rows = []
    for delay in (1, "freshest"):
        # The corrections of a rule take turns; the two rules do not, since no ratio compares them.
        steps, schedules = {}, {}
        for kind in CORRECTIONS:
            model = build(config.model, 10, size).to(device)
            schedule = catalog.cyclic(n, delay, n_stages=config.stages, correction=kind)
            stages = partition(model, config.stages, inputs[: config.batch])
            runtime = SingleProcess(stages, schedule, optimizer, F.cross_entropy)
            steps[kind] = partial(runtime.step, inputs, targets)
            schedules[kind] = schedule
        seconds = alternate(steps, config.rounds, device, WARM_UP)
        for kind, schedule in schedules.items():
            rows.append(
                {
                    "rule": f"CDP-v{1 if delay == 1 else 2}",
                    "correction": kind,
                    "seconds": round(median(seconds[kind]), 5),
                    "ratio": round(median(ratios(seconds[kind], seconds["none"])), 3),
                    "weights of a rank (models)": round(
                        float(footprint(schedule).weights), 3
                    ),
                }
            )
    return rows
