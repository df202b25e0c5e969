"""Cyclic data parallelism on links of limited bandwidth, against DDP and its relatives.

Ranks are processes of this machine in network namespaces, their links limited by token buckets. C
is the time of a training step without any message, M that in which all parameters go from one rank
to another: links are set to ratios of M to C. In every round all methods train on each link, in
random order; medians over rounds are quoted, and ratios to DDP. Linux, as root.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks import network
from benchmarks.links_rank import ALL, COMPUTE, Ranks, Task
from benchmarks.network import Array, Network, Traffic
from benchmarks.timing import ratios
from toolkit.cli.validate import check_counts
from toolkit.errors import UserError
from toolkit.figures import link_times, save
from toolkit.files import write_csv
from toolkit.format import table as format_table
from toolkit.model import MODELS

_CLOSE = 0.03  # of M/C, beside what was asked for
_CORRECTIONS = 3
_COMPUTES = 5  # runs without messages, of which the median counts
_SENDS = 3  # of all parameters, of which the median counts
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
class Link:
    """One setting of the links."""

    workers: int
    ratio: float  # of M to C that was asked for; 0: no limit
    mbit: float | None  # a second, of the limit
    compute: float  # C: seconds of a step without messages
    one_way: float  # M: seconds in which all parameters go from one rank to another

    @property
    def name(self) -> str:
        return link_name(self.ratio)


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

    @property
    def link(self) -> str:
        return link_name(self.ratio)


def link_name(ratio: float) -> str:
    return "unshaped" if ratio == 0 else f"M = {'' if ratio == 1 else f'{ratio:g} '}C"


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row for each number of workers, link and method; then one a bar."""
    check(config, device)
    folder = Path(HydraConfig.get().runtime.output_dir)
    runs: list[Run] = []
    links: list[Link] = []
    for workers in config.workers:
        curves: Curves = {}
        with network.network(workers) as net, network.sampled(net) as sent:
            task = _task(config, workers, seed)
            log = folder / f"ranks_{workers}.log"
            with Ranks(net, task, config.timeout, log) as ranks:
                here = calibrate(config, net, ranks, workers)
                links += here
                write_csv(folder / "links.csv", [asdict(link) for link in links])
                for done, curve in _all_runs(config, seed, net, sent, ranks, here):
                    runs.append(done)
                    write_csv(folder / "runs.csv", [asdict(each) for each in runs])
                    if done.round == 0 and done.method in _DRAWN and done.ratio in _DRAWN_AT:
                        curves.setdefault(done.link, {})[done.method] = curve
        _show(links, runs, workers, curves, folder)
    print(f"\n{format_table([_shown(link) for link in links])}\n\n{WORDS}")
    rows = table(runs, links)
    return [*rows, *bars(rows)]


def calibrate(config: DictConfig, net: Network, ranks: Ranks, workers: int) -> list[Link]:
    """Measure C, and find the rates at which M/C is what was asked for."""
    n_bytes, *_ = ranks.order("hello")
    alone = (ranks.order("train", method=COMPUTE, steps=config.steps) for _ in range(_COMPUTES))
    compute = median(step_time(answers, config.skip) for answers in alone)
    return [_find(ratio, n_bytes, compute, net, ranks, workers) for ratio in config.ratios]


def _find(
    ratio: float, n_bytes: int, compute: float, net: Network, ranks: Ranks, workers: int
) -> Link:
    def measured(rate: float | None) -> Link:
        net.shape(rate)
        begins, ends, *_ = ranks.order("send", bytes=n_bytes, times=_SENDS)
        one_way = median(end - begin for begin, end in zip(begins, ends, strict=True))
        return Link(workers, ratio, None if rate is None else rate / 1e6, compute, one_way)

    if ratio == 0:
        return measured(None)
    rate = 8 * n_bytes / (ratio * compute)
    link = measured(rate)
    for _ in range(_CORRECTIONS):
        off = link.one_way / (ratio * compute)
        if abs(off - 1) <= _CLOSE:
            break
        rate *= off
        link = measured(rate)
    return link


def _all_runs(
    config: DictConfig, seed: int, net: Network, sent: Traffic, ranks: Ranks, links: list[Link]
) -> Iterator[tuple[Run, Array]]:
    """:func:`one_run` of every method in all rounds on all links."""
    methods = list(config.methods) or list(ALL)
    n = config.rounds * len(links) * len(methods)
    with tqdm(total=n, unit="run", leave=False) as bar:
        for number in range(config.rounds):
            for link in links:
                net.shape(None if link.mbit is None else 1e6 * link.mbit)
                order = random.Random(f"{seed} {number} {link.name}").sample(methods, len(methods))
                for method in order:
                    bar.set_description_str(f"{link.workers} workers, {link.name}, {method}")
                    yield one_run(config, link, number, method, ranks, sent)
                    bar.update()


def one_run(
    config: DictConfig, link: Link, number: int, method: str, ranks: Ranks, sent: Traffic
) -> tuple[Run, Array]:
    """Train some steps, of which the first do not count; also the traffic of two, in Mbit/s."""
    sent.mark()
    answers = ranks.order("train", method=method, steps=config.steps)
    seconds = step_time(answers, config.skip)
    start, end = answers[0][config.skip], answers[0][-1]
    samples = sent.samples(end)
    windows = network.in_windows(*samples, start, end)
    n_steps = config.steps - 1 - config.skip
    all_sent = np.array([np.interp((start, end), samples[0], of) for of in samples[1].T])
    done = Run(
        link.workers,
        link.ratio,
        number,
        method,
        seconds,
        network.peak_over_mean(windows),
        float((all_sent[:, 1] - all_sent[:, 0]).mean()) / n_steps / 1e6,
    )
    shown = windows[: round(2 * seconds / network.WINDOW)].sum(axis=1)
    return done, 8e-6 * shown / network.WINDOW


def step_time(answers: list[list[float]], skip: int) -> float:
    """Seconds of a step, of the slowest rank.

    Args:
        answers: of each rank, the moments at which its steps ended.
        skip: steps are timed from the end of step ``skip`` on, the first being 0.
    """
    return max((moments[-1] - moments[skip]) / (len(moments) - 1 - skip) for moments in answers)


def check(config: DictConfig, device: torch.device) -> None:
    """Refuse what cannot be measured, or not here."""
    if device.type != "cpu":
        raise UserError(f"bench=links computes on the CPU: got {device}; give device=cpu")
    check_counts(config, "image_size", "batch", "stages", "rounds", of="bench.")
    if config.skip < 0 or config.steps < config.skip + 2:
        raise UserError(
            f"bench.steps is bench.skip and 2 or more, and bench.skip 0 or more:"
            f" got {config.steps} and {config.skip}"
        )
    for name in ("timeout", "chunk_mb"):
        if config[name] is not None and not config[name] > 0:
            raise UserError(f"bench.{name} is above 0: got {config[name]}")
    for name in ("workers", "ratios"):
        if not config[name] or len(set(config[name])) < len(config[name]):
            raise UserError(f"bench.{name} are one or more, all different: got {config[name]}")
    if min(config.ratios) < 0:
        raise UserError(f"bench.ratios are of M to C, 0 for no limit: got {config.ratios}")
    if set(config.methods) - set(ALL) or len(set(config.methods)) < len(config.methods):
        raise UserError(
            f"bench.methods are some of {', '.join(ALL)}, each once: got {config.methods}"
        )
    if config.model not in MODELS:
        raise UserError(f"bench.model is one of {', '.join(MODELS)}: got {config.model}")
    for workers in config.workers:
        network.check(workers)


def _task(config: DictConfig, workers: int, seed: int) -> Task:
    same = ("model", "image_size", "batch", "stages", "chunk_mb", "chains")
    cuts = config.partition
    partition = OmegaConf.to_container(cuts) if OmegaConf.is_config(cuts) else cuts
    options = {name: config[name] for name in same}
    return Task(workers=workers, partition=partition, seed=seed, **options)


def _show(links: list[Link], runs: list[Run], workers: int, curves: Curves, folder: Path) -> None:
    """The figure of a number of workers, and the traffic in it."""
    here = [link for link in links if link.workers == workers]
    save(link_times(table(runs, here), curves, network.WINDOW), folder / f"links_{workers}")
    series = [
        {"link": link, "method": method, "seconds": round(k * network.WINDOW, 3), "Mbit/s": value}
        for link, by_method in curves.items()
        for method, curve in by_method.items()
        for k, value in enumerate(curve.round(3).tolist())
    ]
    if series:
        write_csv(folder / f"traffic_{workers}.csv", series)


def _shown(link: Link) -> dict[str, Any]:
    return {
        "workers": link.workers,
        "link": link.name,
        "Mbit/s": None if link.mbit is None else round(link.mbit, 1),
        "C (s)": round(link.compute, 4),
        "M (s)": round(link.one_way, 4),
        "M/C": round(link.one_way / link.compute, 3),
    }


def table(runs: Sequence[Run], links: Sequence[Link]) -> list[Row]:
    """A row for each number of workers, link and method."""
    order = {(link.workers, link.ratio): link for link in links}
    found: list[Row] = []
    for place, link in order.items():
        here = [run for run in runs if (run.workers, run.ratio) == place]
        by_method: dict[str, list[Run]] = {}
        for run in sorted(here, key=lambda run: run.round):
            by_method.setdefault(run.method, []).append(run)
        found += [_row(link, by_method[name], by_method) for name in ALL if name in by_method]
    return found


def _row(link: Link, taken: list[Run], all_taken: dict[str, list[Run]]) -> Row:
    name = taken[0].method
    seconds = [run.seconds for run in taken]
    talks = name != COMPUTE
    paired: tuple[float | None, ...] = (None, None, None)
    if "DDP" in all_taken:
        base = {run.round: run.seconds for run in all_taken["DDP"]}
        both = [run for run in taken if run.round in base]
        if both:
            paired = ratios([run.seconds for run in both], [base[run.round] for run in both])
    least, middle, most = paired
    return _filled(
        {
            "workers": link.workers,
            "link": link.name,
            "M/C": _rounded(link.one_way / link.compute),
            "method": name,
            "step (s)": _rounded(median(seconds), 4),
            "min": _rounded(min(seconds), 4),
            "max": _rounded(max(seconds), 4),
            "/ DDP": _rounded(_of(seconds, all_taken.get("DDP"))),
            "paired": _rounded(middle),
            "least": _rounded(least),
            "most": _rounded(most),
            "/ tuned": _rounded(_of(seconds, all_taken.get("DDP tuned"))),
            "peak/mean": _rounded(median(r.peak_over_mean for r in taken) if talks else None, 2),
            "MB sent": _rounded(median(run.mb_sent for run in taken) if talks else None, 2),
        }
    )


_COLUMNS = (
    "workers", "link", "M/C", "method", "step (s)", "min", "max", "/ DDP", "paired", "least",
    "most", "/ tuned", "peak/mean", "MB sent", "measured", "at most", "failed",
)  # fmt: skip


def _filled(values: Row) -> Row:
    return {name: values.get(name) for name in _COLUMNS}


def _of(seconds: list[float], base: list[Run] | None) -> float | None:
    """The ratio of medians."""
    return median(seconds) / median(run.seconds for run in base) if base else None


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or isnan(value) else round(value, digits)


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
    """A row for each bar of which both sides were measured, with ``failed`` 0 or 1."""
    found = {(row["link"], row["method"]): row for row in rows if row["workers"] == _WORKERS}
    held: list[Row] = []

    def hold(link: str, what: str, measured: float, most: float) -> None:
        judged = {"measured": round(measured, 3), "at most": most, "failed": int(measured > most)}
        held.append(_filled({"workers": _WORKERS, "link": link, "method": what} | judged))

    for ratio, method, base, most in BARS:
        one, other = (found.get((link_name(ratio), name)) for name in (method, base))
        if one and other:
            hold(one["link"], f"{method} / {base}", one["step (s)"] / other["step (s)"], most)
    free = {name: row for (link, name), row in found.items() if link == link_name(0)}
    ddp = free.get("DDP")
    others = {name: row for name, row in free.items() if name not in ("DDP", COMPUTE)}
    if others and ddp:
        slowest = max(others, key=lambda name: float(others[name]["step (s)"]))
        measured = others[slowest]["step (s)"] / ddp["step (s)"]
        hold(ddp["link"], f"slowest ({slowest}) / DDP", measured, _UNSHAPED)
    name, most = _PEAK
    if name in free and free[name]["peak/mean"] is not None:
        beside = f" (DDP: {ddp['peak/mean']})" if ddp else ""
        hold(link_name(0), f"peak/mean of {name}{beside}", free[name]["peak/mean"], most)
    return held
