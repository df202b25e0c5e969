"""The messages of one rank, over torch.distributed.

A message travels in chunks and has its own tag, so that messages need no order among each other.
NCCL has no tags: there each direction between two ranks is a separate channel, and its messages
keep the order of the program.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from heapq import heappop, heappush
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.format import MB
from toolkit.runtime.message_layout import Layouts
from toolkit.runtime.pacing import Pacer
from toolkit.runtime.process_group.world import RankGroup, World
from toolkit.runtime.rank import Payload
from toolkit.runtime.streams import finish_stream
from toolkit.schedule import Action, Instruction, Program

_FOR_EVER = timedelta(days=1)  # the failure watch ends waits that are too long

ALL, GATHER, BETWEEN, SPREAD = "all", "gather", "between", "spread"

_COLLECTIVES: dict[Action, Callable] = {
    Action.ALL_REDUCE: dist.all_reduce,
    Action.REDUCE: dist.reduce,
    Action.BROADCAST: dist.broadcast,
}
_IN_TIERS: dict[str, Callable] = {GATHER: dist.reduce, SPREAD: dist.broadcast}

# None only of groups to which this rank does not belong.
Works = Sequence[dist.Work | None]
TransferPhase = Callable[[], Works]
Pair = tuple[int, int]


class Transfer:
    """A message under way: its bytes, and functions that begin one phase after another.

    Each phase begins when the one before has ended.
    """

    def __init__(self, flat: Tensor, *phases: TransferPhase) -> None:
        self.flat = flat
        self._phases = phases

    def begin(self) -> None:
        """Begin the first phase."""
        first_phase, *later_phases = self._phases
        works = first_phase()
        # wait() then finds what has begun, and does not begin it again.
        self._phases = (lambda: works, *later_phases)

    def wait(self) -> None:
        """Wait, once, until it has ended; on a GPU only the current stream waits."""
        for phase in self._phases:
            for work in phase():  # once: gloo does not answer a second time
                assert work is not None
                # With a time limit NCCL would poll every millisecond.
                if self.flat.is_cuda:
                    work.wait()
                else:
                    work.wait(_FOR_EVER)


class Turns:
    """Messages to one rank, sent one at a time, those needed first before the others.

    A message that is needed before all that are under way begins at once, since the receiver may
    need it before it expects them. ``together``: every message begins at once. By positions::

        add 5, 9, 7    5 begins; 9 and 7 wait
        add 3          3 begins, too: the receiver may need it before 5
        end 5          nothing begins, since 3 is under way
        end 3          7 begins, which is needed before 9
    """

    def __init__(self, *, together: bool = False) -> None:
        self._together = together
        self._under_way: set[int] = set()
        self._waiting: list[tuple[int, Transfer]] = []

    def add(self, position: int, transfer: Transfer) -> list[tuple[int, Transfer]]:
        """Add a message, by its position in the program; return those to begin now."""
        heappush(self._waiting, (position, transfer))
        return self._next()

    def end(self, position: int) -> list[tuple[int, Transfer]]:
        """Note that a message has been sent; return those to begin now."""
        self._under_way.remove(position)
        return self._next()

    def _next(self) -> list[tuple[int, Transfer]]:
        messages = []
        # The first of the heap is needed first: if it has to wait, so have all others.
        while self._waiting:
            next_position, _ = self._waiting[0]
            is_needed_first = all(
                next_position < position for position in self._under_way
            )
            if not (self._together or is_needed_first):
                break
            messages.append(heappop(self._waiting))
            self._under_way.add(next_position)
        return messages


class Messages:
    """Begins the messages of a rank. A context: its end ends the pacer."""

    def __init__(
        self,
        world: World,
        layouts: Layouts,
        chunk_bytes: int | None,
        *,
        paced: bool,
        per_machine: int = 0,
    ) -> None:
        self.world = world
        self.layouts = layouts
        self.pacer: Pacer | None = None
        if paced:
            self.pacer = Pacer(world.message_device)
        self._chunk_bytes = chunk_bytes
        self._per_machine = per_machine

    def __enter__(self) -> "Messages":
        return self

    def __exit__(self, *error: object) -> None:
        if self.pacer is not None:
            self.pacer.close()

    def of_exact_weights(self) -> "Messages":
        """Return messages of the same rank, whose weights travel as they are."""
        messages = copy.copy(self)
        messages.layouts = self.layouts.with_exact_weights()
        return messages

    def begin_program(self, instructions: Sequence[Instruction], n_steps: int) -> None:
        """Let the pacer spread what ``instructions`` send in ``n_steps`` over each step."""
        if self.pacer is not None:
            sends = (i for i in instructions if i.action == Action.SEND)
            self.pacer.begin(sum(map(self.n_bytes, sends)) / n_steps)

    def end_step(self) -> None:
        """Note that this rank has computed all of a training step."""
        if self.pacer is not None:
            self.pacer.end_step()

    def send(self, i: Instruction, payload: Payload, tag: int = 0) -> Transfer:
        """Prepare to send; ``payload`` may change afterwards.

        Args:
            i: the send.
            payload: tensors that it sends, on any device.
            tag: number that its receive has, too; without a meaning for NCCL.
        """
        flat = self._pack(i, payload)
        peer = i.peers[0]
        group = self.world.channel(self.world.rank, peer)
        process = self.world.process(peer)
        chunks = self._chunks(flat)
        # Begun by transfer.begin(), when it is this message's turn.
        starts = [
            partial(dist.isend, chunk, process, group=group, tag=tag)
            for chunk in chunks
        ]
        if self.pacer is not None:
            # The pacer's thread sends on another stream: the message must be packed by then.
            finish_stream(flat.device)
            sizes = [chunk.nbytes for chunk in chunks]
            # The first phase is empty: begin() must not wait until the pacer has begun every chunk.
            return Transfer(flat, tuple, self.pacer.put(starts, sizes, i.tick).result)
        return Transfer(flat, lambda: [start() for start in starts])

    def receive(self, i: Instruction, tag: int = 0) -> Transfer:
        """Be ready for a message.

        Args:
            i: the receive.
            tag: as of the send.
        """
        flat = self._pack(i, None)
        peer = i.peers[0]
        group = self.world.channel(peer, self.world.rank)
        process = self.world.process(peer)
        # Now, and not in begin(): a message that comes early finds its memory ready.
        works = [
            dist.irecv(chunk, process, group=group, tag=tag)
            for chunk in self._chunks(flat)
        ]
        return Transfer(flat, lambda: works)

    def collective(self, i: Instruction, payload: Payload | None) -> Transfer:
        """Take part in a collective; ``payload`` is what this rank gives to it.

        Args:
            i: the collective.
            payload: tensors that this rank gives to it; None if it only receives.
        """
        flat = self._pack(i, payload)
        # A sum needs one tensor a type; a broadcast moves plain bytes.
        pieces = [flat]
        if i.action != Action.BROADCAST:
            pieces = self.layouts.of(i).by_dtype(flat)
        phases: list[TransferPhase] = []
        for name, members in _collective_groups(i, self._per_machine):
            if self.world.rank in members:
                collective = _IN_TIERS.get(name, _COLLECTIVES[i.action])
                root = members[0]
                if name == ALL:
                    root = i.peers[0]
                group = self.world.group_of((name, members))
                phases.append(
                    partial(_each, collective, pieces, self.world.process(root), group)
                )
        # The first phase begins now. A waiter begins each later one when the one before has ended.
        first_phase, *later_phases = phases
        works = first_phase()
        return Transfer(flat, lambda: works, *later_phases)

    def received(self, i: Instruction, transfer: Transfer) -> Payload:
        """Return what ``i`` has left on this rank; its ``transfer`` has ended."""
        return self.layouts.unpack(i, transfer.flat.to(self.world.device))

    def n_bytes(self, i: Instruction) -> int:
        """Size of the message of an instruction."""
        return self.layouts.of(i).n_bytes

    @property
    def ordered(self) -> bool:
        """Whether messages from one rank to another must begin in the order of the program."""
        return self.world.backend == "nccl"

    def turns(self) -> Turns:
        """Return the turns of messages to one rank; NCCL and the pacer order them themselves."""
        return Turns(together=self.ordered or self.pacer is not None)

    def _chunks(self, flat: Tensor) -> tuple[Tensor, ...]:
        if self._chunk_bytes is None:
            return (flat,)
        return flat.split(self._chunk_bytes)

    def _pack(self, i: Instruction, payload: Payload | None) -> Tensor:
        """Return the bytes of a message, or memory for them."""
        device = self.world.message_device
        if payload is not None:
            return self.layouts.pack(i, payload, device)
        return torch.empty(self.n_bytes(i), dtype=torch.uint8, device=device)


def _each(
    collective: Callable,
    pieces: Sequence[Tensor],
    root: int,
    group: dist.ProcessGroup | None,
) -> Works:
    """Begin a collective of each piece."""
    # An all-reduce has no root.
    arguments = () if collective is dist.all_reduce else (root,)
    return [
        collective(piece, *arguments, group=group, async_op=True) for piece in pieces
    ]


def _collective_groups(i: Instruction, per_machine: int) -> list[RankGroup]:
    """Return the groups of a collective, in turn; only an all-reduce has several."""
    tiers = per_machine if i.action == Action.ALL_REDUCE else 0
    return all_reduce_groups(sorted(i.peers), tiers)


def all_reduce_groups(ranks: Sequence[int], per_machine: int) -> list[RankGroup]:
    """Return the groups of an all-reduce, in turn; ``per_machine`` ranks share a machine.

    Four ranks on two machines::

        GATHER   0 <- 1   2 <- 3     within each machine, to its first rank
        BETWEEN  0 <-> 2             between the first ranks
        SPREAD   0 -> 1   2 -> 3     within each machine

    Sums cross between machines once a machine, not once a rank. Gather and spread have separate
    groups: a machine may gather the next sum while one of its ranks still awaits the last one.
    """
    if per_machine == 0:
        return [(ALL, tuple(ranks))]
    by_machine = groupby(ranks, key=lambda rank: rank // per_machine)
    machines = [tuple(members) for _, members in by_machine]
    if len(machines) == 1:
        return [(ALL, machines[0])]
    # A machine with one rank has nothing to gather or spread.
    shared_machines = [machine for machine in machines if len(machine) > 1]
    return [
        *((GATHER, machine) for machine in shared_machines),
        (BETWEEN, tuple(machine[0] for machine in machines)),
        *((SPREAD, machine) for machine in shared_machines),
    ]


def groups_and_pairs(
    program: Program, per_machine: int
) -> tuple[list[RankGroup], list[Pair]]:
    """Return the groups of every collective; and (sender, receiver) of every message."""
    groups: set[RankGroup] = set()
    pairs: set[Pair] = set()
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action == Action.SEND:
                pairs.add((rank, i.peers[0]))
            elif i.action in _COLLECTIVES:
                groups.update(_collective_groups(i, per_machine))
    return sorted(groups), sorted(pairs)


def largest_chunk(chunk_mb: float | None, backend: str, *, paced: bool) -> int | None:
    """Return the bytes of a message that are sent at once; None: all of them."""
    # Gloo's connections and the pacer take turns by chunks. NCCL uses more of a GPU the larger a
    # message is.
    if chunk_mb is None:
        if backend == "nccl" and not paced:
            return None
        chunk_mb = 1.0
    return max(1, round(chunk_mb * MB))


def tags(instructions: Sequence[Instruction]) -> list[int]:
    """Return a tag for each message, the same at both ends; 0 for other instructions."""
    # The k-th send to a peer matches its k-th receive from here; both ends count alike.
    numbers: Counter[tuple] = Counter()
    tags_of_instructions = []
    for i in instructions:
        tag = 0
        if i.action in (Action.SEND, Action.RECV):
            numbers[i.action, i.peers] += 1
            tag = numbers[i.action, i.peers]
        tags_of_instructions.append(tag)
    return tags_of_instructions
