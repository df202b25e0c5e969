"""Walk through a program the way blocking channels allow: the one order for proofs and for runs.

Every rank goes through its instructions in order. A send waits for its receive, and a collective
for all of its ranks. Among the instructions that may go next, the earliest by tick goes first, and
at one tick what releases and moves before forwards, and these before backwards; so the memory of
all ranks together is that of the schedule.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from toolkit.schedule.instruction import Action, Instruction

# Looked up once: the loop below is the hot one.
_SEND, _MESSAGES = Action.SEND, (Action.SEND, Action.RECV)
_COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
# At one tick: what releases and moves, then forwards, then backwards, which free as they go.
_PHASES = [1, *[2] * Action.BACKWARD_WEIGHT, *[0] * (len(Action) - Action.UPDATE)]


class DeadlockError(Exception):
    """Every unfinished rank waits: ``waiting`` maps it to its instruction."""

    def __init__(self, waiting: dict[int, Instruction]) -> None:
        super().__init__(f"{len(waiting)} ranks wait for each other")
        self.waiting = waiting


def replay(ranks: Sequence[Sequence[Instruction]]) -> Iterator[tuple[int, Instruction]]:
    """Yield ``(rank, instruction)`` in an order that can run.

    A send comes before its receive. The ranks of a collective follow one another, the root first.

    Raises:
        DeadlockError: the ranks left wait for each other, or for one that has finished.
    """
    position = [0] * len(ranks)
    messages: dict[tuple, tuple[int, Instruction]] = {}  # sends and receives without the other
    collectives: dict[tuple, dict[int, Instruction]] = {}  # ranks that have arrived
    strays: dict[int, Instruction] = {}  # ranks at a collective of others
    ready = [_head(order[0], rank) for rank, order in enumerate(ranks) if order]
    heapify(ready)

    def resume(rank: int) -> None:
        """Release a rank that was waiting."""
        position[rank] += 1
        if position[rank] < len(ranks[rank]):
            heappush(ready, _head(ranks[rank][position[rank]], rank))

    while ready:
        rank = heappop(ready)[2]
        order, at = ranks[rank], position[rank]
        while True:
            instruction = order[at]
            action = instruction.action
            if action in _MESSAGES:
                sends = action == _SEND
                peer = instruction.peers[0]
                # Its meeting; a call would cost a fifth of the loop.
                what = ((rank, peer) if sends else (peer, rank)) + instruction[2:7]
                other = messages.pop(what, None)
                if other is None:
                    messages[what] = (rank, instruction)
                    break
                yield (rank, instruction) if sends else other
                yield other if sends else (rank, instruction)
                resume(peer)
            elif action in _COLLECTIVES:
                if rank not in instruction.peers:
                    strays[rank] = instruction
                    break
                present = collectives.setdefault(instruction[1:], {})
                present[rank] = instruction
                if len(present) < len(instruction.peers):
                    break
                for partner in instruction.peers:
                    yield partner, present[partner]
                    if partner != rank:
                        resume(partner)
                del collectives[instruction[1:]]
            else:
                yield rank, instruction
            at += 1
            if at == len(order):
                break
            if ready and ready[0][0] <= order[at].tick:
                head = _head(order[at], rank)
                if ready[0] < head:
                    heappush(ready, head)
                    break
        position[rank] = at
    waiting = strays | dict(messages.values())
    for present in collectives.values():
        waiting |= present
    if waiting:
        raise DeadlockError(waiting)


def _head(instruction: Instruction, rank: int) -> tuple[int, int, int]:
    return instruction.tick, _PHASES[instruction.action], rank
