"""Pipelines: the order of each rank's ops, and the earliest start times.

Four stages, four micro-batches, one column per slot (``.`` idle)::

    GPipe                                1F1B
    0F0 0F1 0F2 0F3 .   .   .   .   .    0F0 0F1 0F2 0F3 .   .   .   0B0 .   0B1 ...
    .   1F0 1F1 1F2 1F3 .   .   .   .    .   1F0 1F1 1F2 .   .   1B0 1F3 1B1 ...
    .   .   2F0 2F1 2F2 2F3 .   2B0 ...  .   .   2F0 2F1 .   2B0 2F2 2B1 2F3 ...
    .   .   .   3F0 3F1 3F2 3F3 3B0 ...  .   .   .   3F0 3B0 3F1 3B1 3F2 3B2 ...
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain

from toolkit.errors import UserError
from toolkit.schedule.dependencies import dependencies
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.staleness import Delay, in_steps
from toolkit.schedule.timing import Timing

Orders = Sequence[Sequence[Op]]
Item = Op | tuple[Op, Op]
"""An op, or a forward and a backward that the rank overlaps."""


def gpipe(n_stages: int, n_microbatches: int) -> Orders:
    """Run all forwards, then all backwards. Source: arXiv 1811.06965."""
    orders = []
    for stage in range(n_stages):
        forwards = _ops(Kind.FORWARD, stage, n_microbatches)
        orders.append(forwards + _ops(Kind.BACKWARD, stage, n_microbatches))
    return orders


def one_f_one_b(n_stages: int, n_microbatches: int) -> Orders:
    """Alternate forwards and backwards as soon as the first backward can start.

    Source: PipeDream-Flush, arXiv 2006.09503, section 2.2.
    """
    return interleaved_1f1b(n_stages, n_microbatches, n_stages)


def eager_1f1b(n_stages: int, n_microbatches: int) -> Orders:
    """1F1B that begins with twice as many forwards, so that a message has a slot to travel in.

    Two stages, four micro-batches::

        0F0 0F1 0F2 0B0 0F3 0B1 .   0B2 .   0B3
        .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Rank r holds at most 2(S-r)-1 micro-batches. Source: arXiv 2211.05322, section 4.
    """
    orders = []
    for rank in range(n_stages):
        forwards = _ops(Kind.FORWARD, rank, n_microbatches)
        backwards = _ops(Kind.BACKWARD, rank, n_microbatches)
        # 1F1B's warm-up is half of it: a forward for each rank after this one.
        warmup = 2 * (n_stages - 1 - rank)
        orders.append(_one_forward_one_backward(forwards, backwards, warmup))
    return orders


def looped_bfs(n_stages: int, n_microbatches: int, n_ranks: int) -> Orders:
    """GPipe where rank r has stages r, r + n_ranks, ..., one after another for all micro-batches.

    Four stages on two ranks, two micro-batches::

        0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
        .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .

    The backwards take micro-batches in reverse, as torch's do. Source: arXiv 2211.05953, section 3.

    Raises:
        UserError: stages cannot be dealt out evenly.
    """
    _per_rank(n_stages, n_ranks)
    orders = []
    for rank in range(n_ranks):
        forwards: list[Op] = []
        for stage in range(rank, n_stages, n_ranks):
            forwards += _ops(Kind.FORWARD, stage, n_microbatches)
        backwards = [op._replace(kind=Kind.BACKWARD) for op in reversed(forwards)]
        orders.append(forwards + backwards)
    return orders


def interleaved_1f1b(n_stages: int, n_microbatches: int, n_ranks: int) -> Orders:
    """1F1B where rank r has stages r, r + n_ranks, ..., in rounds of n_ranks micro-batches.

    Four stages on two ranks, four micro-batches::

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    If the micro-batches are no multiple of the ranks, rounds are longer but equal, as those of
    torch.distributed.pipelining. Source: arXiv 2104.04473, section 2.2.

    Raises:
        UserError: stages or micro-batches cannot be dealt out evenly.
    """
    per_rank = _per_rank(n_stages, n_ranks)
    rounds = max(1, n_microbatches // n_ranks)
    if per_rank > 1 and n_microbatches % rounds:
        raise UserError(
            f"{n_microbatches} micro-batches do not divide into {rounds} equal rounds: make them a"
            f" multiple of {n_ranks}"
        )

    # 1. Turns of a rank: which of its stages, and which micro-batch. In a round all micro-batches
    # go through one stage after another.
    in_round = n_microbatches // rounds if per_rank > 1 else n_microbatches
    turns = []
    for round_start in range(0, n_microbatches, in_round):
        round_stop = min(round_start + in_round, n_microbatches)
        for lap in range(per_rank):
            turns += [
                (lap, microbatch) for microbatch in range(round_start, round_stop)
            ]

    # 2. Backwards take a rank's stages from the last to the first. Before the first backward a
    # rank runs forwards for each rank after it, two each if it has several stages.
    orders = []
    for rank in range(n_ranks):
        forwards = []
        backwards = []
        for lap, microbatch in turns:
            forwards.append(Op(Kind.FORWARD, lap * n_ranks + rank, microbatch))
            # A backward comes down from the last stage, so a rank meets its stages in reverse.
            last_lap_first = per_rank - 1 - lap
            backwards.append(
                Op(Kind.BACKWARD, last_lap_first * n_ranks + rank, microbatch)
            )
        warmup = n_ranks - 1 - rank
        if per_rank > 1:
            warmup = 2 * warmup + (per_rank - 1) * in_round
        orders.append(_one_forward_one_backward(forwards, backwards, warmup))
    return orders


def _ops(kind: Kind, stage: int, n_microbatches: int) -> list[Op]:
    """Return one op of a stage on each micro-batch."""
    return [Op(kind, stage, microbatch) for microbatch in range(n_microbatches)]


def _per_rank(n_stages: int, n_ranks: int) -> int:
    """Return the number of stages of a rank."""
    if n_stages % n_ranks:
        raise UserError(
            f"{n_stages} stages cannot be dealt out evenly to {n_ranks} ranks: make them a multiple"
        )
    return n_stages // n_ranks


def zero_bubble(n_stages: int, n_microbatches: int, more_forwards: int = 0) -> Orders:
    """ZB-H1: 1F1B with split backwards, within the activations of 1F1B's first stage.

    Three stages, four micro-batches; I and W are the halves of a backward::

        0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Rank r delays its backwards of the weights by r micro-batches; they fill the slots in which
    1F1B waits. Source: arXiv 2401.10241, section 2.

    Args:
        n_stages: stages of the model, S; each has a rank.
        n_microbatches: micro-batches of a training step, M.
        more_forwards: by which a rank may lead 1F1B's forwards, and delay its backwards of the
            weights, at most; a rank uses no more of them than ZB-H2 does. S-1 make it ZB-H2.
    """
    orders = []
    for rank in range(n_stages):
        ranks_after = n_stages - 1 - rank
        lead = ranks_after + min(ranks_after, more_forwards)
        weights_delay = rank + min(rank, more_forwards)
        forwards = _ops(Kind.FORWARD, rank, n_microbatches)
        input_halves = _ops(Kind.BACKWARD_INPUT, rank, n_microbatches)
        weight_halves = iter(_ops(Kind.BACKWARD_WEIGHT, rank, n_microbatches))
        order = []
        for op in _one_forward_one_backward(forwards, input_halves, lead):
            order.append(op)
            if op.kind == Kind.BACKWARD_INPUT and op.microbatch >= weights_delay:
                order.append(next(weight_halves))
        orders.append([*order, *weight_halves])
    return orders


def zb_h2(n_stages: int, n_microbatches: int) -> Orders:
    """ZB-H2: ZB-H1 whose forwards lead by up to S-1 more, so that no slot waits if M >= 2S-1.

    A rank holds at most min(M, 2S-1) micro-batches. The paper's order is for M >= 2S-1. With fewer
    micro-batches its long lead only delays the backwards: with S = M = 8 a step takes 34 slots from
    its first op to its last one, and ZB-H1's takes 31. Forwards lead by M-S more here, so that the
    period is that of the paper's order and a step takes no longer than ZB-H1's. With at most S
    micro-batches this is ZB-H1. Slots of a period and of a step, S = 8:

    ==  ===========  ==============  ==========
    M   ZB-H1        paper's order   here
    ==  ===========  ==============  ==========
    8   31, 31       31, 34          31, 31
    12  43, 43       39, 44          39, 43
    15  52, 52       45, 52          45, 52
    ==  ===========  ==============  ==========

    Source: arXiv 2401.10241, section 2.
    """
    more_forwards = min(n_stages - 1, max(0, n_microbatches - n_stages))
    return zero_bubble(n_stages, n_microbatches, more_forwards)


def _one_forward_one_backward(
    forwards: list[Op], backwards: list[Op], warmup: int
) -> list[Op]:
    """Return ``warmup`` forwards, then a forward and a backward in turn, then backwards."""
    # Two forwards of warm-up, four micro-batches:
    #
    #     F0 F1 | F2 B0 F3 B1 | B2 B3
    #
    # A warm-up of all forwards is GPipe's order.
    warmup = min(warmup, len(forwards))
    n_alternating = len(forwards) - warmup
    order = forwards[:warmup]
    for forward, backward in zip(
        forwards[warmup:], backwards[:n_alternating], strict=True
    ):
        order += [forward, backward]
    return order + backwards[n_alternating:]


def as_early_as_possible(
    orders: Orders,
    delay: Delay = 0,
    period: int | None = None,
    not_before: Mapping[Op, int] | None = None,
    pairs: Mapping[Op, Op] | None = None,
) -> Timing:
    """Time each rank's ops in order, as soon as the rank is free and what the op needs has ended.

    With a period, a rank is not free in a slot in which it is busy with another step. A pair of
    ops, forward first, takes one slot. Arguments and errors are those of
    :meth:`Schedule.from_rank_orders`.
    """
    pairs = pairs or {}
    if period is not None:
        _check_period(orders, period, pairs)
    ends = _earliest_ends(orders, period, not_before or {}, pairs)
    starts = {op: end - 1 for op, end in ends.items()}
    if period is None:
        period = _period(orders, starts, delay)
    return Timing(starts, period, pairs=pairs)


def _earliest_ends(
    orders: Orders,
    period: int | None,
    not_before: Mapping[Op, int],
    pairs: Mapping[Op, Op],
) -> dict[Op, int]:
    """Return the slot after each op, where every op starts as early as it can.

    A rank times its ops in order until one needs an op without a time. It then waits, and continues
    as soon as that op has its time. Arguments and errors as :func:`as_early_as_possible`.
    """
    needs = _needs(orders, pairs)
    ends: dict[Op, int] = {}
    free_at = [0] * len(orders)
    busy: list[set[int]] = [set() for _ in orders]  # slots modulo the period
    remaining = [deque(order) for order in orders]
    # ranks, by the op that they wait for.
    waiting: dict[Op, list[int]] = defaultdict(list)
    # Ranks may go in any order: an op's time depends on its rank's ops before it and on its inputs
    # only.
    ready = [*range(len(orders))]
    while ready:
        rank = ready.pop()
        while remaining[rank]:
            op = remaining[rank][0]

            # 1. The op starts once the rank is free and all that it needs has ended.
            start = max(free_at[rank], not_before.get(op, 0))
            missing = None
            for needed in needs[op]:
                if needed not in ends:
                    missing = needed
                    break
                start = max(start, ends[needed])
            if missing is not None:
                waiting[missing].append(rank)
                break

            # 2. With a period, other steps run in the same slots, a whole number of periods away.
            if period is not None:
                while start % period in busy[rank]:
                    start += 1
                busy[rank].add(start % period)

            # 3. The op ends, a pair with both of its ops, and ranks that wait for it continue.
            free_at[rank] = start + 1
            n_ops = 2 if op in pairs else 1
            for _ in range(n_ops):
                ended = remaining[rank].popleft()
                ends[ended] = start + 1
                ready += waiting.pop(ended, [])
    if waiting:
        raise _orders_that_wait(waiting, remaining)
    return ends


def _needs(orders: Orders, pairs: Mapping[Op, Op]) -> dict[Op, list[Op]]:
    """Return what each op needs; the forward of a pair needs what its backward needs, too."""
    ops = {*chain.from_iterable(orders)}
    n_stages = max(op.stage for op in ops) + 1
    needs = {op: [*dependencies(op, ops, n_stages)] for op in ops}
    for forward, backward in pairs.items():
        # Both start in one slot, so the forward may not begin before the backward can.
        needs[forward] += needs[backward]
    return needs


def _orders_that_wait(
    waiting: Mapping[Op, Sequence[int]], remaining: Sequence[Sequence[Op]]
) -> UserError:
    """Return the error of ranks that wait for each other: each rank's next op, and what it needs.

    Args:
        waiting: the ranks that wait for an op.
        remaining: ``[rank]``, its ops without a time.
    """
    rank_and_needed = []
    for needed, ranks in waiting.items():
        rank_and_needed += [(rank, needed) for rank in ranks]
    waits = []
    for rank, needed in sorted(rank_and_needed):
        waits.append(f"rank {rank} waits at {remaining[rank][0]} for {needed}")
    return UserError(
        f"the orders cannot be carried out: {'; '.join(waits)}."
        " On its own rank, each op comes after those that it needs"
    )


def _check_period(orders: Orders, period: int, pairs: Mapping[Op, Op]) -> None:
    """Raise UserError if a rank has more ops than ``period`` has slots."""
    slots = []
    for order in orders:
        n_pairs = sum(op in pairs for op in order)
        slots.append(len(order) - n_pairs)
    most_ops = max(slots)
    if most_ops > period:
        raise UserError(
            f"rank {slots.index(most_ops)} has {most_ops} ops in a training step: give a period of"
            f" {most_ops} slots or more, not {period}"
        )


def _period(orders: Orders, starts: dict[Op, int], delay: Delay) -> int:
    """Return the least period in which no rank has two steps at once, and weights are ready.

    With delay d, the forward that reads an update starts d + 1 periods after the step that makes
    it: start + (d + 1) period >= ready.
    """
    # From its first op to its last one a rank is in one step.
    period = max(starts[order[-1]] + 1 - starts[order[0]] for order in orders)
    if isinstance(delay, str):  # the freshest: whatever is ready
        return period
    n_stages = max(op.stage for op in starts) + 1
    n_microbatches = max(op.microbatch for op in starts) + 1
    least_staleness, _ = in_steps(delay, n_stages, n_microbatches)
    timing = Timing(starts, period)
    for stage in range(n_stages):
        # The slot at which the step's update of the stage is there to be read.
        ready = timing.update_ready(stage, n_microbatches)
        for microbatch in range(n_microbatches):
            start = starts[Op(Kind.FORWARD, stage, microbatch)]
            # (ready - start) / (d + 1), rounded up
            needed_period = -(
                (start - ready) // (least_staleness[stage][microbatch] + 1)
            )
            period = max(period, needed_period)
    return period
