"""Rank orders as the compute format of torch.distributed.pipelining.

A CSV file has a row per rank and a cell per slot, empty where the rank is idle. Cells are ops and
pairs of :mod:`toolkit.schedule.rank_orders`::

    0F0,0F1,,0B0,,0B1            0F0 period=4,,0F1,0B0,,0B1
    ,1F0,1B0,1F1,1B1,            ,1F0,1B0,1F1,1B1,

Without a period, on the left, slots do not bind: each op starts as early as it can, and the
pipeline drains before the next training step. With one, on the right, a training step begins every
so many slots, and no op starts before its own. torch reads both, and drains; it takes one rank a
stage, so that it does not read pipelines in two directions.

Communication is inferred. Cells such as ``0SEND_F1``, of torch's files with communication, are
compared with what is inferred.
"""

import csv
import errno
import io
import os.path
import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError
from toolkit.schedule.instruction import Op
from toolkit.schedule.pipeline_orders import Item, as_early_as_possible
from toolkit.schedule.placement import Assigned, Placement
from toolkit.schedule.rank_orders import parse_item
from toolkit.schedule.timing import Timing

_MAX_BYTES = 2**26  # of a file, which is read into memory
_MESSAGE = re.compile(
    r"(\d{1,9})((?:SEND|RECV)_[FB])(\d{1,9})|(\d{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)"
)
_WITH_PERIOD = re.compile(r"(\S+)\s+period=(\d{1,9})")


@dataclass(frozen=True)
class CsvOrders:
    """What a CSV file says.

    Attributes:
        orders: ``[rank]``, its ops and pairs in order.
        slots: the slot of each op in the file.
        period: slots between the starts of training steps; None if absent.
        messages: by rank and text of a cell with communication, where the cell is.
    """

    orders: list[list[Item]]
    slots: dict[Op, int]
    period: int | None
    messages: dict[tuple[int, str], str]

    def check_messages(self, layout: Placement, n_stages: int) -> None:
        """Raise UserError unless the file has no communication, or what is inferred."""
        inferred = _boundary_messages(layout, n_stages)
        stages_of_ranks = set()
        for stage in range(n_stages):
            stages_of_ranks |= {(rank, str(stage)) for rank in layout.ranks(stage)}
        boundary_messages: set[tuple[int, str]] = set()
        for (rank, text), location in self.messages.items():
            if text[-1].isdecimal():
                is_expected = (rank, text) in inferred
                boundary_messages.add((rank, text))
            else:  # of weights and gradients: the state says when they travel
                # The letters of UNSHARD, RESHARD and REDUCE_GRAD: what remains is the number of the
                # stage.
                is_expected = (rank, text.rstrip("ACDEGHINRSU_")) in stages_of_ranks
            if not is_expected:
                raise UserError(
                    f"{location}: {text} is no message of these orders, whose communication is"
                    " inferred; leave it out"
                )
        missing_messages = inferred - boundary_messages
        if boundary_messages and missing_messages:
            rank, text = min(missing_messages)
            raise UserError(
                f"row {rank + 1} has no {text}, which these orders need; give all messages or"
                " none, since communication is inferred"
            )


def _boundary_messages(layout: Placement, n_stages: int) -> set[tuple[int, str]]:
    """Return the messages between stages: rank and text of torch's cell."""
    messages: set[tuple[int, str]] = set()
    for stage in range(n_stages - 1):
        for microbatch in range(layout.n_microbatches):
            rank = layout.rank(stage, microbatch)
            next_rank = layout.rank(stage + 1, microbatch)
            if rank != next_rank:
                messages.add((rank, f"{stage}SEND_F{microbatch}"))
                messages.add((next_rank, f"{stage + 1}RECV_F{microbatch}"))
                messages.add((next_rank, f"{stage + 1}SEND_B{microbatch}"))
                messages.add((rank, f"{stage}RECV_B{microbatch}"))
    return messages


def read_csv(source: str | Path) -> CsvOrders:
    """Read rank orders from a CSV file or its text.

    Raises:
        UserError: the file cannot be read, or a cell is not an op (row and column count from 1).
    """
    orders: list[list[Item]] = []
    slots: dict[Op, int] = {}
    messages: dict[tuple[int, str], str] = {}
    periods: dict[int, str] = {}  # where each one is
    content = _content(source)
    is_text = content == str(source).removeprefix("\ufeff")
    file_prefix = "" if is_text else f"{source}, "
    try:
        rows = [*csv.reader(io.StringIO(content))]
    except csv.Error as error:
        raise UserError(f"rank orders that cannot be read as CSV: {error}") from None
    for row, cells in enumerate(rows, 1):
        if cells:
            orders.append([])
        for slot, cell in enumerate(map(str.strip, cells)):
            if not cell:
                continue
            location = f"{file_prefix}row {row}, column {slot + 1}"
            with_period = _WITH_PERIOD.fullmatch(cell)
            if with_period is not None:
                cell = with_period[1]
                periods[int(with_period[2])] = location
            if _MESSAGE.fullmatch(cell):
                messages[len(orders) - 1, cell] = location
                continue
            item = parse_item(cell, location)
            orders[-1].append(item)
            slots |= dict.fromkeys((item,) if isinstance(item, Op) else item, slot)
    if len(periods) > 1:
        listed = " and ".join(
            f"period={period} ({place})" for period, place in periods.items()
        )
        raise UserError(f"a file has one period: got {listed}")
    return CsvOrders(orders, slots, next(iter(periods), None), messages)


def _content(source: str | Path) -> str:
    """Return the text of a file; a string that looks like text and names no file is the text."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise UserError(f"rank orders are a file's path, or its text: got {source!r}")
    # A path seldom has a comma, and a text of several cells always has one or a line break. A file
    # of that very name counts as a path.
    text = str(source).removeprefix("\ufeff")  # a mark with which spreadsheets begin
    is_path = isinstance(source, Path) or text.endswith(".csv") or os.path.isfile(text)
    if not is_path and ("," in text or "\n" in text):
        return text
    try:
        if os.path.exists(text) and not (os.path.isfile(text) or os.path.isdir(text)):
            # Reading might not end.
            raise OSError(errno.EINVAL, "it is a pipe or a device")
        if os.path.isfile(text) and os.path.getsize(text) > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES} bytes")
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(
            f"{source} cannot be read ({reason}): expected a CSV file"
        ) from error


def write_csv(name: str, timing: Timing, layout: Placement) -> str:
    """Return one training step as CSV; see :meth:`Schedule.to_csv`."""
    most_ranks = max(len(set(ranks)) for ranks in layout.cycles)
    # Rank orders may have several ranks per stage: those of two directions.
    several_ranks = most_ranks > 1 and not isinstance(layout, Assigned)
    if several_ranks or layout.one_device or timing.ticks_per_slot != 1:
        raise UserError(
            "the CSV format is for pipelines, with one rank per stage and one op per slot and rank:"
            f" {name} has up to {most_ranks} ranks per stage, placement {layout.name!r}, and"
            f" {timing.ticks_per_slot} start times in a slot; place it per_stage"
        )
    starts = timing.starts
    by_time = sorted(starts, key=lambda op: (starts[op], op))  # pairs forward first
    overlapped = {*timing.pairs.values()}
    orders: list[list[Op]] = [[] for _ in range(layout.n_ranks)]
    rows = [[""] * (starts[by_time[-1]] + 1) for _ in orders]
    for op in by_time:
        rank = layout.rank(op.stage, op.microbatch)
        orders[rank].append(op)
        if op in timing.pairs:
            rows[rank][starts[op]] = f"({op};{timing.pairs[op]})OVERLAP_F_B"
        elif op not in overlapped:
            rows[rank][starts[op]] = str(op)
    if not all(orders):
        raise UserError(
            f"the CSV format has ops of every rank: rank {orders.index([])} of {name} is idle"
        )
    if as_early_as_possible(orders, pairs=timing.pairs) != timing:
        # The orders alone would be timed differently: a period makes slots bind.
        first_op = by_time[0]
        row = rows[layout.rank(first_op.stage, first_op.microbatch)]
        row[starts[first_op]] += f" period={timing.period}"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
