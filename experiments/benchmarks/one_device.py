"""Memory of several micro-batches on one device, measured: together, shifted, some computed again.

Every tensor that is alive counts. The program's peak is predicted from the stages' costs; order
"scheduled" runs one op after another, in the program's order.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from benchmarks.checks import check_cpu
from benchmarks.peak import in_order, predict_peak
from toolkit.cli.check_options import check_counts
from toolkit.cost import Hardware, profile, recomputing
from toolkit.format import MB
from toolkit.model import Stages, build, partition
from toolkit.model.peak_memory import LiveMemory
from toolkit.plan.one_device import least_peak
from toolkit.runtime import StepOptions
from toolkit.schedule import Schedule, catalog

_STEPS = 2
_CLASSES = 10


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each model, number of micro-batches and method, without memory at rest.

    Stages are chosen by a roofline. Their extra time is also that of the seconds measured here.
    """
    check_counts(config, "batch", "image_size", "stages", of="bench.")
    check_cpu("one_device", device)  # bench=peak is for a GPU
    hardware = Hardware(
        "roofline", config.flops, config.memory_bandwidth, link_bandwidth=1.0
    )
    rows = []
    for name, n in tqdm([*product(config.models, config.microbatches)], leave=False):
        torch.manual_seed(seed)
        images = torch.randn(config.batch, 3, config.image_size, config.image_size)
        # The CPU's attention keeps other tensors than a GPU's.
        timed = profile(staged(name, config.stages, images), images)
        # Sizes are those of the CPU. Without their seconds, stages take the roofline's.
        costs = [
            replace(cost, forward_seconds=None, backward_seconds=None) for cost in timed
        ]
        seconds = [cost.seconds(hardware) for cost in timed]
        shifted = least_peak(costs, n, 0.0, hardware)
        chosen = least_peak(costs, n, config.extra_time, hardware)
        methods: list[tuple[str, Schedule, Sequence[int]]] = [
            ("DP", catalog.data_parallel(n, "one", n_stages=config.stages), ()),
            ("shifted", shifted.schedule(hardware), ()),
            ("chosen", chosen.schedule(hardware), chosen.recomputed),
        ]
        dp_predicted = dp_measured = 0.0
        # DP comes first: the others are compared with its peaks.
        for method, schedule, recomputed in methods:
            predicted = predict_peak(
                schedule, recomputing(costs, [*recomputed]), _STEPS, _STEPS
            )
            measured = measure_peak(
                name, schedule, images, StepOptions(checkpoint=[*recomputed])
            )
            if method == "DP":
                dp_predicted = predicted
                dp_measured = measured
            extra_seconds = sum(seconds[stage][0] for stage in recomputed)
            extra_time = extra_seconds / sum(map(sum, seconds))
            rows.append(
                {
                    "model": name,
                    "micro-batches": n,
                    "method": method,
                    "computed again": ", ".join(map(str, recomputed)),
                    "extra time, roofline": f"{chosen.extra_time if recomputed else 0:.1%}",
                    "extra time, measured": f"{extra_time:.1%}",
                    "predicted MB": round(predicted / MB, 1),
                    "measured MB": round(measured / MB, 1),
                    "measured / predicted": round(measured / predicted, 3),
                    "below DP, predicted": f"{1 - predicted / dp_predicted:.1%}",
                    "below DP, measured": f"{1 - measured / dp_measured:.1%}",
                }
            )
    return rows


def staged(name: str, n_stages: int, images: Tensor) -> Stages:
    """Return the stages of a new model."""
    return partition(build(name, _CLASSES, images.shape[-1]), n_stages, images)


def measure_peak(
    name: str, schedule: Schedule, images: Tensor, options: StepOptions
) -> float:
    """Return the peak bytes of tensors above those that stay between training steps."""
    with LiveMemory() as live:
        stages = staged(name, schedule.n_stages, images)
        runtime, batch = in_order(schedule, stages, images, options)
        for _ in range(_STEPS):  # by then no weights are left that were made otherwise
            runtime.step(*batch)
        gc.collect()
        # The peak counts from here.
        at_rest = live.most = live.bytes
        for result in runtime.run([batch] * _STEPS):
            del result
    return live.most - at_rest
