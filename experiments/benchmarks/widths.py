"""Devices of model parallelism: data parallelism, CDP and pipelines, with ranks of several devices.

N workers have N stages of a decoder. Data parallelism takes N x N ranks, CDP N (N + 1) / 2, and a
pipeline N; each times the width. All are simulated.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import Hardware
from toolkit.cost.tensor_width import Width
from toolkit.cost.timeline import ACTIVATIONS, INPUTS
from toolkit.cost.worker_forms import ModelCosts, steady_timeline
from toolkit.format import GIB
from toolkit.model import Sequences, gpt
from toolkit.schedule import Schedule, catalog

_COUNTS = (
    "workers",
    "widths",
    "layers",
    "hidden",
    "heads",
    "tokens",
    "vocabulary",
    "batch",
)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each number of workers, method and width."""
    check_counts(config, *_COUNTS, of="bench.")
    hardware = Hardware.preset(config.machine)
    widths = [Width(n, hardware, config.width_efficiency) for n in config.widths]
    with torch.device("meta"):
        model = gpt(
            config.vocabulary, config.tokens, config.layers, config.hidden, config.heads
        )
    example = Sequences(config.tokens, config.vocabulary).example(config.batch, "meta")
    # One analysis for each width serves all numbers of workers.
    costs_of = {}
    for width in widths:
        costs_of[width.devices] = ModelCosts(
            model, example, config.precision, width=width
        )
    rows = []
    for n_workers, width in tqdm([*product(config.workers, widths)], leave=False):
        costs = costs_of[width.devices](n_workers, "flops")
        for name, schedule in methods(n_workers):
            timeline = steady_timeline(
                schedule, costs, width.hardware_of_ranks, config.optimizer_words
            )
            rank_peaks = [
                timeline.peak_memory(rank) for rank in range(schedule.n_ranks)
            ]
            fullest = max(range(schedule.n_ranks), key=rank_peaks.__getitem__)
            bytes_of_kind = timeline.at_peak(fullest)
            n_devices = schedule.n_ranks * width.devices
            n_samples = config.batch * schedule.n_microbatches
            samples_per_second = n_samples / timeline.step_time
            activation_bytes = bytes_of_kind[ACTIVATIONS] + bytes_of_kind[INPUTS]
            rows.append(
                {
                    "workers": n_workers,
                    "method": name,
                    "width": width.devices,
                    "devices": n_devices,
                    "busy": f"{1 - timeline.idle_share:.0%}",
                    "GiB a device": round(rank_peaks[fullest] / GIB, 2),
                    "of it activations": round(activation_bytes / GIB, 2),
                    "ms a step": round(timeline.step_time * 1e3, 1),
                    "samples/s a device": round(samples_per_second / n_devices, 2),
                    "mean staleness": round(schedule.mean_staleness, 2),
                }
            )
    # By workers and method, so that widths stand below each other.
    order = [name for name, _ in methods(config.workers[0])]
    return sorted(
        rows, key=lambda row: (row["workers"], order.index(row["method"]), row["width"])
    )


def methods(n_workers: int) -> Iterator[tuple[str, Schedule]]:
    """Yield what is compared, by name; each trains on as many micro-batches as workers."""
    both = "per_stage_and_microbatch"
    yield "DP, model parallel", catalog.data_parallel(n_workers, both)
    yield "CDP-v2, model parallel", catalog.cyclic(n_workers, placement=both)
    yield (
        "CDP-v2, a rank for each stage",
        catalog.cyclic(n_workers, placement="per_stage"),
    )
    yield "1F1B", catalog.one_f_one_b(n_workers, n_workers)
