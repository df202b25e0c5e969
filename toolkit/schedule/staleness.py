"""Which weight version each micro-batch reads: derived from timing, checked against it, or drawn.

``staleness[stage][microbatch] = d`` promises that at step t both the forward and the backward of
that stage on that micro-batch read the weights of version t - d (version 0 where t < d).

An update of stage j is available once the last backward of stage j has ended, so the timing
honours d if and only if d is at least

    max(0, ceil((ready_j - F(j,m)) / period) - 1),    ready_j = max_m end of B(j,m).

For cyclic timing with S = M = N this is 0 where (j+1) + (m+1) >= N+1 and 1 elsewhere: the delay
rule CDP-v2 of arXiv 2403.08837, section 3.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import prod
from sys import float_info
from typing import Any

from toolkit.errors import UserError, check_choice, whole
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.timing import Timing

Staleness = tuple[tuple[int, ...], ...]

FRESHEST = "freshest"
DISTRIBUTIONS = ("uniform", "geometric", "poisson")
PER = ("microbatch", "stage", "step")
_BITS = 64  # of a draw
_MOST = 1000  # steps of a delay


@dataclass(frozen=True)
class RandomDelay:
    """Steps by which a weight version is late, drawn anew at every training step.

    A draw is a function of the seed, stage, micro-batch and step only: every rank draws the same,
    in any order. Raises UserError for an unknown choice or a number out of range.

    Args:
        distribution: ``uniform``; or of the steps beyond ``least``: ``geometric`` (each comes with
            probability 1 - ``p``) or ``poisson`` (of ``mean``), without those beyond ``most``.
        least: steps by which every version is late; the timing has to allow it.
        most: steps by which a version can be late; this many old versions are kept.
        p: parameter of ``geometric``, above 0 and at most 1.
        mean: parameter of ``poisson``, above 0.
        per: what shares a draw: a ``microbatch`` (of a stage and step), ``stage``, or ``step``.
        seed: seed of the draws.
    """

    distribution: str = "uniform"
    least: int = 0
    most: int = 1
    p: float | None = None
    mean: float | None = None
    per: str = "microbatch"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("distribution of delays", self.distribution, DISTRIBUTIONS)
        check_choice("per of a random delay", self.per, PER)
        for name in ("least", "most", "seed"):
            steps = whole(getattr(self, name), f"{name} of a random delay")
            object.__setattr__(self, name, steps)
        if not 0 <= self.least <= self.most <= _MOST:
            raise UserError(
                f"a random delay needs 0 <= least <= most <= {_MOST}: got"
                f" least={self.least}, most={self.most}"
            )
        self._check_parameter("p", "geometric", largest=1.0)
        self._check_parameter("mean", "poisson", largest=float_info.max)

    def _check_parameter(self, name: str, owner: str, largest: float) -> None:
        """Raise UserError unless the distribution ``owner``, and no other, has this parameter."""
        value = getattr(self, name)
        if self.distribution != owner:
            if value is not None:
                raise UserError(f"{name}={value!r} is only for distribution={owner}")
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value <= largest):
            raise UserError(
                f"{name} of a {owner} delay is above 0 and at most {largest:g}: got {value!r}"
            )

    def __str__(self) -> str:
        kind = "random" if self.distribution == "uniform" else self.distribution
        return f"{kind} delay {self.least}-{self.most}"

    @property
    def expected(self) -> float:
        """The mean of the draws, in steps."""
        further = sum(steps * weight for steps, weight in enumerate(self._weights))
        return float(self.least + Fraction(further, sum(self._weights)))

    @property
    def values(self) -> range:
        """The delays that can be drawn, in steps."""
        return range(self.least, self.most + 1)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The probability of each of :attr:`values`."""
        total = sum(self._weights)
        return tuple(float(Fraction(weight, total)) for weight in self._weights)

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        """In proportion to the probabilities, as numerators over one common denominator."""
        # The probability of least + k steps, divided by that of one step less; exact.
        steps = range(1, self.most - self.least + 1)
        if self.mean is not None:
            ratios = [Fraction(self.mean) / k for k in steps]
        else:
            # Uniform is geometric with p = 0: a further step is as likely as the one before.
            ratios = [1 - Fraction(self.p or 0)] * len(steps)
        # The product of all denominators is a multiple of each: every weight below is then a whole
        # number.
        weights = [prod(ratio.denominator for ratio in ratios)]
        for ratio in ratios:
            weights.append(weights[-1] // ratio.denominator * ratio.numerator)
        return tuple(weights)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Bounds on the drawn bits: below the k-th the delay is ``least + k``."""
        total = sum(self._weights)  # integers: no platform's rounding can change a draw
        return tuple((below << _BITS) // total for below in accumulate(self._weights))

    def draw(self, stage: int, microbatch: int, step: int) -> int:
        """Return the steps by which ``stage`` reads late weights for ``microbatch`` at ``step``."""
        # Of (step, stage, micro-batch) the key keeps the first one, two or three: see `per`.
        shared_key = (step, stage, microbatch)[: len(PER) - PER.index(self.per)]
        key = " ".join(map(str, (self.seed, *shared_key))).encode()
        # A hash has no state, as a generator has: ranks may draw in any order, and again after a
        # restart. Python's own hash of text differs from process to process.
        bits = int.from_bytes(blake2b(key, digest_size=_BITS // 8).digest(), "big")
        return self.least + bisect_right(self._bounds, bits, hi=self.most - self.least)


@lru_cache(maxsize=256)
def draws(
    delay: RandomDelay, n_stages: int, n_microbatches: int, step: int
) -> Staleness:
    """Return what ``delay`` draws for a training step: ``[stage][microbatch]``."""
    rows = []
    for stage in range(n_stages):
        if delay.per == "microbatch":
            row = tuple(
                delay.draw(stage, microbatch, step)
                for microbatch in range(n_microbatches)
            )
        else:
            row = (delay.draw(stage, 0, step),) * n_microbatches
        rows.append(row)
    return tuple(rows)


Delay = int | str | Sequence[int] | Sequence[Sequence[int]] | RandomDelay
"""An array of NumPy or torch is taken, too."""


def plain(delay: Delay, depth: int = 2) -> Any:
    """Return ``delay`` with arrays and lists as tuples of numbers, at most ``depth`` deep."""
    if hasattr(delay, "tolist"):
        delay = delay.tolist()
    if isinstance(delay, Sequence) and not isinstance(delay, str) and depth:
        return tuple(plain(row, depth - 1) for row in delay)
    return delay


def freshest(
    timing: Timing, n_stages: int, n_microbatches: int, *, together: bool = False
) -> Staleness:
    """Return the least staleness, ``[stage][microbatch]``.

    A forward reads the newest version whose update is complete as it starts. One stage, two
    micro-batches, cyclic timing, one column per slot, ``'`` the next training step::

        m=0     F  B  F' B'        F' starts before the update: it reads one step late
        m=1        F  B  F' B'     F' reads the update
        update           u         complete as this slot begins

    ``together``: the updates of a step wait for the gradients of all stages.
    """
    ready_ticks = [
        timing.update_ready(stage, n_microbatches) for stage in range(n_stages)
    ]
    if together:
        ready_ticks = [max(ready_ticks)] * n_stages
    rows = []
    for stage, ready in enumerate(ready_ticks):
        row = []
        for microbatch in range(n_microbatches):
            start = timing.starts[Op(Kind.FORWARD, stage, microbatch)]
            # At step t the forward starts at start + t period. Version t - d is ready, as the
            # update of step t - d - 1, at ready + (t - d - 1) period. So d is at least (ready -
            # start) / period - 1.
            periods_until_ready = -((start - ready) // timing.period)  # rounded up
            row.append(max(0, periods_until_ready - 1))
        rows.append(tuple(row))
    return tuple(rows)


def staleness_bounds(
    delay: Delay, timing: Timing, n_stages: int, n_microbatches: int
) -> tuple[Staleness, Staleness]:
    """Return the least and the largest staleness of any delay; equal unless it is random."""
    if isinstance(delay, str) and delay == FRESHEST:
        staleness = freshest(timing, n_stages, n_microbatches)
        return staleness, staleness
    return in_steps(delay, n_stages, n_microbatches)


def in_steps(
    delay: Delay, n_stages: int, n_microbatches: int
) -> tuple[Staleness, Staleness]:
    """Return the least and the largest staleness of a delay in steps; equal unless it is random."""
    if isinstance(delay, RandomDelay):
        smallest, _ = in_steps(delay.least, n_stages, n_microbatches)
        largest, _ = in_steps(delay.most, n_stages, n_microbatches)
        return smallest, largest
    delays = plain(delay)
    if isinstance(delays, str):
        raise UserError(
            f"unknown delay {delays!r}: give {FRESHEST!r}, a whole number of steps, a list [stage]"
            " or matrix [stage][microbatch] of them, or a RandomDelay"
        )
    # One number is a list of equal stages, and a list a matrix of equal micro-batches.
    if not isinstance(delays, tuple):
        delays = (delays,) * n_stages
    shape = [len(row) if isinstance(row, tuple) else None for row in delays]
    if shape == [None] * n_stages:
        delays = tuple((row,) * n_microbatches for row in delays)
    elif shape != [n_microbatches] * n_stages:
        raise UserError(
            f"a delay is one number, a list with one for each of {n_stages} stages, or a matrix of"
            f" {n_stages} x {n_microbatches} [stage][microbatch]: got {delays}"
        )
    rows = []
    for row in delays:
        rows.append(tuple(whole(steps, "a delay, in steps,", 0) for steps in row))
    staleness = tuple(rows)
    longest = max(map(max, staleness))
    if longest > _MOST:
        raise UserError(f"a delay is at most {_MOST} steps: got {longest}")
    return staleness, staleness
