"""A schedule as text: a row per rank, a column per slot, an op as ``<stage><kind><microbatch>``.

A rank that runs several ops at once (a single device) takes one row for each micro-batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import whole
from toolkit.schedule.instruction import Op
from toolkit.schedule.placement import Placement
from toolkit.schedule.timing import Timing

_ROWS, _COLUMNS = 16, 40  # shown around an op in brackets


def rows(layout: Placement) -> tuple[str, int]:
    """Return what a row shows, and the number of rows."""
    if layout.one_device:
        return "micro-batch", layout.n_microbatches
    return "rank", layout.n_ranks


def row_of(layout: Placement, rank: int, microbatch: int) -> int:
    """Return the row that shows ``rank`` at work on ``microbatch``."""
    return microbatch if layout.one_device else rank


@dataclass
class _Cells:
    """The texts of a grid, by row and tick.

    Attributes:
        rows: texts by tick, by row.
        end: tick after the last op.
        marked: row and tick of the op in brackets.
    """

    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    end: int = 0
    marked: tuple[int, int] | None = None


def render(
    timing: Timing,
    layout: Placement,
    n_steps: int = 1,
    mark: tuple[Op, int] | None = None,
) -> str:
    """Return the grid of ``n_steps`` training steps (1 or more).

    Columns are ticks if starts fall between slots, and an op covers its further ticks with ``-``.
    Primes distinguish steps that overlap. ``mark`` = (op, step) is put in brackets; a large grid
    then shows its surroundings only.
    """
    cells = _cells(timing, layout, whole(n_steps, "n_steps", 1), mark)
    shown_rows: Sequence[int] = sorted(cells.rows)
    shown_ticks: Sequence[int] = range(cells.end)
    if cells.marked is not None:
        row, tick = cells.marked
        shown_rows = _around(shown_rows, shown_rows.index(row), _ROWS)
        shown_ticks = _around(shown_ticks, tick, _COLUMNS)

    header = ["slot"]
    for tick in shown_ticks:
        slot, remainder = divmod(tick, timing.ticks_per_slot)
        header.append("" if remainder else str(slot))
    label = "rank"
    if layout.one_device and layout.n_microbatches > 1:
        label = "rank 0 mb"
    table = [header]
    for row in shown_rows:
        texts = [cells.rows[row].get(tick, ".") for tick in shown_ticks]
        table.append([f"{label} {row}", *texts])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for texts in table:
        padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
        lines.append(" ".join(padded).rstrip())
    return "\n".join(lines)


def _cells(
    timing: Timing, layout: Placement, n_steps: int, mark: tuple[Op, int] | None
) -> _Cells:
    """Return the texts of all ops."""
    # Two at least: one step's last column may stand right before the next step's first.
    n_primes = max(2, timing.steps_under_way)  # distinct marks of steps that overlap
    # A pair reads as in rank orders. Two other ops of one cell are what an error is about.
    separator = ";" if timing.pairs else "/"
    cells = _Cells()
    for step in range(n_steps):
        for op, start in timing.starts.items():
            tick = start + step * timing.period
            row = row_of(
                layout, layout.rank(op.stage, op.microbatch, step), op.microbatch
            )
            text = str(op) + "'" * (step % n_primes)
            if (op, step) == mark:
                text = f"[{text}]"
                cells.marked = row, tick
            texts = cells.rows.setdefault(row, {})
            if tick in texts:
                text = texts[tick] + separator + text
            texts[tick] = text
            end = tick + timing.ticks_per_slot
            # The rest of its slot, unless another op starts there.
            for further_tick in range(tick + 1, end):
                texts.setdefault(further_tick, "-")
            cells.end = max(cells.end, end)
    return cells


def _around(values: Sequence[int], index: int, limit: int) -> Sequence[int]:
    """Return at most ``limit`` of ``values``, around the ``index``."""
    first = max(0, min(index - limit // 2, len(values) - limit))
    return values[first : first + limit]


def labels(names: Mapping[str, str]) -> dict[str, str]:
    """Return labels of schedules, by key: their names, followed by the key if the name is shared.

    Args:
        names: name of each schedule, by any unique key.
    """
    count = Counter(names.values())
    return {
        key: name if count[name] == 1 else f"{name} ({key})"
        for key, name in names.items()
    }
