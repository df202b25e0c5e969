"""Work dealt to ranks of unequal speed by measured costs: the step times predicted and measured.

Ranks are processes of this machine, whose stages sleep for the time that a device would compute;
those of one rank sleep longer. The first steps are data parallelism, in which each rank runs all
stages, and so measures its own speed.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn import functional as F

from benchmarks import slept
from toolkit.cli.check_options import check_counts
from toolkit.cost import simulate
from toolkit.errors import UserError
from toolkit.plan import SearchSpace, assign_by_speed, search
from toolkit.runtime import Distributed, join, launch
from toolkit.runtime.process_group.world import World
from toolkit.schedule import Schedule
from toolkit.schedule.steady_state import steps_to_time

_ERROR = 0.05  # most, of a predicted step time
_FIRST = 2  # steps that are not compared

Row = dict[str, Any]


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """A row for each way to deal: by equal speeds, and by the measured ones."""
    if device.type != "cpu":
        raise UserError(f"bench=unlike computes on the CPU: got {device}; give device=cpu")
    check_counts(config, "ranks", "stages", "microbatches", "steps", of="bench.")
    options: Any = OmegaConf.to_container(config)
    task = SimpleNamespace(**options, seed=seed)
    for name in ("sleep", "megabytes", "slower"):
        if not getattr(task, name) > 0:
            raise UserError(f"bench.{name} is above 0: got {getattr(task, name)}")
    return launch(compare, task.ranks, task)[0]


def compare(task: SimpleNamespace) -> list[Row]:
    """Measure costs, deal by them, and train by each schedule, as one rank."""
    torch.set_num_threads(1)
    world, alike = join(device="cpu"), [1.0] * task.ranks
    _, runtime = _trained(world, task, assign_by_speed(task.stages, task.microbatches, alike))
    costs, hardware = runtime.costs()

    def searched(speeds: Sequence[float]) -> Schedule:
        found = None
        if world.rank == 0:
            machine = replace(hardware, speeds=speeds)
            space = SearchSpace(
                costs,
                task.microbatches,
                ranks=task.ranks,
                hardware=machine,
                split_backward=False,
            )
            found = search(space, seconds=task.search_seconds, seed=task.seed).schedule
        return world.gather(found)[0]

    ways: dict[str, Callable[[Sequence[float]], Schedule]] = {
        "micro-batches": lambda speeds: assign_by_speed(task.stages, task.microbatches, speeds),
        "stages": searched,
    }
    rows = []
    for (what, way), known in product(ways.items(), (alike, hardware.speeds)):
        schedule = way(known)
        program = schedule.lower(steps_to_time(schedule)).verify()
        predicted = simulate(program, costs, hardware).step_time
        measured = median(_trained(world, task, schedule)[0])
        places = product(range(task.stages), range(task.microbatches))
        ranks = Counter(schedule.rank(*place) for place in places)
        error = measured / predicted - 1
        row: Row = {"dealt": what, "by": "speeds" if known is hardware.speeds else "number"}
        row["forwards of ranks"] = " ".join(str(ranks[rank]) for rank in range(task.ranks))
        row |= {"predicted (s)": round(predicted, 4), "measured (s)": round(measured, 4)}
        rows.append(row | {"error": round(error, 4), "failed": int(abs(error) > _ERROR)})
    return rows


def _trained(
    world: World, task: SimpleNamespace, schedule: Schedule
) -> tuple[list[float], Distributed]:
    """Train; return the seconds of each step but the first ones, and the runtime."""
    own = task.sleep * (task.slower if world.rank == world.size - 1 else 1)
    torch.manual_seed(task.seed)
    stages = slept.cut(slept.model(task.stages, task.megabytes, own), task.stages)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    runtime = Distributed(stages, schedule, optimizer, F.cross_entropy, world=world)
    runtime.time_costs(task.steps)
    m = task.microbatches
    batch = torch.randn(m, slept.FEATURES), torch.randint(10, (m,))
    moments = [time.monotonic() for _ in runtime.run([batch] * task.steps)]
    latest = [max(moment) for moment in zip(*world.gather(moments), strict=True)]
    return [end - begin for begin, end in pairwise(latest)][_FIRST:], runtime
