"""The order of each rank's ops, as ops or as text.

An op is ``<stage><kind><microbatch>``, kind one of F, B, I (backward, input) and W (backward,
weights): ``0F0``. ``0F1;1B0`` is a forward and a backward that the rank overlaps; torch writes
``(0F1;1B0)OVERLAP_F_B``. A rank's order is ops with spaces between.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard

from toolkit.errors import UserError, shortened
from toolkit.schedule.instruction import LETTERS, Kind, Op
from toolkit.schedule.pipeline_orders import Item
from toolkit.schedule.timing import check_pair
from toolkit.schedule.validate import check_complete

# Nine digits are more than any model has stages. Python refuses to convert texts of thousands.
_OP = re.compile(rf"(\d{{1,9}})([{LETTERS}])(\d{{1,9}})")
_LARGEST = 10**9 - 1  # stage or micro-batch that a text has room for
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class RankOrders:
    """Rank orders that are complete.

    Attributes:
        orders: ``[rank]``, its ops in order.
        pairs: the backward, by the forward that its rank overlaps with it.
        rank_table: ``[stage][microbatch]``, the rank that runs it.
    """

    orders: list[list[Op]]
    pairs: Mapping[Op, Op]
    rank_table: list[list[int]]


def parse_orders(orders: Sequence[str | Sequence[Item | str]]) -> RankOrders:
    """Read the order of each rank, from ops or text.

    Raises:
        UserError: an op is missing, unknown, repeated or apart from its forward; or a rank has
            nothing to do.
    """
    # An op is a tuple, too: its three fields would pass as the orders of three ranks.
    if isinstance(orders, str | bytes | bytearray | Op) or not isinstance(
        orders, Sequence
    ):
        raise UserError(
            f"orders are a list with one for each rank: got {shortened(repr(orders))}"
        )
    items_of_ranks = [_parse_order(order, rank) for rank, order in enumerate(orders)]
    ops_of_ranks: list[list[Op]] = []
    pairs: dict[Op, Op] = {}
    for items in items_of_ranks:
        ops: list[Op] = []
        for item in items:
            if isinstance(item, Op):
                ops.append(item)
            else:
                forward, backward = item
                pairs[forward] = backward
                ops += item
        ops_of_ranks.append(ops)
    return RankOrders(ops_of_ranks, pairs, _rank_table(ops_of_ranks))


def _parse_order(order: str | Sequence[Item | str], rank: int) -> list[Item]:
    """Return one rank's ops and pairs."""
    if not isinstance(order, Sequence) or isinstance(order, bytes | bytearray | Op):
        raise UserError(
            f"rank {rank} has a list of ops, or text such as 0F0 0B0: got {shortened(repr(order))}"
        )
    words = order.split() if isinstance(order, str) else order
    return [
        parse_item(word, f"rank {rank}, op {place}") for place, word in enumerate(words)
    ]


def parse_item(word: Item | str, location: str) -> Item:
    """Return an op, or a pair of ops that the rank overlaps; errors begin with ``location``."""
    if isinstance(word, str):
        pair = _PAIR.fullmatch(word)
        text = word if pair is None else pair[1]
        ops = [_op(op_text, location) for op_text in text.split(";")]
    elif isinstance(word, tuple | list) and len(word) == 2:
        ops = [_op(op, location) for op in word]
    else:
        ops = [_op(word, location)]
    if len(ops) == 1:
        return ops[0]
    if len(ops) > 2:
        raise UserError(
            f"{location}: {word!r} has {len(ops)} ops: a rank overlaps two at most"
        )
    forward, backward = ops
    check_pair(forward, backward)
    return forward, backward


def _op(word: object, location: str) -> Op:
    if _is_op(word):
        return word
    text = str(word).strip() if isinstance(word, str) or _has_kind(word) else ""
    match = _OP.fullmatch(text)
    if match is None:
        # Text is shown as it is written, and so is a value that is no text.
        value = repr(text[:40]) if text else shortened(repr(word), 80)
        raise UserError(
            f"{location}: {value} is not an op: write stage, kind and micro-batch, such as 0F0,"
            " with kind one of F, B, I, W"
        )
    return Op(Kind(LETTERS.index(match[2])), int(match[1]), int(match[3]))


def _is_op(word: object) -> TypeGuard[Op]:
    """Whether ``word`` is an op already; most are, and its text would take longer to read."""
    return (
        type(word) is Op
        and type(word.kind) is Kind
        and type(word.stage) is type(word.microbatch) is int
        and 0 <= word.stage <= _LARGEST
        and 0 <= word.microbatch <= _LARGEST
    )


def _has_kind(word: object) -> bool:
    """Whether ``word`` is an op of one of the kinds, so that it has a text."""
    if not isinstance(word, Op) or not isinstance(word.kind, Integral):
        return False
    # True is an integer to Python, and would be read as kind 1, a backward.
    return not isinstance(word.kind, bool) and 0 <= word.kind < len(Kind)


def _rank_table(orders: Sequence[Sequence[Op]]) -> list[list[int]]:
    """Return the rank of each stage and micro-batch: ``[stage][microbatch]``."""
    if not orders or not all(orders):
        idle = [rank for rank, order in enumerate(orders) if not order]
        raise UserError(
            f"every rank has something to do: got {len(orders)} ranks, idle: {idle}"
        )
    rank_of_op: dict[Op, int] = {}
    rank_of: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for op in order:
            if op in rank_of_op:
                raise UserError(
                    f"{op} is done twice: on rank {rank_of_op[op]} and on rank {rank}"
                )
            rank_of_op[op] = rank
            # All ops of a stage on a micro-batch share its activations.
            first_rank = rank_of.setdefault((op.stage, op.microbatch), rank)
            if first_rank != rank:
                raise UserError(
                    f"{op} is on rank {rank} and its other half on rank {first_rank}: activations"
                    " stay where they were made"
                )
    n_stages = max(op.stage for op in rank_of_op) + 1
    n_microbatches = max(op.microbatch for op in rank_of_op) + 1
    check_complete(rank_of_op, n_stages, n_microbatches)
    table = []
    for stage in range(n_stages):
        table.append(
            [rank_of[stage, microbatch] for microbatch in range(n_microbatches)]
        )
    return table
