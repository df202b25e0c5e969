"""Cyclic data parallelism on links of limited bandwidth, against DDP and its relatives.

Ranks are processes of this machine in network namespaces, their links limited by token buckets. C
is the time of a training step without any message, M that in which all parameters go from one rank
to another: links are set to ratios of M to C. In every round all methods train on each link, in
random order; medians over rounds are quoted, and ratios to DDP. Linux, as root.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks import network
from benchmarks.links_rank import ALL, COMPUTE, Link, Task, Times, link_name, step_time, train_all
from benchmarks.network import Array, Traffic
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.figures import link_times, save
from toolkit.files import write_csv
from toolkit.format import table as format_table
from toolkit.runtime import launch

_DRAWN = ("DDP", "CDP-v1", "CDP-v1 paced")  # whose traffic is shown ...
_DRAWN_AT = (1.0, 0.0)  # ... at these ratios
_DIGITS = {
    "step (s)": 4, "min": 4, "max": 4, "M/C": 3, "/ DDP": 3, "/ tuned": 3, "least": 3, "paired": 3,
    "most": 3, "peak/mean": 2, "MB sent": 2,
}  # fmt: skip

Row = dict[str, Any]

Curves = dict[str, dict[str, Array]]
"""Mbit/s of all ranks together in each window of two training steps, by link and method."""


@dataclass(frozen=True)
class Run:
    """What one run of a method has shown."""

    workers: int
    ratio: float
    round: int
    method: str
    seconds: float  # of a step
    peak_over_mean: float  # of all ranks' traffic together
    mb_sent: float  # by a rank in a step


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """A row for each number of workers, link and method."""
    check(config, device)
    folder = output_folder()
    runs: list[Run] = []
    links: list[Link] = []
    for workers in config.workers:
        options: Any = OmegaConf.to_container(config)
        train(Task(**options | {"workers": workers, "seed": seed}), folder, links, runs)
    shown = [
        {
            "workers": link.workers,
            "link": link.name,
            "Mbit/s": None if link.mbit is None else round(link.mbit, 1),
            "C (s)": round(link.compute, 4),
            "M (s)": round(link.one_way, 4),
            "M/C": round(link.one_way / link.compute, 3),
        }
        for link in links
    ]
    print(f"\n{format_table(shown)}")
    return table(runs, links)


def train(task: Task, folder: Path, links: list[Link], runs: list[Run]) -> None:
    """Train one number of workers; add to ``links`` and ``runs``, write them and a figure."""
    curves: Curves = {}
    n_runs = task.rounds * len(task.ratios) * len(task.methods or ALL)
    with (
        tqdm(total=n_runs, unit="run", leave=False) as bar,
        network.network(task.workers) as net,
        closing(Traffic(net)) as traffic,
    ):

        def take(_: int, found: Any) -> None:
            if isinstance(found, list):
                links.extend(found)
                write_csv(folder / "links.csv", [asdict(link) for link in links])
                return
            done, curve = measured(task, traffic, *found)
            runs.append(done)
            write_csv(folder / "runs.csv", [asdict(each) for each in runs])
            if done.round == 0 and done.method in _DRAWN and done.ratio in _DRAWN_AT:
                curves.setdefault(link_name(done.ratio), {})[done.method] = curve
            bar.update()

        launch(train_all, task.workers, net, task, on_report=take, timeout=task.timeout)
    rows = table(runs, [link for link in links if link.workers == task.workers])
    save(link_times(rows, curves, network.WINDOW), folder / f"links_{task.workers}")


def measured(
    task: Task, traffic: Traffic, link: Link, number: int, method: str, times: Times
) -> tuple[Run, Array]:
    """A run, and the traffic of two of its steps, in Mbit/s."""
    seconds = step_time(times, task.skip)
    start, end = times[0][task.skip], times[0][-1]
    moments, sent = traffic.samples(start, end)
    windows = network.in_windows(moments, sent, start, end)
    sums = np.array([np.interp((start, end), moments, of_rank) for of_rank in sent.T])
    mb_sent = float((sums[:, 1] - sums[:, 0]).mean()) / (task.steps - 1 - task.skip) / 1e6
    peak = network.peak_over_mean(windows)
    shown = windows[: round(2 * seconds / network.WINDOW)].sum(axis=1)
    done = Run(link.workers, link.ratio, number, method, seconds, peak, mb_sent)
    return done, 8e-6 * shown / network.WINDOW


def check(config: DictConfig, device: torch.device) -> None:
    """Refuse what cannot be measured, or not here."""
    if device.type != "cpu":
        raise UserError(f"bench=links computes on the CPU: got {device}; give device=cpu")
    check_counts(config, "workers", "image_size", "batch", "stages", "rounds", of="bench.")
    for name, holds, rule in (
        ("skip", config.skip >= 0, "is 0 or more"),
        ("steps", config.steps >= config.skip + 2, "is bench.skip and 2 or more"),
        ("ratios", min(config.ratios, default=-1) >= 0, "are of M to C, 0 for no limit"),
        ("methods", {*config.methods} <= {*ALL}, f"are of {', '.join(ALL)}"),
        *(
            (name, len({*config[name]}) == len(config[name]), "are different")
            for name in ("workers", "ratios", "methods")
        ),
    ):
        if not holds:
            raise UserError(f"bench.{name} {rule}: got {config[name]}")
    for workers in config.workers:
        network.check(workers)


def table(runs: Sequence[Run], links: Sequence[Link]) -> list[Row]:
    """A row for each number of workers, link and method; None where there is no number."""
    rows: list[Row] = []
    every = pd.DataFrame([asdict(run) for run in runs])
    for link in links:
        here = every[(every.workers == link.workers) & (every.ratio == link.ratio)]
        seconds = here.pivot(index="round", columns="method", values="seconds")
        seconds = seconds.reindex(columns=ALL).dropna(axis="columns", how="all")
        for name, mine in seconds.items():
            row: Row = {"workers": link.workers, "link": link.name, "method": name}
            numbers = {"M/C": link.one_way / link.compute, "step (s)": mine.median()}
            numbers |= {"min": mine.min(), "max": mine.max()}
            for base, column in (("DDP", "/ DDP"), ("DDP tuned", "/ tuned")):
                theirs = seconds.get(base, pd.Series(dtype=float))
                numbers[column] = mine.median() / theirs.median()
            paired = mine / seconds.get("DDP", np.nan)
            numbers |= {"least": paired.min(), "paired": paired.median(), "most": paired.max()}
            of_method = here[here.method == name].median(numeric_only=True)
            sends = name != COMPUTE
            numbers["peak/mean"] = of_method.peak_over_mean if sends else np.nan
            numbers["MB sent"] = of_method.mb_sent if sends else np.nan
            for column, value in numbers.items():
                row[column] = None if isnan(value) else round(float(value), _DIGITS[column])
            rows.append(row)
    return rows
