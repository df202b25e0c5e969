"""The instructions of each rank while a program is made, and their order at one tick."""

from functools import partial
from itertools import chain
from operator import itemgetter

from toolkit.schedule.instruction import RECV, SEND, Instruction

# What a rank does at one tick, in this order. Messages come before the ops that read them and
# before the frees that end what they carry; a freed prediction makes room for a new one.
_TURNS = range(8)
(
    BOUNDARIES,
    GRADIENT_SUMS,
    UPDATES,
    WEIGHT_MESSAGES,
    PREDICTION_FREES,
    PREDICTIONS,
    FREES,
    OPS,
) = _TURNS

# A program has a million instructions: their own constructor takes twice as long.
make_instruction = partial(tuple.__new__, Instruction)


class InstructionLists:
    """Instructions by rank and by their turn at a tick.

    Attributes:
        by_turn: ``[rank][turn]``, instructions in any order of ticks.
    """

    def __init__(self, n_ranks: int) -> None:
        self.by_turn: list[list[list[Instruction]]] = []
        for _ in range(n_ranks):
            self.by_turn.append([[] for _ in _TURNS])
        # The peers of a message. All messages of a rank share one tuple.
        self._alone = [(rank,) for rank in range(n_ranks)]

    def add_message(
        self, turn: int, source: int, target: int, tick: int, content: tuple
    ) -> None:
        """Send ``content``, the fields ``stage`` to ``buffer`` of an instruction, at ``tick``."""
        send = (tick, SEND, *content, self._alone[target])
        receive = (tick, RECV, *content, self._alone[source])
        self.by_turn[source][turn].append(make_instruction(send))
        self.by_turn[target][turn].append(make_instruction(receive))

    def in_order(self) -> tuple[tuple[Instruction, ...], ...]:
        """Return each rank's instructions by tick, then by turn."""
        ranks = []
        for turns in self.by_turn:
            # A stable sort: at one tick turns keep their order, and so do instructions of a turn.
            instructions = sorted(chain.from_iterable(turns), key=itemgetter(0))
            ranks.append(tuple(instructions))
        return tuple(ranks)
