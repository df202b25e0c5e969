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
from textwrap import wrap
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

_GAP = "  "  # between columns of text

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
    """Return bytes in KiB, MiB from 1024 KiB on, or GiB from 1024 MiB on."""
    unit, name = unit_for(n_bytes, SIZES, at_least=1.0)
    decimals = 0 if name != "GiB" and n_bytes >= 100 * unit else 1
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
        raise UserError(
            f"memory is a number of bytes above 0, such as 16GiB: got {text}"
        )
    base = 1024.0 if match[3] else 1000.0
    return number * base ** " KMGT".index(match[2] or " ")


def digits(value: float) -> str:
    """Return three significant digits, or all digits of a large number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def count(n: int, thing: str) -> str:
    """Return ``n`` with the name of what is counted, such as 2 runs."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def table(rows: Sequence[Row], form: str = "simple", width: int | None = None) -> str:
    """Return rows, at least one, as aligned text or, by ``github``, as Markdown.

    A table that is too wide gets headers of several lines, then cells of several lines. If that is
    not enough, a row becomes a column.

    Args:
        rows: cells by header.
        form: a format of tabulate.
        width: characters of a line, at most; by default the terminal's, if there is one.
    """
    cells = [[_general(value) for value in row.values()] for row in rows]
    headers = list(rows[0])
    aligned = _aligned(headers, cells, form)
    if width is None:
        width = (
            shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        )
    if form != "simple" or _width_of(aligned) <= width:
        return aligned
    split_headers = []
    for header, *column in zip(headers, *cells, strict=True):
        split_headers.append(
            _split_header(header, max(len(str(cell)) for cell in column))
        )
    narrow = _aligned(split_headers, cells, form)
    if _width_of(narrow) <= width:
        return narrow
    wrapped = _wrapped(split_headers, cells, width)
    if _width_of(wrapped) <= width:
        return wrapped
    first_column, *other_columns = zip_longest(headers, *cells)
    upright = _aligned(first_column, other_columns, form)
    return min(upright, wrapped, key=_width_of)


def _split_header(header: str, width: int) -> str:
    """Return a heading in lines that end between words, no wider than cells of this width."""
    text = header.replace("_", "_ ")
    longest_word = max(map(len, text.split()), default=1)
    lines = wrap(
        text, max(width, longest_word), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("_ ", "_")


def _general(value: object) -> object:
    """Return a float as short text, and other values unchanged."""
    return f"{value:g}" if isinstance(value, float) else value


def _aligned(
    headers: Sequence[object], cells: Sequence[Sequence[object]], form: str
) -> str:
    """Return a table whose columns of numbers are aligned to the right."""
    return tabulate(
        cells,
        headers=headers,
        tablefmt=form,
        disable_numparse=True,  # keep formatted cells unchanged
        colalign=_alignments(cells),
    )


def _alignments(cells: Sequence[Sequence[object]]) -> list[str]:
    """Return for each column on which side its cells are aligned."""
    alignments = []
    for column in zip_longest(*cells, fillvalue=""):
        alignments.append("right" if all(map(_is_number, column)) else "left")
    return alignments


def _wrapped(
    headers: Sequence[str], cells: Sequence[Sequence[object]], width: int
) -> str:
    """Return a table whose widest texts are broken between words until it fits, if it can."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in cells]
    limits: list[int] = []  # characters of a line in each column
    least_limits: list[int] = []  # what the heading and the longest word take
    for header, *column in zip(headers, *texts, strict=True):
        heading = max(map(len, header.splitlines()), default=0)
        words = [len(word) for text in column for word in text.split()]
        least_limits.append(max([heading, *words]))
        limits.append(max([heading, *map(len, column)]))
    too_long = sum(limits) + len(_GAP) * (len(limits) - 1) - width
    # One character at a time from the widest column, so that all end about equally wide.
    for _ in range(too_long):
        breakable = [n for n, limit in enumerate(limits) if limit > least_limits[n]]
        if not breakable:
            break
        longest = max(breakable, key=limits.__getitem__)
        limits[longest] -= 1
    rows = [[*headers]]
    for row in texts:
        broken_row = []
        for text, limit in zip(row, limits, strict=True):
            lines = wrap(text, limit, break_long_words=False, break_on_hyphens=False)
            broken_row.append("\n".join(lines))
        rows.append(broken_row)
    # Headings are a row: as headings they would get two more characters each.
    aligned = tabulate(
        rows,
        tablefmt="plain",
        disable_numparse=True,
        colalign=_alignments(cells),
    )
    lines = aligned.splitlines()
    n_heading_lines = max(len(header.splitlines()) for header in headers)
    lines.insert(n_heading_lines, _GAP.join("-" * limit for limit in limits))
    return "\n".join(lines)


def _width_of(text: str) -> int:
    """Return the length of the longest line."""
    return max(map(len, text.splitlines()))


def _is_number(cell: object) -> bool:
    """Return whether a cell is empty, or a number as value or text."""
    if isinstance(cell, str):
        return (
            cell in ("", "-")
            or re.fullmatch(r"[+-]?[\d.]+(e[+-]\d+)?|nan", cell) is not None
        )
    return cell is None or isinstance(cell, int)


def plus_minus(
    value: float | None, width: float | None, sign: str = "", decimals: int = 2
) -> str:
    """Return ``value ± width``, the value alone without a width, or a dash without a value."""
    if value is None or isnan(value):
        return "-"
    text = f"{value:{sign}z.{decimals}f}"
    if width and not isnan(width):
        text += f" ± {width:.{decimals}f}"
    return text


def metric_cells(row: Row, by: Metric, first: str) -> Cells:
    """Return a rule's test metric, its paired difference from rule ``first``, and the verdict.

    The verdict, and its p-value, are those of a row with a margin.
    """
    value, spread, difference, width = (row[name] for name in by.columns)
    cells = {
        f"test {by.name} ({by.unit})": plus_minus(value, spread, decimals=by.decimals),
        f"paired difference from {first}": plus_minus(
            difference, width, "+", by.decimals
        ),
    }
    if row.get("margin") is not None:
        cells[f"at a margin of {row['margin']:g}"] = row["verdict"] or "-"
        cells["p (equivalence)"] = plus_minus(row["equivalence_p"], None, decimals=3)
    return cells


def rate_cells(row: Row) -> Cells:
    """Return the learning rate of a rule."""
    return {"learning rate": f"{row['lr']:g}"}


def staleness_cells(row: Row) -> Cells:
    """Return the mean and largest staleness of a schedule."""
    return {
        "mean staleness (largest)": f"{row['staleness_mean']:.2f} ({row['staleness_max']})"
    }


def peak_cells(row: Row) -> Cells:
    """Return the peaks of activations and traffic, over all workers together."""
    return {
        "peak activations": f"{row['peak_activations']:g}",
        "largest traffic in a slot": f"{row['traffic_max']:g}",
    }


def reduction_cells(by_workers: Mapping[int, float], largest: float) -> Cells:
    """Return how far staggered workers reduce the peak of simultaneous ones."""
    shares = {
        f"N = {n_workers}": f"{share:.1%}" for n_workers, share in by_workers.items()
    }
    return shares | {"1 - mean/peak": f"{largest:.1%}"}


def again_cells(row: Row) -> Cells:
    """Return the least memory of workers on one device, some stages computed again.

    *at once*: all workers compute at the same time; *op after op*: as order "scheduled" runs them.
    """
    together_bytes = row["peak_bytes_together"]
    in_turn_bytes = row["peak_bytes_in_turn"]
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


_DELAY_LEGEND = """\
late: steps; cosine: of the gradient and that of the newest weights
gradient, fresh, weights: norms; fresh: of the newest weights' gradient
moved: distance of the newest weights from those one step before"""


def delay_table(rows: Sequence[Row], labels: Mapping[str, str] | None = None) -> str:
    """Return what delays do to the gradients of stages, as a table with its legend.

    Args:
        rows: means of the delay diagnostics.
        labels: of the rules that rows belong to, by key; None: of one rule.
    """
    return f"{table([_delay_cells(row, labels) for row in rows])}\n\n{_DELAY_LEGEND}"


def _delay_cells(row: Row, labels: Mapping[str, str] | None) -> Cells:
    cells: Cells = {}
    if labels is not None:
        cells["rule"] = labels[row["rule"]]
    cells |= {
        "stage": row["stage"],
        "late": f"{row['delay']:g}",
        "cosine": f"{row['cosine']:.3f}",
    }
    for name in ("gradient", "fresh_gradient", "moved", "weights"):
        cells[name.removesuffix("_gradient")] = digits(row[name])
    return cells


def run_cells(metrics: Row) -> Cells:
    """Return the metrics of a run's last epoch; shares are in per cent."""
    cells: Cells = {}
    for name, value in metrics.items():
        heading = name.replace("_", " ").replace("samples per second", "samples/s")
        text = f"{value:.4g}" if isinstance(value, float) else value
        if name.endswith(("top1", "top5")) and value is not None:
            heading = heading.replace("top", "top-") + " (%)"
            text = f"{100 * value:.2f}"
        cells[heading] = text
    return cells


def counted_cells(row: Row) -> Cells:
    """Return a footprint counted from programs."""
    return measured_cells(row, "") | {
        "kept": f"{fraction(row['parameters'])} P",
        "in a slot": f"{fraction(row['traffic_in_slot'])} P",
        "rounds": fraction(row["rounds"]),
    }


def measured_cells(row: Row, suffix: str = "_measured") -> Cells:
    """Return a footprint measured on processes, or the one in columns with another suffix."""
    names = (
        "ranks",
        "activations",
        "total_activations",
        "weights",
        "traffic",
        "messages",
    )
    text = {name: fraction(row[name + suffix]) for name in names}
    return {
        "setting": row["setting"],
        "rule": row["rule"],
        "ranks": text["ranks"],
        "activations (all)": f"{text['activations']} ({text['total_activations']}) A",
        "weights": f"{text['weights']} P",
        "sent": f"{text['traffic']} P",
        "messages": text["messages"],
    }


def agreement(row: Row, suffix: str) -> str:
    """Return yes if every value of ``row`` equals its counterpart named ``... + suffix``, or no."""
    names = [name for name in row if name + suffix in row]
    return "yes" if all(row[name] == row[name + suffix] for name in names) else "no"


def rank_cells(row: Row) -> Cells:
    """Return a rank's peak memory and traffic over the recorded steps."""
    cells = {"rank": row["rank"]}
    for name in ("activations", "weights"):
        for statistic in ("peak", "predicted", "most"):
            key = f"{statistic}_{name}"
            if key in row:
                cells[f"{statistic} {name} (MB)"] = _megabytes(row[key])
    for key in ("optimizer_state", "predicted_optimizer_state"):
        if key in row:
            cells[f"{key.replace('_', ' ')} (MB)"] = _megabytes(row[key])
    cells |= {
        "messages sent": row["messages_sent"],
        "sent (MB)": _megabytes(row["bytes_sent"]),
    }
    if "predicted_bytes_sent" in row:
        cells["predicted sent (MB)"] = _megabytes(row["predicted_bytes_sent"])
    return cells | {
        "messages received": row["messages_received"],
        "received (MB)": _megabytes(row["bytes_received"]),
    }


def fraction(value: float | Fraction) -> str:
    """Return a number as the nearest fraction of small numbers, such as 14/9."""
    return str(Fraction(value).limit_denominator(10_000))


def _megabytes(n_bytes: float) -> str:
    return f"{n_bytes / MB:.3f}"
