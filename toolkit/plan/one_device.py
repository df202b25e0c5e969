"""The least activation memory of several micro-batches on one device, at a given price in time.

Two things lower it. Micro-batches that start after one another reach their peaks at different
times; and stages that compute their forward again keep only their input. They are chosen together:
a stage whose activations fill the peak of the sum is worth more than one that fills its valleys::

    activations of a micro-batch        3 of them, shifted       stage 0 computed again
      ___                               ________________
     |   |__                            |                         sum of
    _|      |__                         |      the sum            ______________
    time of a step                      time of a step            time of a step + 1 forward
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.model_memory import MemoryCurve
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost, recomputing
from toolkit.cost.timeline import ACTIVATIONS, INPUTS
from toolkit.errors import UserError, whole
from toolkit.schedule import FRESHEST, Kind, Op, Schedule
from toolkit.schedule.staleness import Delay

_BINS = 1024  # of a period, in which the search counts memory
_ROUNDS = 20  # at most, of stages and shifts in turn


@dataclass(frozen=True)
class LeastPeak:
    """Shifts of micro-batches, and stages that compute their forward again.

    Attributes:
        costs: ``[stage]``, those that compute again marked.
        offsets: ``[microbatch]``, its start as a share of the period, from 0 to below 1.
        recomputed: the stages that compute their forward again.
        peak: most bytes of activations, and of stage inputs, of all micro-batches.
        simultaneous: those of micro-batches that start together and compute nothing again, as in
            data parallelism.
        bound: bytes that no shifts of these stages can undercut: the mean over the period.
        seconds: forward and backward of one micro-batch.
        extra_time: share of the time that computing again adds.
    """

    costs: tuple[StageCost, ...]
    offsets: tuple[float, ...]
    recomputed: tuple[int, ...]
    peak: float
    simultaneous: float
    bound: float
    seconds: float
    extra_time: float

    @property
    def reduction(self) -> float:
        """1 - peak / simultaneous."""
        return 1 - self.peak / self.simultaneous

    def schedule(self, hardware: Hardware = UNIT, delay: Delay = FRESHEST) -> Schedule:
        """Return the order of all ops on one device; give a runtime ``recomputed`` as checkpoint.

        Args:
            hardware: that of the search.
            delay: as in :class:`Schedule`.
        """
        forward, backward = _starts(self.costs, hardware)
        period, starts = forward[-1] + sum(_backwards(self.costs, hardware)), {}
        for m, offset in enumerate(self.offsets):
            for j in range(len(self.costs)):
                starts[Op(Kind.FORWARD, j, m)] = offset + forward[j] / period
                starts[Op(Kind.BACKWARD, j, m)] = offset + backward[j] / period
        # Each op has a slot of its own: by time in the period, that of a micro-batch in its order.
        within = sorted(starts, key=lambda op: (starts[op] % 1, -op.kind, op.stage, op.microbatch))
        slots = {op: k + int(starts[op]) * len(starts) for k, op in enumerate(within)}
        order = sorted(slots, key=slots.__getitem__)
        name = f"least peak of {len(self.offsets)}"
        return Schedule.from_rank_orders(
            [order], name=name, delay=delay, period=len(slots), not_before=slots
        )


def least_peak(
    costs: Costs, n_microbatches: int, extra_time: float = 0.1, hardware: Hardware = UNIT
) -> LeastPeak:
    """Choose shifts of micro-batches and stages to compute again, for the least activation memory.

    A local search from uniform shifts, and from the stages that save most in the time they take.
    All micro-batches compute at the same time, each at its own pace.

    Args:
        costs: one entry per stage; more stages allow finer choices.
        n_microbatches: micro-batches of a training step.
        extra_time: largest share of the time of a micro-batch that computing again may add.
        hardware: seconds of stages that were not measured.

    Raises:
        UserError: ``extra_time`` is negative, or stages take no time or keep nothing.
    """
    n = whole(n_microbatches, "the number of micro-batches", 1)
    if not (isfinite(extra_time) and extra_time >= 0):
        raise UserError(f"extra_time is 0 or more, a share of the time of a step: got {extra_time}")
    search = _Search(recomputing(costs, "none"), n, extra_time, hardware)
    chosen, offsets = search.run()
    found = recomputing(costs, sorted(chosen))
    curve = stage_curve(found, hardware)
    plain = stage_curve(search.costs, hardware)
    return LeastPeak(
        found,
        tuple(map(float, offsets)),
        tuple(sorted(chosen)),
        peak_of(curve, offsets),
        n * plain.peak,
        n * curve.mean,
        float(curve.edges[-1]),
        float(curve.edges[-1] / plain.edges[-1]) - 1,
    )


def peak_in_turn(costs: Costs, schedule: Schedule) -> float:
    """Return the most bytes of activations and stage inputs, if one op runs after another.

    As in order "scheduled". Fewer ops are under way than when micro-batches compute at the same
    time, so stages that compute again hold less.
    """
    timeline = simulate(schedule.lower(3), costs, UNIT)
    kept = [change for change in timeline.changes if change.kind in (ACTIVATIONS, INPUTS)]
    return replace(timeline, changes=kept).peak_memory()


def stage_curve(costs: Costs, hardware: Hardware) -> MemoryCurve:
    """Return the activations and stage inputs that a micro-batch keeps, over its ops in turn.

    Activations count from the start of their forward, computed again from the start of the
    backward; an input, from the end of the stage before.
    """
    forward, backward = _starts(costs, hardware)
    ends = [a + b for a, b in zip(backward, _backwards(costs, hardware), strict=True)]
    held: list[tuple[float, float, float]] = []  # from, until, bytes
    for j, cost in enumerate(costs):
        held.append((forward[j], ends[j], cost.kept_bytes + cost.extra_input_bytes))
        if cost.recomputes:
            held.append((backward[j], ends[j], cost.activation_bytes))
    edges = np.unique([0.0, *(t for since, until, _ in held for t in (since, until))])
    if len(edges) == 1:
        raise UserError("stages take no time: give them seconds, or hardware that takes some")
    middles, levels = (edges[1:] + edges[:-1]) / 2, np.zeros(len(edges) - 1)
    for since, until, n_bytes in held:
        levels[(since < middles) & (middles < until)] += n_bytes
    if not levels.any():
        raise UserError("stages keep no activations: there is no memory to save")
    return MemoryCurve(edges, levels)


def peak_of(curve: MemoryCurve, offsets: ArrayLike) -> float:
    """Return the most bytes of micro-batches that begin at ``offsets``, shares of the period."""
    period = curve.edges[-1]
    shifts = np.asarray(offsets) * period
    times = np.unique(np.mod(curve.edges[:, None] + shifts, period))
    middles = (times + np.append(times[1:], times[0] + period)) / 2
    lasting = np.diff(times, append=times[0] + period) > 1e-9 * period  # not rounding alone
    held = curve.at(middles[lasting][:, None] - shifts)  # [moment, micro-batch]
    return float(held.sum(axis=1).max())


def _starts(costs: Costs, hardware: Hardware) -> tuple[list[float], list[float]]:
    """Starts of the forward and of the backward of each stage; forwards end with their end."""
    forwards = [cost.seconds(hardware)[0] for cost in costs]
    forward = [0.0, *np.cumsum(forwards)]
    backward = forward[-1] + np.cumsum([0.0, *_backwards(costs, hardware)[::-1]])
    return forward, [*backward[:-1][::-1]]


def _backwards(costs: Costs, hardware: Hardware) -> list[float]:
    """Seconds of each stage's backward."""
    pairs = [(cost.recomputes, *cost.seconds(hardware)) for cost in costs]
    return [backward + again * forward for again, forward, backward in pairs]


class _Search:
    """Local search over stages and shifts, with memory counted in bins of the period."""

    def __init__(self, costs: Costs, n: int, extra_time: float, hardware: Hardware) -> None:
        self.costs, self.n, self.hardware = costs, n, hardware
        self.bins = n * -(-_BINS // n)  # so that uniform shifts are whole bins
        seconds = [cost.seconds(hardware) for cost in costs]
        self.forwards = [forward for forward, _ in seconds]
        self.budget = extra_time * sum(map(sum, seconds)) * (1 + 1e-9)
        self.rows: dict[frozenset[int], NDArray[np.float64]] = {}

    def run(self) -> tuple[frozenset[int], NDArray[np.float64]]:
        """Return the stages, and the shifts as shares of the period."""
        shifts = np.arange(self.n) * (self.bins // self.n)
        chosen = self._greedy(shifts)
        best = self.peak(chosen, shifts)
        for _ in range(_ROUNDS):
            chosen = self._improve(chosen, shifts)
            shifts = self._shift(chosen, shifts)
            if (peak := self.peak(chosen, shifts)) >= best:
                break
            best = peak
        uniform = np.arange(self.n) / self.n
        offsets = shifts / self.bins
        curve = stage_curve(recomputing(self.costs, sorted(chosen)), self.hardware)
        return chosen, min(uniform, offsets, key=lambda given: peak_of(curve, given))

    def row(self, chosen: frozenset[int]) -> NDArray[np.float64]:
        """The most bytes that a micro-batch keeps in each bin."""
        if chosen not in self.rows:
            curve = stage_curve(recomputing(self.costs, sorted(chosen)), self.hardware)
            places = curve.edges / curve.edges[-1] * self.bins
            row = np.zeros(self.bins)
            for since, until, level in zip(places, places[1:], curve.levels, strict=False):
                bins = slice(int(since + 1e-6), int(np.ceil(until - 1e-6)))
                row[bins] = np.maximum(row[bins], level)
            self.rows[chosen] = row
        return self.rows[chosen]

    def peak(self, chosen: frozenset[int], shifts: NDArray[np.int64]) -> float:
        """The most bytes of all micro-batches."""
        row = self.row(chosen)
        places = (np.arange(self.bins)[:, None] - shifts) % self.bins
        return float(row[places].sum(axis=1).max())

    def _fits(self, chosen: Collection[int]) -> bool:
        return sum(self.forwards[j] for j in chosen) <= self.budget

    def _greedy(self, shifts: NDArray[np.int64]) -> frozenset[int]:
        """Add the stage that saves most for its time, as long as one fits."""
        chosen: frozenset[int] = frozenset()
        while True:
            peak, found = self.peak(chosen, shifts), []
            for j in range(len(self.costs)):
                if j not in chosen and self._fits(more := chosen | {j}):
                    saved = peak - self.peak(more, shifts)
                    found.append((saved / max(self.forwards[j], 1e-30), j))
            if not found or max(found)[0] <= 0:
                return chosen
            chosen |= {max(found)[1]}

    def _improve(self, chosen: frozenset[int], shifts: NDArray[np.int64]) -> frozenset[int]:
        """Add, drop or exchange stages as long as that lowers the peak."""
        best = self.peak(chosen, shifts)
        while True:
            around = [other for other in self._around(chosen) if self._fits(other)]
            peak, found = min(
                ((self.peak(other, shifts), sorted(other)) for other in around),
                default=(best, []),
            )
            if peak >= best:
                return chosen
            best, chosen = peak, frozenset(found)

    def _around(self, chosen: frozenset[int]) -> Iterator[frozenset[int]]:
        others = [j for j in range(len(self.costs)) if j not in chosen]
        for drop, add in product([[], *([j] for j in chosen)], [[], *([j] for j in others)]):
            if drop or add:
                yield chosen.difference(drop).union(add)

    def _shift(self, chosen: frozenset[int], shifts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move one micro-batch after another to where it adds least to the peak."""
        row, places = self.row(chosen), np.arange(self.bins)
        rolled = row[(places[:, None] - places) % self.bins]  # [bin, shift]
        shifts = shifts.copy()
        total = rolled[:, shifts].sum(axis=1)
        for m in range(1, self.n):
            others = total - rolled[:, shifts[m]]
            peaks = (others[:, None] + rolled).max(axis=0)
            if peaks.min() < peaks[shifts[m]]:
                shifts[m] = int(peaks.argmin())
                total = others + rolled[:, shifts[m]]
        return shifts
