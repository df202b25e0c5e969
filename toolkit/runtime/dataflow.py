"""Which of a rank's instructions can begin next, when each waits only for what it uses."""

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from toolkit.schedule import Action, Buffer, Instruction
from toolkit.schedule.dependencies import needs


def in_background(i: Instruction) -> bool:
    """Whether an instruction runs concurrently with the ops; the others keep their order."""
    frees_weights = i.action == Action.FREE and i.buffer == Buffer.WEIGHTS
    return i.action.communicates or i.action == Action.UPDATE or frees_weights


def queue_of(
    i: Instruction,
    *,
    ordered: bool,
    ordered_updates: bool = False,
    chained: Collection[Buffer] = (),
) -> tuple | None:
    """Return the queue of an instruction in the background; None if it may begin at any time.

    The members of a queue begin one after another, in the order of the program. Receives queue so
    that each takes the message that its sender means for it.

    Args:
        i: the instruction.
        ordered: messages between two ranks match by their order alone.
        ordered_updates: so do the exchanges within updates.
        chained: kinds whose messages of a stage each depend on the one before.
    """
    #                 ordered (NCCL)     by tags (gloo)
    #   send          one a receiver     none; of chained gradients, one a receiver and stage
    #   receive       one a sender       one a sender, buffer and stage
    #   collective    one for all        one for all
    #   update        one for all with ordered_updates, else none
    #   free          none
    if ordered_updates and i.action == Action.UPDATE:
        return channel_of(i)
    if i.action == Action.SEND and ordered:
        return ("send", *i.peers)
    if i.action == Action.SEND and i.buffer == Buffer.GRADIENT and i.buffer in chained:
        return ("send", *i.peers, i.buffer, i.stage)
    if i.action == Action.RECV and ordered:
        return ("receive", *i.peers)
    if i.action == Action.RECV:
        return channel_of(i)
    if i.action == Action.SEND or not i.action.communicates:
        # Sends have no queue here: the executor's Turns decide which message to a rank goes first.
        return None
    # All ranks must begin collectives in one order.
    return channel_of(i)


def channel_of(i: Instruction) -> tuple:
    """Return the channel of a message or collective: a waiter waits for the ends on each.

    There is one for each direction, peer, buffer and stage: a late message holds up no other.
    Updates in which the devices of a rank exchange share one, so that they keep their order; no
    thread waits on it.
    """
    if i.action == Action.UPDATE:
        return ("update",)
    if i.action in (Action.SEND, Action.RECV):
        return (i.action, *i.peers, i.buffer, i.stage)
    return ("collective",)


def last_step(i: Instruction) -> int:
    """Return the last step whose gradients, or whose forward, an instruction follows from."""
    if i.step is not None:
        return i.step
    assert i.version is not None
    return i.version - 1


def next_op(instructions: Sequence[Instruction], position: int) -> Instruction:
    """Return the op after ``position``, or the last instruction."""
    for i in instructions[position + 1 :]:
        if i.action.computes:
            return i
    return instructions[-1]


def last_op_positions(instructions: Sequence[Instruction]) -> frozenset[int]:
    """Return the position of the last op of each training step."""
    last_positions: dict[int | None, int] = {}
    for position, i in enumerate(instructions):
        if i.action.computes:
            last_positions[i.step] = position
    return frozenset(last_positions.values())


class Dataflow:
    """The instructions of a rank, by their positions in its program.

    An instruction in the background can begin when it is open, what it needs has ended, and the
    earlier ones of its queue have begun::

        closed --open()--> open --needs have ended, first of its queue--> admitted
                                                            admitted --within the limits--> ready

    Two things hold back what has all that it needs. *Opening* bounds how early it begins: a receive
    takes memory from its begin on, so positions open in the order of the program, a little before
    the op that uses them. A *limit* bounds the training step: beyond it the caller may still end
    the program, or its optimizer may not have the next learning rate yet.

    Args:
        instructions: the rank's program.
        rank: the rank.
        ordered: all messages to a rank are one queue, and all from a rank are another.
        limit: training step; only what follows from steps up to it can begin, see
            :func:`last_step`, and messages of earlier steps do not queue behind those of later
            ones.
        update_limit: training step; only updates of steps up to it can begin.
        ordered_updates: updates begin in the order of the program, since the devices of a rank
            exchange within them.
        chained: kinds whose messages of a stage each depend on the one before: sums to a rank
            begin in the order of the program, and weights come in it.

    Attributes:
        needs: for each position, the positions that have to end before.
        ended: for each position, whether it has ended.
        n_left: how many instructions have not ended.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        rank: int,
        *,
        ordered: bool,
        limit: float = inf,
        update_limit: float = inf,
        ordered_updates: bool = False,
        chained: Collection[Buffer] = (),
    ) -> None:
        self.instructions = instructions
        self.needs = needs(instructions, rank)
        if Buffer.WEIGHTS in chained:
            _order_weights(instructions, self.needs)
        self.n_left = len(instructions)
        self.ended = bytearray(len(instructions))
        # By position: needs that have not ended.
        self._n_lacking = list(map(len, self.needs))
        # By position: who needs it.
        self._users: list[list[int]] = [[] for _ in instructions]
        self._limit = limit
        self._update_limit = update_limit
        # Positions that only a limit holds back, by training step.
        self._beyond_limit: defaultdict[int, list[int]] = defaultdict(list)
        self._updates_beyond_limit: defaultdict[int, list[int]] = defaultdict(list)
        self._n_opened = 0
        self._ready: list[int] = []  # a heap
        queues: defaultdict[tuple, deque[int]] = defaultdict(deque)
        self._queue_of: dict[int, deque[int]] = {}
        for position, dependencies in enumerate(self.needs):
            for dependency in dependencies:
                self._users[dependency].append(position)
        # With a limit, queues follow the training steps: a message of an earlier step must not wait
        # behind one of a later step that the limit holds.
        positions: Sequence[int] = range(len(instructions))
        if limit < inf:
            positions = sorted(positions, key=self._step)
        for position in positions:
            name = queue_of(
                instructions[position],
                ordered=ordered,
                ordered_updates=ordered_updates,
                chained=chained,
            )
            if name is not None:
                self._queue_of[position] = queues[name]
                queues[name].append(position)

    def raise_limit(self, step: float) -> None:
        """Allow what follows from training steps up to ``step`` to begin.

        What the former limit held back is ready now. A lower ``step`` changes nothing.
        """
        self._limit = max(self._limit, step)
        self._admit_until(self._limit, self._beyond_limit)

    def raise_update_limit(self, step: float) -> None:
        """Allow the updates of training steps up to ``step`` to begin.

        Those that the former limit held back are ready now, if ``limit`` lets them.
        """
        self._update_limit = max(self._update_limit, step)
        self._admit_until(self._update_limit, self._updates_beyond_limit)

    def _admit_until(
        self, limit: float, positions_of_step: dict[int, list[int]]
    ) -> None:
        for admitted_step in [step for step in positions_of_step if step <= limit]:
            for position in positions_of_step.pop(admitted_step):
                self._admit(position)

    def cut(self) -> Collection[int]:
        """Take out what cannot end if no later training step begins; return the other positions.

        Messages of weights stay: their receiver may not have freed what it received before.
        """
        remaining: set[int] = set()
        for position, i in enumerate(self.instructions):
            carries_weights = i.action.communicates and i.buffer == Buffer.WEIGHTS
            # An instruction ends only if all that it needs does. Needs come earlier in the program,
            # so one pass over it finds all that remains.
            if self._step(position) <= self._limit and (
                carries_weights or remaining.issuperset(self.needs[position])
            ):
                remaining.add(position)
        removed = [p for p in range(len(self.instructions)) if p not in remaining]
        # Mark all before any is released: a release may admit what still waits for another.
        for position in removed:
            self.ended[position] = True
        self.n_left -= len(removed)
        for position in removed:
            self._release(position)
        return remaining

    def _step(self, position: int) -> int:
        return last_step(self.instructions[position])

    def open(self, end: int) -> None:
        """Allow instructions in the background before position ``end`` to begin.

        Those that lack nothing and are first of their queue are ready now; the others will be when
        that has come true.
        """
        newly_open = range(self._n_opened, end)
        self._n_opened = max(self._n_opened, end)
        for position in newly_open:
            self._consider(position)

    def open_sums(self, step: int) -> None:
        """:meth:`open` all that the updates up to ``step`` wait for, on any rank, and these.

        The caller waits for the updates and computes nothing meanwhile, so no op would open them.
        That includes weights that this rank hands on to ranks whose ``step`` ends later.
        """
        end = self._n_opened
        for position in range(self._n_opened, len(self.instructions)):
            i = self.instructions[position]
            uses_sum = i.action == Action.UPDATE or i.buffer == Buffer.GRADIENT
            if last_step(i) < step or (uses_sum and last_step(i) == step):
                end = position + 1
        self.open(end)

    def open_until(self, tick: int) -> None:
        """:meth:`open` what starts at ``tick`` or before.

        Ticks ascend over the program, so this is a prefix of it.
        """
        end = self._n_opened
        while end < len(self.instructions) and self.instructions[end].tick <= tick:
            end += 1
        self.open(end)

    def next(self) -> int | None:
        """Take the first in the background that can begin, or None."""
        if not self._ready:
            return None
        # The earliest in the program first: its result is used first.
        position = heappop(self._ready)
        if position in self._queue_of:
            queue = self._queue_of[position]
            # Starting one admits the next of its queue: peers match a queue's messages by order.
            queue.popleft()
            if queue:
                self._consider(queue[0])
        return position

    def next_release(self) -> int | None:
        """Take the first release of weights that can begin, or None.

        Any thread may carry it out: it takes no time, and nothing is handed to another rank.
        """
        releases = [
            p for p in self._ready if self.instructions[p].action == Action.FREE
        ]
        if not releases:
            return None
        position = min(releases)
        # Few are ready at a time, so a search through the heap costs nothing.
        self._ready.remove(position)
        heapify(self._ready)
        return position

    def end(self, position: int) -> None:
        """Note that an instruction has ended: what needs it may begin.

        A send ends here as soon as its payload is packed, since what it read may change from then
        on; the message itself is still under way.
        """
        assert not self.ended[position]
        self.ended[position] = True
        self.n_left -= 1
        self._release(position)

    def _release(self, position: int) -> None:
        for user in self._users[position]:
            self._n_lacking[user] -= 1
            self._consider(user)

    def lacks_nothing(self, position: int) -> bool:
        """Whether everything that an instruction needs has ended."""
        return self._n_lacking[position] == 0

    def blocker_of(self, position: int) -> int:
        """Return the first instruction of the chain that ``position`` waits for; else itself."""
        # Needs come earlier in the program, so the chain has an end.
        while True:
            unfinished = [need for need in self.needs[position] if not self.ended[need]]
            if not unfinished:
                return position
            position = unfinished[0]

    def _consider(self, position: int) -> None:
        """Mark an instruction as ready if it can begin in the background."""
        queue = self._queue_of.get(position)
        if (
            position < self._n_opened
            and not self.ended[position]
            and in_background(self.instructions[position])
            and self._n_lacking[position] == 0
            and (queue is None or (bool(queue) and queue[0] == position))
        ):
            self._admit(position)

    def _admit(self, position: int) -> None:
        """Mark an instruction as ready, unless a limit holds it."""
        step = self._step(position)
        is_update = self.instructions[position].action == Action.UPDATE
        if step > self._limit:
            self._beyond_limit[step].append(position)
        elif is_update and step > self._update_limit:
            self._updates_beyond_limit[step].append(position)
        else:
            heappush(self._ready, position)


def _order_weights(
    instructions: Sequence[Instruction], needs: list[tuple[int, ...]]
) -> None:
    """Let each receive of a stage's weights wait for the one before, which it is a difference to.

    Messages from one rank come in order anyway; those of two ranks may not.
    """
    last_receive: dict[int, int] = {}
    for position, i in enumerate(instructions):
        if i.action == Action.RECV and i.buffer == Buffer.WEIGHTS:
            if i.stage in last_receive:
                needs[position] = tuple(
                    sorted({*needs[position], last_receive[i.stage]})
                )
            last_receive[i.stage] = position
