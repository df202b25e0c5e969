"""A schedule as text: one row a rank, one column a slot, an op as ``<stage><kind><microbatch>``.

A rank that runs several ops at once (a single device) takes one row for each micro-batch.
"""

from collections.abc import Sequence

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


def render(
    timing: Timing, layout: Placement, n_steps: int = 1, mark: tuple[Op, int] | None = None
) -> str:
    """Return the grid of ``n_steps`` training steps (1 or more).

    Columns are ticks if starts fall between slots, and an op covers its further ticks with ``-``.
    Primes distinguish steps that overlap. ``mark`` = (op, step) is put in brackets; a large grid
    then shows its surroundings only.
    """
    tick = timing.ticks_per_slot
    primes = max(2, timing.steps_under_way)  # distinct marks of steps that overlap
    cells: dict[int, dict[int, str]] = {}
    last = 0
    marked: tuple[int, int] | None = None
    for step in range(whole(n_steps, "n_steps", 1)):
        for op, start in timing.starts.items():
            position = start + step * timing.period
            row = row_of(layout, layout.rank(op.stage, op.microbatch, step), op.microbatch)
            text = str(op) + "'" * (step % primes)
            if (op, step) == mark:
                text = f"[{text}]"
                marked = row, position
            columns = cells.setdefault(row, {})
            joint = ";" if timing.pairs else "/"
            columns[position] = f"{columns[position]}{joint}{text}" if position in columns else text
            for further in range(position + 1, position + tick):
                columns.setdefault(further, "-")
            last = max(last, position + tick)

    numbers: Sequence[int] = sorted(cells)
    ticks: Sequence[int] = range(last)
    if marked is not None:
        row, column = marked
        numbers = _around(numbers, numbers.index(row), _ROWS)
        ticks = _around(ticks, column, _COLUMNS)
    label = "rank 0 mb" if layout.one_device and layout.n_microbatches > 1 else "rank"
    head = ["slot", *(str(position // tick) if position % tick == 0 else "" for position in ticks)]
    body = [
        [f"{label} {row}", *(cells[row].get(position, ".") for position in ticks)]
        for row in numbers
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = (
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    )
    return "\n".join(lines)


def _around(values: Sequence[int], index: int, limit: int) -> Sequence[int]:
    """Return at most ``limit`` of ``values``, around the ``index``."""
    first = max(0, min(index - limit // 2, len(values) - limit))
    return values[first : first + limit]
