"""The ranks of a job, seen from one of them: their sums, groups and moments."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import UserError
from toolkit.runtime.process_group.shared_status import machine
from toolkit.runtime.process_group.watch import Watch
from toolkit.runtime.streams import finish_stream

_GRACE = 30.0  # seconds by which the watch speaks before the backend's own time-out

Group = tuple[str, tuple[int, ...]]
"""What a process group is for, and its ranks, ascending."""


@dataclass(eq=False)
class World:
    """The ranks of a job, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of ranks.
        device: where this rank computes.
        backend: ``nccl`` or ``gloo``.
        watch: the failure watch; every wait for others is within ``watch.waiting``.
        store: store that all ranks share.
        group: process group; None for that of all processes.
        objects: process group of Python objects: one of gloo, so that they take no GPU memory.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    watch: Watch
    store: dist.Store
    group: dist.ProcessGroup | None = None
    objects: dist.ProcessGroup | None = None
    _name: str = "world"
    _n_names: int = field(default=0, init=False)
    _groups: dict[Group, dist.ProcessGroup] = field(default_factory=dict, init=False)
    _channels: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict, init=False)

    @property
    def message_device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def make_groups(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> None:
        """Make the process groups of a program's messages. Every rank calls it with the same ones.

        Collectives have groups of their own, since another thread starts them. With NCCL so has
        each direction between two ranks: a receive that was started early would hold up a send.

        Args:
            groups: ranks that have collectives.
            pairs: sender and receiver.

        Raises:
            UserError: this is a part of a job, so the other processes do not call it.
        """
        # The group of a part is that of its collectives over all ranks.
        known = {g for g in groups if self.group is not None and len(g[1]) == self.size}
        new_groups = [g for g in dict.fromkeys(groups) if g not in known | self._groups.keys()]
        self._groups |= {group: self._new_group(group[1]) for group in new_groups}
        if self.backend == "nccl":
            new_pairs = [p for p in dict.fromkeys(pairs) if p not in self._channels]
            self._channels |= {pair: self._new_group(pair) for pair in new_pairs}
            self.connect(new_groups, new_pairs)

    def connect(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> None:
        """Send a first number within ``groups`` and between ``pairs``, one after another.

        NCCL connects ranks at their first message, and blocks the caller until the peer connects
        too. Every rank makes the same connections in the same order here, so none deadlocks.
        """
        number = torch.zeros(1, device=self.message_device)
        for group in groups:
            if self.rank in group[1]:
                with self.watch.waiting("a first sum within a group", group[1]):
                    dist.all_reduce(number, group=self.group_of(group))
                    self.finish_computing()
        for sender, receiver in pairs:
            if self.rank in (sender, receiver):
                channel = self.channel(sender, receiver)
                with self.watch.waiting("a first message", (sender, receiver)):
                    if self.rank == sender:
                        dist.send(number, receiver, group=channel)
                    else:
                        dist.recv(number, sender, group=channel)
                    self.finish_computing()

    def group_of(self, group: Group) -> dist.ProcessGroup | None:
        """Return the process group of ``group``'s collectives."""
        return self._groups.get(group, self.group)

    def channel(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """Return the process group of messages from ``sender`` to ``receiver``."""
        return self._channels.get((sender, receiver), self.group)

    def finish_computing(self) -> None:
        """Wait for this thread's work on the device, except messages.

        Messages have the backend's streams, and may wait for what a peer does only later.
        """
        finish_stream(self.device)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        with self.watch.waiting("all ranks to come together", range(self.size)):
            dist.barrier(group=self.group)

    def common_moment(self) -> float:
        """Return one moment, the same on every rank, by this process's performance counter.

        Ranks of one machine share the counter. Between machines the moment is when a gather ends.
        """
        mine = (machine(), time.perf_counter())
        first, *_ = self.gather(mine)
        return first[1] if first[0] == mine[0] else time.perf_counter()

    def next_name(self) -> str:
        """Return a new name, the same on every rank that calls as often."""
        self._n_names += 1
        return f"{self._name}/{self._n_names}"

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' ``values``, on every rank. Every rank calls it."""
        total = values.to(self.message_device, copy=True)
        with self.watch.waiting("a sum over all ranks", range(self.size)):
            dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, ``[rank]``, on every rank. Every rank calls it."""
        found: list[Any] = [None] * self.size
        with self.watch.waiting("results of all ranks", range(self.size)):
            dist.all_gather_object(found, value, group=self.objects)
        return found

    def agree(self, check: Callable[[], None]) -> None:
        """Call ``check`` on every rank, and raise on all if one raises. Every rank calls it.

        Raises:
            UserError: the message of the first rank whose check raised a ValueError.
        """
        fault = ""
        try:
            check()
        except ValueError as error:
            fault = str(error)
        if faults := list(filter(None, self.gather(fault))):
            raise UserError(faults[0])

    def part(self, n_ranks: int) -> "World | None":
        """Return a world of the first ``n_ranks`` ranks; None on others. Every rank calls it."""
        if n_ranks == self.size:
            return self
        name, group = self.next_name(), self._new_group(range(n_ranks))
        if self.rank >= n_ranks:
            return None
        # No gloo group of objects: in torch 2.11 ranks outside it split NCCL's group, and hang.
        return replace(self, size=n_ranks, group=group, objects=group, _name=name)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if self.group is not None:
            raise UserError(
                f"got ranks {list(ranks)} of a part of the job, which cannot make a group of their"
                f" own: start {self.size} processes"
            )
        with self.watch.waiting("new process group", range(self.size)):
            group = dist.new_group(list(ranks), timeout=backend_timeout(self.watch.timeout))
        return cast(dist.ProcessGroup, group)  # or a mark, on ranks that are not in it


def backend_timeout(timeout: float) -> timedelta:
    """Return the backend's own time-out, before which the watch has named the rank at fault."""
    return timedelta(seconds=timeout + _GRACE)
