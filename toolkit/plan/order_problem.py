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
        n, k = len(self.seconds), len(self.kinds)
        rank = [self.placement[c // k] for c in range(n)]
        chains = [tuple(c for c in range(n) if rank[c] == r) for r in range(len(self.room))]
        users: list[list[int]] = [[r] for r in rank]
        for c, needed in enumerate(self.needs):
            for d, _ in needed:
                if rank[c] not in users[d]:
                    users[d].append(rank[c])
        object.__setattr__(self, "of_rank", tuple(chains))
        object.__setattr__(self, "users", tuple(map(tuple, users)))

    @property
    def n_ranks(self) -> int:
        """Devices."""
        return len(self.room)

    def load(self, rank: int) -> float:
        """Seconds of the ops of ``rank`` in a training step."""
        return self.n_microbatches * sum(self.seconds[c] for c in self.of_rank[rank])

    def fits(self, rank: int, word: Word) -> bool:
        """Whether ``rank`` has room for what it holds in the order of ``word``."""
        held, room, n, work = 0.0, self.room[rank], len(self.kinds), self.work
        for c in word:
            if c % n == 0:
                held += self.held[c // n]
            if held + work[c] > room:
                return False
            if c % n == n - 1:
                held -= self.held[c // n]
        return True

    def period(self, words: Sequence[Word]) -> float:
        """Seconds of a training step in the steady state; infinite if ranks wait for each other."""
        m, ends = self.n_microbatches, self._ends(words, _STEPS)
        if any(len(of_chain) < _STEPS * m for of_chain in ends):
            return inf
        # A rank ends a step with the last op of its word.
        before, last = ([ends[word[-1]][k * m - 1] for word in words] for k in (_STEPS - 1, _STEPS))
        return max(b - a for a, b in zip(before, last, strict=True))

    def starts(self, words: Sequence[Word]) -> list[list[float]]:
        """When ops of the first training step start, ``[chain][microbatch]``."""
        ends = self._ends(words, 1)
        return [[x - took for x in found] for found, took in zip(ends, self.seconds, strict=True)]

    def peaks(self, words: Sequence[Word]) -> list[float]:
        """``[rank]``, the most bytes held, messages that wait included."""
        n, ends, found = len(self.kinds), self._ends(words, _STEPS), []
        for chains in self.of_rank:
            changes = []
            for c in chains:
                last, size = c % n == n - 1, self.held[c // n]
                for k, end in enumerate(ends[c]):
                    start = end - self.seconds[c]
                    changes += [(start, self.work[c] + size * (c % n == 0))]
                    changes += [(end, -self.work[c] - size * last)]
                    if self.waiting[c]:
                        d, lag = self.needs[c][-1]
                        changes += [(ends[d][k] + lag, self.waiting[c]), (start, -self.waiting[c])]
            found.append(max(accumulate(change for _, change in sorted(changes))))
        return found

    def _ends(self, words: Sequence[Word], n_steps: int) -> list[list[float]]:
        """When ops end, ``[chain]``, as far as ranks get."""
        n, m, seconds, needs = len(self.kinds), self.n_microbatches, self.seconds, self.needs
        ends: list[list[float]] = [[] for _ in seconds]
        waiting: list[list[int]] = [[] for _ in seconds]  # ranks, by the chain that they wait for
        free, at, ready = [0.0] * len(words), [0] * len(words), [*range(len(words))]
        while ready:
            rank = ready.pop()
            word, now, i = words[rank], free[rank], at[rank]
            length = len(word)
            while i < n_steps * length:
                c = word[i % length]
                of_chain = ends[c]
                k = len(of_chain)
                for d, lag in needs[c]:
                    found = ends[d]
                    if len(found) <= k:
                        break
                    if found[k] + lag > now:
                        now = found[k] + lag
                else:
                    if k and k % m == 0 and c % n == 0:  # the first that reads new weights
                        now = max(now, ends[c + n - 1][k - 1] + self.updates[c // n])
                    now += seconds[c]
                    of_chain.append(now)
                    i += 1
                    if waiting[c]:
                        ready += waiting[c]
                        waiting[c] = []
                    continue
                waiting[d].append(rank)
                break
            free[rank], at[rank] = now, i
        return ends

    def bound(self) -> float:
        """Seconds that a step takes at least, in any order.

        A rank runs all its ops. Before its first backward it waits for the ranks behind; until then
        it runs no more forwards than it has room for. If it has one stage and less room than
        micro-batches, likewise after its last forward.
        """
        return max(map(self._bound_of, range(self.n_ranks)))

    def _bound_of(self, rank: int) -> float:
        n, m, load = len(self.kinds), self.n_microbatches, self.load(rank)
        stages = sorted(c // n for c in self.of_rank[rank] if c % n == 0)
        if not stages:
            return 0.0
        first, last = stages[0], stages[-1]
        if len(stages) == 1:  # with more, ops of others may run during an update
            load += self.updates[first]
        until = self._way(first * n, last * n + 1) - self.seconds[last * n + 1]
        room, ahead = self.room[rank], 0.0  # forwards meanwhile, those that need least room first
        for j in sorted(stages, key=lambda j: self.held[j] / max(self.seconds[j * n], 1e-30)):
            count = m if self.held[j] == 0 else min(m, room / self.held[j])
            ahead += count * self.seconds[j * n]
            room -= count * self.held[j]
        waits = max(0.0, until - ahead)
        if len(stages) == 1 and self.held[first] * m > self.room[rank]:
            at_once = self.room[rank] // self.held[first]
            took = self.seconds[first * n : first * n + n]
            back = self._way(first * n, first * n + 1) + sum(took[2:])
            waits += max(0.0, back - took[0] - at_once * sum(took[1:]))
        return load + waits

    def _way(self, begin: int, end: int) -> float:
        """Seconds from the start of one chain's op to the end of another's, without waiting."""
        took = [-inf] * len(self.seconds)
        took[begin] = self.seconds[begin]
        n, stages = len(self.kinds), len(self.held)
        there = [j * n for j in range(stages)] + [j * n + 1 for j in reversed(range(stages))]
        for c in there:
            for d, lag in self.needs[c]:
                took[c] = max(took[c], took[d] + lag + self.seconds[c])
        return took[end]

    @property
    def n_ops(self) -> int:
        """Ops of a training step."""
        return len(self.seconds) * self.n_microbatches

    def tick(self) -> float:
        """Seconds of which all others are multiples; a small share of a micro-batch if none is."""
        lags = (lag for needed in self.needs for _, lag in needed)
        amounts = [x for x in (*self.seconds, *lags, *self.updates) if x > 0]
        for parts in (1, 2, 3, 4, 6, 12):
            tick = min(amounts) / parts
            if all(abs(x / tick - round(x / tick)) < 1e-9 * parts for x in amounts):
                return tick
        return max(map(self.load, range(self.n_ranks))) / self.n_microbatches / _TICKS

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Stages that follow one another on a rank, about half of its ops at most."""
        n, found = len(self.kinds), []
        took = [sum(self.seconds[j * n : j * n + n]) for j in range(len(self.placement))]
        for _, stages in groupby(range(len(took)), key=self.placement.__getitem__):
            run = [*stages]
            whole = sum(took[j] for j in run)
            parts = max(1, round(2 * self.n_ranks * whole / sum(took)))
            ends = accumulate(took[j] for j in run)
            # A stage belongs to the part in which its middle falls.
            part = [
                int((end - took[j] / 2) / whole * parts) for j, end in zip(run, ends, strict=True)
            ]
            found += [
                tuple(j for j, k in zip(run, part, strict=True) if k == which)
                for which in dict.fromkeys(part)
            ]
        return tuple(found)

    @cached_property
    def merged(self) -> "OrderProblem":
        """The problem whose stages are the groups: fewer orders, which :meth:`split` undoes."""
        n = len(self.kinds)
        if len(self.groups) == len(self.placement):
            return self
        of = {j: g for g, stages in enumerate(self.groups) for j in stages}
        ends = [stages[0 if k == 0 else -1] * n + k for stages in self.groups for k in range(n)]
        seconds = [sum(self.seconds[j * n + k] for j in g) for g in self.groups for k in range(n)]
        work = [max(self.work[j * n + k] for j in g) for g in self.groups for k in range(n)]
        # A group's op needs what its first op needs of other groups, and its own ops before.
        needs = [
            tuple((of[d // n] * n + d % n, lag) for d, lag in self.needs[c] if d // n != c // n)
            for c in ends
        ]
        needs = [((c - 1, 0.0), *found) if c % n else found for c, found in enumerate(needs)]
        return OrderProblem(
            tuple(self.placement[g[0]] for g in self.groups), self.n_microbatches, self.kinds,
            tuple(seconds), tuple(needs), tuple(sum(self.held[j] for j in g) for g in self.groups),
            tuple(work), tuple(self.waiting[c] for c in ends), self.room,
            tuple(max(self.updates[j] for j in g) for g in self.groups),
        )  # fmt: skip

    def split(self, words: Sequence[Word]) -> list[Word]:
        """The orders of this problem that do what ``words`` of :attr:`merged` do."""
        n = len(self.kinds)
        return [
            [
                j * n + c % n
                for c in word
                for j in (self.groups[c // n] if c % n == 0 else reversed(self.groups[c // n]))
            ]
            for word in words
        ]

    def schedule(self, words: Sequence[Word], name: str) -> Schedule:
        """The schedule of these orders."""
        orders, n = [], len(self.kinds)
        for word in words:
            count = [0] * len(self.seconds)
            order = []
            for c in word:
                order.append(Op(self.kinds[c % n], c // n, count[c]))
                count[c] += 1
            orders.append(order)
        return Schedule.from_rank_orders(orders, name=name)

    def words(self, schedule: Schedule) -> list[Word]:
        """The orders of a schedule of this problem's sizes and placement."""
        n, found = len(self.kinds), [Word() for _ in self.room]
        starts = schedule.timing.starts
        for op in sorted(starts, key=starts.__getitem__):
            found[self.placement[op.stage]].append(op.stage * n + self.kinds.index(op.kind))
        return found


def order_problem(
    costs: Costs,
    n_microbatches: int,
    placement: Sequence[int],
    hardware: Hardware,
    split_backward: bool = True,
    memory: Sequence[float] = (),
    optimizer_bytes: Sequence[float] = (),
) -> OrderProblem:
    """Describe the problem as the simulator counts; arguments as in :func:`toolkit.plan.search`.

    Raises:
        UserError: a rank has no room for one micro-batch; the message names it.
    """
    kinds, n_ranks, last = _KINDS[split_backward], max(placement) + 1, len(costs) - 1
    n = len(kinds)
    states: Sequence[float | None] = [*optimizer_bytes] or [None] * len(costs)
    seconds: list[float] = []
    needs: list[list[tuple[int, float]]] = []
    held: list[float] = []
    work: list[float] = []
    waiting: list[float] = []
    updates: list[float] = []

    def message(n_bytes: float, sender: int, receiver: int) -> float:
        a, b = placement[sender], placement[receiver]
        local = hardware.machine(a) == hardware.machine(b)
        return 0.0 if a == b else hardware.message(n_bytes, local=local)

    for j, cost in enumerate(costs):
        speed = hardware.speed(placement[j])
        forward, backward = (x / speed for x in cost.seconds(hardware))
        first = (forward + backward) if cost.recomputes else backward / (n - 1)
        seconds += [forward, first, 0.0 if cost.recomputes else backward / 2][:n]
        needs += [[], *([(n * j + k, 0.0)] for k in range(n - 1))]
        if j > 0:
            needs[n * j].append((n * (j - 1), message(costs[j - 1].output_bytes, j - 1, j)))
        if j < last:
            n_bytes = costs[j + 1].input_gradient_bytes
            needs[n * j + 1].append((n * (j + 1) + 1, message(n_bytes, j + 1, j)))
        alone = j > 0 and placement[j - 1] != placement[j]
        held.append(cost.kept_bytes + (cost.input_bytes if alone else cost.extra_input_bytes))
        sent = placement[min(j + 1, last)] != placement[j]
        waiting += [cost.input_bytes * alone]
        waiting += [costs[min(j + 1, last)].input_gradient_bytes * sent, 0.0][: n - 1]
        again = cost.activation_bytes * cost.recomputes
        work += [cost.working_bytes[0], *[cost.working_bytes[1] + again] * (n - 1)]
        updates.append(cost.update_bytes(states[j]) / hardware.memory_bandwidth / speed)
    room = [*memory] or [inf] * n_ranks
    for rank, given in enumerate(room):
        stages = [j for j, r in enumerate(placement) if r == rank]
        for j in stages:
            room[rank] -= costs[j].parameter_bytes + costs[j].gradient_bytes + (states[j] or 0.0)
        least = max(max(work[n * j : n * j + n]) for j in stages) + sum(held[j] for j in stages)
        if least > room[rank]:
            raise UserError(
                f"stages {stages} with one micro-batch take {least + given - room[rank]:.4g} bytes"
                f" of rank {rank}: got a memory of {given:.4g}. Place them elsewhere, or make"
                " micro-batches smaller"
            )
    return OrderProblem(
        tuple(placement), n_microbatches, kinds, tuple(seconds), tuple(map(tuple, needs)),
        tuple(held), tuple(work), tuple(waiting), tuple(room), tuple(updates),
    )  # fmt: skip
