"""Pipelines in two directions, whose ranks fill the gaps of one with ops of the other.

Even micro-batches go down the ranks and odd ones go up, so that every stage has two ranks and every
rank two stages. DualPipeV has one direction, down the ranks and up again; its p ranks are half of
DualPipe's. Chimera on four ranks, one column per slot::

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
    half = _half(n_stages)
    starts: dict[Op, int] = {}
    for microbatch in range(n_microbatches):
        # Half of a round goes each way, a micro-batch every other slot; rounds are 2S slots apart.
        # Micro-batches 2k and 2k + 1 enter together at opposite ends, and meet in the middle.
        round_index, turn = divmod(microbatch // 2, half)
        begin = 2 * (round_index * n_stages + turn)
        for stage in range(n_stages):
            starts[Op(Kind.FORWARD, stage, microbatch)] = begin + stage
            starts[Op(Kind.BACKWARD, stage, microbatch)] = (
                begin + 2 * n_stages - 1 - stage
            )
    orders: list[list[Op]] = [[] for _ in range(n_stages)]
    for op in sorted(starts, key=starts.__getitem__):
        goes_up = op.microbatch % 2 == 1
        rank = n_stages - 1 - op.stage if goes_up else op.stage
        orders[rank].append(op)
    return orders


def dualpipe(n_stages: int, n_microbatches: int) -> list[list[Item]]:
    """Both directions with overlapped pairs, within S + 1 stage-activations.

    A rank idles for (S/2 - 1)(F&B + B - 3W): the seconds of a pair, a backward, and a backward of
    the weights. Source: arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe.

    Raises:
        UserError: stages or micro-batches are odd, or micro-batches too few.
    """
    half = _half(n_stages)
    if n_microbatches % 2 or n_microbatches < 2 * n_stages:
        raise UserError(
            f"DualPipe takes an even number of micro-batches, two per stage or more: got"
            f" {n_microbatches} for {n_stages} stages"
        )
    orders = []
    for rank in range(n_stages):
        # Even micro-batches enter at the first rank, odd ones at the last.
        distance = min(rank, n_stages - 1 - rank)
        # Ranks r and S-1-r have the same two stages. What is near the entrance of one direction is
        # far from that of the other: the two ranks run the same order with the directions
        # exchanged.
        near_parity = int(rank >= half)
        near_microbatches = range(near_parity, n_microbatches, 2)
        far_microbatches = range(1 - near_parity, n_microbatches, 2)
        stages = (distance, n_stages - 1 - distance)
        orders.append(
            _dual(distance, half, stages, (near_microbatches, far_microbatches))
        )
    return orders


def dualpipe_v(n_stages: int, n_microbatches: int) -> list[list[Item]]:
    """DualPipe without copies of the weights: rank r has stages r and 2p-1-r, its halves.

    Bubble and activations of :func:`dualpipe`. Source: github.com/deepseek-ai/DualPipe.

    Raises:
        UserError: the number of stages is odd, or micro-batches are too few.
    """
    half = _half(n_stages)
    if n_microbatches < n_stages:
        raise UserError(
            f"DualPipeV takes a micro-batch per stage or more: got {n_microbatches} for {n_stages}"
            " stages"
        )
    microbatches = (range(n_microbatches), range(n_microbatches))
    orders = []
    for rank in range(half):
        stages = (rank, n_stages - 1 - rank)
        orders.append(_dual(rank, half, stages, microbatches))
    return orders


def _dual(
    distance: int, half: int, stages: tuple[int, int], microbatches: tuple[range, range]
) -> list[Item]:
    """Return the ops of a rank with two stages.

    Rank 0 of DualPipeV on two ranks, four stages and four micro-batches, by the steps below::

        0F0 0F1 | 0F2 3F0 | 3I0 3W0 3F1 | 0F3;3B1 3F2;0B0 | 3B2 3F3;0B1 | 3B3 0I2 | 0W2 0I3 0W3
        step 1    step 2    step 3        step 4            step 5        step 6    step 7

    Args:
        distance: ranks from the end at which the micro-batches of its first stage enter, 0 to
            half - 1; the last is next to the other half, or at the turn of the V.
        half: ranks from an end to the middle.
        stages: the one that its micro-batches meet soon after they enter, and the one that they
            meet late.
        microbatches: of either stage, in order.
    """
    ops = _TwoStageOps(stages, microbatches)
    order: list[Item] = []
    # Each rank between this one and the middle adds a turn to the first and the last steps.
    n_between = half - 1 - distance

    # 1. Forwards of the first stage, until the first micro-batch has come back to the second.
    for _ in range(2 * n_between):
        order.append(ops.forward(0))

    # 2. Forwards of both stages, until the first backward arrives.
    for _ in range(distance + 1):
        order += [ops.forward(0), ops.forward(1)]

    # 3. Backwards in halves, at once, so that the rank before need not wait for the weights'.
    for _ in range(n_between):
        order += [ops.input_half(1), ops.weight_halves.popleft(), ops.forward(1)]

    # 4. Overlapped pairs of both stages: the steady part.
    for turn in range(len(microbatches[0]) - 2 * half + distance + 1):
        if turn == n_between == 0:  # in the middle the first forward alone is sooner
            order += [ops.forward(0), ops.backward(1)]
        else:
            order.append((ops.forward(0), ops.backward(1)))
        order.append((ops.forward(1), ops.backward(0)))

    # 5. The first stage has no forwards left.
    for _ in range(n_between):
        order += [ops.backward(1), (ops.forward(1), ops.backward(0))]

    # 6. Backwards of both stages in turn; the later half of them puts its weights' halves off.
    for turn in range(2 * (distance + 1)):
        side = 1 - turn % 2
        if turn > distance:
            order.append(ops.input_half(side))
        else:
            order.append(ops.backward(side))

    # 7. Halves for the weights fill the slots in which the rank waits for backwards.
    for _ in range(n_between):
        if ops.weight_halves:
            order.append(ops.weight_halves.popleft())
        order.append(ops.input_half(0))
    return [*order, *ops.weight_halves]


class _TwoStageOps:
    """Makes the ops of a rank's two stages; each call takes a stage's next micro-batch.

    Args:
        stages: the two stages; ops name one by its ``side``, 0 or 1.
        microbatches: of either stage, in order.

    Attributes:
        weight_halves: backwards of the weights that are put off.
    """

    def __init__(
        self, stages: tuple[int, int], microbatches: tuple[range, range]
    ) -> None:
        self.stages = stages
        self.forwards = [iter(of_stage) for of_stage in microbatches]
        self.backwards = [iter(of_stage) for of_stage in microbatches]
        self.weight_halves: deque[Op] = deque()

    def forward(self, side: int) -> Op:
        return Op(Kind.FORWARD, self.stages[side], next(self.forwards[side]))

    def backward(self, side: int) -> Op:
        return Op(Kind.BACKWARD, self.stages[side], next(self.backwards[side]))

    def input_half(self, side: int) -> Op:
        op = Op(Kind.BACKWARD_INPUT, self.stages[side], next(self.backwards[side]))
        self.weight_halves.append(op._replace(kind=Kind.BACKWARD_WEIGHT))
        return op


def _half(n_stages: int) -> int:
    if n_stages % 2:
        raise UserError(f"a pipeline in two directions: make {n_stages} stages even")
    return n_stages // 2
