"""Walk through a program the way blocking channels allow: the one order for proofs and for runs.

Every rank goes through its instructions in order. A send waits for its receive, and a collective
for all of its ranks. Among the instructions that may go next, the earliest by tick goes first, and
at one tick what releases and moves before forwards, and these before backwards; so the memory of
all ranks together is that of the schedule.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from toolkit.schedule.instruction import (
    ALL_REDUCE,
    BACKWARD_WEIGHT,
    BROADCAST,
    RECV,
    REDUCE,
    SEND,
    UPDATE,
    Action,
    Instruction,
)

# Looked up once: the loop below is the hot one.
_OTHER_END = {SEND: RECV, RECV: SEND}
_COLLECTIVES = (ALL_REDUCE, REDUCE, BROADCAST)
# By action, its turn at a tick: what releases and moves is first, then forwards, and then
# backwards, which free as they go.
_TURNS = [1, *[2] * BACKWARD_WEIGHT, *[0] * (len(Action) - UPDATE)]


class DeadlockError(Exception):
    """Every unfinished rank waits: ``waiting`` maps it to its instruction."""

    def __init__(self, waiting: dict[int, Instruction]) -> None:
        super().__init__(f"{len(waiting)} ranks wait for each other")
        self.waiting = waiting


def replay(ranks: Sequence[Sequence[Instruction]]) -> Iterator[tuple[int, Instruction]]:  # noqa: C901, PLR0912
    """Yield ``(rank, instruction)`` in an order that can run.

    A send comes before its receive. The ranks of a collective follow one another, the root first.

    Raises:
        DeadlockError: the ranks left wait for each other, or for one that has finished.
    """
    position = [0] * len(ranks)
    waiting: dict[int, Instruction] = {}  # ranks at a message or a collective without the others
    collectives: dict[tuple, dict[int, Instruction]] = {}  # ranks that have arrived
    n_ranks = len(ranks)

    def head(instruction: Instruction, rank: int) -> int:
        """Return its place among the ready as one number: by tick, turn and rank."""
        return (instruction.tick * 3 + _TURNS[instruction.action]) * n_ranks + rank

    ready = [head(order[0], rank) for rank, order in enumerate(ranks) if order]
    heapify(ready)

    def resume(rank: int) -> None:
        """Release a rank that was waiting."""
        del waiting[rank]
        position[rank] += 1
        if position[rank] < len(ranks[rank]):
            heappush(ready, head(ranks[rank][position[rank]], rank))

    while ready:
        rank = heappop(ready) % n_ranks
        order, index = ranks[rank], position[rank]
        while True:
            instruction = order[index]
            action = instruction.action
            if action in _OTHER_END:
                (peer,) = instruction.peers
                peer_instruction = waiting.get(peer)
                if (
                    peer_instruction is None
                    or peer_instruction.action != _OTHER_END[action]
                    or peer_instruction.peers != (rank,)
                    or peer_instruction[2:7] != instruction[2:7]
                ):
                    waiting[rank] = instruction
                    break
                if action == SEND:
                    yield rank, instruction
                    yield peer, peer_instruction
                else:
                    yield peer, peer_instruction
                    yield rank, instruction
                resume(peer)
            elif action in _COLLECTIVES:
                waiting[rank] = instruction
                if rank not in instruction.peers:
                    break
                present = collectives.setdefault(instruction[1:], {})
                present[rank] = instruction
                if len(present) < len(instruction.peers):
                    break
                del collectives[instruction[1:]], waiting[rank]
                for partner in instruction.peers:
                    yield partner, present[partner]
                    if partner != rank:
                        resume(partner)
            else:
                yield rank, instruction
            index += 1
            if index == len(order):
                break
            if ready and ready[0] < (next_head := head(order[index], rank)):
                heappush(ready, next_head)
                break
        position[rank] = index
    if waiting:
        raise DeadlockError(waiting)
