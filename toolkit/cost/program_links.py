"""What each instruction of a program waits for: the same for all costs and machines.

An instruction waits for those whose results it uses, as in the runtime: see
:func:`toolkit.schedule.dependencies.needs`. The ops of a rank keep the order of its program, and so
do its collectives. A message waits until its receiver expects it and both ranks are within the
schedule's lookahead.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from toolkit.schedule import Action, Instruction, Program
from toolkit.schedule.dependencies import unsorted_needs
from toolkit.schedule.instruction import (
    BACKWARD_WEIGHT,
    FORWARD,
    PREDICT,
    RECV,
    SEND,
)

# By action, whether a rank runs it in the order of its program, as ops and predictions.
_IN_ORDER = [action.computes or action == PREDICT for action in Action]


class ProgramLinks:
    """Dependencies of a program's instructions.

    Instructions have numbers, rank by rank; a send stands for its receive, too, and the root's
    instruction for all of a collective.

    Args:
        program: a verified program.

    Attributes:
        program: the program.
        instructions: by number.
        ranks: the rank of each instruction.
        n_awaited: how many others each instruction waits for.
        users: the instructions that wait for each.
        unblocked: instructions that wait for nothing.
        pairs: forwards that overlap with the next instruction.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions: list[Instruction] = []
        self.ranks: list[int] = []
        for rank, order in enumerate(program.ranks):
            self.instructions += order
            self.ranks += [rank] * len(order)
        self.n_awaited = [0] * len(self.instructions)
        self.users: list[list[int]] = [[] for _ in self.instructions]
        self.pairs: set[int] = set()
        representatives = self._representatives()
        first_number = 0
        for rank, order in enumerate(program.ranks):
            end = first_number + len(order)
            self._link(rank, order, representatives[first_number:end], first_number)
            first_number = end
        self.unblocked = [
            number
            for number, n_awaited in enumerate(self.n_awaited)
            if not n_awaited and representatives[number] == number
        ]

    def _representatives(self) -> list[int]:
        """Return what stands for each instruction: a receive's send, a collective's root."""
        representatives = [*range(len(self.instructions))]
        # A send and its receive are one event on both ranks, as is a collective on all of its
        # ranks. One instruction stands for all of them, so that it has one start and one end.
        sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        receives: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        collectives: defaultdict[tuple, list[int]] = defaultdict(list)
        first_number = 0
        for rank, order in enumerate(self.program.ranks):
            for number, instruction in enumerate(order, first_number):
                _, action, _, _, _, _, _, peers = instruction
                if not peers:
                    continue
                if action == SEND:
                    sends[rank, peers[0]].append(number)
                elif action == RECV:
                    receives[peers[0], rank].append(number)
                else:
                    collectives[instruction[1:]].append(number)
            first_number += len(order)

        # Messages from one rank to another have the same order on both, as have collectives.
        for rank_pair, receive_numbers in receives.items():
            for number, send_number in zip(
                receive_numbers, sends[rank_pair], strict=True
            ):
                representatives[number] = send_number
        for numbers in collectives.values():
            # Numbers grow with ranks: first all occurrences on the lowest rank, then on the next.
            peers = self.instructions[numbers[0]].peers
            n_occurrences = len(numbers) // len(peers)
            root_position = sorted(peers).index(peers[0])
            for occurrence in range(n_occurrences):
                root_number = numbers[occurrence + root_position * n_occurrences]
                for number in numbers[occurrence::n_occurrences]:
                    representatives[number] = root_number
        return representatives

    def _link(
        self,
        rank: int,
        order: Sequence[Instruction],
        numbers: Sequence[int],
        first_number: int,
    ) -> None:
        """Add what the instructions of a rank wait for.

        Args:
            rank: the rank.
            order: its instructions.
            numbers: what stands for each of them.
            first_number: number of the first.
        """
        if not order:
            return
        # Columns of a table are faster to go through than the fields of each instruction.
        ticks, actions, *_, peers = zip(*order, strict=True)
        ops = [
            position
            for position, action in enumerate(actions)
            if action <= BACKWARD_WEIGHT
        ]
        schedule = self.program.schedule
        needs: Iterable[list[int]] = unsorted_needs(order, rank)
        # Ops of one device stand at equal ticks for another reason: all micro-batches are in flight
        # at once.
        pairs = [] if schedule.layout.one_device else _pairs(ticks, actions, ops)
        if pairs:
            # The forward of a pair waits for what its backward needs: both start together.
            needs = [*needs]
            for index in pairs:
                needs[index] += [
                    needed for needed in needs[index + 1] if needed != index
                ]
                self.pairs.add(first_number + index)
        lookahead = _Lookahead(ticks, ops, schedule.lookahead)
        rows = zip(ticks, actions, peers, needs, strict=True)
        self._add_waits(rows, numbers, lookahead, [_IN_ORDER[a] for a in actions])

    def _add_waits(
        self,
        rows: Iterable[tuple[int, Action, tuple[int, ...], list[int]]],
        numbers: Sequence[int],
        lookahead: "_Lookahead",
        in_order: Sequence[bool],
    ) -> None:
        """Add what the instructions of a rank wait for: not all that they need.

        - Ops run in order, so that of several ops the last one is enough, and each waits for the
          one before it.
        - A message or collective waits for the last op that starts before its lookahead.
        - Collectives run in order.

        Args:
            rows: tick, action and peers of each instruction, and the positions that it needs.
            numbers: what stands for each instruction.
            lookahead: of the rank.
            in_order: whether each instruction is an op or a prediction.
        """
        users = self.users
        previous_op = -1
        previous_collective = -1
        for index, (tick, action, peers, needed_positions) in enumerate(rows):
            number = numbers[index]
            n_awaited = 0
            last_op = -1
            if in_order[index]:
                # The op before ended after all earlier ones, so it stands for every op needed.
                last_op = previous_op
                previous_op = index
            elif peers:
                last_op = lookahead.last_op(tick)
                # The runtime carries out the collectives of a rank one after another.
                # Of what has peers, collectives come after RECV in the order of Action.
                if action > RECV:
                    if previous_collective >= 0:
                        users[numbers[previous_collective]].append(number)
                        n_awaited += 1
                    previous_collective = index
            for position in needed_positions:
                if not in_order[position]:
                    users[numbers[position]].append(number)
                    n_awaited += 1
                elif position > last_op:
                    last_op = position
            if last_op >= 0:
                users[numbers[last_op]].append(number)
                n_awaited += 1
            self.n_awaited[number] += n_awaited


class _Lookahead:
    """The ops of a rank that messages wait for, since they start before the messages may."""

    def __init__(
        self, ticks: Sequence[int], ops: Sequence[int], lookahead: int
    ) -> None:
        self._lookahead = lookahead
        self._ops = ops
        self._op_ticks: list[float] = [ticks[position] for position in ops]
        self._op_ticks.append(inf)  # no message waits for what comes after the last op
        self._n_before = 0

    def last_op(self, tick: int) -> int:
        """Return the position of the last op before the lookahead of a message at ``tick``, or -1.

        Messages come in the order of their ticks.
        """
        # Ticks grow along the program, so one pointer moves over the ops only once.
        first_tick = tick - self._lookahead
        while self._op_ticks[self._n_before] < first_tick:
            self._n_before += 1
        return self._ops[self._n_before - 1] if self._n_before else -1


def _pairs(
    ticks: Sequence[int], actions: Sequence[Action], ops: Sequence[int]
) -> list[int]:
    """Return the positions of a rank's forwards that start with the next op, so both overlap."""
    return [
        op
        for op, next_op in pairwise(ops)
        if next_op == op + 1 and ticks[op] == ticks[next_op] and actions[op] == FORWARD
    ]
