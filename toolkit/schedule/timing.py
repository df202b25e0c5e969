r"""When each op of a training step starts: pure functions from sizes to a :class:`Timing`.

Three stages, three micro-batches; time runs to the right, one column a slot, ``Fj``/``Bj`` the
forward/backward of stage j, ``'`` the next training step::

    simultaneous                          cyclic
    m=0  F0 F1 F2 B2 B1 B0                m=0  F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'
    m=1  F0 F1 F2 B2 B1 B0                m=1        F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'
    m=2  F0 F1 F2 B2 B1 B0                m=2              F0 F1 F2 B2 B1 B0 F0'F1'F2'B2'B1'B0'

Index legend: ``j`` stage, ``m`` micro-batch, ``S`` stages, ``M`` micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd

from toolkit.schedule.op import Kind, Op


@dataclass(frozen=True)
class Timing:
    """Start of every op of one training step, and the distance between steps, in ticks.

    A slot (the time that one stage's forward, or one stage's backward, takes) is
    ``ticks_per_slot`` ticks, chosen so that every start is a whole number.
    """

    starts: Mapping[Op, int]
    period: int
    ticks_per_slot: int = 1

    def __post_init__(self) -> None:
        for name in ("period", "ticks_per_slot"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} of a timing is 1 tick or more: got {value}")

    def end(self, op: Op) -> int:
        """The tick at which ``op`` of step 0 has ended."""
        return self.starts[op] + self.ticks_per_slot

    def gradient_end(self, stage: int, microbatch: int) -> int:
        """The tick at which the gradient of the stage's parameters is complete."""
        op = Op(Kind.BACKWARD_WEIGHT, stage, microbatch)
        return self.end(op if op in self.starts else Op(Kind.BACKWARD, stage, microbatch))


def _staggered(
    n_stages: int, n_microbatches: int, offset: Callable[[int], int], tick: int
) -> dict[Op, int]:
    starts: dict[Op, int] = {}
    for m in range(n_microbatches):
        for j in range(n_stages):
            starts[Op(Kind.FORWARD, j, m)] = offset(m) + j * tick
            starts[Op(Kind.BACKWARD, j, m)] = offset(m) + (2 * n_stages - 1 - j) * tick
    return starts


def simultaneous(n_stages: int, n_microbatches: int) -> Timing:
    """All micro-batches at once: F(j,m) at slot j, B(j,m) at slot 2S-1-j, period 2S."""
    starts = _staggered(n_stages, n_microbatches, lambda m: 0, tick=1)
    return Timing(starts, period=2 * n_stages)


def cyclic(n_stages: int, n_microbatches: int) -> Timing:
    """Micro-batches staggered uniformly over the period: m starts 2S/M * m slots after the first.

    Source: arXiv 2403.08837, section 3, where S = M = N and the stagger is two slots.
    """
    period = 2 * n_stages
    tick = n_microbatches // gcd(period, n_microbatches)
    stagger = period * tick // n_microbatches
    starts = _staggered(n_stages, n_microbatches, lambda m: m * stagger, tick)
    return Timing(starts, period * tick, tick)


def pipelined(n_stages: int, n_microbatches: int) -> Timing:
    """1F1B that never drains: a micro-batch every other slot, period 2M (cyclic if M = S)."""
    starts = _staggered(n_stages, n_microbatches, lambda m: 2 * m, tick=1)
    return Timing(starts, 2 * n_microbatches)


def sequential(n_stages: int, n_microbatches: int) -> Timing:
    """One micro-batch after another (gradient accumulation): period 2SM."""
    period = 2 * n_stages
    starts = _staggered(n_stages, n_microbatches, lambda m: m * period, tick=1)
    return Timing(starts, period * n_microbatches)
