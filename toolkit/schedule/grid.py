"""A schedule as text: one row a rank, one column a slot, an op as ``<stage><kind><microbatch>``.

A rank that runs several ops at once (a single device) takes one row for each micro-batch.
"""

from typing import TYPE_CHECKING

from toolkit.schedule.op import Op

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule

_IDLE = "."


def render(schedule: "Schedule", n_steps: int = 1, mark: tuple[Op, int] | None = None) -> str:
    """The grid of ``n_steps`` training steps; ``mark=(op, step)`` puts that op in brackets.

    Columns are ticks where starts fall between slots; an op then covers its further ticks
    with ``-``. Odd training steps bear a prime.
    """
    timing = schedule.timing
    tick = timing.ticks_per_slot
    cells: dict[tuple[int, int], dict[int, str]] = {}
    last = 0
    for step in range(n_steps):
        for op, start in timing.starts.items():
            at = start + step * timing.period
            rank = schedule.layout.rank(op.stage, op.microbatch, step)
            row = (rank, op.microbatch if schedule.layout.name == "one" else 0)
            text = str(op) + "'" * (step % 2)
            if (op, step) == mark:
                text = f"[{text}]"
            columns = cells.setdefault(row, {})
            columns[at] = f"{columns[at]}/{text}" if at in columns else text
            for further in range(at + 1, at + tick):
                columns.setdefault(further, "-")
            last = max(last, at + tick)

    rows = sorted(cells)
    several = len({rank for rank, _ in rows}) < len(rows)
    labels = [f"rank {rank}" + (f" mb {mb}" if several else "") for rank, mb in rows]
    head = ["slot", *(str(at // tick) if at % tick == 0 else "" for at in range(last))]
    body = [
        [label, *(cells[row].get(at, _IDLE) for at in range(last))]
        for label, row in zip(labels, rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = (
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    )
    return "\n".join(lines)
