"""Numbers and tables as text: the same headings in the terminal, on pages and in notebooks.

Functions named ``..._cells`` return cells by heading for one row of a ``result.json``.
"""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from math import isnan
from typing import Any

from tabulate import tabulate

from toolkit.errors import UserError
from toolkit.metric import Metric

MB = 1e6
MIB, GIB = 2**20, 2**30

Unit = tuple[float, str]
TIMES: Sequence[Unit] = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES: Sequence[Unit] = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"))
RATES: Sequence[Unit] = ((1e9, "GB/s"), (MB, "MB/s"), (1e3, "kB/s"))

Row = Mapping[str, Any]
Cells = dict[str, Any]


def unit_for(largest: float, units: Sequence[Unit], at_least: float = 2.0) -> Unit:
    """Return the largest unit that fits ``at_least`` times into ``largest``, or the last."""
    return next((unit for unit in units if largest >= at_least * unit[0]), units[-1])


def duration(seconds: float) -> tuple[str, str]:
    """Return seconds as a number of three digits, and its unit."""
    unit, name = unit_for(seconds, TIMES, at_least=1.0)
    return digits(seconds / unit), name


def size(n_bytes: float) -> str:
    """Return bytes in MiB, or in GiB from 1024 MiB on."""
    unit, name = unit_for(n_bytes, SIZES[:2], at_least=1.0)
    decimals = 0 if name == "MiB" and n_bytes >= 100 * unit else 1
    return f"{n_bytes / unit:.{decimals}f} {name}"


def bytes_in(text: str | float) -> float:
    """Return the bytes of a number, or of text such as 16GiB or 16GB.

    Raises:
        UserError: it is something else, or not above 0.
    """
    match = re.fullmatch(r"([\d.e+]+) ?([KMGT]?)(i?)B?", str(text))
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not number > 0:
        raise UserError(f"memory is a number of bytes above 0, such as 16GiB: got {text}")
    return number * (1024.0 if match[3] else 1000.0) ** " KMGT".index(match[2] or " ")


def digits(value: float) -> str:
    """Return three significant digits, or all digits of a large number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def count(n: int, thing: str) -> str:
    """Return ``n`` with the name of what is counted, such as 2 runs."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def table(rows: Sequence[Row], form: str = "simple", width: int | None = None) -> str:
    """Return rows, at least one, as aligned text or, by ``github``, as Markdown.

    Text that is too wide gets headers of several lines. If that is not enough, a row becomes a
    column.

    Args:
        rows: cells by header.
        form: a format of tabulate.
        width: characters of a line, at most; by default the terminal's, if there is one.
    """
    cells = [
        [f"{value:g}" if isinstance(value, float) else value for value in row.values()]
        for row in rows
    ]
    headers = list(rows[0])
    aligned = _aligned(headers, cells, form)
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    if form != "simple" or _width_of(aligned) <= width:
        return aligned
    split_headers = [header.replace(" ", "\n").replace("_", "_\n") for header in headers]
    if _width_of(narrow := _aligned(split_headers, cells, form)) <= width:
        return narrow
    turned_rows = [
        ["" if value is None else value for value in row] for row in zip_longest(headers, *cells)
    ]
    upright = _aligned(turned_rows[0], turned_rows[1:], form)
    return min(upright, narrow, key=_width_of)


def _aligned(headers: Sequence[str], cells: Sequence[Sequence[object]], form: str) -> str:
    """Return a table whose columns of numbers are aligned to the right."""
    columns = zip_longest(*cells, fillvalue="")
    return tabulate(
        cells,
        headers=headers,
        tablefmt=form,
        disable_numparse=True,  # keep formatted cells unchanged
        colalign=["right" if all(map(_is_number, column)) else "left" for column in columns],
    )


def _width_of(text: str) -> int:
    """Return the length of the longest line."""
    return max(map(len, text.splitlines()))


def _is_number(cell: object) -> bool:
    """Return whether a cell is empty, or a number as value or text."""
    if isinstance(cell, str):
        return cell in ("", "-") or re.fullmatch(r"[+-]?[\d.]+(e[+-]\d+)?|nan", cell) is not None
    return cell is None or isinstance(cell, int)


def plus_minus(value: float | None, width: float | None, sign: str = "", decimals: int = 2) -> str:
    """Return ``value ± width``, the value alone without a width, or a dash without a value."""
    if value is None or isnan(value):
        return "-"
    has_width = width and not isnan(width)
    return f"{value:{sign}z.{decimals}f}" + (f" ± {width:.{decimals}f}" if has_width else "")


def metric_cells(row: Row, by: Metric, first: str) -> Cells:
    """Return a rule's test metric, its paired difference from rule ``first``, and the verdict.

    The verdict, and its p-value, are those of a row with a margin.
    """
    value, spread, difference, width = (row[name] for name in by.columns)
    cells = {
        f"test {by.name} ({by.unit})": plus_minus(value, spread, decimals=by.decimals),
        f"paired difference from {first}": plus_minus(difference, width, "+", by.decimals),
    }
    if (margin := row.get("margin")) is None:
        return cells
    p = plus_minus(row["equivalence_p"], None, decimals=3)
    return cells | {f"at a margin of {margin:g}": row["verdict"] or "-", "p (equivalence)": p}


def rate_cells(row: Row) -> Cells:
    """Return the learning rate of a rule."""
    return {"learning rate": f"{row['lr']:g}"}


def staleness_cells(row: Row) -> Cells:
    """Return the mean and largest staleness of a schedule."""
    return {"mean staleness (largest)": f"{row['staleness_mean']:.2f} ({row['staleness_max']})"}


def peak_cells(row: Row) -> Cells:
    """Return the peaks of activations and traffic, over all workers together."""
    peak, traffic = f"{row['peak_activations']:g}", f"{row['traffic_max']:g}"
    return {"peak activations": peak, "largest traffic in a slot": traffic}


def reduction_cells(by_workers: Mapping[int, float], largest: float) -> Cells:
    """Return how far staggered workers reduce the peak of simultaneous ones."""
    shares = {f"N = {n_workers}": f"{share:.1%}" for n_workers, share in by_workers.items()}
    return shares | {"1 - mean/peak": f"{largest:.1%}"}


def again_cells(row: Row) -> Cells:
    """Return the least memory of workers on one device, some stages computed again.

    *at once*: all workers compute at the same time; *op after op*: as order "scheduled" runs them.
    """
    together_bytes, in_turn_bytes = row["peak_bytes_together"], row["peak_bytes_in_turn"]
    return {
        "N": row["workers"],
        "computed again": ", ".join(map(str, row["recomputed"])) or "none",
        "extra time": f"{row['extra_time']:.1%}",
        "together": size(together_bytes),
        "at once": size(row["peak_bytes_shifted"]),
        "below": f"{row['reduction']:.1%}",
        "limit": f"{row['largest_reduction']:.1%}",
        "op after op": size(in_turn_bytes),
        "this below": f"{1 - in_turn_bytes / together_bytes:.1%}",
    }


def counted_cells(row: Row) -> Cells:
    """Return a footprint counted from programs."""
    return measured_cells(row, "") | {
        "kept": f"{_fraction(row['parameters'])} P",
        "in a slot": f"{_fraction(row['traffic_in_slot'])} P",
        "rounds": _fraction(row["rounds"]),
    }


def measured_cells(row: Row, how: str = "_measured") -> Cells:
    """Return a footprint measured on processes, or otherwise determined."""
    names = ("ranks", "activations", "total_activations", "weights", "traffic", "messages")
    value = {name: _fraction(row[name + how]) for name in names}
    return {
        "setting": row["setting"],
        "rule": row["rule"],
        "ranks": value["ranks"],
        "activations (all)": f"{value['activations']} ({value['total_activations']}) A",
        "weights": f"{value['weights']} P",
        "sent": f"{value['traffic']} P",
        "messages": value["messages"],
    }


def agreement(row: Row, how: str) -> str:
    """Return yes if every value of ``row`` equals its counterpart named ``... + how``."""
    names = [name for name in row if name + how in row]
    return "yes" if all(row[name] == row[name + how] for name in names) else "no"


def pipeline_cells(row: Row) -> Cells:
    """Return a pipeline that :func:`toolkit.cost.pipeline_table.assess` counted."""
    activations, total_activations, messages, boundaries = (
        float(row[key]) for key in ("activations", "total_activations", "messages", "boundaries")
    )
    return {
        "micro-batches": row["microbatches"],
        "method": row["method"],
        "activations (all)": f"{activations:.4g} ({total_activations:.4g}) A",
        "idle": f"{row['idle']:z.1%}",
        "weights": f"{_fraction(row['weights'])} P",
        **staleness_cells(row),
        "flush": "yes" if row["flush"] else "no",
        "sent (messages)": f"{_fraction(row['traffic'])} P ({messages:.4g})",
        "boundaries": f"{boundaries:.4g}",
    }


def situation_cells(row: Row) -> Cells:
    """Return what :func:`toolkit.cost.situations.assess` found; times are by that of DP."""
    cells = {"situation": row["situation"], "workers": row["workers"]}
    cells["M/C"] = f"{row['ratio']:g}"
    for name in ("devices", "activations"):
        dp_text, cdp_text = (f"{row[key]:.4g}" for key in (f"{name}_dp", name))
        cells[name] = dp_text if dp_text == cdp_text else f"{dp_text} → {cdp_text}"
    for name, label in (("cdp_v1", "CDP-v1"), ("cdp_v2", "CDP-v2"), ("affordable", "affordable")):
        cells[label] = f"{row[f'{name}_time']:.2f} ({row[f'{name}_staleness']:.2f})"
    return cells


def plan_cells(row: Row) -> Cells:
    """Return a prediction of :class:`toolkit.plan.Plan`."""
    return {
        "schedule": row["schedule"],
        "by DDP's time": f"{row['ratio']:.2f}",
        "ms a step": digits(row["seconds"] * 1e3),
        "fullest rank": size(row["memory"]),
        "ranks": row["ranks"],
        "staleness": f"{row['staleness']:.2f}",
        "MB a step": digits(row["traffic"] / MB),
        "fits": "yes" if row["fits"] else "no",
    }


def rank_cells(row: Row) -> Cells:
    """Return a rank's peak memory and traffic over the recorded steps."""
    measured = {
        f"{statistic} {name} (MB)": _megabytes(row[f"{statistic}_{name}"])
        for name in ("activations", "weights")
        for statistic in ("peak", "predicted", "most")
        if f"{statistic}_{name}" in row
    }
    return {
        "rank": row["rank"],
        **measured,
        "messages sent": row["messages_sent"],
        "sent (MB)": _megabytes(row["bytes_sent"]),
        "messages received": row["messages_received"],
        "received (MB)": _megabytes(row["bytes_received"]),
    }


def _fraction(value: float | Fraction) -> str:
    return str(Fraction(value).limit_denominator(10_000))


def _megabytes(n_bytes: float) -> str:
    return f"{n_bytes / MB:.3f}"
