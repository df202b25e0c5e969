"""Pipelines in two directions, whose ranks fill the gaps of one with ops of the other.

Even micro-batches go down the ranks and odd ones go up, so that every stage has two ranks and every
rank two stages. DualPipeV has one direction, down the ranks and up again; its p ranks are half of
DualPipe's. Chimera on four ranks, one column a slot::

    rank 0 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2
    rank 1 .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 .
    rank 2 .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 .
    rank 3 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3
"""

from collections import deque

from toolkit.errors import UserError
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.pipeline_orders import Item, Orders


def chimera(n_stages: int, n_microbatches: int) -> Orders:
    """1F1B in both directions, in rounds of S micro-batches that fit without a gap.

    If S divides M, a step takes 2M + S - 2 slots, and ranks hold S/2 + 1 to S stage-activations.
    Source: arXiv 2107.06925.

    Raises:
        UserError: the number of stages is odd.
    """
    s, half = n_stages, _half(n_stages)
    starts: dict[Op, int] = {}
    orders: list[list[Op]] = [[] for _ in range(s)]
    for microbatch in range(n_microbatches):
        round_index, turn = divmod(microbatch // 2, half)
        begin = 2 * (round_index * s + turn)
        for stage in range(s):
            for kind, slot in ((Kind.FORWARD, stage), (Kind.BACKWARD, 2 * s - 1 - stage)):
                starts[Op(kind, stage, microbatch)] = begin + slot
    for op in sorted(starts, key=starts.__getitem__):
        orders[_rank(op, s)].append(op)
    return orders


def dualpipe(n_stages: int, n_microbatches: int) -> list[list[Item]]:
    """Both directions with overlapped pairs, within S + 1 stage-activations.

    A rank idles for (S/2 - 1)(F&B + B - 3W): the seconds of a pair, a backward, and a backward of
    the weights. Source: arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe.

    Raises:
        UserError: stages or micro-batches are odd, or micro-batches too few.
    """
    s, half = n_stages, _half(n_stages)
    if n_microbatches % 2 or n_microbatches < 2 * s:
        raise UserError(
            f"DualPipe takes an even number of micro-batches, two a stage or more: got"
            f" {n_microbatches} for {s} stages"
        )
    orders = []
    for rank in range(s):
        turn, up = min(rank, s - 1 - rank), rank >= half
        ways = [range((phase + up) % 2, n_microbatches, 2) for phase in range(2)]
        orders.append(_dual(turn, half, (turn, s - 1 - turn), ways))
    return orders


def dualpipe_v(n_stages: int, n_microbatches: int) -> list[list[Item]]:
    """DualPipe without copies of the weights: rank r has stages r and 2p-1-r, its halves.

    Bubble and activations of :func:`dualpipe`. Source: github.com/deepseek-ai/DualPipe.

    Raises:
        UserError: the number of stages is odd, or micro-batches are too few.
    """
    s, half = n_stages, _half(n_stages)
    if n_microbatches < s:
        raise UserError(
            f"DualPipeV takes a micro-batch a stage or more: got {n_microbatches} for {s} stages"
        )
    ways = [range(n_microbatches)] * 2
    return [_dual(rank, half, (rank, s - 1 - rank), ways) for rank in range(half)]


def _dual(turn: int, half: int, stages: tuple[int, int], ways: list[range]) -> list[Item]:
    """Return the ops of a rank; its first stage's data enter ``turn`` ranks away.

    Args:
        turn: 0 to half - 1; the last is next to the other half, or at the turn of the V.
        half: ranks from an end to the middle.
        stages: the nearer to the start of its way, and the nearer to the end.
        ways: micro-batches of either stage.
    """
    forwards, backwards = [iter(way) for way in ways], [iter(way) for way in ways]
    order: list[Item] = []
    weights: deque[Op] = deque()  # put off

    def forward(way: int) -> Op:
        return Op(Kind.FORWARD, stages[way], next(forwards[way]))

    def backward(way: int, *, split: bool = False) -> Op:
        kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        op = Op(kind, stages[way], next(backwards[way]))
        if split:
            weights.append(op._replace(kind=Kind.BACKWARD_WEIGHT))
        return op

    ahead = half - 1 - turn
    order += [forward(0) for _ in range(2 * ahead)]
    for _ in range(turn + 1):
        order += [forward(0), forward(1)]
    for _ in range(ahead):
        order += [backward(1, split=True), weights.popleft(), forward(1)]
    for k in range(len(ways[0]) - 2 * half + turn + 1):
        both = forward(0), backward(1)
        order += both if k == ahead == 0 else [both]  # in the middle the forward alone is sooner
        order.append((forward(1), backward(0)))
    for _ in range(ahead):
        order += [backward(1), (forward(1), backward(0))]
    order += [backward(1 - k % 2, split=k > turn) for k in range(2 * (turn + 1))]
    for _ in range(ahead):
        order += [weights.popleft()] if weights else []
        order.append(backward(0, split=True))
    return [*order, *weights]


def _rank(op: Op, n_stages: int) -> int:
    """Even micro-batches go down the ranks, odd ones up."""
    return n_stages - 1 - op.stage if op.microbatch % 2 else op.stage


def _half(n_stages: int) -> int:
    if n_stages % 2:
        raise UserError(f"a pipeline in two directions: make {n_stages} stages even")
    return n_stages // 2
