"""A measured timeline, from the table that a run has left."""

import csv
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 20_000  # spans; more make a figure of many megabytes


def draw_spans(path: Path, name: str) -> "Figure":
    """The figure of ``spans.csv``.

    Raises:
        ValueError: it cannot be read, or holds too many to draw.
    """
    from toolkit.cost.timeline import COMPUTED, LANES, Span, Timeline
    from toolkit.figures.timeline_figure import activity

    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
        spans = [
            Span(
                rank=int(row["rank"]),
                lane=row["lane"],
                start=float(row["start"]),
                end=float(row["end"]),
                name=row["name"],
                stage=int(row["stage"]),
                microbatch=None,
                step=None,
                bytes=float(row["bytes"] or 0),
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path.name} cannot be read ({error!r})") from error
    n_ranks = 1 + max((span.rank for span in spans), default=-1)
    sound = all(
        span.rank >= 0
        and span.lane in LANES
        and isfinite(span.end)
        and 0 <= span.start <= span.end
        and (span.lane != "compute" or span.computed in COMPUTED)
        for span in spans
    )
    if not spans or not sound or not any(span.end for span in spans):
        raise UserError(f"{path.name} holds no timeline")
    if len(spans) > _MOST or n_ranks > 64:
        raise UserError(f"{path.name} has {len(spans)} spans of {n_ranks} ranks, too many to draw")
    return activity(Timeline(name, n_ranks, spans, (), (max(span.end for span in spans),)))
