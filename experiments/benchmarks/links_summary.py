"""The table of the benchmark of links: medians over rounds, ratios, and what they are held to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from statistics import median
from typing import Any

from benchmarks.methods import ALL, COMPUTE
from benchmarks.timing import ratios

Row = dict[str, Any]

WORDS = """\
Where the speed comes from: one step of staleness lets messages travel while the next step computes.
Delayed all-reduce buys the same overlap with the same staleness. What CDP adds is balance in time,
messages from one rank to one other, and less activation memory."""


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
    worst_peak_over_mean: float  # of the rank where it is most
    mb_sent: float  # by a rank in a step

    @property
    def link(self) -> str:
        return link_name(self.ratio)


def link_name(ratio: float) -> str:
    return "unshaped" if ratio == 0 else f"M = {'' if ratio == 1 else f'{ratio:g} '}C"


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


@dataclass(frozen=True)
class Bar:
    """The median step time of ``method`` by that of ``base`` is at most ``most``."""

    ratio: float
    method: str
    base: str
    most: float


BARS = (
    Bar(1, "CDP-v1", "DDP", 0.72),
    Bar(1, "CDP-v1", "DDP tuned", 0.78),
    Bar(1, "CDP-v1", "delayed all-reduce", 1.05),
    Bar(1, "CDP-v2", "DDP", 0.78),
    Bar(2, "CDP-v1 16-bit", "DDP 16-bit", 0.90),
)
_UNSHAPED = 1.05  # every method's step by DDP's, where messages cost nothing
_PEAK = ("CDP-v1 paced", 3.0)  # of traffic in 10 ms windows, by the mean
_WORKERS = 2


def bars(rows: Sequence[Row], at: Sequence[Bar] = BARS) -> list[Row]:
    """A row for each bar of which both sides were measured, with ``failed`` 0 or 1."""
    at_work = [row for row in rows if row["workers"] == _WORKERS]
    by_link = groupby(at_work, key=lambda row: row["link"])
    found = {name: {row["method"]: row for row in some} for name, some in by_link}
    return [_bar(*values) for values in (*_speed(found, at), *_calm(found))]


Found = dict[str, dict[str, Row]]
Judged = tuple[str, str, float, float]  # link, what, measured, at most


def _speed(found: Found, at: Sequence[Bar]) -> Iterator[Judged]:
    for bar in at:
        here = found.get(link_name(bar.ratio), {})
        if bar.method in here and bar.base in here:
            measured = here[bar.method]["step (s)"] / here[bar.base]["step (s)"]
            yield link_name(bar.ratio), f"{bar.method} / {bar.base}", measured, bar.most


def _calm(found: Found) -> Iterator[Judged]:
    here = found.get(link_name(0), {})
    others = {name: row for name, row in here.items() if name not in ("DDP", COMPUTE)}
    if others and "DDP" in here:
        slowest = max(others, key=lambda name: float(others[name]["step (s)"]))
        measured = others[slowest]["step (s)"] / here["DDP"]["step (s)"]
        yield link_name(0), f"slowest ({slowest}) / DDP", measured, _UNSHAPED
    name, most = _PEAK
    if name in here and here[name]["peak/mean"] is not None:
        beside = f" (DDP: {here['DDP']['peak/mean']})" if "DDP" in here else ""
        yield link_name(0), f"peak/mean of {name}{beside}", here[name]["peak/mean"], most


def _bar(link: str, what: str, measured: float, most: float) -> Row:
    values = {
        "workers": _WORKERS,
        "link": link,
        "method": what,
        "measured": round(measured, 3),
        "at most": most,
        "failed": int(measured > most),
    }
    return _filled(values)
