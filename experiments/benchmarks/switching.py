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
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn import functional as F

from benchmarks import network, slept
from benchmarks.checks import check_above_zero, check_cpu
from benchmarks.step_times import job_steps
from benchmarks.training_steps import momentum_sgd
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.figures import save, switching
from toolkit.files import write_csv
from toolkit.format import MB
from toolkit.options import SwitchOptions
from toolkit.runtime import Distributed, SwitchDecision, Switching, launch, report
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.spec import same_sized

SWITCHING = "switching"

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What rank 0 reports of a run."""

    name: str  # of the schedule, or SWITCHING
    round: int
    seconds: list[float]  # of each step
    decisions: list[SwitchDecision] = field(default_factory=list)
    # Schedules and their steps.
    phases: list[tuple[str, int]] = field(default_factory=list)


def train_all(net: network.Network, task: SimpleNamespace) -> None:
    """Train by every schedule in all rounds, as one rank; rank 0 reports each run."""
    rank = int(os.environ["RANK"])
    world = network.join_from(net.machines[rank], task.timeout)
    rates = rates_of(task)
    phase_ends = [*accumulate(task.steps)]
    torch.manual_seed(task.seed)
    batch = slept.random_samples(task.workers)
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
            stages = slept.stages(task.stages, task.megabytes, task.sleep)
            # The run that switches begins with the first candidate.
            schedule = fixed.get(name) or next(iter(candidates.values()))
            runtime = Distributed(
                stages, schedule, momentum_sgd, F.cross_entropy, world=world
            )
            chooser = (
                Switching(runtime, candidates, options) if name == SWITCHING else None
            )
            world.barrier()
            moments = [time.monotonic()]
            for result in (chooser or runtime).run([batch] * phase_ends[-1]):
                moments.append(time.monotonic())
                steps_done = result.step + 1
                # The links change between two steps of rank 0. Other ranks may be in
                # another step.
                if rank == 0 and steps_done in phase_ends[:-1]:
                    net.shape(rates[phase_ends.index(steps_done) + 1])
            seconds = job_steps(world, moments)
            if rank == 0:
                run = Run(name, number, seconds)
                if chooser:
                    run = replace(
                        run, decisions=chooser.decisions, phases=chooser.phases()
                    )
                report(run)


def rates_of(task: SimpleNamespace) -> list[float]:
    """Return the bits per second of the links in each phase."""
    # M is `ratio` times C, and all parameters are sent in M. In bits.
    usual = 8 * MB * task.megabytes / (task.ratio * task.sleep)
    return [
        usual / (task.slower if phase % 2 else 1) for phase in range(len(task.steps))
    ]


def schedules_of(task: SimpleNamespace, options: Sequence[Any]) -> dict[str, Schedule]:
    """Return by name the schedules of some options, on the workers and stages of the task."""
    base = catalog.data_parallel(task.workers, n_stages=task.stages)
    schedules = [
        same_sized(base, schedule_options).build() for schedule_options in options
    ]
    return {schedule.name: schedule for schedule in schedules}


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """Return a row for each schedule: seconds of a step in each phase, and of the whole run."""
    task = check(config, device, seed)
    folder = output_folder()
    runs: list[Run] = []

    def on_report(_: int, run: Run) -> None:
        runs.append(run)
        print(f"{run.name}, round {run.round}: {sum(run.seconds):.1f} s", flush=True)

    with network.network(task.workers) as net:
        launch(
            train_all,
            task.workers,
            net,
            task,
            on_report=on_report,
            timeout=task.timeout,
        )
    step_rows = []
    for run in runs:
        for step, seconds in enumerate(run.seconds):
            row = {"run": run.name, "round": run.round, "step": step}
            step_rows.append(row | {"seconds": round(seconds, 4)})
    write_csv(folder / "steps.csv", step_rows)
    drawn = next(run for run in runs if run.name == SWITCHING)
    write_csv(folder / "looks.csv", [asdict(decision) for decision in drawn.decisions])
    step_schedules = [name for name, n_steps in drawn.phases for _ in range(n_steps)]
    # Of each fixed schedule the first run.
    fixed = {run.name: run.seconds for run in reversed(runs) if run.name != SWITCHING}
    phase_ends = [*accumulate(task.steps)]
    figure = switching(drawn.seconds, step_schedules, fixed, phase_ends[:-1])
    save(figure, folder / "switching")
    candidates = [*schedules_of(task, task.candidates)]
    return table(task, [(run.name, run.seconds) for run in runs], candidates)


def table(
    task: SimpleNamespace,
    runs: Sequence[tuple[str, list[float]]],
    candidates: Sequence[str],
) -> list[Row]:
    """Return a row for each schedule; medians over rounds, and ratios of switching to them."""
    bounds = [*pairwise([0, *accumulate(task.steps)])]
    names = list(dict.fromkeys([SWITCHING, *candidates, *(name for name, _ in runs)]))
    rows = []
    for name in names:
        rounds = [seconds for run, seconds in runs if run == name]
        row: Row = {"run": name, "candidate": name in candidates}
        for phase, (begin, end) in enumerate(bounds):
            # The mean leaves out the steps after a change until the run looks at its costs again.
            # The time of the whole run has them.
            means = [mean(seconds[begin + task.settled : end]) for seconds in rounds]
            row[f"phase {phase} (s)"] = median(means)
        row["whole (s)"] = median(map(sum, rounds))
        rows.append(row)
    columns = [name for name in rows[0] if name.endswith("(s)")]
    for column in columns:
        # Fixed schedules that the run may not choose set no mark.
        best = min(row[column] for row in rows if row["candidate"])
        for row in rows:
            row[column.replace("(s)", "/ best")] = round(row[column] / best, 3)
    for row in rows:
        for column in columns:
            row[column] = round(row[column], 4)
    return rows


def check(config: DictConfig, device: torch.device, seed: int) -> SimpleNamespace:
    """Return the options; raise UserError if they cannot be measured, or not here."""
    check_cpu("switching", device)
    check_counts(config, "workers", "stages", "every", "rounds", of="bench.")
    options: Any = OmegaConf.to_container(config)
    task = SimpleNamespace(**options, seed=seed)
    check_above_zero(config, "sleep", "megabytes", "ratio", "slower")
    if not task.steps or min(task.steps) <= task.settled or not task.candidates:
        raise UserError(
            f"bench.steps are above bench.settled={task.settled}, and bench.candidates one or more:"
            f" got {task.steps} and {task.candidates}"
        )
    schedules_of(task, (*task.candidates, *task.beside))
    network.check(task.workers)
    return task
