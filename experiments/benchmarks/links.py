"""Cyclic data parallelism on links of limited bandwidth, against DDP and its relatives.

Ranks are processes of this machine, a namespace stands for a machine, and token buckets limit what
goes from one to another. C is the time of a training step without any message, M that in which all
parameters go from one machine to another: links are set to ratios of M to C. In every round all
methods train on each link, in random order; medians over rounds are quoted, and ratios to DDP.
Linux, as root.

Stages sleep for the time that a device would compute, so that a few cores carry many ranks, and the
simulator predicts each step time; or a network is computed. A run given the ``hydra.run.dir`` of an
earlier one continues it.
"""

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import inf, isnan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks import network
from benchmarks.checks import check_cpu, check_rules
from benchmarks.link_methods import (
    AFFORDED,
    ALL,
    COMPUTE,
    Link,
    Task,
    Times,
    Train,
    fresh_model,
    link_name,
    make,
    methods_of,
    predicted,
    step_time,
)
from benchmarks.network import Array, Traffic
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.figures import link_times, save
from toolkit.files import write_csv
from toolkit.format import table as format_table
from toolkit.results.run_files import CONTINUED_FILE
from toolkit.runtime import launch, report

_TRAININGS = "trainings.csv"  # a row for each that has ended
_COMPUTES = 3  # runs without messages; their median counts
_SENDS = 3  # of all parameters; their median counts


def train_all(net: network.Network, task: Task) -> None:
    """Measure the links, then train by every method in all rounds on all links, as one rank.

    Rank 0 reports the links, then of each run its link, round, method, and :data:`Times`.
    """
    rank = int(os.environ["RANK"])
    machine = net.machines[rank // task.ranks_per_machine]
    world = network.join_from(machine, task.timeout)
    trainings: dict[tuple[str, Link | None], Train] = {}

    def shape(rate: float | None) -> None:
        if rank == 0:
            net.shape(rate)
        # No rank sends before the links have their new rate.
        world.barrier()

    def train(method: str, link: Link | None = None) -> Times:
        # A method is made once and then trains on, in all rounds and on all links: the values of
        # the weights do not change the time of a step. Only an affordable delay depends on the
        # link.
        key = method, link if method in AFFORDED else None
        if key not in trainings:
            trainings[key] = make(task, method, link, world)
        # A rank that is ready first would otherwise also time how long it waits for the others.
        world.barrier()
        return world.gather([time.monotonic() for _ in trainings[key](task.steps)])

    def send(n_bytes: int, target: int) -> float:
        """Return the seconds of a message from rank 0 to another."""
        content = torch.zeros(n_bytes, dtype=torch.uint8)
        world.barrier()
        begin = time.monotonic()
        if rank == 0:
            dist.send(content, target)
        elif rank == target:
            dist.recv(content, 0)
        # Rank 0 gives its begin, the target its end: processes of one machine share this clock.
        moments = world.gather(time.monotonic() if rank else begin)
        return moments[target] - moments[0]

    n_bytes = sum(4 * parameter.numel() for parameter in fresh_model(task).parameters())
    links = task.links or calibrate(task, n_bytes, shape, train, send)
    methods = methods_of(task)
    if rank == 0:
        report(links)
    for number in range(task.rounds):
        for link in links:
            shape(None if link.mbit is None else 1e6 * link.mbit)
            # All ranks draw the same order, since they train by each method together.
            # Runs that have ended take part in the draw: a bench that continues keeps its order.
            chance = random.Random(f"{task.seed} {number} {link.name}")
            for method in chance.sample(methods, len(methods)):
                if (link.ratio, number, method) in task.done:
                    continue
                times = train(method, link)
                if rank == 0:
                    report((link, number, method, times))


def calibrate(
    task: Task,
    n_bytes: int,
    shape: Callable[[float | None], object],
    train: Callable[[str], Times],
    send: Callable[[int, int], float],
) -> list[Link]:
    """Measure C, limit the links so that M is a multiple of it, and measure M."""
    # 1. C: steps without messages, before the links have a limit.
    compute = median(step_time(train(COMPUTE), task.skip) for _ in range(_COMPUTES))
    links = []
    other_machine = task.ranks_per_machine  # its first rank
    local = 0.0

    # 2. Messages within a machine, which no link limits.
    if task.ranks_per_machine > 1:
        local = median(send(n_bytes, 1) for _ in range(_SENDS))

    # 3. M on each link: what a limit lets through is measured, not inferred from its number.
    for ratio in task.ratios:
        # Bits a second at which a message of all parameters takes `ratio` times C.
        rate = 8 * n_bytes / (ratio * compute) if ratio else None
        shape(rate)
        one_way = median(send(n_bytes, other_machine) for _ in range(_SENDS))
        # The least: the others also wait for a core.
        latency = min(send(1, other_machine) for _ in range(_SENDS))
        mbit = None if rate is None else rate / 1e6
        links.append(Link(task.workers, ratio, mbit, compute, one_way, latency, local))
    return links


# The network and the table, from outside

_DRAWN = ("DDP", "CDP-v1", "CDP-v1 paced")  # whose traffic is shown ...
_DRAWN_AT = (1.0, 0.0)  # ... at these ratios
_DIGITS = {
    "step (s)": 4,
    "min": 4,
    "max": 4,
    "M/C": 3,
    "/ DDP": 3,
    "/ tuned": 3,
    "least": 3,
    "paired": 3,
    "most": 3,
    "peak/mean": 2,
    "MB sent": 2,
}

Row = dict[str, Any]

Curves = dict[str, dict[str, Array]]
"""Mbit/s of all ranks together in each window of two training steps, by link and method."""


@dataclass(frozen=True)
class Run:
    """What was measured in one run of a method."""

    workers: int
    ratio: float
    round: int
    method: str
    seconds: float  # of a step
    peak_over_mean: float  # of all ranks' traffic together
    mb_sent: float  # by a rank in a step, to other machines


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """Return a row for each number of workers, link and method."""
    check(config, device)
    folder = output_folder()
    options: Any = OmegaConf.to_container(config)
    options["seed"] = seed
    links, runs = earlier(folder, options)
    tasks = []
    for workers in config.workers:
        # Links belong to a number of workers, since their limits follow from its C.
        own_links = [link for link in links if link.workers == workers]
        ended = {
            (run.ratio, run.round, run.method) for run in runs if run.workers == workers
        }
        task = Task(**options | {"workers": workers, "links": own_links, "done": ended})
        tasks.append(task)
        train(task, folder, links, runs)
    print(f"\n{format_table([{'link': link.name, **asdict(link)} for link in links])}")
    rows = table(runs, links)
    # Only seconds of stages that sleep are known before they run.
    if config.sleep:
        add_predictions(rows, tasks, links)
    return rows


def earlier(folder: Path, options: dict[str, Any]) -> tuple[list[Link], list[Run]]:
    """Return the links and runs that a bench with the same ``options`` has left in ``folder``."""
    path, text = folder / CONTINUED_FILE, json.dumps(options, indent=1)
    if not path.exists():
        path.write_text(text)
    if path.read_text() != text:
        raise UserError(
            f"{folder} is of other options than these: choose another hydra.run.dir"
        )
    return _read(Link, folder / "links.csv"), _read(Run, folder / _TRAININGS)


def _read(kind: Any, path: Path) -> list[Any]:
    if not path.exists():
        return []
    # Columns of objects keep None, which floats would have as NaN.
    table = pd.read_csv(path).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [kind(**row) for row in rows]


def add_predictions(
    rows: list[Row], tasks: Sequence[Task], links: Sequence[Link]
) -> None:
    """Add to each row the simulator's step time and its error, and print how many are near."""
    task_of_size = {task.workers: task for task in tasks}
    link_of_name = {(link.workers, link.name): link for link in links}
    errors = []
    for row in rows:
        if row["method"] == COMPUTE:
            continue
        link = link_of_name[row["workers"], row["link"]]
        seconds = predicted(task_of_size[row["workers"]], link, row["method"])
        error = 100 * (seconds / row["step (s)"] - 1)
        errors.append(abs(error))
        row["predicted (s)"] = round(seconds, 4)
        row["error (%)"] = round(error, 1)
    n_near = sum(error <= 5 for error in errors)
    print(f"\npredicted within 5 % of measured: {n_near} of {len(errors)} step times")


def train(task: Task, folder: Path, links: list[Link], runs: list[Run]) -> None:
    """Train one number of workers; add to ``links`` and ``runs``, write them and a figure."""
    curves: Curves = {}
    n_runs = task.rounds * len(task.ratios) * len(methods_of(task))
    if n_runs == len(task.done):
        return
    with (
        tqdm(total=n_runs, initial=len(task.done), unit="run", leave=False) as bar,
        network.network(task.workers // task.ranks_per_machine) as net,
        closing(Traffic(net)) as traffic,
    ):

        def on_report(_: int, message: Any) -> None:
            if isinstance(message, list):
                links.extend(link for link in message if link not in links)
                write_csv(folder / "links.csv", [asdict(link) for link in links])
                return
            run, curve = measured(task, traffic, *message)
            runs.append(run)
            # After each run, so that a bench that is cut off can continue from it.
            write_csv(folder / _TRAININGS, [asdict(each) for each in runs])
            if run.round == 0 and run.method in _DRAWN and run.ratio in _DRAWN_AT:
                curves.setdefault(link_name(run.ratio), {})[run.method] = curve
            bar.update()

        launch(
            train_all,
            task.workers,
            net,
            task,
            on_report=on_report,
            timeout=task.timeout,
        )
    rows = table(runs, [link for link in links if link.workers == task.workers])
    save(link_times(rows, curves, network.WINDOW), folder / f"links_{task.workers}")


def measured(
    task: Task, traffic: Traffic, link: Link, number: int, method: str, times: Times
) -> tuple[Run, Array]:
    """Return a run, and the traffic of two of its steps, in Mbit/s."""
    seconds = step_time(times, task.skip)
    # The traffic of the timed steps alone, which lie between these two ends of steps of rank 0.
    start, end = times[0][task.skip], times[0][-1]
    moments, bytes_sent = traffic.samples(start, end)
    total_bytes = 0.0
    for machine_bytes in bytes_sent.T:
        sent_before, sent_after = np.interp((start, end), moments, machine_bytes)
        total_bytes += float(sent_after - sent_before)
    n_steps = task.steps - 1 - task.skip
    windows = network.in_windows(moments, bytes_sent, start, end)
    run = Run(
        workers=link.workers,
        ratio=link.ratio,
        round=number,
        method=method,
        seconds=seconds,
        peak_over_mean=network.peak_over_mean(windows),
        mb_sent=total_bytes / task.workers / n_steps / 1e6,
    )
    drawn = windows[: round(2 * seconds / network.WINDOW)].sum(axis=1)
    return run, 8e-6 * drawn / network.WINDOW


def check(config: DictConfig, device: torch.device) -> None:
    """Raise UserError for options that cannot be measured, or not here."""
    check_cpu("links", device)
    check_counts(config, "workers", "image_size", "batch", "stages", of="bench.")
    check_counts(config, "rounds", "ranks_per_machine", of="bench.")
    methods = {*config.methods}
    per_machine = config.ranks_per_machine
    delay_rule = f"is above 0 for delays that links afford: {', '.join(AFFORDED)}"
    checks = [
        ("skip", config.skip >= 0, "is 0 or more"),
        ("steps", config.steps >= config.skip + 2, "is bench.skip and 2 or more"),
        (
            "ratios",
            min(config.ratios, default=-1) >= 0,
            "are of M to C, 0 for no limit",
        ),
        ("methods", methods <= {*ALL}, f"are of {', '.join(ALL)}"),
        ("sleep", 0 <= config.sleep < inf, "is the seconds of a step, or 0 to compute"),
        ("megabytes", 0 < config.megabytes < inf, "is above 0"),
        ("sleep", config.sleep or not methods & {*AFFORDED}, delay_rule),
        (
            "ranks_per_machine",
            not any(workers % per_machine for workers in config.workers),
            "divides bench.workers",
        ),
    ]
    for name in ("workers", "ratios", "methods"):
        checks.append(
            (name, len({*config[name]}) == len(config[name]), "are different")
        )
    check_rules(config, *checks)
    for workers in config.workers:
        network.check(workers // per_machine)


def table(runs: Sequence[Run], links: Sequence[Link]) -> list[Row]:
    """Return a row for each number of workers, link and method; None where there is no number."""
    rows: list[Row] = []
    all_runs = pd.DataFrame([asdict(run) for run in runs])
    for link in links:
        is_here = (all_runs.workers == link.workers) & (all_runs.ratio == link.ratio)
        link_runs = all_runs[is_here]
        seconds = link_runs.pivot(index="round", columns="method", values="seconds")
        seconds = seconds.reindex(columns=ALL).dropna(axis="columns", how="all")
        step = seconds.median()
        # Other work of the machine slows whole rounds, and cancels in ratios within one.
        ratios = seconds.div(seconds.get("DDP", np.nan), axis="index")  # round by round
        sending = link_runs[link_runs.method != COMPUTE].groupby("method")
        traffic = sending.median(numeric_only=True).reindex(step.index)
        columns = pd.DataFrame(
            {
                "M/C": link.one_way / link.compute,
                "step (s)": step,
                "min": seconds.min(),
                "max": seconds.max(),
                "/ DDP": step / step.get("DDP", np.nan),
                "/ tuned": step / step.get("DDP tuned", np.nan),
                "least": ratios.min(),
                "paired": ratios.median(),
                "most": ratios.max(),
                "peak/mean": traffic.peak_over_mean,
                "MB sent": traffic.mb_sent,
            }
        )
        for method, numbers in columns.round(_DIGITS).to_dict("index").items():
            row = {"workers": link.workers, "link": link.name, "method": method}
            for name, number in numbers.items():
                row[name] = None if isnan(number) else number
            rows.append(row)
    return rows
