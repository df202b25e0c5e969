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
from statistics import median
from typing import Any

import numpy as np
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
from toolkit.model import MODELS
from toolkit.runtime import launch

_DRAWN = ("DDP", "CDP-v1", "CDP-v1 paced")  # whose traffic is shown ...
_DRAWN_AT = (1.0, 0.0)  # ... at these ratios

Row = dict[str, Any]
WORDS = """\
Where the speed comes from: one step of staleness lets messages travel while the next step computes.
Delayed all-reduce buys the same overlap with the same staleness. What CDP adds is balance in time,
messages from one rank to one other, and less activation memory."""

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
    """A row for each number of workers, link and method; then one a bar."""
    check(config, device)
    folder = output_folder()
    runs: list[Run] = []
    links: list[Link] = []
    for workers in config.workers:
        options: Any = OmegaConf.to_container(config)
        train(Task(**options | {"workers": workers, "seed": seed}), folder, links, runs)
    shown = []
    for link in links:
        rate = None if link.mbit is None else round(link.mbit, 1)
        found = {"workers": link.workers, "link": link.name, "Mbit/s": rate}
        found |= {"C (s)": round(link.compute, 4), "M (s)": round(link.one_way, 4)}
        shown.append(found | {"M/C": round(link.one_way / link.compute, 3)})
    print(f"\n{format_table(shown)}\n\n{WORDS}")
    rows = table(runs, links)
    return [*rows, *bars(rows)]


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
    check_counts(config, "image_size", "batch", "stages", "rounds", of="bench.")
    lists = {name: list(config[name]) for name in ("workers", "ratios", "methods")}
    above_0 = [config[name] is None or config[name] > 0 for name in ("timeout", "chunk_mb")]
    for name, holds, rule in (
        ("skip", config.skip >= 0, "is 0 or more"),
        ("steps", config.steps >= config.skip + 2, "is bench.skip and 2 or more"),
        ("timeout", above_0[0], "is above 0"),
        ("chunk_mb", above_0[1], "is above 0"),
        *((name, len({*found}) == len(found), "are different") for name, found in lists.items()),
        *((name, len(lists[name]) > 0, "are one or more") for name in ("workers", "ratios")),
        ("ratios", all(ratio >= 0 for ratio in config.ratios), "are of M to C, 0 for no limit"),
        ("methods", {*config.methods} <= {*ALL}, f"are of {', '.join(ALL)}"),
        ("model", config.model in MODELS, f"is one of {', '.join(MODELS)}"),
    ):
        if not holds:
            raise UserError(f"bench.{name} {rule}: got {config[name]}")
    for workers in config.workers:
        network.check(workers)


_DIGITS = {
    "workers": 0, "link": 0, "M/C": 3, "method": 0, "step (s)": 4, "min": 4, "max": 4, "/ DDP": 3,
    "paired": 3, "least": 3, "most": 3, "/ tuned": 3, "peak/mean": 2, "MB sent": 2, "measured": 3,
    "at most": 3, "failed": 0,
}  # fmt: skip
"""The columns of the table, and the decimals of those that are rounded."""


def _filled(values: Row) -> Row:
    """A row with all columns; None where there is no number."""
    row = {name: values.get(name) for name in _DIGITS}
    for name, value in row.items():
        if isinstance(value, float):
            row[name] = None if isnan(value) else round(value, _DIGITS[name])
    return row


def table(runs: Sequence[Run], links: Sequence[Link]) -> list[Row]:
    """A row for each number of workers, link and method."""
    rows: list[Row] = []
    for link in links:
        on_link = [r for r in runs if (r.workers, r.ratio) == (link.workers, link.ratio)]
        seconds = {m: {r.round: r.seconds for r in on_link if r.method == m} for m in ALL}
        ddp = seconds["DDP"]
        for name in (method for method in ALL if seconds[method]):
            mine = seconds[name]
            row: Row = {"workers": link.workers, "link": link.name, "method": name}
            row |= {"M/C": link.one_way / link.compute, "step (s)": median(mine.values())}
            row |= {"min": min(mine.values()), "max": max(mine.values())}
            for base, column in (("DDP", "/ DDP"), ("DDP tuned", "/ tuned")):
                if seconds[base]:
                    row[column] = row["step (s)"] / median(seconds[base].values())
            if paired := [mine[k] / ddp[k] for k in mine.keys() & ddp]:
                row |= {"least": min(paired), "paired": median(paired), "most": max(paired)}
            if name != COMPUTE:
                of_method = [run for run in on_link if run.method == name]
                row["peak/mean"] = median(run.peak_over_mean for run in of_method)
                row["MB sent"] = median(run.mb_sent for run in of_method)
            rows.append(_filled(row))
    return rows


BARS = (
    (1.0, "CDP-v1", "DDP", 0.72),
    (1.0, "CDP-v1", "DDP tuned", 0.78),
    (1.0, "CDP-v1", "delayed all-reduce", 1.05),
    (1.0, "CDP-v2", "DDP", 0.78),
    (2.0, "CDP-v1 16-bit", "DDP 16-bit", 0.90),
)
"""At this ratio, the step time of a method by that of another is at most this much."""
_UNSHAPED = 1.05  # every method's step by DDP's, where messages cost nothing
_PEAK = ("CDP-v1 paced", 3.0)  # of traffic in 10 ms windows, by the mean
_WORKERS = 2


def bars(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each bar with both sides measured; ``failed`` is 0 or 1."""
    found = {(row["link"], row["method"]): row for row in rows if row["workers"] == _WORKERS}
    judged: list[tuple[float, str, float, float]] = []
    for ratio, method, base, most in BARS:
        one, other = (found.get((link_name(ratio), name)) for name in (method, base))
        if one and other:
            relative = one["step (s)"] / other["step (s)"]
            judged.append((ratio, f"{method} / {base}", relative, most))
    free = {name: row for (link, name), row in found.items() if link == link_name(0)}
    ddp = free.get("DDP")
    others = {row["step (s)"]: name for name, row in free.items() if name not in ("DDP", COMPUTE)}
    if others and ddp:
        slowest = max(others)
        what = f"slowest ({others[slowest]}) / DDP"
        judged.append((0, what, slowest / ddp["step (s)"], _UNSHAPED))
    name, most = _PEAK
    if name in free and free[name]["peak/mean"] is not None:
        known = f" (DDP: {ddp['peak/mean']})" if ddp else ""
        judged.append((0, f"peak/mean of {name}{known}", free[name]["peak/mean"], most))
    return [
        _filled({"workers": _WORKERS, "link": link_name(ratio), "method": what})
        | {"measured": round(value, 3), "at most": most, "failed": int(value > most)}
        for ratio, what, value, most in judged
    ]
