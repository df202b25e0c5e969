"""Delays drawn at random, as asynchronous training has them: by a seed, the same everywhere.

A draw is a function of the seed and of what it is for (stage, micro-batch, step), and of nothing
else: not of who asks, in what order, how often, or how many stages and micro-batches there are.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import inf, prod

from toolkit.errors import UserError, check_choice, whole

Draws = tuple[tuple[int, ...], ...]

PER = ("microbatch", "stage", "step")
_BITS = 64  # of a draw
_MOST = 1000

# The probability of a delay of k steps more than the least, to that of k - 1.
_RATIOS: dict[str, Callable[["RandomDelay", int], Fraction]] = {
    "uniform": lambda delay, k: Fraction(1),
    "geometric": lambda delay, k: 1 - Fraction(float(delay.p or 0)),
    "poisson": lambda delay, k: Fraction(float(delay.mean or 0)) / k,
}
DISTRIBUTIONS = tuple(_RATIOS)


@dataclass(frozen=True)
class RandomDelay:
    """Steps by which a weight version is late, drawn anew at every training step.

    Args:
        distribution: ``uniform`` from ``least`` to ``most``; or ``least`` and a number of further
            steps that is ``geometric`` (each comes with probability 1 - ``p``) or ``poisson`` (of
            the given ``mean``). What would be later than ``most`` is drawn again.
        least: steps by which every version is late; the timing has to allow it.
        most: steps by which a version can be late; as many old versions of the weights are kept.
        p: parameter of ``geometric``, above 0 and at most 1.
        mean: mean number of ``poisson``'s further steps, above 0, before the cut at ``most``.
        per: ``microbatch``: one draw for each stage, micro-batch and step; ``stage``: one for
            each stage and step, which all micro-batches share; ``step``: one for each step.
        seed: seed of the draws.

    Raises:
        UserError: no such distribution, or numbers that it cannot have.
    """

    distribution: str = "uniform"
    least: int = 0
    most: int = 1
    p: float | None = None
    mean: float | None = None
    per: str = "microbatch"
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, known in (
            ("distribution of delays", self.distribution, DISTRIBUTIONS),
            ("per of a random delay", self.per, PER),
        ):
            check_choice(what, value, known)
        for name in ("least", "most", "seed"):
            steps = whole(getattr(self, name), f"{name} of a random delay")
            object.__setattr__(self, name, steps)
        if not 0 <= self.least <= self.most:
            raise UserError(
                "a random delay is from least to most, 0 or more: got"
                f" least={self.least}, most={self.most}"
            )
        if self.most > _MOST:
            raise UserError(
                f"a random delay is of at most {_MOST} steps, and as many versions of the weights"
                f" are kept: got most={self.most}"
            )
        self._check("p", "geometric", 1, "above 0 and at most 1, such as 0.5")
        self._check("mean", "poisson", inf, "above 0, such as 1.5")

    def _check(self, name: str, distribution: str, most: float, allowed: str) -> None:
        """One of the numbers that a single distribution has."""
        value = getattr(self, name)
        if self.distribution != distribution:
            if value is not None:
                raise UserError(
                    f"{name} is of distribution={distribution}: leave it out for"
                    f" {self.distribution}, or choose that"
                )
        elif (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= most
            or value == inf
        ):
            raise UserError(f"{name} of a {distribution} delay is {allowed}: got {value!r}")

    def __str__(self) -> str:
        kind = "random" if self.distribution == "uniform" else self.distribution
        return f"{kind} delay {self.least}-{self.most}"

    @property
    def probabilities(self) -> tuple[Fraction, ...]:
        """Of ``least`` steps, one more, ..., ``most``."""
        return tuple(Fraction(weight, sum(self._weights)) for weight in self._weights)

    @property
    def expected(self) -> float:
        """The mean of the draws, in steps."""
        further = sum(k * weight for k, weight in enumerate(self._weights))
        return float(self.least + Fraction(further, sum(self._weights)))

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        """In proportion to the probabilities, over the denominator that all of them share."""
        further = range(1, self.most - self.least + 1)
        ratios = [_RATIOS[self.distribution](self, k) for k in further]
        return tuple(
            accumulate(
                ratios,
                lambda last, ratio: last // ratio.denominator * ratio.numerator,
                initial=prod(ratio.denominator for ratio in ratios),
            )
        )

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Below which a draw of so many bits means ``least`` steps, one more, ...

        Whole numbers, made exactly: no rounding of a platform can change a draw.
        """
        total = sum(self._weights)
        return tuple((below << _BITS) // total for below in accumulate(self._weights))

    def draw(self, stage: int, microbatch: int, step: int) -> int:
        """The steps by which ``stage`` reads late weights for ``microbatch`` at ``step``."""
        what = (step, stage, microbatch)[: len(PER) - PER.index(self.per)]
        key = " ".join(map(str, (self.seed, *what))).encode()
        bits = int.from_bytes(blake2b(key, digest_size=_BITS // 8).digest(), "big")
        return self.least + bisect_right(self._bounds, bits, hi=self.most - self.least)


@lru_cache(maxsize=256)
def draws(delay: RandomDelay, n_stages: int, n_microbatches: int, step: int) -> Draws:
    """What ``delay`` draws for a training step: ``[stage][microbatch]``."""
    if delay.per == "microbatch":
        microbatches = range(n_microbatches)
        return tuple(tuple(delay.draw(j, m, step) for m in microbatches) for j in range(n_stages))
    return tuple((delay.draw(j, 0, step),) * n_microbatches for j in range(n_stages))
