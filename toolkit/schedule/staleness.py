"""Which weight version each micro-batch reads: staleness derived from, or checked against, timing.

``staleness[stage][microbatch] = d`` promises that at step t both the forward and the backward of
that stage on that micro-batch read the weights of version t - d (version 0 where t < d).

An update of stage j is available once the last backward of stage j has ended, so the timing
honours d if and only if d is at least

    max(0, ceil((ready_j - F(j,m)) / period) - 1),    ready_j = max_m end of B(j,m).

For cyclic timing with S = M = N this is 0 where (j+1) + (m+1) >= N+1 and 1 elsewhere: the delay
rule CDP-v2 of arXiv 2403.08837, section 3.
"""

from collections.abc import Sequence
from numbers import Integral

from toolkit.schedule.op import Kind, Op
from toolkit.schedule.timing import Timing

Staleness = tuple[tuple[int, ...], ...]
Delay = int | str | Sequence[Sequence[int]]

FRESHEST = "freshest"


def freshest(timing: Timing, n_stages: int, n_microbatches: int) -> Staleness:
    """The smallest staleness that ``timing`` honours, per stage and micro-batch."""
    rows = []
    for j in range(n_stages):
        ready = max(timing.gradient_end(j, m) for m in range(n_microbatches))
        starts = (timing.starts[Op(Kind.FORWARD, j, m)] for m in range(n_microbatches))
        rows.append(tuple(max(0, -((start - ready) // timing.period) - 1) for start in starts))
    return tuple(rows)


def requested(delay: Delay, timing: Timing, n_stages: int, n_microbatches: int) -> Staleness:
    """The staleness that ``delay`` asks for, whether or not the timing honours it."""
    if isinstance(delay, str):
        if delay != FRESHEST:
            raise ValueError(
                f"unknown delay {delay!r}: give {FRESHEST!r}, a whole number of steps, or a matrix"
                " [stage][microbatch] of them"
            )
        return freshest(timing, n_stages, n_microbatches)
    if isinstance(delay, Sequence):
        shape = [len(row) if isinstance(row, Sequence) else None for row in delay]
        if shape != [n_microbatches] * n_stages:
            raise ValueError(
                f"a delay matrix has one row a stage and one column a micro-batch, here"
                f" {n_stages} x {n_microbatches}: the rows given have lengths {shape}"
            )
        return tuple(tuple(_steps(d) for d in row) for row in delay)
    return ((_steps(delay),) * n_microbatches,) * n_stages


def _steps(delay: object) -> int:
    if not isinstance(delay, Integral) or isinstance(delay, bool) or delay < 0:
        raise ValueError(f"a delay is a whole number of steps, 0 or more: got {delay!r}")
    return int(delay)
