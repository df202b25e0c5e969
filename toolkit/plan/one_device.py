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

from toolkit.cost.activation_curve import MemoryCurve
from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost, recomputing
from toolkit.cost.timeline import ACTIVATIONS, INPUTS
from toolkit.errors import UserError, whole
from toolkit.plan.shifts import shifted_levels
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
        period = forward[-1] + sum(_backwards(self.costs, hardware))
        starts = {}
        for microbatch, offset in enumerate(self.offsets):
            for stage in range(len(self.costs)):
                starts[Op(Kind.FORWARD, stage, microbatch)] = (
                    offset + forward[stage] / period
                )
                starts[Op(Kind.BACKWARD, stage, microbatch)] = (
                    offset + backward[stage] / period
                )

        # Each op has a slot of its own: by time in the period, that of a micro-batch in its order.
        # What a micro-batch runs after the end of the period has the slots of the next one::
        #
        #     micro-batch 0    F0 F1 B1 B0 |                  8 ops: slots 0 to 7 are the period's,
        #     micro-batch 1          F0 F1 | B1 B0            8 to 15 those of the next
        def time_in_period(op: Op) -> tuple[float, int, int, int]:
            return starts[op] % 1, -op.kind, op.stage, op.microbatch

        slots = {}
        for position, op in enumerate(sorted(starts, key=time_in_period)):
            slots[op] = position + int(starts[op]) * len(starts)
        order = sorted(slots, key=slots.__getitem__)
        name = f"least peak of {len(self.offsets)}"
        return Schedule.from_rank_orders(
            [order], name=name, delay=delay, period=len(slots), not_before=slots
        )


def least_peak(
    costs: Costs,
    n_microbatches: int,
    extra_time: float = 0.1,
    hardware: Hardware = UNIT,
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
    n_microbatches = whole(n_microbatches, "the number of micro-batches", 1)
    if not (isfinite(extra_time) and extra_time >= 0):
        raise UserError(
            f"extra_time is 0 or more, a share of the time of a step: got {extra_time}"
        )
    search = _Search(recomputing(costs, "none"), n_microbatches, extra_time, hardware)
    chosen_stages, offsets = search.run()
    chosen_costs = recomputing(costs, sorted(chosen_stages))
    curve = stage_curve(chosen_costs, hardware)
    plain_curve = stage_curve(search.costs, hardware)
    seconds = float(curve.edges[-1])
    return LeastPeak(
        costs=chosen_costs,
        offsets=tuple(map(float, offsets)),
        recomputed=tuple(sorted(chosen_stages)),
        peak=peak_of(curve, offsets),
        simultaneous=n_microbatches * plain_curve.peak,
        bound=n_microbatches * curve.mean,
        seconds=seconds,
        extra_time=float(seconds / plain_curve.edges[-1]) - 1,
    )


def peak_in_turn(costs: Costs, schedule: Schedule) -> float:
    """Return the most bytes of activations and stage inputs, if one op runs after another.

    Order "scheduled" of a runtime does so. Fewer ops are under way than when micro-batches compute
    at the same time, so stages that compute again hold less.

    Args:
        costs: one entry per stage.
        schedule: a schedule on one device.
    """
    timeline = simulate(schedule.lower(3), costs, UNIT)
    memory_changes = [
        change for change in timeline.changes if change.kind in (ACTIVATIONS, INPUTS)
    ]
    return replace(timeline, changes=memory_changes).peak_memory()


def stage_curve(costs: Costs, hardware: Hardware) -> MemoryCurve:
    """Return the activations and stage inputs that a micro-batch keeps, over its ops in turn.

    Activations count from the start of their forward, computed again from the start of the
    backward; an input, from the end of the stage before.
    """
    forward, backward = _starts(costs, hardware)
    # What a stage keeps of a micro-batch:
    #
    #     ops              F ....... B
    #     kept             |=========|      activations; of one that computes again, its input
    #     computed again             |=|    then its activations, while its backward runs
    lifetimes: list[tuple[float, float, float]] = []  # start, end, bytes
    for stage, backward_seconds in enumerate(_backwards(costs, hardware)):
        cost = costs[stage]
        end = backward[stage] + backward_seconds
        lifetimes.append(
            (forward[stage], end, cost.kept_bytes + cost.extra_input_bytes)
        )
        if cost.recomputes:
            lifetimes.append((backward[stage], end, cost.activation_bytes))
    times = [0.0]
    for start, end, _ in lifetimes:
        times += [start, end]
    edges = np.unique(times)
    if len(edges) == 1:
        raise UserError(
            "stages take no time: give them seconds, or hardware that takes some"
        )
    # Between two edges nothing changes, so what lives in the middle lives all the time.
    middles = (edges[1:] + edges[:-1]) / 2
    level_bytes = np.zeros(len(edges) - 1)
    for start, end, n_bytes in lifetimes:
        level_bytes[(start < middles) & (middles < end)] += n_bytes
    if not level_bytes.any():
        raise UserError("stages keep no activations: there is no memory to save")
    return MemoryCurve(edges, level_bytes)


def peak_of(curve: MemoryCurve, offsets: ArrayLike) -> float:
    """Return the most bytes that micro-batches keep together.

    Args:
        curve: memory of one micro-batch over the period.
        offsets: ``[microbatch]``, starts as shares of the period.
    """
    period = curve.edges[-1]
    shifts = np.asarray(offsets) * period
    times = np.unique(np.mod(curve.edges[:, None] + shifts, period))
    # Memory is constant between two changes, so it is read in the middle. The period repeats: the
    # last interval reaches around to the first change.
    middles = (times + np.append(times[1:], times[0] + period)) / 2
    # Not rounding alone.
    is_interval = np.diff(times, append=times[0] + period) > 1e-9 * period
    # [moment, micro-batch].
    live_bytes = curve.at(middles[is_interval][:, None] - shifts)
    return float(live_bytes.sum(axis=1).max())


def _starts(costs: Costs, hardware: Hardware) -> tuple[list[float], list[float]]:
    """Return the starts of each stage's forward and backward, in seconds.

    The list of forwards has one more entry: the end of the last forward.
    """
    forwards = [cost.seconds(hardware)[0] for cost in costs]
    forward = [0.0, *np.cumsum(forwards)]
    backward = forward[-1] + np.cumsum([0.0, *_backwards(costs, hardware)[::-1]])
    return forward, [*backward[:-1][::-1]]


def _backwards(costs: Costs, hardware: Hardware) -> list[float]:
    """Return the seconds of each stage's backward, with the forward if it computes that again."""
    backwards = []
    for cost in costs:
        forward, backward = cost.seconds(hardware)
        backwards.append(backward + cost.recomputes * forward)
    return backwards


class _Search:
    """Local search over stages and shifts, with memory counted in bins of the period."""

    def __init__(
        self, costs: Costs, n: int, extra_time: float, hardware: Hardware
    ) -> None:
        self.costs = costs
        self.n = n
        self.hardware = hardware
        self.bins = n * -(-_BINS // n)  # so that uniform shifts are whole bins
        seconds = [cost.seconds(hardware) for cost in costs]
        self.forwards = [forward for forward, _ in seconds]
        # A little more, so that rounding refuses no set of stages that takes just the budget.
        self.budget = extra_time * sum(map(sum, seconds)) * (1 + 1e-9)
        self.rows: dict[frozenset[int], NDArray[np.float64]] = {}

    def run(self) -> tuple[frozenset[int], NDArray[np.float64]]:
        """Return the stages, and the shifts as shares of the period."""
        shifts = np.arange(self.n) * (self.bins // self.n)
        chosen_stages = self._greedy(shifts)
        best_bytes = self.peak(chosen_stages, shifts)
        for _ in range(_ROUNDS):
            chosen_stages = self._improve(chosen_stages, shifts)
            shifts = self._shift(chosen_stages, shifts)
            peak_bytes = self.peak(chosen_stages, shifts)
            if peak_bytes >= best_bytes:
                break
            best_bytes = peak_bytes
        # A bin counts the most of its time, so binned peaks may be too high: exact ones decide.
        # Uniform shifts are the paper's, and nothing that is found may be worse.
        uniform = np.arange(self.n) / self.n
        offsets = shifts / self.bins
        curve = stage_curve(
            recomputing(self.costs, sorted(chosen_stages)), self.hardware
        )
        return chosen_stages, min(
            uniform, offsets, key=lambda starts: peak_of(curve, starts)
        )

    def row(self, chosen: frozenset[int]) -> NDArray[np.float64]:
        """Return the most bytes that a micro-batch keeps in each bin."""
        if chosen not in self.rows:
            curve = stage_curve(recomputing(self.costs, sorted(chosen)), self.hardware)
            # Bins are shares of the period, which is longer the more stages compute again.
            bin_edges = curve.edges / curve.edges[-1] * self.bins
            row = np.zeros(self.bins)
            for start, end, level in zip(
                bin_edges, bin_edges[1:], curve.levels, strict=False
            ):
                # A level that ends on a border of bins, up to rounding, does not count in the next.
                bins = slice(int(start + 1e-6), int(np.ceil(end - 1e-6)))
                row[bins] = np.maximum(row[bins], level)
            self.rows[chosen] = row
        return self.rows[chosen]

    def peak(self, chosen: frozenset[int], shifts: NDArray[np.int64]) -> float:
        """Return the peak bytes of all micro-batches together."""
        return float(shifted_levels(self.row(chosen), shifts).sum(axis=1).max())

    def _fits(self, chosen: Collection[int]) -> bool:
        return sum(self.forwards[stage] for stage in chosen) <= self.budget

    def _greedy(self, shifts: NDArray[np.int64]) -> frozenset[int]:
        """Add the stage that saves most for its time, as long as one fits."""
        chosen_stages: frozenset[int] = frozenset()
        while True:
            peak = self.peak(chosen_stages, shifts)
            savings = []
            for stage in range(len(self.costs)):
                more_stages = chosen_stages | {stage}
                if stage not in chosen_stages and self._fits(more_stages):
                    saved_bytes = peak - self.peak(more_stages, shifts)
                    savings.append(
                        (saved_bytes / max(self.forwards[stage], 1e-30), stage)
                    )
            if not savings or max(savings)[0] <= 0:
                return chosen_stages
            chosen_stages |= {max(savings)[1]}

    def _improve(
        self, chosen: frozenset[int], shifts: NDArray[np.int64]
    ) -> frozenset[int]:
        """Add, drop or exchange stages as long as that lowers the peak."""
        best_bytes = self.peak(chosen, shifts)
        while True:
            # Exchanges matter: once the budget is spent, no stage can be added without dropping
            # one.
            neighbours = [
                neighbour for neighbour in self._around(chosen) if self._fits(neighbour)
            ]
            peak_bytes, best_stages = min(
                (
                    (self.peak(neighbour, shifts), sorted(neighbour))
                    for neighbour in neighbours
                ),
                default=(best_bytes, []),
            )
            if peak_bytes >= best_bytes:
                return chosen
            best_bytes = peak_bytes
            chosen = frozenset(best_stages)

    def _around(self, chosen: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield the sets that one addition, removal or exchange makes of ``chosen``."""
        other_stages = [
            stage for stage in range(len(self.costs)) if stage not in chosen
        ]
        removals: list[list[int]] = [[], *([stage] for stage in chosen)]
        additions: list[list[int]] = [[], *([stage] for stage in other_stages)]
        for removed, added in product(removals, additions):
            if removed or added:
                yield chosen.difference(removed).union(added)

    def _shift(
        self, chosen: frozenset[int], shifts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Move one micro-batch after another to where it adds least to the peak."""
        rolled = shifted_levels(self.row(chosen), np.arange(self.bins))  # [bin, shift]
        shifts = shifts.copy()
        total_bytes = rolled[:, shifts].sum(axis=1)
        # Micro-batch 0 stays, since a shift of all of them changes nothing.
        for microbatch in range(1, self.n):
            other_bytes = total_bytes - rolled[:, shifts[microbatch]]
            peak_of_shift = (other_bytes[:, None] + rolled).max(axis=0)
            if peak_of_shift.min() < peak_of_shift[shifts[microbatch]]:
                shifts[microbatch] = int(peak_of_shift.argmin())
                total_bytes = other_bytes + rolled[:, shifts[microbatch]]
        return shifts
