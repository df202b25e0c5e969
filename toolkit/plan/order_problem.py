"""The problem that a search for rank orders solves: durations, places, and room for activations.

A chain is a kind of op of a stage, on all micro-batches. These cost the same, so each chain runs
them in order: if it did not, the k-th start of every chain could go to micro-batch k. The order of
a rank is then a list of chains, in which the k-th occurrence of a chain is its micro-batch k::

    stage        0           1                      orders of two ranks, two micro-batches
    kind       F   B       F   B                    rank 0:  0 0 1 1    0F0 0F1 0B0 0B1
    chain      0   1       2   3                    rank 1:  2 3 2 3    1F0 1B0 1F1 1B1
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from toolkit.schedule import Kind, Op, Schedule

RankOrder = list[int]
"""Chains, in the order in which a rank runs them."""

_TICKS = 10_000  # of the busiest rank on a micro-batch, where seconds are rounded
_STEPS = 4  # after which a step takes as long as the one before, nearly always


@dataclass(frozen=True)
class OrderProblem:
    """A flush: every rank ends its ops of a training step before it begins those of the next.

    Weights and sums of gradients take room at all times, so that a little more may fit.

    Attributes:
        placement: ``[stage]``, its rank.
        n_microbatches: of a training step.
        kinds: of a stage's ops, n of them; chain ``c`` is kind ``c % n`` of stage ``c // n``.
        seconds: ``[chain]``, of an op.
        needs: ``[chain]``, chains whose op on the same micro-batch comes first, and the seconds of
            a message between them.
        kept_bytes: ``[stage]``, of a micro-batch from its forward to its last backward.
        workspace_bytes: ``[chain]``, while an op runs.
        waiting_bytes: ``[chain]``, of a message from its arrival until its op starts.
        room: ``[rank]``, bytes for all of them.
        update_seconds: ``[stage]``, from its last backward until its weights are new.
    """

    placement: tuple[int, ...]
    n_microbatches: int
    kinds: tuple[Kind, ...]
    seconds: tuple[float, ...]
    needs: tuple[tuple[tuple[int, float], ...], ...]
    kept_bytes: tuple[float, ...]
    workspace_bytes: tuple[float, ...]
    waiting_bytes: tuple[float, ...]
    room: tuple[float, ...]
    update_seconds: tuple[float, ...]

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return len(self.room)

    @property
    def n_stages(self) -> int:
        """Parts of the model."""
        return len(self.placement)

    @property
    def n_kinds(self) -> int:
        """Ops of a stage on a micro-batch."""
        return len(self.kinds)

    @property
    def n_ops(self) -> int:
        """Ops of a training step."""
        return len(self.seconds) * self.n_microbatches

    def chains(self, stage: int) -> range:
        """Return the chains of ``stage``: its forward first, its last backward last."""
        return range(stage * self.n_kinds, (stage + 1) * self.n_kinds)

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """``[rank]``, its stages."""
        stages: list[list[int]] = [[] for _ in self.room]
        for stage, rank in enumerate(self.placement):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def chains_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """``[rank]``, its chains."""
        chains: list[tuple[int, ...]] = []
        for stages in self.stages_of_rank:
            chains.append(
                tuple(itertools.chain.from_iterable(map(self.chains, stages)))
            )
        return tuple(chains)

    @cached_property
    def path(self) -> tuple[int, ...]:
        """Chains of forwards, then of backwards of inputs, in the order of a lone micro-batch."""
        forwards = [self.chains(stage)[0] for stage in range(self.n_stages)]
        backwards = [self.chains(stage)[1] for stage in reversed(range(self.n_stages))]
        return (*forwards, *backwards)

    @cached_property
    def tick(self) -> float:
        """Largest seconds that divide all times; a small share of a micro-batch if none do."""
        lags = [lag for _, lag in itertools.chain.from_iterable(self.needs)]
        amounts = [
            amount
            for amount in (*self.seconds, *lags, *self.update_seconds)
            if amount > 0
        ]
        # Times are often small multiples of each other, such as a backward of 1.5 forwards: a
        # fraction of the least one then divides all of them, and nothing is rounded.
        for divisor in (1, 2, 3, 4, 6, 12):
            tick = min(amounts) / divisor
            n_ticks = [amount / tick for amount in amounts]
            if all(abs(number - round(number)) < 1e-9 * divisor for number in n_ticks):
                return tick
        return self.busiest_seconds / _TICKS

    @property
    def busiest_seconds(self) -> float:
        """Seconds of the busiest rank's ops on a micro-batch."""
        return max(map(self.load, range(self.n_ranks))) / self.n_microbatches

    def load(self, rank: int) -> float:
        """Seconds of the ops of ``rank`` in a training step."""
        return self.n_microbatches * sum(
            self.seconds[chain] for chain in self.chains_of_rank[rank]
        )

    def fits(self, rank: int, order: RankOrder) -> bool:
        """Whether ``rank`` has room for what it keeps in this order."""
        n_kinds = self.n_kinds
        room = self.room[rank]
        workspace_bytes = self.workspace_bytes
        live_bytes = 0.0
        for chain in order:
            stage, kind = divmod(chain, n_kinds)
            if kind == 0:
                live_bytes += self.kept_bytes[stage]
            if live_bytes + workspace_bytes[chain] > room:
                return False
            if kind == n_kinds - 1:
                live_bytes -= self.kept_bytes[stage]
        return True

    def period(self, orders: Sequence[RankOrder]) -> float:
        """Seconds of a training step in the steady state; infinite if ranks wait for each other."""
        n_microbatches = self.n_microbatches
        ends = self._ends(orders, _STEPS)
        if any(len(chain_ends) < _STEPS * n_microbatches for chain_ends in ends):
            return inf

        # A rank ends a step with the last op of its order.
        last_chain_ends = [ends[order[-1]] for order in orders]
        return max(
            chain_ends[-1] - chain_ends[-1 - n_microbatches]
            for chain_ends in last_chain_ends
        )

    def starts(self, orders: Sequence[RankOrder]) -> list[list[float]]:
        """Return the starts of the first training step's ops, ``[chain][microbatch]``."""
        ends = self._ends(orders, 1)
        starts = []
        for chain_ends, op_seconds in zip(ends, self.seconds, strict=True):
            starts.append([end - op_seconds for end in chain_ends])
        return starts

    def peaks(self, orders: Sequence[RankOrder]) -> list[float]:
        """Return the peak bytes of each rank, including messages that wait."""
        ends = self._ends(orders, _STEPS)
        peaks = []
        for stages in self.stages_of_rank:
            changes: list[tuple[float, float]] = []  # times and bytes
            for stage in stages:
                for chain in self.chains(stage):
                    changes += self._memory_changes(stage, chain, ends)
            # Of changes at the same time those with negative bytes sort first: an op has the room
            # of the one that ends as it starts.
            peaks.append(
                max(itertools.accumulate(n_bytes for _, n_bytes in sorted(changes)))
            )
        return peaks

    def _memory_changes(
        self, stage: int, chain: int, ends: Sequence[Sequence[float]]
    ) -> list[tuple[float, float]]:
        """Return times and bytes of what the ops of a chain take and free on their rank."""
        taken_bytes = freed_bytes = self.workspace_bytes[chain]
        if chain == self.chains(stage)[0]:
            taken_bytes += self.kept_bytes[stage]
        if chain == self.chains(stage)[-1]:
            freed_bytes += self.kept_bytes[stage]

        changes = []
        starts = [end - self.seconds[chain] for end in ends[chain]]
        for start, end in zip(starts, ends[chain], strict=True):
            changes += [(start, taken_bytes), (end, -freed_bytes)]
        if self.waiting_bytes[chain]:
            # The sender of a message is the last need. Ranks that wait for each other leave
            # chains of different lengths.
            sender, lag = self.needs[chain][-1]
            for start, sender_end in zip(starts, ends[sender], strict=False):
                changes += [
                    (sender_end + lag, self.waiting_bytes[chain]),
                    (start, -self.waiting_bytes[chain]),
                ]
        return changes

    def _ends(self, orders: Sequence[RankOrder], n_steps: int) -> list[list[float]]:
        """Return the ends of the ops of each chain, as far as ranks get.

        A rank runs until its next op needs a later op of another chain. It then sleeps until that
        chain runs its next op, so that each op is examined about once.
        """
        n_kinds = self.n_kinds
        n_microbatches = self.n_microbatches
        seconds = self.seconds
        needs = self.needs
        ends: list[list[float]] = [[] for _ in seconds]
        # By the chain they wait for.
        sleeping_ranks: list[list[int]] = [[] for _ in seconds]
        free_at = [0.0] * len(orders)
        positions = [0] * len(orders)
        ready_ranks = [*range(len(orders))]
        # Ranks may run in any order here: an op starts when its rank is free and its needs have
        # ended, whoever is examined first.
        while ready_ranks:
            rank = ready_ranks.pop()
            order = orders[rank]
            now = free_at[rank]
            position = positions[rank]
            length = len(order)
            while position < n_steps * length:
                chain = order[position % length]
                chain_ends = ends[chain]
                # The micro-batch, counted over all steps: a chain runs its ops in order.
                index = len(chain_ends)
                for needed_chain, lag in needs[chain]:
                    needed_ends = ends[needed_chain]
                    if len(needed_ends) <= index:
                        break
                    if needed_ends[index] + lag > now:
                        now = needed_ends[index] + lag
                else:
                    # The first forward of a step reads new weights, so it waits for the update.
                    if index and index % n_microbatches == 0 and chain % n_kinds == 0:
                        last_backward_end = ends[chain + n_kinds - 1][index - 1]
                        now = max(
                            now,
                            last_backward_end + self.update_seconds[chain // n_kinds],
                        )
                    now += seconds[chain]
                    chain_ends.append(now)
                    position += 1
                    if sleeping_ranks[chain]:
                        ready_ranks += sleeping_ranks[chain]
                        sleeping_ranks[chain] = []
                    continue
                # The loop over needs has stopped at the chain to wait for.
                sleeping_ranks[needed_chain].append(rank)
                break
            free_at[rank] = now
            positions[rank] = position
        return ends

    def schedule(self, orders: Sequence[RankOrder], name: str) -> Schedule:
        """Return the schedule of these orders."""
        rank_ops = []
        for order in orders:
            n_occurrences = [0] * len(self.seconds)
            ops = []
            for chain in order:
                stage, kind = divmod(chain, self.n_kinds)
                ops.append(Op(self.kinds[kind], stage, n_occurrences[chain]))
                n_occurrences[chain] += 1
            rank_ops.append(ops)
        return Schedule.from_rank_orders(rank_ops, name=name)

    def orders_of(self, schedule: Schedule) -> list[RankOrder]:
        """Return the rank orders of a schedule of this problem's sizes and placement."""
        orders: list[RankOrder] = [[] for _ in self.room]
        starts = schedule.timing.starts
        for op in sorted(starts, key=starts.__getitem__):
            chain = self.chains(op.stage)[self.kinds.index(op.kind)]
            orders[self.placement[op.stage]].append(chain)
        return orders
