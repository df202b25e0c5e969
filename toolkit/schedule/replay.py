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
    position = [0] * len(program.ranks)
    parked: dict[int, Instruction] = {}
    ready = [entry for rank in range(len(program.ranks)) if (entry := _head(program, rank, 0))]
    heapify(ready)
    while ready:
        rank = heappop(ready)[-1]
        instruction = program.ranks[rank][position[rank]]
        moving = _partners(rank, instruction, parked)
        if moving is None:
            parked[rank] = instruction
            continue
        for partner in moving:
            yield partner, parked.pop(partner, instruction)
            position[partner] += 1
            if entry := _head(program, partner, position[partner]):
                heappush(ready, entry)
    if parked:
        raise DeadlockError(parked)


def _head(program: Program, rank: int, position: int) -> tuple[int, bool, int] | None:
    if position == len(program.ranks[rank]):
        return None
    instruction = program.ranks[rank][position]
    return instruction.tick, instruction.action.computes, rank


def _partners(
    rank: int, instruction: Instruction, parked: dict[int, Instruction]
) -> tuple[int, ...] | None:
    """The ranks that move with ``instruction``, or None while one of them is not there."""
    action = instruction.action
    if action in _COLLECTIVES:
        others = (parked.get(peer) == instruction for peer in instruction.peers if peer != rank)
        return instruction.peers if all(others) else None
    if action not in (Action.SEND, Action.RECV):
        return (rank,)
    peer = instruction.peers[0]
    opposite = Action.RECV if action == Action.SEND else Action.SEND
    if parked.get(peer) != instruction._replace(
        action=opposite, peers=(rank,), tick=parked[peer].tick if peer in parked else 0
    ):
        return None
    return (rank, peer) if action == Action.SEND else (peer, rank)
