"""Lowering, verifying and simulating, in seconds, and beside torch.distributed.pipelining's own."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.pipelining import schedules as theirs
from tqdm import tqdm

from toolkit.cli.validate import check_counts
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.schedule import Schedule, catalog


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a job: its ops, median seconds, microseconds an op, and what they are relative to."""
    del device, seed
    check_counts(config, "stages", "microbatches", "cyclic", "rounds", of="bench.")
    large = (config.stages, config.microbatches)
    small = (config.stages, max(config.stages, config.microbatches // 8))
    jobs: dict[str, tuple[int, Callable[[], object]]] = {}
    for stages, microbatches in (small, large):
        schedule = catalog.one_f_one_b(stages, microbatches)
        n_ops = len(schedule.timing.starts)
        jobs[f"1F1B {stages}x{microbatches}"] = (n_ops, _ours(schedule))
        jobs[f"1F1B {stages}x{microbatches}, torch"] = (n_ops, _torch(schedule))
    cyclic = catalog.cyclic(config.cyclic)
    jobs[f"CDP-v2 {config.cyclic}x{config.cyclic}"] = (len(cyclic.timing.starts), _ours(cyclic))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in tqdm(range(config.rounds), unit="round", leave=False):
        for name, (_, job) in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, (n_ops, _) in jobs.items():
        taken = median(seconds[name])
        pair = seconds.get(f"{name}, torch")
        row = {
            "job": name,
            "ops": n_ops,
            "seconds": round(taken, 3),
            "us an op": round(taken / n_ops * 1e6, 2),
            "of torch's": round(taken / median(pair), 3) if pair else None,
            "peak GB": round(_peak_gigabytes(), 2),
        }
        rows.append(row)
    return rows


def _ours(schedule: Schedule) -> Callable[[], object]:
    costs = unit_costs(schedule.n_stages)
    return lambda: simulate(schedule.lower(1).verify(), costs, UNIT)


def _torch(schedule: Schedule) -> Callable[[], object]:
    """torch's lowering to messages and its simulator, on the same orders."""
    orders = {
        rank: [theirs._Action.from_str(cell) for cell in row.split(",") if cell]
        for rank, row in enumerate(schedule.to_csv().splitlines())
    }
    n_stages = schedule.n_stages

    def lower_and_simulate() -> object:
        lowered = theirs._add_send_recv(
            {rank: list(order) for rank, order in orders.items()},
            stage_to_rank=lambda stage: stage,
            num_stages=n_stages,
        )
        return theirs._simulate_comms_compute(
            lowered, stage_to_rank=lambda stage: stage, num_stages=n_stages
        )

    return lower_and_simulate


def _peak_gigabytes() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
