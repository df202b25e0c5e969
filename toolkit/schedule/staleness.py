"""Which weight version each micro-batch reads: staleness derived from, or checked against, timing.

``staleness[stage][microbatch] = d`` promises that at step t both the forward and the backward of
that stage on that micro-batch read the weights of version t - d (version 0 where t < d). Where
delays are drawn at random d is the largest of them, and the two read by the same draw.

An update of stage j is available once the last backward of stage j has ended, so the timing
honours d if and only if d is at least

    max(0, ceil((ready_j - F(j,m)) / period) - 1),    ready_j = max_m end of B(j,m).

For cyclic timing with S = M = N this is 0 where (j+1) + (m+1) >= N+1 and 1 elsewhere: the delay
rule CDP-v2 of arXiv 2403.08837, section 3.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from toolkit.errors import UserError, whole
from toolkit.schedule.op import Kind, Op
from toolkit.schedule.random_delay import RandomDelay
from toolkit.schedule.timing import Timing

Staleness = tuple[tuple[int, ...], ...]

FRESHEST = "freshest"


class Array(Protocol):
    """What holds numbers as NumPy's and torch's arrays do."""

    def tolist(self) -> Any: ...


Delay = int | str | Sequence[int] | Sequence[Sequence[int]] | Array | RandomDelay


def plain(delay: Delay) -> Any:
    """``delay`` as a number or tuples of numbers, if it was given as an array or as lists."""
    if hasattr(delay, "tolist"):
        delay = delay.tolist()
    if isinstance(delay, Sequence) and not isinstance(delay, str):
        return tuple(map(plain, delay))
    return delay


def freshest(
    timing: Timing, n_stages: int, n_microbatches: int, *, together: bool = False
) -> Staleness:
    """The smallest staleness that ``timing`` honours, per stage and micro-batch.

    Args:
        timing: when ops start.
        n_stages: S.
        n_microbatches: M.
        together: whether updates wait for the gradients of all stages.
    """
    ends = [timing.update_ready(j, n_microbatches) for j in range(n_stages)]
    rows = []
    for j in range(n_stages):
        ready = max(ends) if together else ends[j]
        starts = (timing.starts[Op(Kind.FORWARD, j, m)] for m in range(n_microbatches))
        rows.append(tuple(max(0, -((start - ready) // timing.period) - 1) for start in starts))
    return tuple(rows)


def requested(
    delay: Delay, timing: Timing, n_stages: int, n_microbatches: int
) -> tuple[Staleness, Staleness]:
    """The least and the largest staleness that ``delay`` asks for; the timing may not honour it.

    They differ where delays are drawn at random.

    Raises:
        UserError: it is no delay, or for other numbers of stages and micro-batches.
    """
    if isinstance(delay, str) and delay == FRESHEST:
        found = freshest(timing, n_stages, n_microbatches)
        return found, found
    return in_steps(delay, n_stages, n_microbatches)


def in_steps(delay: Delay, n_stages: int, n_microbatches: int) -> tuple[Staleness, Staleness]:
    """:func:`requested` of a delay that is given in steps, for which no timing is needed.

    Raises:
        UserError: it is given otherwise, or for other numbers of stages and micro-batches.
    """
    if isinstance(delay, RandomDelay):
        least, largest = (
            ((int(steps),) * n_microbatches,) * n_stages for steps in (delay.least, delay.most)
        )
        return least, largest
    delay = plain(delay)
    if isinstance(delay, str):
        raise UserError(
            f"unknown delay {delay!r}: give {FRESHEST!r}, a whole number of steps, a list [stage]"
            " or matrix [stage][microbatch] of them, or a RandomDelay"
        )
    if isinstance(delay, Sequence):
        found = _by_stage(delay, n_stages, n_microbatches)
    else:
        found = ((_steps(delay),) * n_microbatches,) * n_stages
    return found, found


def _by_stage(delay: Sequence, n_stages: int, n_microbatches: int) -> Staleness:
    """A list, or a matrix."""
    shape = [len(row) if isinstance(row, Sequence) else None for row in delay]
    if shape == [n_microbatches] * n_stages:
        return tuple(tuple(_steps(d) for d in row) for row in delay)
    if shape == [None] * n_stages:
        return tuple((_steps(d),) * n_microbatches for d in delay)
    if set(shape) == {None}:
        raise UserError(
            f"a list of delays has one for each stage, here {n_stages}: got {len(shape)}"
        )
    raise UserError(
        f"a delay matrix has one row a stage and one column a micro-batch, here"
        f" {n_stages} x {n_microbatches}: the rows given have lengths {shape}"
    )


def _steps(delay: object) -> int:
    return whole(delay, "a delay, in steps,", 0)
