"""Seconds to lower, verify and simulate, against torch.distributed.pipelining's own functions."""

import resource
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.step_times import alternate
from toolkit.cli.check_options import check_counts
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.schedule import Schedule, catalog


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each job: its ops, median seconds, and the ratio to torch's."""
    del device, seed
    check_counts(config, "stages", "microbatches", "cyclic", "rounds", of="bench.")
    ops: dict[str, int] = {}
    jobs: dict[str, Callable[[], object]] = {}
    for microbatches in (
        max(config.stages, config.microbatches // 8),
        config.microbatches,
    ):
        schedule = catalog.one_f_one_b(config.stages, microbatches)
        name = f"1F1B {config.stages}x{microbatches}"
        jobs[name] = _toolkit(schedule)
        jobs[f"{name}, torch"] = _torch(schedule)
        ops[name] = ops[f"{name}, torch"] = len(schedule.timing.starts)
    cyclic = catalog.cyclic(config.cyclic)
    name = f"CDP-v2 {config.cyclic}x{config.cyclic}"
    jobs[name] = _toolkit(cyclic)
    ops[name] = len(cyclic.timing.starts)
    rounds = alternate(jobs, config.rounds, torch.device("cpu"), warm_up=0)
    medians = {name: median(seconds) for name, seconds in rounds.items()}
    # Linux counts in KiB. The peak is that of the whole process, and so the same in all rows.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    rows = []
    for name, seconds in medians.items():
        torch_seconds = medians.get(f"{name}, torch")
        rows.append(
            {
                "job": name,
                "ops": ops[name],
                "seconds": round(seconds, 3),
                "us an op": round(seconds / ops[name] * 1e6, 2),
                "of torch's": torch_seconds and round(seconds / torch_seconds, 3),
                "peak GB": round(peak, 2),
            }
        )
    return rows


def _toolkit(schedule: Schedule) -> Callable[[], object]:
    # Unit costs, as torch's simulator has them.
    costs = unit_costs(schedule.n_stages)
    return lambda: simulate(schedule.lower(1).verify(), costs, UNIT)


def _torch(schedule: Schedule) -> Callable[[], object]:
    """Return lowering and simulation by torch, on the same orders."""
    orders = {
        rank: [
            torch_schedules._Action.from_str(cell) for cell in row.split(",") if cell
        ]
        for rank, row in enumerate(schedule.to_csv().splitlines())
    }
    places: Any = {
        "stage_to_rank": lambda stage: stage,
        "num_stages": schedule.n_stages,
    }

    def lower_and_simulate() -> object:
        # torch empties the lists that it is given.
        copies = {rank: list(order) for rank, order in orders.items()}
        with_messages = torch_schedules._add_send_recv(copies, **places)
        return torch_schedules._simulate_comms_compute(with_messages, **places)

    return lower_and_simulate
