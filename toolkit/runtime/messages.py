"""The messages of one rank, over torch.distributed.

A message travels in chunks and has a tag of its own, so that messages need no order among each
other. NCCL knows no tags: there each direction between two ranks is a channel by itself, and its
messages keep the order of the program.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.format import MB
from toolkit.runtime import hierarchy
from toolkit.runtime.message_layout import Layouts
from toolkit.runtime.pacing import Pacer
from toolkit.runtime.process_group.group import World
from toolkit.runtime.rank import Payload
from toolkit.runtime.streams import finish_stream
from toolkit.schedule import Action, Instruction

_FOR_EVER = timedelta(days=1)  # a wait that is too long is the watch's business

Works = Sequence[dist.Work | None]  # None only of groups to which this rank does not belong


class Transfer:
    """A message under way.

    Args:
        flat: its bytes, which live until it has ended.
        phases: each returns the works of its chunks, once all of them have begun; the next one
            is asked when they have ended.
    """

    def __init__(self, flat: Tensor, *phases: Callable[[], Works]) -> None:
        self.flat = flat
        self._phases = phases

    def wait(self) -> None:
        """Wait until it has ended. Only once: gloo does not answer a second time.

        On a GPU the current stream waits, and who asks has to wait for that.

        Raises:
            RuntimeError: of the backend.
        """
        for phase in self._phases:
            for work in phase():
                assert work is not None
                if self.flat.is_cuda:  # with a time limit NCCL would look once a millisecond
                    work.wait()
                else:
                    work.wait(_FOR_EVER)


class Messages:
    """Begins the messages of a rank.

    Args:
        world: the ranks.
        layouts: of the messages.
        chunk_bytes: largest part of a message that is sent at once; None: all of it.
        paced: whether what is sent is spread over time; the context ends it.
        per_machine: consecutive ranks that are on one machine, for all-reduces in two tiers; 0:
            the backend's own.

    Attributes:
        pacer: spreads it; None where all is sent at once.
    """

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
        self.pacer = Pacer(world.message_device) if paced else None
        self._chunk_bytes = chunk_bytes
        self._per_machine = per_machine

    def __enter__(self) -> "Messages":
        return self

    def __exit__(self, *error: object) -> None:
        if self.pacer is not None:
            self.pacer.close()

    def send(self, i: Instruction, payload: Payload, tag: int = 0) -> Transfer:
        """Begin to send; ``payload`` may change afterwards."""
        flat = self.layouts.pack(i, payload, self.world.message_device)
        peer = i.peers[0]
        group = self.world.channel(self.world.rank, peer)
        begin = [
            partial(dist.isend, chunk, peer, group=group, tag=tag) for chunk in self._chunks(flat)
        ]
        if self.pacer is not None:
            sizes = [chunk.nbytes for chunk in self._chunks(flat)]
            # The pacer's thread sends on another stream: the message must be packed by then.
            finish_stream(flat.device)
            return Transfer(flat, self.pacer.put(begin, sizes, i.tick).result)
        works = [start() for start in begin]
        return Transfer(flat, lambda: works)

    def receive(self, i: Instruction, tag: int = 0) -> Transfer:
        """Be ready for a message."""
        flat, peer = self._empty(i), i.peers[0]
        group = self.world.channel(peer, self.world.rank)
        works = [dist.irecv(chunk, peer, group=group, tag=tag) for chunk in self._chunks(flat)]
        return Transfer(flat, lambda: works)

    def collective(self, i: Instruction, payload: Payload | None) -> Transfer:
        """Take part in a collective, with what this rank gives to it."""
        root, ranks = i.peers[0], tuple(sorted(i.peers))
        group = self.world.group_of((hierarchy.ALL, ranks))
        if payload is None:
            flat = self._empty(i)
        else:
            flat = self.layouts.pack(i, payload, self.world.message_device)
        if i.action == Action.BROADCAST:
            works = [dist.broadcast(flat, root, group=group, async_op=True)]
        else:
            pieces = self.layouts.of(i).by_dtype(flat)
            if i.action == Action.ALL_REDUCE:
                first, *later = hierarchy.all_reduce(
                    pieces, ranks, self.world.rank, self._per_machine, self.world.group_of
                )
                begun = first()
                return Transfer(flat, lambda: begun, *later)
            works = [dist.reduce(piece, root, group=group, async_op=True) for piece in pieces]
        return Transfer(flat, lambda: works)

    def received(self, i: Instruction, transfer: Transfer) -> Payload:
        """What ``i`` has left on this rank, as its ``transfer`` has ended."""
        return self.layouts.unpack(i, transfer.flat.to(self.world.device))

    def n_bytes(self, i: Instruction) -> int:
        """Of the message of an instruction."""
        return self.layouts.of(i).n_bytes

    @property
    def ordered(self) -> bool:
        """Whether messages from one rank to another must begin in the order of the program."""
        return self.world.backend == "nccl"

    def _chunks(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (flat,) if self._chunk_bytes is None else flat.split(self._chunk_bytes)

    def _empty(self, i: Instruction) -> Tensor:
        n_bytes = self.layouts.of(i).n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.world.message_device)


def largest_chunk(chunk_mb: float | None, backend: str, *, paced: bool) -> int | None:
    """The bytes of a message that are sent at once; None: all of them.

    Gloo's connections take turns by chunks, and what is paced is spread by them. NCCL puts more of
    a GPU to a message the larger it is, so there it stays whole.

    Args:
        chunk_mb: as the user has chosen; None: what suits the backend.
        backend: of the messages.
        paced: whether what is sent is spread over time.
    """
    if chunk_mb is None and backend == "nccl" and not paced:
        return None
    return max(1, round((1.0 if chunk_mb is None else chunk_mb) * MB))


def tags(instructions: Sequence[Instruction]) -> list[int]:
    """A tag for each of a rank's messages, which its peer finds likewise; 0 for all else."""
    count: Counter[tuple] = Counter()
    found = []
    for i in instructions:
        tag = 0
        if i.action in (Action.SEND, Action.RECV):
            # The k-th send to a peer matches its k-th receive from here; both ends count alike.
            count[i.action, i.peers] += 1
            tag = count[i.action, i.peers]
        found.append(tag)
    return found
