"""Switching on measured cost, against each fixed schedule, on links that slow down and recover.

Ranks are processes of this machine, each in a network namespace, whose stages sleep for the time
that a device would compute. Rank 0 limits the links anew after the last step of a phase. Each run
trains the same steps; a phase is compared from ``settled`` steps after its change on, and the run
as a whole. Linux, as root.
"""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn import functional as F

from benchmarks import network, slept
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.figures import save, switching
from toolkit.files import write_csv
from toolkit.format import MB
from toolkit.options import SwitchOptions
from toolkit.runtime import Distributed, SwitchDecision, Switching, join, launch, report
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.spec import same_sized

SWITCHING = "switching"

Row = dict[str, Any]


def train_all(net: network.Network, task: SimpleNamespace) -> None:
    """Train by every schedule in all rounds, as one rank; rank 0 reports each run."""
    rank = int(os.environ["RANK"])
    network.enter(net.machines[rank])
    # The store of ``launch`` cannot be reached from here, so rank 0 has another.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
    os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
    torch.set_num_threads(1)
    world = join(device="cpu", timeout=task.timeout)
    rates, ends = rates_of(task), [*accumulate(task.steps)]
    torch.manual_seed(task.seed)
    batch = torch.randn(task.workers, slept.FEATURES), torch.randint(10, (task.workers,))
    fixed = schedules_of(task, (*task.candidates, *task.beside))
    candidates = schedules_of(task, task.candidates)
    options = SwitchOptions(
        every=task.every, threshold=task.threshold, staleness_price=task.staleness_price
    )
    for number in range(task.rounds):
        names = [SWITCHING, *fixed]
        for name in random.Random(f"{task.seed} {number}").sample(names, len(names)):
            if rank == 0:
                net.shape(rates[0])
            torch.manual_seed(task.seed)
            stages = slept.cut(slept.model(task.stages, task.megabytes, task.sleep), task.stages)
            schedule = fixed.get(name) or next(iter(candidates.values()))
            runtime = Distributed(stages, schedule, _sgd, F.cross_entropy, world=world)
            chooser = Switching(runtime, candidates, options) if name == SWITCHING else None
            world.barrier()
            moments = [time.monotonic()]
            for result in (chooser or runtime).run([batch] * ends[-1]):
                moments.append(time.monotonic())
                if rank == 0 and result.step + 1 in ends[:-1]:
                    net.shape(rates[ends.index(result.step + 1) + 1])
            of_ranks = world.gather(moments)
            if rank == 0:
                latest = [max(moment) for moment in zip(*of_ranks, strict=True)]
                seconds = [end - begin for begin, end in pairwise(latest)]
                looks, parts = (chooser.decisions, chooser.phases()) if chooser else ([], [])
                report((name, number, seconds, looks, parts))


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def rates_of(task: SimpleNamespace) -> list[float]:
    """Bits per second of the links in each phase."""
    usual = 8 * MB * task.megabytes / (task.ratio * task.sleep)
    return [usual / (task.slower if phase % 2 else 1) for phase in range(len(task.steps))]


def schedules_of(task: SimpleNamespace, given: Sequence[Any]) -> dict[str, Schedule]:
    """Schedules by name."""
    usual = catalog.data_parallel(task.workers, n_stages=task.stages)
    made = [same_sized(usual, each).build() for each in given]
    return {schedule.name: schedule for schedule in made}


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """A row for each schedule: seconds of a step in each phase, and of the whole run."""
    task = check(config, device, seed)
    folder = output_folder()
    runs: list[tuple[str, int, list[float], list[SwitchDecision], list[tuple[str, int]]]] = []

    def take(_: int, found: Any) -> None:
        runs.append(found)
        print(f"{found[0]}, round {found[1]}: {sum(found[2]):.1f} s", flush=True)

    with network.network(task.workers) as net:
        launch(train_all, task.workers, net, task, on_report=take, timeout=task.timeout)
    write_csv(
        folder / "steps.csv",
        [
            {"run": name, "round": number, "step": step, "seconds": round(taken, 4)}
            for name, number, seconds, *_ in runs
            for step, taken in enumerate(seconds)
        ],
    )
    chosen = next(run for run in runs if run[0] == SWITCHING)
    write_csv(folder / "looks.csv", [asdict(look) for look in chosen[3]])
    in_force = [name for name, n in chosen[4] for _ in range(n)]
    others = {name: seconds for name, _, seconds, *_ in runs[::-1] if name != SWITCHING}
    ends = [*accumulate(task.steps)]
    save(switching(chosen[2], in_force, others, ends[:-1]), folder / "switching")
    names = [*schedules_of(task, task.candidates)]
    return table(task, [(name, seconds) for name, _, seconds, *_ in runs], names)


def table(
    task: SimpleNamespace, runs: Sequence[tuple[str, list[float]]], candidates: Sequence[str]
) -> list[Row]:
    """A row for each schedule; medians over rounds, and ratios of switching to them."""
    bounds = [*pairwise([0, *accumulate(task.steps)])]
    names = list(dict.fromkeys([SWITCHING, *candidates, *(name for name, _ in runs)]))
    rows = []
    for name in names:
        every = [seconds for run, seconds in runs if run == name]
        row: Row = {"run": name, "candidate": name in candidates}
        for k, (begin, end) in enumerate(bounds):
            row[f"phase {k} (s)"] = median(mean(s[begin + task.settled : end]) for s in every)
        rows.append(row | {"whole (s)": median(map(sum, every))})
    columns = [name for name in rows[0] if name.endswith("(s)")]
    fixed = [row for row in rows if row["candidate"]]
    for column in columns:
        best = min(row[column] for row in fixed)
        for row in rows:
            row[column.replace("(s)", "/ best")] = round(row[column] / best, 3)
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in rows]


def check(config: DictConfig, device: torch.device, seed: int) -> SimpleNamespace:
    """Return the options; refuse what cannot be measured, or not here."""
    if device.type != "cpu":
        raise UserError(f"bench=switching computes on the CPU: got {device}; give device=cpu")
    check_counts(config, "workers", "stages", "every", "rounds", of="bench.")
    options: Any = OmegaConf.to_container(config)
    task = SimpleNamespace(**options, seed=seed)
    for name in ("sleep", "megabytes", "ratio", "slower"):
        if not getattr(task, name) > 0:
            raise UserError(f"bench.{name} is above 0: got {getattr(task, name)}")
    if not task.steps or min(task.steps) <= task.settled or not task.candidates:
        raise UserError(
            f"bench.steps are above bench.settled={task.settled}, and bench.candidates one or more:"
            f" got {task.steps} and {task.candidates}"
        )
    schedules_of(task, (*task.candidates, *task.beside))
    network.check(task.workers)
    return task
