"""Work assigned to ranks of unequal speed by measured costs: the step times predicted and measured.

Ranks are processes of this machine, whose stages sleep for the time that a device would compute;
those of one rank sleep longer. The first steps are data parallelism, in which each rank runs all
stages, and so measures its own speed.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn import functional as F

from benchmarks import slept
from benchmarks.checks import check_above_zero, check_cpu
from benchmarks.step_times import job_steps
from toolkit.cli.check_options import check_counts
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.plan import SearchSpace, assign_by_speed, search
from toolkit.runtime import Distributed, join, launch
from toolkit.runtime.process_group.world import World
from toolkit.schedule import Schedule

_MAX_ERROR = 0.05  # of a predicted step time
_N_SKIPPED = 2  # first steps, which are not compared

Row = dict[str, Any]


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """Return a row for each way to assign: by equal speeds, and by the measured ones."""
    check_cpu("unlike", device)
    check_counts(config, "ranks", "stages", "microbatches", "steps", of="bench.")
    options: Any = OmegaConf.to_container(config)
    task = SimpleNamespace(**options, seed=seed)
    check_above_zero(config, "sleep", "megabytes", "slower")
    return launch(compare, task.ranks, task)[0]


def compare(task: SimpleNamespace) -> list[Row]:
    """Measure costs, assign work by them, and train by each schedule, as one rank."""
    torch.set_num_threads(1)
    world = join(device="cpu")
    equal_speeds = [1.0] * task.ranks
    equal_schedule = assign_by_speed(task.stages, task.microbatches, equal_speeds)
    # 1. Measure costs and speeds where each rank runs all stages.
    _, runtime = _train(world, task, equal_schedule)
    costs, hardware = runtime.costs()

    def assign_microbatches(speeds: Sequence[float]) -> Schedule:
        return assign_by_speed(task.stages, task.microbatches, speeds)

    def assign_stages(speeds: Sequence[float]) -> Schedule:
        schedule = None
        if world.rank == 0:
            space = SearchSpace(
                costs,
                task.microbatches,
                ranks=task.ranks,
                hardware=replace(hardware, speeds=speeds),
                split_backward=False,
            )
            schedule = search(
                space, seconds=task.search_seconds, seed=task.seed
            ).schedule
        # A search ends by the clock, and so might differ from rank to rank: rank 0's counts for
        # all.
        return world.gather(schedule)[0]

    # 2. Assign both kinds of work as if ranks were alike, and by their speeds.
    ways = {"micro-batches": assign_microbatches, "stages": assign_stages}
    speeds_by = {"number": equal_speeds, "speeds": hardware.speeds}
    rows = []
    for (work, assign), (by, speeds) in product(ways.items(), speeds_by.items()):
        schedule = assign(speeds)
        # By the measured speeds in both cases: only the assignment may suppose equal ones.
        predicted = simulate_steady_steps(schedule, costs, hardware).step_time
        step_seconds, _ = _train(world, task, schedule)
        measured = median(step_seconds)
        error = measured / predicted - 1
        forwards = Counter(
            schedule.rank(stage, microbatch)
            for stage in range(task.stages)
            for microbatch in range(task.microbatches)
        )
        rows.append(
            {
                "dealt": work,
                "by": by,
                "forwards of ranks": " ".join(
                    str(forwards[rank]) for rank in range(task.ranks)
                ),
                "predicted (s)": round(predicted, 4),
                "measured (s)": round(measured, 4),
                "error": round(error, 4),
                "failed": int(abs(error) > _MAX_ERROR),
            }
        )
    return rows


def _train(
    world: World, task: SimpleNamespace, schedule: Schedule
) -> tuple[list[float], Distributed]:
    """Train; return the seconds of each step but the first ones, and the runtime."""
    is_slower = world.rank == world.size - 1
    seconds = task.sleep * (task.slower if is_slower else 1)
    torch.manual_seed(task.seed)
    stages = slept.stages(task.stages, task.megabytes, seconds)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    runtime = Distributed(stages, schedule, optimizer, F.cross_entropy, world=world)
    runtime.time_costs(task.steps)
    batches = [slept.random_samples(task.microbatches)] * task.steps
    moments = [time.monotonic() for _ in runtime.run(batches)]
    return job_steps(world, moments)[_N_SKIPPED:], runtime
