"""How many weights a rank can hold when messages and updates overlap with its ops.

In the order of a program a weight version arrives at its place. With overlap it arrives as soon as
its sender has it, and the rank may still read the version before::

    ops of a rank       |  F0  |  F1  |  B1  |  B0  |  F0  |
    gaps                |  0   |  1   |  2   |  3   |  4   |
    version v, stage 1  |======|======|======|                 B1 reads it last
    version v + 1              |......|......|......|======|   can arrive since gap 1

When an op ends or a message arrives depends on the machine; what can have happened by then does
not. A version can be there in the gap after the last of the rank's ops that its maker follows from.
It is freed after its last reader. A message that gives it away copies it when it begins.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from toolkit.schedule.dependencies import needs
from toolkit.schedule.instruction import Action, Buffer, Instruction, WeightsKey
from toolkit.schedule.program import Program


def most_weights(program: Program, sizes: Sequence[float] = ()) -> tuple[float, ...]:
    """Return the most weights that each rank can hold, whatever ops and messages take.

    Sends, updates and releases begin as soon as they can, one update at a time; collectives end in
    the order of the program. Without overlap a rank holds at most ``program.peak_weights()``.

    Args:
        program: a verified program.
        sizes: weights of each stage, such as bytes; empty: 1 each.
    """
    sizes = sizes or [1.0] * program.schedule.n_stages
    order = _PartialOrder(program)
    return tuple(_most(order, rank, sizes) for rank in range(len(program.ranks)))


class _PartialOrder:
    """In which gaps instructions can end. Instructions are numbered rank by rank.

    Gap k of a rank is from the end of its op k - 1 until the end of its op k. In
    ``since[g][rank]`` instruction g can end at the earliest, in ``until[g][rank]`` at the latest.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.needs = [needs(order, rank) for rank, order in enumerate(program.ranks)]
        # Number of a rank's first.
        self.first = [0, *accumulate(map(len, program.ranks))]
        self.op_ticks: list[list[int]] = []  # by rank, when its ops start
        waits: list[list[int]] = []  # by number, the instructions that it waits for
        for rank, order in enumerate(program.ranks):
            self.op_ticks.append([i.tick for i in order if i.action.computes])
            waits += self._waits(rank)

        # A receive waits for its send, and a collective for all that its members wait for.
        for meeting in self._meetings():
            awaited = [g for g, i in meeting if i.action == Action.SEND]
            if not awaited:
                for g, _ in meeting:
                    awaited += waits[g]
            for g, i in meeting:
                if i.action != Action.SEND:
                    waits[g] = [*waits[g], *awaited]

        # An instruction ends after the last op, of each rank, that it follows from; and before the
        # first that follows from it.
        ops = self._ops()
        self.since = [[0] * len(program.ranks) for _ in waits]
        self.until = [[*map(len, self.op_ticks)] for _ in waits]
        numbers = _sorted(waits)
        for g in numbers:
            for earlier in waits[g]:
                # Only ops are in gaps. For others the default leaves the bound of rank 0 as it is.
                rank, gap = ops.get(earlier, (0, -1))
                self.since[g] = [*map(max, self.since[g], self.since[earlier])]
                self.since[g][rank] = max(self.since[g][rank], gap + 1)
        for g in reversed(numbers):
            # The default is the bound that rank 0 begins with: it changes nothing.
            rank, gap = ops.get(g, (0, len(self.op_ticks[0])))
            self.until[g][rank] = min(self.until[g][rank], gap)
            for earlier in waits[g]:
                self.until[earlier] = [*map(min, self.until[earlier], self.until[g])]

    def opens(self, rank: int, i: Instruction) -> int:
        """Return the gap in which a message may begin, if it has what it needs."""
        before = i.tick - self.program.schedule.lookahead
        return sum(tick < before for tick in self.op_ticks[rank])

    def _ops(self) -> dict[int, tuple[int, int]]:
        """Return each op's rank, and its place among the ops of the rank."""
        op_places: dict[int, tuple[int, int]] = {}
        for rank, order in enumerate(self.program.ranks):
            place = 0
            for g, i in enumerate(order, self.first[rank]):
                if i.action.computes:
                    op_places[g] = (rank, place)
                    place += 1
        return op_places

    def _waits(self, rank: int) -> Iterator[list[int]]:
        """Yield what each instruction of a rank waits for on this rank."""
        ops: list[int] = []
        in_order: list[int] = []  # ops and predictions
        collectives: list[int] = []
        first_number = self.first[rank]
        for g, i in enumerate(self.program.ranks[rank], first_number):
            waits = [
                first_number + position
                for position in self.needs[rank][g - first_number]
            ]
            if i.action.computes or i.action == Action.PREDICT:
                waits += in_order[-1:]
                in_order.append(g)
                if i.action.computes:
                    ops.append(g)
            elif i.action.communicates:
                # The op before the gap in which it may begin; none before gap 0.
                waits += ops[: self.opens(rank, i)][-1:]
                if i.action not in (Action.SEND, Action.RECV):
                    waits += collectives[-1:]
                    collectives.append(g)
            yield waits

    def _meetings(self) -> Iterator[list[tuple[int, Instruction]]]:
        """Yield the instructions of each message and of each collective, by number."""
        n_seen: defaultdict[tuple, int] = defaultdict(int)
        meetings: defaultdict[tuple, list[tuple[int, Instruction]]] = defaultdict(list)
        for rank, order in enumerate(self.program.ranks):
            for position, i in enumerate(order):
                if i.action.communicates:
                    key = i.meeting(rank)
                    meetings[key, n_seen[rank, key]].append(
                        (self.first[rank] + position, i)
                    )
                    n_seen[rank, key] += 1
        yield from meetings.values()


def _sorted(waits: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers, each after those that it waits for."""
    lacking = [len(awaited) for awaited in waits]
    users: list[list[int]] = [[] for _ in waits]
    for g, awaited in enumerate(waits):
        for earlier in awaited:
            users[earlier].append(g)
    order = [g for g, n_lacking in enumerate(lacking) if not n_lacking]
    # The list grows as the loop walks it: a number joins once it lacks nothing.
    for g in order:
        for user in users[g]:
            lacking[user] -= 1
            if not lacking[user]:
                order.append(user)
    return order


def _most(order: _PartialOrder, rank: int, sizes: Sequence[float]) -> float:
    """Return the most weights of one rank."""
    instructions = order.program.ranks[rank]
    first_number = order.first[rank]
    last_gap = len(order.op_ticks[rank])
    # Gaps are 0 .. last_gap; the entry after them takes what is held to the end.
    weight_changes = [0.0] * (last_gap + 2)  # changes of the weights held, by gap
    updating = [0.0] * (last_gap + 1)  # one update at a time holds two versions

    def hold(stage: int, since: int, until: int) -> None:
        weight_changes[since] += sizes[stage]
        weight_changes[until + 1] -= sizes[stage]

    # First gap of each version.
    arrivals = dict.fromkeys(_first_weights(order.program, rank), 0)
    for position, i in enumerate(instructions):
        if i.action == Action.FREE and i.buffer != Buffer.ACTIVATION:
            since = until = arrivals.pop(i.weights)
            for user_position in order.needs[rank][position]:
                user = instructions[user_position]
                g = first_number + user_position
                if user.action == Action.UPDATE and user.weights != i.weights:
                    # The update puts the next version, which counts, into the place of this one.
                    until = max(until, order.since[g][rank] - 1)
                    for gap in range(until + 1, order.until[g][rank] + 1):
                        updating[gap] = max(updating[gap], sizes[i.stage])
                elif user.action == Action.SEND:
                    until = max(until, order.opens(rank, user))
                else:
                    until = max(until, order.until[g][rank])
            hold(i.stage, since, until)
        elif i.action in (Action.UPDATE, Action.PREDICT) or (
            i.action.communicates and i.buffer == Buffer.WEIGHTS and i.leaves(rank)
        ):
            arrivals[i.weights] = order.since[first_number + position][rank]
    for weights, since in arrivals.items():
        hold(weights[0], since, last_gap)
    return max(map(sum, zip(accumulate(weight_changes[:-1]), updating, strict=True)))


def _first_weights(program: Program, rank: int) -> Iterator[WeightsKey]:
    """Yield the weights that a rank begins with."""
    for stage in range(program.schedule.n_stages):
        if rank in program.schedule.first_holders(stage, program.first_step):
            for version in program.schedule.versions(stage, program.first_step):
                yield stage, version
