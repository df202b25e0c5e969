"""The problem that a search for rank orders solves: durations, places, and room for activations.

A chain is a kind of op of a stage, on all micro-batches. These cost the same, so each chain runs
them in order: if it did not, the k-th start of every chain could go to micro-batch k. The order of
a rank is then a word of chains, in which the k-th occurrence of a chain is its micro-batch k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from math import inf

from toolkit.cost import Costs, Hardware
from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, Schedule

Word = list[int]
"""Chains, in the order in which a rank runs them."""

_KINDS = {
    True: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    False: (Kind.FORWARD, Kind.BACKWARD),
}
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
        held: ``[stage]``, bytes that a micro-batch keeps from its forward to its last backward.
        work: ``[chain]``, bytes of workspace while an op runs.
        waiting: ``[chain]``, bytes of a message from its arrival until its op starts.
        room: ``[rank]``, bytes for all of them.
        updates: ``[stage]``, seconds from its last backward until its weights are new.
        of_rank: ``[rank]``, its chains.
        users: ``[chain]``, the ranks that wait for it, its own first.
    """

    placement: tuple[int, ...]
    n_microbatches: int
    kinds: tuple[Kind, ...]
    seconds: tuple[float, ...]
    needs: tuple[tuple[tuple[int, float], ...], ...]
    held: tuple[float, ...]
    work: tuple[float, ...]
    waiting: tuple[float, ...]
    room: tuple[float, ...]
    updates: tuple[float, ...]
    of_rank: tuple[tuple[int, ...], ...] = field(init=False)
    users: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        n_chains, n_kinds = len(self.seconds), len(self.kinds)
        rank_of_chain = [self.placement[chain // n_kinds] for chain in range(n_chains)]
        chains_of_rank = [
            tuple(chain for chain in range(n_chains) if rank_of_chain[chain] == rank)
            for rank in range(len(self.room))
        ]
        users: list[list[int]] = [[rank] for rank in rank_of_chain]
        for chain, chain_needs in enumerate(self.needs):
            for needed_chain, _ in chain_needs:
                if rank_of_chain[chain] not in users[needed_chain]:
                    users[needed_chain].append(rank_of_chain[chain])
        object.__setattr__(self, "of_rank", tuple(chains_of_rank))
        object.__setattr__(self, "users", tuple(map(tuple, users)))

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return len(self.room)

    def load(self, rank: int) -> float:
        """Seconds of the ops of ``rank`` in a training step."""
        return self.n_microbatches * sum(self.seconds[chain] for chain in self.of_rank[rank])

    def fits(self, rank: int, word: Word) -> bool:
        """Whether ``rank`` has room for what it holds in the order of ``word``."""
        held_bytes, room, n_kinds, work = 0.0, self.room[rank], len(self.kinds), self.work
        for chain in word:
            if chain % n_kinds == 0:
                held_bytes += self.held[chain // n_kinds]
            if held_bytes + work[chain] > room:
                return False
            if chain % n_kinds == n_kinds - 1:
                held_bytes -= self.held[chain // n_kinds]
        return True

    def period(self, words: Sequence[Word]) -> float:
        """Seconds of a training step in the steady state; infinite if ranks wait for each other."""
        n_microbatches, ends = self.n_microbatches, self._ends(words, _STEPS)
        if any(len(chain_ends) < _STEPS * n_microbatches for chain_ends in ends):
            return inf
        # A rank ends a step with the last op of its word.
        previous_ends, last_ends = (
            [ends[order[-1]][n_steps * n_microbatches - 1] for order in words]
            for n_steps in (_STEPS - 1, _STEPS)
        )
        return max(
            last_end - previous_end
            for previous_end, last_end in zip(previous_ends, last_ends, strict=True)
        )

    def starts(self, words: Sequence[Word]) -> list[list[float]]:
        """Return the starts of the first training step's ops, ``[chain][microbatch]``."""
        ends = self._ends(words, 1)
        return [
            [end - op_seconds for end in chain_ends]
            for chain_ends, op_seconds in zip(ends, self.seconds, strict=True)
        ]

    def peaks(self, words: Sequence[Word]) -> list[float]:
        """Return the peak bytes of each rank, including messages that wait."""
        n_kinds, ends, peaks = len(self.kinds), self._ends(words, _STEPS), []
        for chains in self.of_rank:
            changes = []
            for chain in chains:
                is_last, held_bytes = chain % n_kinds == n_kinds - 1, self.held[chain // n_kinds]
                for index, end in enumerate(ends[chain]):
                    start = end - self.seconds[chain]
                    changes += [(start, self.work[chain] + held_bytes * (chain % n_kinds == 0))]
                    changes += [(end, -self.work[chain] - held_bytes * is_last)]
                    if self.waiting[chain]:
                        needed_chain, lag = self.needs[chain][-1]
                        changes += [
                            (ends[needed_chain][index] + lag, self.waiting[chain]),
                            (start, -self.waiting[chain]),
                        ]
            peaks.append(max(accumulate(change for _, change in sorted(changes))))
        return peaks

    def _ends(self, words: Sequence[Word], n_steps: int) -> list[list[float]]:
        """Return the ends of the ops of each chain, as far as ranks get.

        A rank runs until its next op needs a later op of another chain. It then sleeps until that
        chain runs its next op, so that each op is examined about once.
        """
        n_kinds, n_microbatches, seconds, needs = (
            len(self.kinds),
            self.n_microbatches,
            self.seconds,
            self.needs,
        )
        ends: list[list[float]] = [[] for _ in seconds]
        # Ranks, by the chain that they wait for.
        waiting_ranks: list[list[int]] = [[] for _ in seconds]
        free_at, positions, ready_ranks = [0.0] * len(words), [0] * len(words), [*range(len(words))]
        while ready_ranks:
            rank = ready_ranks.pop()
            order, now, position = words[rank], free_at[rank], positions[rank]
            length = len(order)
            while position < n_steps * length:
                chain = order[position % length]
                chain_ends = ends[chain]
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
                        now = max(
                            now,
                            ends[chain + n_kinds - 1][index - 1] + self.updates[chain // n_kinds],
                        )
                    now += seconds[chain]
                    chain_ends.append(now)
                    position += 1
                    if waiting_ranks[chain]:
                        ready_ranks += waiting_ranks[chain]
                        waiting_ranks[chain] = []
                    continue
                waiting_ranks[needed_chain].append(rank)
                break
            free_at[rank], positions[rank] = now, position
        return ends

    def bound(self) -> float:
        """Return seconds that a step takes at least, in any order.

        A rank runs all its ops. Before its first backward it waits for the ranks behind; until then
        it runs no more forwards than it has room for. If it has one stage and less room than
        micro-batches, likewise after its last forward.
        """
        return max(map(self._bound_of, range(self.n_ranks)))

    def _bound_of(self, rank: int) -> float:
        n_kinds, n_microbatches, load = len(self.kinds), self.n_microbatches, self.load(rank)
        stages = sorted(chain // n_kinds for chain in self.of_rank[rank] if chain % n_kinds == 0)
        if not stages:
            return 0.0
        first_stage, last_stage = stages[0], stages[-1]
        if len(stages) == 1:  # with more, ops of others may run during an update
            load += self.updates[first_stage]
        gradient_arrival = (
            self._way(first_stage * n_kinds, last_stage * n_kinds + 1)
            - self.seconds[last_stage * n_kinds + 1]
        )
        # Meanwhile the rank runs forwards; those that need least room for their time come first.
        room_bytes, forward_seconds = self.room[rank], 0.0
        for stage in sorted(
            stages, key=lambda stage: self.held[stage] / max(self.seconds[stage * n_kinds], 1e-30)
        ):
            n_forwards = (
                n_microbatches
                if self.held[stage] == 0
                else min(n_microbatches, room_bytes / self.held[stage])
            )
            forward_seconds += n_forwards * self.seconds[stage * n_kinds]
            room_bytes -= n_forwards * self.held[stage]
        idle_seconds = max(0.0, gradient_arrival - forward_seconds)
        if len(stages) == 1 and self.held[first_stage] * n_microbatches > self.room[rank]:
            n_in_flight = self.room[rank] // self.held[first_stage]
            op_seconds = self.seconds[first_stage * n_kinds : first_stage * n_kinds + n_kinds]
            round_trip = self._way(first_stage * n_kinds, first_stage * n_kinds + 1) + sum(
                op_seconds[2:]
            )
            idle_seconds += max(0.0, round_trip - op_seconds[0] - n_in_flight * sum(op_seconds[1:]))
        return load + idle_seconds

    def _way(self, begin: int, end: int) -> float:
        """Seconds from the start of one chain's op to the end of another's, without waiting."""
        path_seconds = [-inf] * len(self.seconds)
        path_seconds[begin] = self.seconds[begin]
        n_kinds, n_stages = len(self.kinds), len(self.held)
        path = [stage * n_kinds for stage in range(n_stages)] + [
            stage * n_kinds + 1 for stage in reversed(range(n_stages))
        ]
        for chain in path:
            for needed_chain, lag in self.needs[chain]:
                path_seconds[chain] = max(
                    path_seconds[chain], path_seconds[needed_chain] + lag + self.seconds[chain]
                )
        return path_seconds[end]

    @property
    def n_ops(self) -> int:
        """Ops of a training step."""
        return len(self.seconds) * self.n_microbatches

    def tick(self) -> float:
        """Seconds of which all others are multiples; a small share of a micro-batch if none is."""
        lags = (lag for chain_needs in self.needs for _, lag in chain_needs)
        amounts = [amount for amount in (*self.seconds, *lags, *self.updates) if amount > 0]
        for divisor in (1, 2, 3, 4, 6, 12):
            tick = min(amounts) / divisor
            if all(
                abs(amount / tick - round(amount / tick)) < 1e-9 * divisor for amount in amounts
            ):
                return tick
        return max(map(self.load, range(self.n_ranks))) / self.n_microbatches / _TICKS

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Stages that follow one another on a rank, about half of its ops at most."""
        n_kinds, groups = len(self.kinds), []
        stage_seconds = [
            sum(self.seconds[stage * n_kinds : stage * n_kinds + n_kinds])
            for stage in range(len(self.placement))
        ]
        for _, stages in groupby(range(len(stage_seconds)), key=self.placement.__getitem__):
            neighbours = [*stages]
            total_seconds = sum(stage_seconds[stage] for stage in neighbours)
            n_groups = max(1, round(2 * self.n_ranks * total_seconds / sum(stage_seconds)))
            end_seconds = accumulate(stage_seconds[stage] for stage in neighbours)
            # A stage belongs to the part in which its middle falls.
            group_numbers = [
                int((end_second - stage_seconds[stage] / 2) / total_seconds * n_groups)
                for stage, end_second in zip(neighbours, end_seconds, strict=True)
            ]
            groups += [
                tuple(
                    stage
                    for stage, number in zip(neighbours, group_numbers, strict=True)
                    if number == group_number
                )
                for group_number in dict.fromkeys(group_numbers)
            ]
        return tuple(groups)

    @cached_property
    def merged(self) -> "OrderProblem":
        """The problem whose stages are the groups: fewer orders, which :meth:`split` undoes."""
        n_kinds = len(self.kinds)
        if len(self.groups) == len(self.placement):
            return self
        group_of_stage = {
            stage: group for group, stages in enumerate(self.groups) for stage in stages
        }
        group_chains = [
            stages[0 if kind == 0 else -1] * n_kinds + kind
            for stages in self.groups
            for kind in range(n_kinds)
        ]
        seconds = [
            sum(self.seconds[stage * n_kinds + kind] for stage in group)
            for group in self.groups
            for kind in range(n_kinds)
        ]
        work = [
            max(self.work[stage * n_kinds + kind] for stage in group)
            for group in self.groups
            for kind in range(n_kinds)
        ]
        # A group's op needs what its first op needs of other groups, and its own ops before.
        needs = [
            tuple(
                (group_of_stage[needed_chain // n_kinds] * n_kinds + needed_chain % n_kinds, lag)
                for needed_chain, lag in self.needs[chain]
                if needed_chain // n_kinds != chain // n_kinds
            )
            for chain in group_chains
        ]
        needs = [
            ((chain - 1, 0.0), *chain_needs) if chain % n_kinds else chain_needs
            for chain, chain_needs in enumerate(needs)
        ]
        return OrderProblem(
            tuple(self.placement[group[0]] for group in self.groups),
            self.n_microbatches,
            self.kinds,
            tuple(seconds),
            tuple(needs),
            tuple(sum(self.held[stage] for stage in group) for group in self.groups),
            tuple(work),
            tuple(self.waiting[chain] for chain in group_chains),
            self.room,
            tuple(max(self.updates[stage] for stage in group) for group in self.groups),
        )

    def split(self, words: Sequence[Word]) -> list[Word]:
        """Return the orders of this problem that do what ``words`` of :attr:`merged` do."""
        n_kinds = len(self.kinds)
        return [
            [
                stage * n_kinds + chain % n_kinds
                for chain in order
                for stage in (
                    self.groups[chain // n_kinds]
                    if chain % n_kinds == 0
                    else reversed(self.groups[chain // n_kinds])
                )
            ]
            for order in words
        ]

    def schedule(self, words: Sequence[Word], name: str) -> Schedule:
        """The schedule of these orders."""
        orders, n_kinds = [], len(self.kinds)
        for chain_order in words:
            n_scheduled = [0] * len(self.seconds)
            order = []
            for chain in chain_order:
                order.append(Op(self.kinds[chain % n_kinds], chain // n_kinds, n_scheduled[chain]))
                n_scheduled[chain] += 1
            orders.append(order)
        return Schedule.from_rank_orders(orders, name=name)

    def words(self, schedule: Schedule) -> list[Word]:
        """Return the rank orders of a schedule of this problem's sizes and placement."""
        n_kinds, rank_orders = len(self.kinds), [Word() for _ in self.room]
        starts = schedule.timing.starts
        for op in sorted(starts, key=starts.__getitem__):
            rank_orders[self.placement[op.stage]].append(
                op.stage * n_kinds + self.kinds.index(op.kind)
            )
        return rank_orders


def order_problem(
    costs: Costs,
    n_microbatches: int,
    placement: Sequence[int],
    hardware: Hardware,
    split_backward: bool = True,
    memory: Sequence[float] = (),
    optimizer_bytes: Sequence[float] = (),
) -> OrderProblem:
    """Describe the problem as the simulator counts time and memory.

    Args:
        costs: one entry per stage.
        n_microbatches: of a training step.
        placement: ``[stage]``, its rank.
        hardware: seconds of messages and kernels, and the ranks' speeds.
        split_backward: whether backwards of inputs and weights are separate ops.
        memory: ``[rank]``, bytes; empty: no limit.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.

    Raises:
        UserError: a rank has no room for one micro-batch; the message names it.
    """
    kinds, n_ranks, last_stage = _KINDS[split_backward], max(placement) + 1, len(costs) - 1
    n_kinds = len(kinds)
    state_bytes: Sequence[float | None] = [*optimizer_bytes] or [None] * len(costs)
    seconds: list[float] = []
    needs: list[list[tuple[int, float]]] = []
    held_bytes: list[float] = []
    workspace_bytes: list[float] = []
    waiting_bytes: list[float] = []
    update_seconds: list[float] = []

    def message(n_bytes: float, sender: int, receiver: int) -> float:
        sender_rank, receiver_rank = placement[sender], placement[receiver]
        local = hardware.machine(sender_rank) == hardware.machine(receiver_rank)
        return 0.0 if sender_rank == receiver_rank else hardware.message(n_bytes, local=local)

    for stage, cost in enumerate(costs):
        speed = hardware.speed(placement[stage])
        forward, backward = (duration / speed for duration in cost.seconds(hardware))
        input_backward = (forward + backward) if cost.recomputes else backward / (n_kinds - 1)
        seconds += [forward, input_backward, 0.0 if cost.recomputes else backward / 2][:n_kinds]
        needs += [[], *([(n_kinds * stage + kind, 0.0)] for kind in range(n_kinds - 1))]
        if stage > 0:
            needs[n_kinds * stage].append(
                (n_kinds * (stage - 1), message(costs[stage - 1].output_bytes, stage - 1, stage))
            )
        if stage < last_stage:
            n_bytes = costs[stage + 1].input_gradient_bytes
            needs[n_kinds * stage + 1].append(
                (n_kinds * (stage + 1) + 1, message(n_bytes, stage + 1, stage))
            )
        # A message waits on the receiving rank until its op starts.
        has_remote_input = stage > 0 and placement[stage - 1] != placement[stage]
        held_bytes.append(
            cost.kept_bytes + (cost.input_bytes if has_remote_input else cost.extra_input_bytes)
        )
        has_remote_gradient = placement[min(stage + 1, last_stage)] != placement[stage]
        waiting_bytes += [cost.input_bytes * has_remote_input]
        waiting_bytes += [
            costs[min(stage + 1, last_stage)].input_gradient_bytes * has_remote_gradient,
            0.0,
        ][: n_kinds - 1]
        recomputed_bytes = cost.activation_bytes * cost.recomputes
        workspace_bytes += [
            cost.working_bytes[0],
            *[cost.working_bytes[1] + recomputed_bytes] * (n_kinds - 1),
        ]
        update_seconds.append(
            cost.update_bytes(state_bytes[stage]) / hardware.memory_bandwidth / speed
        )
    # Weights, gradients and optimizer state stay: the room is what they leave of the memory.
    room = [*memory] or [inf] * n_ranks
    for rank, memory_bytes in enumerate(room):
        stages = [stage for stage, stage_rank in enumerate(placement) if stage_rank == rank]
        for stage in stages:
            room[rank] -= (
                costs[stage].parameter_bytes
                + costs[stage].gradient_bytes
                + (state_bytes[stage] or 0.0)
            )
        least_bytes = max(
            max(workspace_bytes[n_kinds * stage : n_kinds * stage + n_kinds]) for stage in stages
        ) + sum(held_bytes[stage] for stage in stages)
        if least_bytes > room[rank]:
            raise UserError(
                f"stages {stages} with one micro-batch take"
                f" {least_bytes + memory_bytes - room[rank]:.4g} bytes of rank {rank}:"
                f" got a memory of {memory_bytes:.4g}. Place them elsewhere, or make"
                " micro-batches smaller"
            )
    return OrderProblem(
        tuple(placement),
        n_microbatches,
        kinds,
        tuple(seconds),
        tuple(map(tuple, needs)),
        tuple(held_bytes),
        tuple(workspace_bytes),
        tuple(waiting_bytes),
        tuple(room),
        tuple(update_seconds),
    )
