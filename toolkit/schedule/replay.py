"""Walk through a program the way blocking channels allow: the one order for proofs and for runs.

Every rank goes through its instructions in order. A send waits for its receive, and a collective
for all of its ranks. Among the instructions that may go next, the earliest by tick goes first, and
at one tick what releases and moves before forwards, and these before backwards; so the memory of
all ranks together is that of the schedule.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heappushpop

from toolkit.schedule.instruction import (
    BACKWARD_WEIGHT,
    FREE,
    RECV,
    SEND,
    UPDATE,
    Action,
    Instruction,
)

_OTHER_END = {SEND: RECV, RECV: SEND}
# By action, its turn at a tick: what releases and moves is first, then forwards, and then
# backwards, which free as they go.
_TURNS = [1, *[2] * BACKWARD_WEIGHT, *[0] * (len(Action) - UPDATE)]


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
    progress = _Progress(ranks)
    ready = progress.ready
    waiting = progress.waiting
    position = progress.position
    n_ranks = len(ranks)
    # A rank is in `ready` or in `waiting`, or it runs here, or it has finished.
    while ready:
        # The place of a rank has the rank as its last digit, see _place.
        rank = heappop(ready) % n_ranks

        # Instructions of different ranks, until the rank that runs waits or has finished.
        while True:
            order = ranks[rank]
            index = position[rank]
            instruction = order[index]
            action = instruction.action
            if action < SEND or action == FREE:
                yield rank, instruction
            elif action in _OTHER_END:
                (peer,) = instruction.peers
                peer_instruction = waiting.get(peer)
                if peer_instruction is None or not _meet(
                    peer_instruction, instruction, rank
                ):
                    waiting[rank] = instruction
                    break
                if action == SEND:
                    yield rank, instruction
                    yield peer, peer_instruction
                else:
                    yield peer, peer_instruction
                    yield rank, instruction
                progress.resume(peer)
            else:
                arrived = progress.arrive(rank, instruction)
                if arrived is None:
                    break
                for partner in instruction.peers:
                    yield partner, arrived[partner]
                    if partner != rank:
                        progress.resume(partner)
            index += 1
            position[rank] = index
            if index == len(order):
                break
            # The rank goes back to the heap, and the earliest of all comes out: often itself.
            place = heappushpop(ready, _place(order[index], rank, n_ranks))
            rank = place % n_ranks
    if waiting:
        raise DeadlockError(waiting)


def _place(instruction: Instruction, rank: int, n_ranks: int) -> int:
    """Return the place of ``rank`` among the ready as one number: by tick, turn and rank."""
    # One number, which a heap compares faster than a tuple. There are three turns.
    return (instruction.tick * 3 + _TURNS[instruction.action]) * n_ranks + rank


def _meet(waiting: Instruction, instruction: Instruction, rank: int) -> bool:
    """Whether ``waiting`` is the other end of a message of ``rank``."""
    # A peer that waits for something else is not: then both ranks wait. Blocking channels do the
    # same, so a deadlock of channels is one of the replay.
    return (
        waiting[2:7] == instruction[2:7]  # all but tick, action and peers
        and waiting.action == _OTHER_END[instruction.action]
        and waiting.peers == (rank,)
    )


class _Progress:
    """How far each rank has come.

    Attributes:
        position: place of the instruction of each rank that comes next.
        ready: a heap of the ranks that can continue, as the place of their next instructions.
        waiting: by rank, the message or the collective at which it waits for others.
        collectives: by collective, the instructions of the ranks that have arrived.
    """

    def __init__(self, ranks: Sequence[Sequence[Instruction]]) -> None:
        self.ranks = ranks
        self.n_ranks = len(ranks)
        self.position = [0] * self.n_ranks
        self.ready: list[int] = []
        self.waiting: dict[int, Instruction] = {}
        self.collectives: dict[tuple, dict[int, Instruction]] = {}
        for rank, order in enumerate(ranks):
            if order:
                heappush(self.ready, _place(order[0], rank, self.n_ranks))

    def resume(self, rank: int) -> None:
        """Release a rank that was waiting."""
        del self.waiting[rank]
        index = self.position[rank] + 1
        self.position[rank] = index
        order = self.ranks[rank]
        if index < len(order):
            heappush(self.ready, _place(order[index], rank, self.n_ranks))

    def arrive(
        self, rank: int, collective: Instruction
    ) -> dict[int, Instruction] | None:
        """Let ``rank`` arrive at a collective; return those of all ranks if it is the last one."""
        self.waiting[rank] = collective
        if rank not in collective.peers:  # it would never be complete
            return None
        # By all fields but the tick: ranks meet in a collective even if one has it at a wrong tick.
        arrived = self.collectives.setdefault(collective[1:], {})
        arrived[rank] = collective
        if len(arrived) < len(collective.peers):
            return None
        del self.collectives[collective[1:]]
        del self.waiting[rank]
        return arrived
