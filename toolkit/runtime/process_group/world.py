"""The ranks of a job, seen from one of them: its process groups, and sums and objects of all."""

import io
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

# Seconds by which the watch speaks before the backend's own time-out.
_BACKEND_GRACE = 30.0
_RELAY_CHUNK = 2**18  # bytes

RankGroup = tuple[str, tuple[int, ...]]
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
        object_group: process group of Python objects: one of gloo, so that they take no GPU memory.
        script_made_group: whether the script had made torch's process group before.
        columns: by width, the column of this process in a job whose ranks are several devices.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    watch: Watch
    store: dist.Store
    group: dist.ProcessGroup | None = None
    object_group: dist.ProcessGroup | None = None
    script_made_group: bool = False
    _name: str = "world"
    _is_part: bool = False  # of a job
    columns: dict[int, "World"] = field(default_factory=dict, init=False)
    _n_names: int = field(default=0, init=False)
    _groups: dict[RankGroup, dist.ProcessGroup] = field(
        default_factory=dict, init=False
    )
    _channels: dict[tuple[int, int], dist.ProcessGroup] = field(
        default_factory=dict, init=False
    )
    _user: Any = field(default=None, init=False)  # whose messages may be under way
    _end_use: Callable[[], None] | None = field(default=None, init=False)

    # The devices of a rank: here it has one. See ``columns`` for several.

    @property
    def shares_ranks(self) -> bool:
        """Whether each rank is several processes, which exchange within ops and updates."""
        return False

    def within_op(
        self, activity: object, step: int | None
    ) -> AbstractContextManager[None]:
        """Return the context of an op or update; an error of the row within ends the job."""
        return nullcontext()

    # Process groups.

    def process(self, rank: int) -> int:
        """Return the number of the process of ``rank``, by which torch's messages name it."""
        return rank

    @property
    def message_device(self) -> torch.device:
        """Where tensors must be to be sent."""
        if self.backend == "nccl":
            return self.device
        return torch.device("cpu")

    def make_groups(
        self, groups: Sequence[RankGroup], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Make the process groups of a program's messages. Every rank calls it with the same ones.

        Collectives have groups of their own, since another thread starts them. With NCCL so has
        each direction between two ranks: a receive that was started early would hold up a send.

        Args:
            groups: ranks that have collectives.
            pairs: sender and receiver.

        Raises:
            UserError: this is a part of a job, so the other processes do not call it.
        """
        new_groups = []
        for group in groups:
            # The group of a part is that of its collectives over all ranks.
            exists = group in self._groups or (
                self._is_part and len(group[1]) == self.size
            )
            if not exists:
                self._groups[group] = self._new_group(group[1])
                new_groups.append(group)

        if self.backend == "nccl":
            new_pairs = []
            for pair in pairs:
                if pair not in self._channels:
                    self._channels[pair] = self._new_group(pair)
                    new_pairs.append(pair)
            self.connect(new_groups, new_pairs)

    def connect(
        self, groups: Sequence[RankGroup], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Send a first number within ``groups`` and between ``pairs``, one after another.

        NCCL connects ranks at their first message, and blocks the caller until the peer connects
        too. Every rank makes the same connections in the same order here, so none deadlocks.

        Args:
            groups: ranks that have collectives, in the same order on every rank.
            pairs: sender and receiver, likewise.
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
                        dist.send(number, self.process(receiver), group=channel)
                    else:
                        dist.recv(number, self.process(sender), group=channel)
                    self.finish_computing()

    def group_of(self, group: RankGroup) -> dist.ProcessGroup | None:
        """Return the process group of ``group``'s collectives."""
        return self._groups.get(group, self.group)

    def channel(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """Return the process group of messages from ``sender`` to ``receiver``."""
        return self._channels.get((sender, receiver), self.group)

    def part(self, n_ranks: int) -> "World | None":
        """Return a world of some of the ranks; None on the others. Every rank calls it.

        It cannot make further groups, since the other ranks take no part.

        Args:
            n_ranks: number of ranks, the first ones.
        """
        if n_ranks == self.size:
            return self
        name = self.next_name()
        group = self._new_group(range(n_ranks))
        if self.rank >= n_ranks:
            return None
        # No gloo group of objects: in torch 2.11 ranks outside it split NCCL's group, and hang.
        return replace(
            self,
            size=n_ranks,
            group=group,
            object_group=group,
            _name=name,
            _is_part=True,
        )

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if self._is_part:
            raise UserError(
                f"got ranks {list(ranks)} of a part of the job, which cannot make a group of their"
                f" own: start {self.size} processes"
            )
        with self.watch.waiting("new process group", range(self.size)):
            group = dist.new_group(
                list(ranks), timeout=backend_timeout(self.watch.timeout)
            )
        return cast(dist.ProcessGroup, group)  # or a mark, on ranks that are not in it

    # Who sends, and when.

    def use(self, user: Any, end: Callable[[], None]) -> None:
        """Let ``user`` send messages, once the user before has ended its own. Every rank calls it.

        Otherwise a rank could take a message of one program for a message of the other.

        Args:
            user: object whose messages may be under way from now on.
            end: function that completes them; the next other user's call of this method calls it.
        """
        previous_user = self._user
        end_previous = self._end_use
        self._user = user
        self._end_use = end
        if previous_user is not user and end_previous is not None:
            end_previous()

    def next_name(self) -> str:
        """Return a new name, the same on every rank that calls as often."""
        self._n_names += 1
        return f"{self._name}/{self._n_names}"

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
        own_moment = (machine(), time.perf_counter())
        first_moment, *_ = self.gather(own_moment)
        if first_moment[0] != own_moment[0]:
            return time.perf_counter()
        return first_moment[1]

    # What all ranks have.

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank. Every rank calls it.

        Args:
            values: this rank's, of the same shape and type on every rank, on any device.

        Returns:
            A new tensor on the device of ``values``.
        """
        total = values.to(self.message_device, copy=True)
        with self.watch.waiting("a sum over all ranks", range(self.size)):
            dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, value: Any, label: str = "results") -> list[Any]:
        """Return every rank's ``value``, ``[rank]``, on every rank. Every rank calls it.

        Args:
            value: an object that can be pickled.
            label: what it is, the same on every rank.

        Raises:
            UserError: ranks have called it for different things.
        """
        gathered: list[Any] = [None] * self.size
        with self.watch.waiting(f"{label} of all ranks", range(self.size)):
            dist.all_gather_object(gathered, (label, value), group=self.object_group)
        # Ranks in different places would take each other's objects for their own.
        for rank, (rank_label, _) in enumerate(gathered):
            if rank_label != label:
                raise UserError(
                    f"rank {self.rank} exchanges {label} and rank {rank} exchanges {rank_label}:"
                    " make the same calls on every rank, in the same order"
                )
        return [rank_value for _, rank_value in gathered]

    def first(self, value: Any) -> Any:
        """Return the first process's ``value``, on every process. Every one of them calls it.

        Args:
            value: an object that can be pickled.
        """
        return self.gather(value)[0]

    def agree(self, check: Callable[[], None]) -> None:
        """Check something on every rank, and raise on all if one raises. Every rank calls it.

        A rank that raised alone would leave the others in their next wait for it.

        Args:
            check: function that raises ValueError if something is wrong on this rank.

        Raises:
            UserError: the message of the first rank whose check raised a ValueError.
        """
        fault = ""
        try:
            check()
        except ValueError as error:
            fault = str(error)
        for rank_fault in self.gather(fault, "agreement"):
            if rank_fault:
                raise UserError(rank_fault)

    def relay(self, value: Any, ranks: Sequence[int]) -> Any:
        """Pass the first rank's ``value`` along ``ranks``; return it on each of them.

        Only these ranks call it. A large value travels in chunks, so all their links are busy::

            ranks[0] -> ranks[1]    chunk 0 | chunk 1 | chunk 2 |
            ranks[1] -> ranks[2]            | chunk 0 | chunk 1 | chunk 2

        Args:
            value: an object that can be pickled; ignored on all but the first of ``ranks``.
            ranks: numbers of ranks, in the order of the chain.
        """
        index = ranks.index(self.rank)
        is_first = index == 0
        is_last = index == len(ranks) - 1
        sends: list[dist.Work] = []

        def hand_on(chunk: Tensor) -> None:
            if not is_first:
                dist.recv(
                    chunk, self.process(ranks[index - 1]), group=self.object_group
                )
            if not is_last:
                receiver = self.process(ranks[index + 1])
                send = dist.isend(chunk, receiver, group=self.object_group)
                sends.append(cast(dist.Work, send))

        with self.watch.waiting("state of stages", ranks):
            # The size first: a rank knows from it how much memory the chunks take.
            n_bytes = torch.zeros(1, dtype=torch.int64)
            if is_first:
                pickled = pickle_to_bytes(value)
                n_bytes += len(pickled)
            hand_on(n_bytes)
            if not is_first:
                pickled = torch.empty(int(n_bytes), dtype=torch.uint8)
            # Chunks are views: what is received in them fills the whole.
            for chunk in pickled.split(_RELAY_CHUNK):
                hand_on(chunk)
            for send in sends:
                send.wait()
        if is_first:
            return value
        return unpickle_bytes(pickled)


def pickle_to_bytes(value: Any) -> Tensor:
    """Return ``value`` as a message: a tensor of bytes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpickle_bytes(message: Tensor) -> Any:
    """Return the value that :func:`pickle_to_bytes` was given on another rank.

    Ranks of one job trust each other, and optimizers' states may have values of any type.
    """
    return torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=False)


def backend_timeout(timeout: float) -> timedelta:
    """Return the backend's own time-out, before which the watch has named the rank at fault."""
    return timedelta(seconds=timeout + _BACKEND_GRACE)
