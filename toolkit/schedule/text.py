"""Rank orders as text, and as the compute format of torch.distributed.pipelining.

An op is ``<stage><kind><microbatch>``, kind one of F, B, I (backward, input) and W (backward,
weights): ``0F0``. A rank's order is ops with spaces between; a CSV file has a row a rank and a cell
a slot, empty where the rank is idle.
"""

import csv
import io
import os.path
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.schedule.op import Kind, Op

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule

_OP = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {kind.letter: kind for kind in Kind}


def parse_op(text: str, where: str) -> Op:
    """The op that ``text`` names.

    Raises:
        ValueError: it names none; the message begins with ``where``.
    """
    found = _OP.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"{where}: {text.strip()!r} is not an op: write stage, kind and micro-batch, such as"
            " 0F0, with kind one of F, B, I, W"
        )
    return Op(_KINDS[found[2]], int(found[1]), int(found[3]))


def parse_order(order: str | Sequence[Op | str], rank: int) -> list[Op]:
    """One rank's ops, from ops or text."""
    words = order.split() if isinstance(order, str) else order
    return [
        parse_op(word, f"rank {rank}, op {k}") if isinstance(word, str) else Op(*word)
        for k, word in enumerate(words)
    ]


def read_csv(source: str | Path) -> list[list[Op]]:
    """Rank orders from a CSV file, or from its text.

    A string is text if it has a comma or a line end, and neither ends with ``.csv`` nor names a
    file.

    Raises:
        ValueError: the file cannot be read, or a cell is not an op (row and column count from 1).
    """
    text = str(source)
    named = text.endswith(".csv") or os.path.isfile(text)
    if isinstance(source, Path) or named or not set(text) & {",", "\n"}:
        try:
            text = Path(source).read_text(encoding="utf-8-sig")  # spreadsheets begin it with a mark
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ValueError(
                f"{source} cannot be read ({reason}): expected a CSV file with a row a rank and a"
                " cell an op, such as 0F0"
            ) from error
    rows = csv.reader(io.StringIO(text))
    return [
        [
            parse_op(cell, f"row {row}, column {column}")
            for column, cell in enumerate(cells, 1)
            if cell.strip()
        ]
        for row, cells in enumerate(rows, 1)
        if cells
    ]


def write_csv(schedule: "Schedule") -> str:
    """One training step as CSV: a row a rank, a cell a slot.

    Raises:
        ValueError: a stage runs on several ranks, or starts fall between slots.
    """
    for j in range(schedule.n_stages):
        if len(schedule.layout.ranks(j)) > 1:
            raise ValueError(
                f"the CSV format is for pipelines, where a stage has one rank: stage {j} of"
                f" {schedule.name} has {len(schedule.layout.ranks(j))}; place it per_stage"
            )
    if schedule.timing.ticks_per_slot != 1 or schedule.one_device:
        raise ValueError(
            f"the CSV format has one op a slot and rank: {schedule.name} runs on one device or has"
            " ops between slots; place it per_stage, and start every op at a whole slot"
        )
    starts = schedule.timing.starts
    n_slots = max(starts.values()) + 1
    rows = [[""] * n_slots for _ in range(schedule.n_ranks)]
    for op, start in starts.items():
        rows[schedule.rank(op.stage, op.microbatch)][start] = str(op)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
