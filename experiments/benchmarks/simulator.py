"""Seconds to lower, verify and simulate, against torch.distributed.pipelining's own functions."""

import resource
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.pipelining import schedules as theirs

from benchmarks.grouped import alternate
from toolkit.cli.check_options import check_counts
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.schedule import Schedule, catalog


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a job: its ops, median seconds, microseconds an op, and the ratio to torch's."""
    del device, seed
    check_counts(config, "stages", "microbatches", "cyclic", "rounds", of="bench.")
    ops: dict[str, int] = {}
    jobs: dict[str, Callable[[], object]] = {}
    for microbatches in (max(config.stages, config.microbatches // 8), config.microbatches):
        schedule = catalog.one_f_one_b(config.stages, microbatches)
        name = f"1F1B {config.stages}x{microbatches}"
        jobs[name], jobs[f"{name}, torch"] = _ours(schedule), _torch(schedule)
        ops[name] = ops[f"{name}, torch"] = len(schedule.timing.starts)
    cyclic, name = catalog.cyclic(config.cyclic), f"CDP-v2 {config.cyclic}x{config.cyclic}"
    jobs[name], ops[name] = _ours(cyclic), len(cyclic.timing.starts)
    taken = alternate(jobs, config.rounds, torch.device("cpu"), warm_up=0)
    seconds = {name: median(of_job) for name, of_job in taken.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return [
        {
            "job": name,
            "ops": ops[name],
            "seconds": round(mine, 3),
            "us an op": round(mine / ops[name] * 1e6, 2),
            "of torch's": round(mine / torchs, 3)
            if (torchs := seconds.get(f"{name}, torch"))
            else None,
            "peak GB": round(peak, 2),
        }
        for name, mine in seconds.items()
    ]


def _ours(schedule: Schedule) -> Callable[[], object]:
    costs = unit_costs(schedule.n_stages)
    return lambda: simulate(schedule.lower(1).verify(), costs, UNIT)


def _torch(schedule: Schedule) -> Callable[[], object]:
    """Lowering and simulation by torch, on the same orders."""
    orders = {
        rank: [theirs._Action.from_str(cell) for cell in row.split(",") if cell]
        for rank, row in enumerate(schedule.to_csv().splitlines())
    }
    places: Any = {"stage_to_rank": lambda stage: stage, "num_stages": schedule.n_stages}

    def lower_and_simulate() -> object:
        copied = {rank: list(order) for rank, order in orders.items()}
        return theirs._simulate_comms_compute(theirs._add_send_recv(copied, **places), **places)

    return lower_and_simulate
