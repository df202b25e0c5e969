"""V-shaped pipelines: a micro-batch goes down the ranks and up again, once or several times.

With two stages per rank and backwards in two halves, a rank holds from a third to all of the
activations that 1F1B's first rank holds.

Rank r of p has stages r and 2p-1-r, so a micro-batch goes down the ranks and up again, forward and
backward. All micro-batches repeat one building block, six slots apart. This is the block of V-Min
on four ranks, with one column per slot (``.`` is a free slot)::

    rank 0  F . . . . . . f . . b . . . . . . B
    rank 1  . F . . . . f . . . . b . . . . B .
    rank 2  . . F . . f . . . . . . b . . B . .
    rank 3  . . . F f . . . . . . . . b B . . .

``F`` is the forward and ``B`` the backward of inputs of the rank's first stage; ``f`` and ``b`` are
those of its second stage. The four take different slots of six. The two slots that are left take
the backwards of weights.

A rank runs its ops in the order of the blocks, each as early as possible, without holding more
activations than its bound k. While the next op cannot start, the rank runs a backward of weights
or, if there is none, a later op that can start. This shortens the first and the last micro-batches.
If the activations of all micro-batches fit into k, later ops go before backwards of weights.

k counts stage-activations; a micro-batch has two on each rank. With many micro-batches a rank idles
for 6p-1-3k slots in a step, or 0 if that is negative. For comparison, 1F1B's first rank holds 2p
stage-activations and idles for 6(p-1) slots::

    ZB-V      k = 2p              0
    V-Half    k = 2 ((p+2) // 2)  3p-4, or 3p-7 if 2 divides p
    V-Min     k = 2 ((p+4) // 3)  4p-5, or 4p-7 if 3 divides p, or 4p-9 if 3 divides p+1
    1F1B-V    k = 2 (2p // 3 + 1)  backwards whole, of two slots

Sources: arXiv 2405.15362; ZB-V arXiv 2401.10241, section 6; Hanayo arXiv 2308.15762.
"""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from toolkit.errors import UserError
from toolkit.schedule.dependencies import dependencies
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.pipeline_orders import Orders

# Slots of a micro-batch: two stages, a forward and two halves of a backward each.
_INTERVAL = 6


@dataclass(frozen=True)
class _Block:
    """A building block: when each rank runs the ops of one micro-batch, but those of weights."""

    down: int  # slots from a rank to the next
    up: int  # slots from a rank to the one before
    # slots: F to f on the last rank, f to b on the first, b to B.
    turns: tuple[int, int, int]
    bound: int  # stage-activations that a rank holds at most

    def order(self, rank: int, n_ranks: int, n_microbatches: int) -> list[Op]:
        """Return the rank's ops, without the backwards of the weights."""
        first_stage = rank
        second_stage = 2 * n_ranks - 1 - rank
        last_rank = n_ranks - 1
        way_down = self.down * rank
        way_up = self.up * (last_rank - rank)
        # The slots in which a micro-batch reaches the turns: F to f, f to b, b to B.
        turn_1 = self.down * last_rank + self.turns[0]
        turn_2 = turn_1 + self.up * last_rank + self.turns[1]
        turn_3 = turn_2 + self.down * last_rank + self.turns[2]
        block = [
            (way_down, Kind.FORWARD, first_stage),
            (turn_1 + way_up, Kind.FORWARD, second_stage),
            (turn_2 + way_down, Kind.BACKWARD_INPUT, second_stage),
            (turn_3 + way_up, Kind.BACKWARD_INPUT, first_stage),
        ]
        starts = {}
        for slot, kind, stage in block:
            for microbatch in range(n_microbatches):
                starts[Op(kind, stage, microbatch)] = slot + microbatch * _INTERVAL
        return sorted(starts, key=starts.__getitem__)


def zb_v(n_stages: int, n_microbatches: int) -> Orders:
    """Every rank holds what 1F1B's first rank holds; no rank idles from 2p-1 micro-batches on."""
    p = _n_ranks(n_stages)
    block = _Block(down=4, up=2, turns=(3, 1, 3), bound=2 * p)
    return _squeeze(block, p, n_microbatches)


def v_half(n_stages: int, n_microbatches: int) -> Orders:
    """A rank holds and idles about half as much as 1F1B's first rank."""
    p = _n_ranks(n_stages)
    turn = 1 if p % 2 else 4  # 1 would put ops of a rank into the same slot of six
    block = _Block(down=2, up=1, turns=(1, turn, 2), bound=2 * ((p + 2) // 2))
    return _squeeze(block, p, n_microbatches)


def v_min(n_stages: int, n_microbatches: int) -> Orders:
    """A rank holds about a third as much as 1F1B's first rank, and idles two thirds as long."""
    p = _n_ranks(n_stages)
    turn = 5 if p % 3 == 2 else 3  # as long as the bound allows, and an odd number
    block = _Block(down=1, up=1, turns=(1, turn, 1), bound=2 * ((p + 4) // 3))
    return _squeeze(block, p, n_microbatches)


def _n_ranks(n_stages: int) -> int:
    if n_stages % 2:
        raise UserError(f"each rank of a V has two stages: make {n_stages} stages even")
    return n_stages // 2


def _squeeze(block: _Block, n_ranks: int, n_microbatches: int) -> Orders:
    """Return each rank's ops in order, each as early as it can start."""
    planned = [block.order(rank, n_ranks, n_microbatches) for rank in range(n_ranks)]
    split = {*chain.from_iterable(planned)}
    # Activations of all micro-batches do not fit.
    scarce = 2 * n_microbatches > block.bound
    weight_halves: list[list[Op]] = [[] for _ in planned]  # that may run now, by rank
    n_held = [0] * n_ranks
    orders: list[list[Op]] = [[] for _ in planned]
    ends: dict[Op, int] = {}
    slot = 0

    def ready(op: Op) -> bool:
        needed_ops = dependencies(op, split, 2 * n_ranks)
        # An op that has not run has no end yet: one after this slot stands for it.
        return all(ends.get(needed_op, slot + 1) <= slot for needed_op in needed_ops)

    def choose(rank: int) -> Op | None:
        """Return the planned op that runs next; None: a backward of the weights goes first."""
        # If an op goes first, the rank holds what the ops before it hold until they have run, too:
        # `peak` is the most that the planned order holds up to that op.
        level = peak = n_held[rank]
        # No later op of a kind and stage may run first: their micro-batches keep their order.
        kinds_and_stages: set[tuple[int, ...]] = set()
        for op in planned[rank]:
            is_forward = op.kind == Kind.FORWARD
            if op[:2] not in kinds_and_stages:
                exceeds_bound = is_forward and peak == block.bound
                if not exceeds_bound and ready(op):
                    return op
                # A rank has ops of two kinds and two stages.
                if (scarce and weight_halves[rank]) or len(kinds_and_stages) == 3:
                    return None
                kinds_and_stages.add(op[:2])
            level += 1 if is_forward else -1
            peak = max(peak, level)
        return None

    while any(planned) or any(weight_halves):
        n_ended = len(ends)
        for rank in range(n_ranks):
            op = choose(rank)
            if op is not None:
                planned[rank].remove(op)
            elif weight_halves[rank]:
                op = weight_halves[rank].pop(0)
            else:
                continue
            if op.kind == Kind.FORWARD:
                n_held[rank] += 1
            elif op.kind == Kind.BACKWARD_INPUT:
                weight_halves[rank].append(op._replace(kind=Kind.BACKWARD_WEIGHT))
            else:
                n_held[rank] -= 1
            # It ends with the slot, so ranks that choose after this one cannot use it yet.
            ends[op] = slot + 1
            orders[rank].append(op)
        assert len(ends) > n_ended, "the block's ranks wait for each other"
        slot += 1
    return orders


def one_f_one_b_v(n_stages: int, n_microbatches: int) -> Orders:
    """With whole backwards, a rank holds about two thirds as much as 1F1B's first rank.

    A backward takes two of a block's six slots. Each op of the repeated block moves to the first
    gap of its rank in which it fits, a forward only while the rank then holds no more than before.
    """
    p = _n_ranks(n_stages)

    # 1. All blocks, six slots apart.
    starts: dict[Op, int] = {}
    for op, start in _whole_backward_block(p).items():
        for microbatch in range(n_microbatches):
            starts[op._replace(microbatch=microbatch)] = start + microbatch * _INTERVAL

    # 2. What ranks then do and hold in each slot.
    lengths = {op: 2 if op.kind == Kind.BACKWARD else 1 for op in starts}
    rank_of = {op: min(op.stage, 2 * p - 1 - op.stage) for op in starts}
    ranks = [_RankSlots() for _ in range(p)]
    for op, start in starts.items():
        rank_slots = ranks[rank_of[op]]
        rank_slots.busy.update(range(start, start + lengths[op]))
        if op.kind == Kind.FORWARD:
            end = starts[op._replace(kind=Kind.BACKWARD)] + 2
            rank_slots.activations.update(range(start, end))
    bound = max(max(rank_slots.activations.values()) for rank_slots in ranks)

    # 3. In order of time, each op moves to the first gap of its rank after what it waits for.
    for op, start in sorted(starts.items(), key=lambda item: item[1]):
        predecessors = [*dependencies(op, starts, 2 * p)]
        if op.microbatch:
            predecessors.append(op._replace(microbatch=op.microbatch - 1))
        earliest = 0
        for predecessor in predecessors:
            earliest = max(earliest, starts[predecessor] + lengths[predecessor])
        if op.kind == Kind.FORWARD:
            starts[op] = ranks[rank_of[op]].move_forward(start, earliest, bound)
        else:
            starts[op] = ranks[rank_of[op]].move_backward(start, earliest)

    orders: list[list[Op]] = [[] for _ in range(p)]
    for op in sorted(starts, key=starts.__getitem__):
        orders[rank_of[op]].append(op)
    return orders


def _whole_backward_block(n_ranks: int) -> dict[Op, int]:
    """Return the slot of each op of a micro-batch: forwards down and up, then backwards.

    Two ranks, one column per slot; a backward takes two::

        rank 0  F . . f b b . . . . . . . B B
        rank 1  . F f . . . . . . b b B B . .

    The backwards leave room where they would meet the ops of the next blocks.
    """
    block = {Op(Kind.FORWARD, stage, 0): stage for stage in range(2 * n_ranks)}
    slot = 2 * n_ranks
    if n_ranks % 3 == 0:
        slot += 3
    for stage in reversed(range(2 * n_ranks)):
        block[Op(Kind.BACKWARD, stage, 0)] = slot
        slot += 2
        # A fourth in a row would take slots of the first.
        if (stage - n_ranks) % 3 == 1:
            slot += 3
    return block


class _RankSlots:
    """What a rank does and holds in each slot.

    Attributes:
        busy: slots in which it runs an op.
        activations: stage-activations that it holds, by slot.
    """

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.activations: Counter[int] = Counter()

    def move_forward(self, start: int, earliest: int, bound: int) -> int:
        """Move a forward from ``start`` to the first gap in which it fits; return the gap.

        Args:
            start: its slot.
            earliest: first slot in which it can run.
            bound: stage-activations that the rank holds at most.
        """
        # An earlier start adds one in each slot until `start`: it comes after the last full one.
        for slot in range(earliest, start):
            if self.activations[slot] == bound:
                earliest = slot + 1
        new_start = self._move(start, earliest, length=1)
        self.activations.update(range(new_start, start))
        return new_start

    def move_backward(self, start: int, earliest: int) -> int:
        """Move a backward, of two slots, to the first gap in which it fits; return the gap."""
        new_start = self._move(start, earliest, length=2)
        self.activations.subtract(range(new_start + 2, start + 2))
        return new_start

    def _move(self, start: int, earliest: int, length: int) -> int:
        self.busy.difference_update(range(start, start + length))
        new_start = min(earliest, start)
        # Its own slots are free now, so it fits at the latest where it was.
        while not self.busy.isdisjoint(range(new_start, new_start + length)):
            new_start += 1
        self.busy.update(range(new_start, new_start + length))
        return new_start


def hanayo(n_stages: int, n_microbatches: int, n_ranks: int) -> Orders:
    """1F1B in W waves: a micro-batch goes down and up the p ranks W times, 2Wp stages.

    At most p micro-batches are under way. A rank prefers backwards, then early micro-batches. It
    idles for 2(p-1) slots, those of a 2W-th of a rank's layers. Source: arXiv 2308.15762.

    Raises:
        UserError: stages are no multiple of 2p.
    """
    if n_stages % (2 * n_ranks):
        raise UserError(
            f"a wave has two stages for each of {n_ranks} ranks: make {n_stages} stages a multiple"
            f" of {2 * n_ranks}"
        )
    stages = range(n_stages)
    path = [(Kind.FORWARD, stage) for stage in stages]
    path += [(Kind.BACKWARD, stage) for stage in reversed(stages)]
    orders: list[list[Op]] = [[] for _ in range(n_ranks)]
    # [rank], ops that can start, the next first: whether a forward, micro-batch, - place on the way
    waiting: list[list[tuple[bool, int, int]]] = [[] for _ in orders]
    waiting[0] = [
        (True, microbatch, 0) for microbatch in range(min(n_ranks, n_microbatches))
    ]
    while any(waiting):
        running = [
            (rank, heappop(queue)) for rank, queue in enumerate(waiting) if queue
        ]
        for rank, (_, microbatch, negative_place) in running:
            kind, stage = path[-negative_place]
            orders[rank].append(Op(kind, stage, microbatch))
            next_place = 1 - negative_place
            if next_place == len(path):
                microbatch, next_place = microbatch + n_ranks, 0
            if microbatch < n_microbatches:
                kind, stage = path[next_place]
                position = stage % (2 * n_ranks)
                queue = waiting[min(position, 2 * n_ranks - 1 - position)]
                heappush(queue, (kind == Kind.FORWARD, microbatch, -next_place))
    return orders
