"""Results as they are read: rows under the same headings in the terminal, on pages, in notebooks.

Each function but :func:`table` gives cells by their headings, of a row of a ``result.json`` or of
the numbers that go into one.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from math import isnan
from typing import Any

from tabulate import tabulate

from toolkit.measure import Measure
from toolkit.units import MB

Row = Mapping[str, Any]
Cells = dict[str, Any]


def table(rows: Sequence[Row], form: str = "simple") -> str:
    """Rows as aligned text, their keys as headings.

    Args:
        form: ``simple``, or ``github`` for Markdown.
    """
    cells = [[f"{x:g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    columns = zip_longest(*cells, fillvalue="")
    return tabulate(
        cells,
        headers=list(rows[0]),
        tablefmt=form,
        disable_numparse=True,  # cells that are formed already stay as they are
        colalign=["right" if all(map(_is_number, column)) else "left" for column in columns],
    )


def _is_number(cell: object) -> bool:
    """Whether a cell is a number, or is written as one, or is none."""
    if isinstance(cell, str):
        return cell in ("", "-") or re.fullmatch(r"[+-]?[\d.]+(e[+-]\d+)?|nan", cell) is not None
    return cell is None or isinstance(cell, int)


def plus_minus(value: float | None, width: float | None, sign: str = "", decimals: int = 2) -> str:
    """``value ± width``; the value alone where no width is known, a dash where neither is.

    Args:
        sign: ``+``, for a difference.
    """
    if value is None or isnan(value):
        return "-"
    known = width and not isnan(width)
    return f"{value:{sign}z.{decimals}f}" + (f" ± {width:.{decimals}f}" if known else "")


def compared(row: Row, by: Measure, first: str) -> Cells:
    """A rule's test accuracy or loss, and by how much it differs from that of ``first``.

    Args:
        row: with ``by.columns``.
    """
    value, spread, difference, width = (row[name] for name in by.columns)
    return {
        f"test {by.name} ({by.unit})": plus_minus(value, spread, decimals=by.decimals),
        f"paired difference from {first}": plus_minus(difference, width, "+", by.decimals),
    }


def staleness(row: Row) -> Cells:
    """How many steps late a schedule's weights are."""
    late = f"{row['staleness_mean']:.2f} ({row['staleness_max']})"
    return {"mean staleness (largest)": late}


def peaks(row: Row) -> Cells:
    """What a schedule holds and sends at most, all workers together."""
    return {
        "peak activations": f"{row['peak_activations']:g}",
        "largest traffic in a slot": f"{row['traffic_max']:g}",
    }


def reductions(by_workers: Mapping[int, float], largest: float) -> Cells:
    """How far the peak of shifted workers is below that of workers together."""
    shares = {f"N = {n}": f"{share:.1%}" for n, share in by_workers.items()}
    return shares | {"1 - mean/peak": f"{largest:.1%}"}


def counted(row: Row) -> Cells:
    """A setting under a rule: its footprint as counted from programs."""
    return _footprint(row) | {
        "kept": f"{_fraction(row['parameters'])} P",
        "in a slot": f"{_fraction(row['traffic_in_slot'])} P",
        "rounds": _fraction(row["rounds"]),
    }


def measured(row: Row) -> Cells:
    """A setting under a rule: its footprint as measured on processes."""
    return _footprint(row, "_measured")


def alike(row: Row, how: str) -> str:
    """Whether what ``row`` has by ``_formula``, or has ``_measured``, is all as counted."""
    names = [name for name in row if name + how in row]
    return "yes" if all(row[name] == row[name + how] for name in names) else "no"


def pipeline(row: Row) -> Cells:
    """One pipeline, as :func:`toolkit.cost.pipelines.assess` has it."""
    return {
        "micro-batches": row["microbatches"],
        "method": row["method"],
        "activations (all)": f"{row['activations']:.4g} ({row['total_activations']:.4g}) A",
        "idle": f"{row['idle']:z.1%}",
        "weights": f"{_fraction(row['weights'])} P",
        **staleness(row),
        "flush": "yes" if row["flush"] else "no",
    }


def rank(row: Row) -> Cells:
    """What a rank held at most, and sent and received in the steps that were recorded."""
    held = {
        f"{of} {name} (MB)": _megabytes(row[f"{of}_{name}"])
        for name in ("activations", "weights")
        for of in ("peak", "predicted")
        if f"{of}_{name}" in row
    }
    return {
        "rank": row["rank"],
        **held,
        "messages sent": row["messages_sent"],
        "sent (MB)": _megabytes(row["bytes_sent"]),
        "messages received": row["messages_received"],
        "received (MB)": _megabytes(row["bytes_received"]),
    }


def _footprint(row: Row, how: str = "") -> Cells:
    def value(name: str) -> str:
        return _fraction(row[name + how])

    return {
        "setting": row["setting"],
        "rule": row["rule"],
        "ranks": value("ranks"),
        "activations (all)": f"{value('activations')} ({value('total_activations')}) A",
        "weights": f"{value('weights')} P",
        "sent": f"{value('traffic')} P",
        "messages": value("messages"),
    }


def _fraction(value: float | Fraction) -> str:
    return str(Fraction(value).limit_denominator(10_000))


def _megabytes(n_bytes: float) -> str:
    return f"{n_bytes / MB:.3f}"
