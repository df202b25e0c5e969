r"""When each op of a training step starts: pure functions from sizes to a :class:`Timing`.

Three stages, three micro-batches; time runs to the right, one column per slot, ``Fj``/``Bj`` the
forward/backward of stage j, ``'`` the next training step::

    simultaneous                          cyclic
    m=0  F0 F1 F2 B2 B1 B0                m=0  F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'
    m=1  F0 F1 F2 B2 B1 B0                m=1        F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'
    m=2  F0 F1 F2 B2 B1 B0                m=2              F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'

Index legend: ``j`` stage, ``m`` micro-batch, ``S`` stages, ``M`` micro-batches, ``n`` workers,
``k`` micro-batches of a worker; M = k n, and n = M unless gradients are accumulated. Worker w runs
micro-batches w, w + n, w + 2n, ... one after another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import gcd

from toolkit.errors import UserError, whole
from toolkit.schedule.instruction import Kind, Op


@dataclass(frozen=True)
class Timing:
    """Start of every op of one training step, and the distance between steps, in ticks.

    Args:
        starts: tick at which each op starts, from the start of the step.
        period: ticks between the starts of consecutive training steps.
        ticks_per_slot: ticks of a slot, the time that one stage's forward or backward takes.
        pairs: the backward, by the forward that its rank overlaps with it: both start in the same
            slot, on different micro-batches.
    """

    starts: Mapping[Op, int]
    period: int
    ticks_per_slot: int = 1
    pairs: Mapping[Op, Op] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("period", "ticks_per_slot"):
            ticks = whole(getattr(self, name), f"{name} of a timing, in ticks,", 1)
            object.__setattr__(self, name, ticks)
        if not isinstance(self.starts, Mapping):
            raise UserError(f"a timing maps ops to their starts: got {self.starts!r}")
        for op, start in self.starts.items():
            if not isinstance(op, Op):
                raise UserError(
                    f"a timing maps ops, such as Op(Kind.FORWARD, 0, 0): got {op}"
                )
            # Most starts are plain ints, and there may be 2^18 of them: only others pay for a call.
            if type(start) is not int or start < 0:
                whole(start, f"the start of {op}, in ticks,", 0)
        n_backwards = len({*self.pairs.values()})
        for forward, backward in self.pairs.items():
            check_pair(forward, backward)
            forward_start = self.starts.get(forward)
            backward_start = self.starts.get(backward)
            is_together = forward_start is not None and forward_start == backward_start
            if not is_together or n_backwards < len(self.pairs):
                raise UserError(
                    "an overlapped pair is two ops that start in the same slot, and in no other"
                    f" pair: got {forward};{backward}"
                )

    def __hash__(self) -> int:
        # The hash that dataclasses make would fail on the mappings. It may leave fields out, as it
        # does the pairs: equal timings still have equal hashes.
        return hash((frozenset(self.starts.items()), self.period, self.ticks_per_slot))

    def end(self, op: Op) -> int:
        """Return the tick at which ``op`` of step 0 has ended."""
        return self.starts[op] + self.ticks_per_slot

    @property
    def steps_under_way(self) -> int:
        """Training steps that run at once."""
        # A step takes e ticks and one begins every period: e / period at once, rounded up.
        return -(-max(map(self.end, self.starts)) // self.period)

    def gradient_end(self, stage: int, microbatch: int) -> int:
        """Return the tick at which the gradient of the stage's parameters is complete."""
        # Where the backward is split, its second half makes the gradient of the parameters.
        op = Op(Kind.BACKWARD_WEIGHT, stage, microbatch)
        return self.end(
            op if op in self.starts else Op(Kind.BACKWARD, stage, microbatch)
        )

    def update_ready(self, stage: int, n_microbatches: int) -> int:
        """Return the tick at which all gradients of a stage are complete: it can be updated."""
        return max(self.gradient_end(stage, m) for m in range(n_microbatches))


def check_pair(forward: Op, backward: Op) -> None:
    """Raise UserError unless a rank can overlap the two ops."""
    is_backward = backward.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    are_kinds = forward.kind == Kind.FORWARD and is_backward
    if not are_kinds or forward.microbatch == backward.microbatch:
        raise UserError(
            "an overlapped pair is a forward and then a backward of another micro-batch, such as"
            f" 0F1;1B0: got {forward};{backward}"
        )


def _staggered(
    n_stages: int, n_microbatches: int, offset: Callable[[int], int], tick: int
) -> dict[Op, int]:
    """Return starts of micro-batches that go straight up and down, ``offset(m)`` ticks late."""
    starts: dict[Op, int] = {}
    # One micro-batch on S stages, in slots:  F0 F1 ... F(S-1) B(S-1) ... B1 B0
    for m in range(n_microbatches):
        for j in range(n_stages):
            starts[Op(Kind.FORWARD, j, m)] = offset(m) + j * tick
            starts[Op(Kind.BACKWARD, j, m)] = offset(m) + (2 * n_stages - 1 - j) * tick
    return starts


def simultaneous(n_stages: int, n_workers: int, accumulate: int = 1) -> Timing:
    """Start all workers at once: F(j,m) at slot j, B(j,m) at slot 2S-1-j, period 2S.

    With k micro-batches each, micro-batch m is 2S (m div n) slots later, and the period is 2Sk.
    """
    length = 2 * n_stages
    starts = _staggered(
        n_stages, n_workers * accumulate, lambda m: m // n_workers * length, tick=1
    )
    return Timing(starts, length * accumulate)


def cyclic(
    n_stages: int, n_workers: int, accumulate: int = 1, groups: int | None = None
) -> Timing:
    """Workers staggered uniformly over 2S slots: m starts 2S/n * m slots after the first.

    With k micro-batches each, the formula stays, and the period is 2Sk. Source: arXiv 2403.08837,
    section 3, where S = M = N and the stagger is two slots. In g ``groups`` the n/g workers of each
    start together, and groups 2S/g slots after one another: two groups of four workers, two stages,
    one column per slot::

        m=0, m=1  F0 F1 B1 B0
        m=2, m=3        F0 F1 B1 B0
    """
    groups = groups or n_workers
    length = 2 * n_stages
    # A slot is the fewest ticks that make the stagger, length / groups slots, a whole number.
    # Four stages and three groups are 8/3 slots apart: with three ticks a slot, eight ticks.
    tick = groups // gcd(length, groups)
    stagger = length * tick // groups
    group_size = n_workers // groups
    starts = _staggered(
        n_stages, n_workers * accumulate, lambda m: m // group_size * stagger, tick
    )
    return Timing(starts, length * tick * accumulate, tick)


def interleaved(n_stages: int, n_workers: int, accumulate: int = 1) -> Timing:
    """Workers a stage after one another, each with a forward and a backward in turn, drained.

    In turn w + r S + j, worker w runs the forward of stage j on its micro-batch r; S turns later it
    begins the backward, which precedes that turn's forward. Period 2(k S + n - 1). Two workers, two
    stages, k = 2, one column per slot, ``.`` idle, ``'`` the second micro-batch of a worker::

        w=0  F0 F1 B1 F0'B0 F1'B1'.  B0'.
        w=1  .  F0 .  F1 B1 F0'B0 F1'B1'B0'
    """
    starts: dict[Op, int] = {}
    n_turns = accumulate * n_stages + n_workers - 1  # with a forward
    for m in range(n_workers * accumulate):
        first_turn = m % n_workers + m // n_workers * n_stages
        for j in range(n_stages):
            # Before turn S a turn is one slot, a forward; from then on two, while forwards last;
            # and then one again, a backward.
            turn = first_turn + j
            starts[Op(Kind.FORWARD, j, m)] = turn + max(0, turn + 1 - n_stages)
            turn = first_turn + 2 * n_stages - 1 - j
            starts[Op(Kind.BACKWARD, j, m)] = min(turn, n_turns) + turn - n_stages
    return Timing(starts, 2 * n_turns)


def pipelined(n_stages: int, n_microbatches: int) -> Timing:
    """1F1B that never drains: a micro-batch every other slot, period 2M (cyclic if M = S).

    Two stages, M = 3, one column per slot, ``'`` the next training step::

        j=0  F0 .  F1 B0 F2 B1 F0'B2 F1'B0'...
        j=1  .  F0 B0 F1 B1 F2 B2 F0'B0'...

    Here ``Fm``/``Bm`` are the forward and the backward of micro-batch m.
    """
    # Stage j has its forwards at slots 2m + j and its backwards at 2m + 2S-1-j. One of them is even
    # and the other odd, so that its rank never has two ops in one slot, nor an idle one.
    starts = _staggered(n_stages, n_microbatches, lambda m: 2 * m, tick=1)
    return Timing(starts, 2 * n_microbatches)
