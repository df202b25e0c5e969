"""Rank orders as text, and as the compute format of torch.distributed.pipelining.

An op is ``<stage><kind><microbatch>``, kind one of F, B, I (backward, input) and W (backward,
weights): ``0F0``. ``0F1;1B0`` is a forward and a backward that the rank overlaps; torch writes
``(0F1;1B0)OVERLAP_F_B``. A rank's order is ops with spaces between; a CSV file has a row a rank and
a cell a slot, empty where the rank is idle::

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
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from toolkit.errors import UserError, shortened
from toolkit.schedule.instruction import LETTERS, Kind, Op
from toolkit.schedule.pipeline_orders import Item, as_early_as_possible
from toolkit.schedule.placement import Assigned, Placement
from toolkit.schedule.timing import Timing, check_pair

_OP = re.compile(rf"(\d{{1,9}})([{LETTERS}])(\d{{1,9}})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_MESSAGE = re.compile(
    r"(\d{1,9})((?:SEND|RECV)_[FB])(\d{1,9})|(\d{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)"
)
_WITH_PERIOD = re.compile(r"(\S+)\s+period=(\d{1,9})")


def parse_order(order: str | Sequence[Item | str], rank: int) -> list[Item]:
    """Return one rank's ops and pairs, from ops or text."""
    if not isinstance(order, Sequence) or isinstance(order, bytes | bytearray | Op):
        raise UserError(
            f"rank {rank} has a list of ops, or text such as 0F0 0B0: got {shortened(repr(order))}"
        )
    words = order.split() if isinstance(order, str) else order
    return [_item(word, f"rank {rank}, op {position}") for position, word in enumerate(words)]


def _item(word: Item | str, location: str) -> Item:
    if isinstance(word, str):
        text = pair_match[1] if (pair_match := _PAIR.fullmatch(word)) else word
        ops = [_op(text, location) for text in text.split(";")]
    elif isinstance(word, tuple | list) and len(word) == 2:
        ops = [_op(op, location) for op in word]
    else:
        ops = [_op(word, location)]
    if len(ops) == 1:
        return ops[0]
    if len(ops) > 2:
        raise UserError(f"{location}: {word!r} has {len(ops)} ops: a rank overlaps two at most")
    check_pair(*ops)
    return ops[0], ops[1]


def _op(word: object, location: str) -> Op:
    text = str(word).strip() if isinstance(word, str) or _has_kind(word) else ""
    match = _OP.fullmatch(text)
    if match is None:
        # Text that says nothing is shown as it is, and so is what is neither text nor an op.
        value = repr(text[:40]) if text else shortened(repr(word), 80)
        raise UserError(
            f"{location}: {value} is not an op: write stage, kind and micro-batch, such as 0F0,"
            " with kind one of F, B, I, W"
        )
    return Op(Kind(LETTERS.index(match[2])), int(match[1]), int(match[3]))


def _has_kind(word: object) -> bool:
    """Whether ``word`` is an op of one of the kinds, so that it has a text."""
    if not isinstance(word, Op) or not isinstance(word.kind, Integral):
        return False
    return not isinstance(word.kind, bool) and 0 <= word.kind < len(Kind)


@dataclass(frozen=True)
class RankOrders:
    """What a CSV file says."""

    orders: list[list[Item]]
    slots: dict[Op, int]
    period: int | None
    messages: dict[tuple[int, str], str]  # by rank and text of the cell, where it is

    def check_messages(self, layout: Placement, n_stages: int) -> None:
        """Raise UserError unless the file has no communication, or what is inferred."""
        inferred: set[tuple[int, str]] = set()
        for stage in range(n_stages - 1):
            for microbatch in range(layout.n_microbatches):
                stage_rank, next_rank = (
                    layout.rank(stage, microbatch),
                    layout.rank(stage + 1, microbatch),
                )
                if stage_rank != next_rank:
                    inferred |= {
                        (stage_rank, f"{stage}SEND_F{microbatch}"),
                        (next_rank, f"{stage + 1}RECV_F{microbatch}"),
                    }
                    inferred |= {
                        (next_rank, f"{stage + 1}SEND_B{microbatch}"),
                        (stage_rank, f"{stage}RECV_B{microbatch}"),
                    }
        stages_of_ranks = {
            (rank, str(stage)) for stage in range(n_stages) for rank in layout.ranks(stage)
        }
        sent: set[tuple[int, str]] = set()
        for (rank, text), location in self.messages.items():
            if text[-1].isdecimal():
                is_expected, sent = (rank, text) in inferred, sent | {(rank, text)}
            else:  # of weights and gradients: the state says when they travel
                is_expected = (rank, text.rstrip("ACDEGHINRSU_")) in stages_of_ranks
            if not is_expected:
                raise UserError(
                    f"{location}: {text} is no message of these orders, whose communication is"
                    " inferred; leave it out"
                )
        if sent and (missing_messages := inferred - sent):
            rank, text = min(missing_messages)
            raise UserError(
                f"row {rank + 1} has no {text}, which these orders need; give all messages or"
                " none, since communication is inferred"
            )


def read_csv(source: str | Path) -> RankOrders:
    """Read rank orders from a CSV file or its text.

    Raises:
        UserError: the file cannot be read, or a cell is not an op (row and column count from 1).
    """
    orders: list[list[Item]] = []
    slots: dict[Op, int] = {}
    messages: dict[tuple[int, str], str] = {}
    periods: dict[int, str] = {}
    try:
        rows = [*csv.reader(io.StringIO(_content(source)))]
    except csv.Error as error:
        raise UserError(f"rank orders that cannot be read as CSV: {error}") from None
    for row, cells in enumerate(rows, 1):
        if cells:
            orders.append([])
        for slot, cell in enumerate(map(str.strip, cells)):
            if not cell:
                continue
            location = f"row {row}, column {slot + 1}"
            if cell_with_period := _WITH_PERIOD.fullmatch(cell):
                cell = cell_with_period[1]
                periods[int(cell_with_period[2])] = location
            if _MESSAGE.fullmatch(cell):
                messages[len(orders) - 1, cell] = location
                continue
            item = _item(cell, location)
            orders[-1].append(item)
            slots |= dict.fromkeys((item,) if isinstance(item, Op) else item, slot)
    if len(periods) > 1:
        listed = " and ".join(
            f"period={period} ({location})" for period, location in periods.items()
        )
        raise UserError(f"a file has one period: got {listed}")
    return RankOrders(orders, slots, next(iter(periods), None), messages)


def _content(source: str | Path) -> str:
    """Return the text of a file; a string that looks like text and names no file is the text."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise UserError(f"rank orders are a file's path, or its text: got {source!r}")
    text = str(source).removeprefix("\ufeff")  # a mark with which spreadsheets begin
    named = text.endswith(".csv") or os.path.isfile(text)
    if not (isinstance(source, Path) or named) and set(text) & {",", "\n"}:
        return text
    try:
        if os.path.exists(text) and not (os.path.isfile(text) or os.path.isdir(text)):
            raise OSError(errno.EINVAL, "it is a pipe or a device")  # reading might not end
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{source} cannot be read ({reason}): expected a CSV file") from error


def write_csv(name: str, timing: Timing, layout: Placement) -> str:
    """Return one training step as CSV; see :meth:`Schedule.to_csv`."""
    most_ranks = max(len(set(ranks)) for ranks in layout.cycles)
    dealt_out = isinstance(layout, Assigned)  # as rank orders are, also in two directions
    if (most_ranks > 1 and not dealt_out) or layout.one_device or timing.ticks_per_slot != 1:
        raise UserError(
            "the CSV format is for pipelines, with one rank a stage and one op a slot and rank:"
            f" {name} has up to {most_ranks} ranks a stage, placement {layout.name!r}, and"
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
        pair = f"({op};{timing.pairs[op]})OVERLAP_F_B" if op in timing.pairs else str(op)
        if op not in overlapped:
            rows[rank][starts[op]] = pair
    if not all(orders):
        raise UserError(
            f"the CSV format has ops of every rank: rank {orders.index([])} of {name} is idle"
        )
    if (
        as_early_as_possible(orders, pairs=timing.pairs) != timing
    ):  # the orders alone would be timed differently
        first_op = by_time[0]
        row = rows[layout.rank(first_op.stage, first_op.microbatch)]
        row[starts[first_op]] += f" period={timing.period}"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
