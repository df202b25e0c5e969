"""The messages of one rank, over torch.distributed.

Instructions come in an order that has been proven free of deadlock for channels that block. Sends
do not block here, which only ever lets a rank go on earlier.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.runtime.layout import Layouts
from toolkit.runtime.processes.world import World
from toolkit.runtime.rank import Payload
from toolkit.schedule import Action, Instruction


class Links:
    """Carries out the instructions that concern other ranks.

    An error of the backend ends the job, with the position that the watch was told last.

    Args:
        world: the ranks.
        layouts: of the messages.
    """

    def __init__(self, world: World, layouts: Layouts) -> None:
        self.world = world
        self.layouts = layouts
        self._posted: list[tuple[Instruction, dist.Work, Tensor]] = []

    def send(self, i: Instruction, payload: Payload) -> int:
        """Begin to send; return how many bytes."""
        flat = self.layouts.pack(i, payload, self.world.message_device)
        with self.world.watch.failing():
            work = dist.isend(flat, i.peers[0], group=self.world.group)
        assert work is not None
        self._posted.append((i, work, flat))  # flat must live, unchanged, until it has been sent
        return flat.nbytes

    def receive(self, i: Instruction) -> tuple[Payload, int]:
        """Wait for a message; return it and how many bytes it had."""
        flat = self._empty(i)
        with self.world.watch.failing():
            dist.recv(flat, i.peers[0], group=self.world.group)
        return self.layouts.unpack(i, flat.to(self.world.device)), flat.nbytes

    def collective(self, i: Instruction, payload: Payload | None) -> tuple[Payload | None, int]:
        """Take part in a collective; return what it leaves on this rank, and its bytes."""
        root, group = i.peers[0], self.world.group_of(tuple(sorted(i.peers)))
        if payload is None:
            flat = self._empty(i)
        else:
            flat = self.layouts.pack(i, payload, self.world.message_device)
        with self.world.watch.failing():
            if i.action == Action.BROADCAST:
                dist.broadcast(flat, root, group=group)
            for piece in self.layouts.of(i).by_dtype(flat):
                if i.action == Action.ALL_REDUCE:
                    dist.all_reduce(piece, group=group)
                elif i.action == Action.REDUCE:
                    dist.reduce(piece, root, group=group)
        if i.action == Action.REDUCE and self.world.rank != root:
            return None, flat.nbytes
        return self.layouts.unpack(i, flat.to(self.world.device)), flat.nbytes

    def drain(self) -> None:
        """Wait until everything has been sent."""
        for i, work, _ in self._posted:
            self.world.watch.at(i, i.step, i.peers)
            with self.world.watch.failing():
                work.wait()
        self._posted.clear()

    def _empty(self, i: Instruction) -> Tensor:
        n_bytes = self.layouts.of(i).n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.world.message_device)
