"""Walk through a program the way blocking channels allow: the one order for proofs and for runs.

Every rank goes through its instructions in order. A send waits for its receive, and a collective
for all of its ranks. Among the instructions that may go next, the earliest by tick goes first, and
at one tick what releases and moves before what computes; so the memory of all ranks together is
that of the schedule.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from toolkit.schedule.program import Action, Instruction, Program

_COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
_Head = tuple[int, bool, int]  # tick, whether it computes, rank


class DeadlockError(Exception):
    """No rank can go on; ``waiting`` maps each rank that has not finished to its instruction."""

    def __init__(self, waiting: dict[int, Instruction]) -> None:
        super().__init__(f"{len(waiting)} ranks wait for each other")
        self.waiting = waiting


def replay(program: Program) -> Iterator[tuple[int, Instruction]]:
    """Yield ``(rank, instruction)`` in order: a send, then its receive; a collective's ranks
    one after another, the root first.

    Raises:
        DeadlockError: the ranks left wait for each other, or for one that has finished.
    """
    ranks = program.ranks
    position = [0] * len(ranks)
    messages: dict[tuple, tuple[int, Instruction]] = {}  # sends and receives without the other
    collectives: dict[tuple, dict[int, Instruction]] = {}  # who has come
    ready = [_head(order[0], rank) for rank, order in enumerate(ranks) if order]
    heapify(ready)

    def advance(rank: int) -> _Head | None:
        position[rank] += 1
        order = ranks[rank]
        return _head(order[position[rank]], rank) if position[rank] < len(order) else None

    while ready:
        rank = heappop(ready)[2]
        head: _Head | None = None
        while head is None or not ready or head < ready[0]:
            instruction = ranks[rank][position[rank]]
            action = instruction.action
            if action == Action.SEND or action == Action.RECV:
                sends = action == Action.SEND
                peer = instruction.peers[0]
                ends = (rank, peer) if sends else (peer, rank)
                what = ends + instruction[2:7]
                other = messages.pop(what, None)
                if other is None:
                    messages[what] = (rank, instruction)
                    break
                yield (rank, instruction) if sends else other
                yield other if sends else (rank, instruction)
                if awoken := advance(peer):
                    heappush(ready, awoken)
            elif action in _COLLECTIVES:
                present = collectives.setdefault(instruction[1:], {})
                present[rank] = instruction
                if len(present) < len(instruction.peers):
                    break
                for partner in instruction.peers:
                    yield partner, present[partner]
                    if partner != rank and (awoken := advance(partner)):
                        heappush(ready, awoken)
                del collectives[instruction[1:]]
            else:
                yield rank, instruction
            head = advance(rank)
            if head is None:
                break
        else:
            heappush(ready, head)
    waiting = dict(messages.values())
    for present in collectives.values():
        waiting |= present
    if waiting:
        raise DeadlockError(waiting)


def _head(instruction: Instruction, rank: int) -> _Head:
    return instruction.tick, instruction.action <= Action.BACKWARD_WEIGHT, rank
