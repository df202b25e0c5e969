"""How numbers and counts are written in a report."""

from collections.abc import Iterable, Mapping
from math import isnan, nan
from statistics import mean
from typing import Any

from toolkit.format import MB

NONE = "\N{EN DASH}"


def number(value: float, form: str) -> str:
    """``value`` by a format, a dash for NaN."""
    return NONE if isnan(value) else form.format(value)


def text(value: Any) -> str:
    return NONE if value is None else str(value)


def count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def mean_of(rows: Iterable[Mapping[str, float]], name: str) -> float:
    """The mean of a column; NaN where a row has none."""
    values = [row.get(name, nan) for row in rows]
    return mean(values) if values else nan


def per_million(row: Mapping[str, float], name: str, form: str = "{:.3f}") -> str:
    """Bytes as megabytes."""
    return number(row.get(name, nan) / MB, form)
