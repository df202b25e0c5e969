"""The ranks of a job, and how one meets the others: its place, its GPU, the store, the backend."""

import functools
import io
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import UserError, check_choice, first_line
from toolkit.runtime.process_group import watch as watching
from toolkit.runtime.process_group.shared_status import machine
from toolkit.runtime.process_group.watch import Watch
from toolkit.runtime.streams import enter_device, finish_stream

BACKENDS = ("auto", "nccl", "gloo")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SUBMITIT = "SUBMITIT_EXECUTOR"  # set in tasks that submitit has started

_BACKEND_GRACE = 30.0  # seconds by which the watch speaks before the backend's own time-out

_RELAYED = 2**18  # bytes of a chunk of an object

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
        object_group: process group of Python objects: one of gloo, so that they take no GPU memory.
        script_made_group: whether the script had made torch's process group before.
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
    _part: bool = False  # of a job
    _n_names: int = field(default=0, init=False)
    _groups: dict[Group, dist.ProcessGroup] = field(default_factory=dict, init=False)
    _channels: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict, init=False)
    _user: Any = field(default=None, init=False)  # whose messages may be under way
    _end_use: Callable[[], None] | None = field(default=None, init=False)

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
        existing_groups = {group for group in groups if self._part and len(group[1]) == self.size}
        new_groups = [
            group
            for group in dict.fromkeys(groups)
            if group not in existing_groups | self._groups.keys()
        ]
        self._groups |= {group: self._new_group(group[1]) for group in new_groups}
        if self.backend == "nccl":
            new_pairs = [pair for pair in dict.fromkeys(pairs) if pair not in self._channels]
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
        own_moment = (machine(), time.perf_counter())
        first_moment, *_ = self.gather(own_moment)
        return first_moment[1] if first_moment[0] == own_moment[0] else time.perf_counter()

    def use(self, user: Any, end: Callable[[], None]) -> None:
        """Let ``user`` send messages, once the user before has ended its own. Every rank calls it.

        Otherwise a rank could take a message of one program for a message of the other.

        Args:
            user: object whose messages may be under way from now on.
            end: function that completes them; the next other user's call of this method calls it.
        """
        previous_user, end_previous = self._user, self._end_use
        self._user = user
        self._end_use = end
        if previous_user is not user and end_previous is not None:
            end_previous()

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

    def gather(self, value: Any, what: str = "results") -> list[Any]:
        """Return every rank's ``value``, ``[rank]``, on every rank. Every rank calls it.

        Args:
            value: an object that can be pickled.
            what: what it is, the same on every rank.

        Raises:
            UserError: ranks have called it for different things.
        """
        gathered: list[Any] = [None] * self.size
        with self.watch.waiting(f"{what} of all ranks", range(self.size)):
            dist.all_gather_object(gathered, (what, value), group=self.object_group)
        disagreeing = [rank for rank, (label, _) in enumerate(gathered) if label != what]
        if disagreeing:
            raise UserError(
                f"rank {self.rank} exchanges {what} and rank {disagreeing[0]} exchanges"
                f" {gathered[disagreeing[0]][0]}: make the same calls on every rank, in the same"
                " order"
            )
        return [gathered_value for _, gathered_value in gathered]

    def relay(self, value: Any, ranks: Sequence[int]) -> Any:
        """Pass the first rank's ``value`` along ``ranks``; return it on each of them.

        Only these ranks call it. A large value travels in chunks, so all their links are busy.

        Args:
            value: an object that can be pickled; ignored on all but the first of ``ranks``.
            ranks: numbers of ranks, in the order of the chain.
        """
        index, sends = ranks.index(self.rank), list[dist.Work]()
        senders, receivers = ranks[:index][-1:], ranks[index + 1 :][:1]
        size = torch.zeros(1, dtype=torch.int64)
        if not senders:
            torch.save(value, stream := io.BytesIO())
            size[0] = len(stream.getbuffer())

        def hand_on(chunk: Tensor) -> None:
            for rank in senders:
                dist.recv(chunk, rank, group=self.object_group)
            for rank in receivers:
                sends.append(cast(dist.Work, dist.isend(chunk, rank, group=self.object_group)))

        with self.watch.waiting("state of stages", ranks):
            hand_on(size)
            flat = torch.empty(int(size), dtype=torch.uint8)
            if not senders:
                flat = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
            for chunk in flat.split(_RELAYED):
                hand_on(chunk)
            for work in sends:
                work.wait()
        if senders:
            value = torch.load(io.BytesIO(flat.numpy().tobytes()), weights_only=False)
        return value

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
        if faults := list(filter(None, self.gather(fault, "agreement"))):
            raise UserError(faults[0])

    def part(self, n_ranks: int) -> "World | None":
        """Return a world of the first ``n_ranks`` ranks; None on others. Every rank calls it."""
        if n_ranks == self.size:
            return self
        name, group = self.next_name(), self._new_group(range(n_ranks))
        if self.rank >= n_ranks:
            return None
        # No gloo group of objects: in torch 2.11 ranks outside it split NCCL's group, and hang.
        return replace(self, size=n_ranks, group=group, object_group=group, _name=name, _part=True)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if self._part:
            raise UserError(
                f"got ranks {list(ranks)} of a part of the job, which cannot make a group of their"
                f" own: start {self.size} processes"
            )
        with self.watch.waiting("new process group", range(self.size)):
            group = dist.new_group(list(ranks), timeout=backend_timeout(self.watch.timeout))
        return cast(dist.ProcessGroup, group)  # or a mark, on ranks that are not in it


def backend_timeout(timeout: float) -> timedelta:
    """Return the backend's own time-out, before which the watch has named the rank at fault."""
    return timedelta(seconds=timeout + _BACKEND_GRACE)


_joined: World | None = None


def join(
    n_ranks: int | None = None,
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout: float = 120.0,
    interface: str | None = None,
) -> World:
    """Meet the other ranks of this job, as torchrun, Slurm or ``launch`` started them.

    A process joins once; a second call returns the same world. If the script has called
    ``torch.distributed.init_process_group``, the ranks are the same and have groups of their own.

    Args:
        n_ranks: required number of ranks; any number unless given.
        device: ``auto`` is this rank's GPU if it has one, else the CPU; ``cuda`` or ``cpu``.
        backend: ``auto`` is NCCL if every rank has a GPU of its own, else gloo, whose messages
            go through the CPU's memory.
        timeout: seconds after which a rank that does not answer ends the job.
        interface: network interface of this machine's messages, such as ``eth1``; as the
            environment says (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) unless given.

    Returns:
        The ranks of the job, seen from this process.

    Raises:
        UserError: this process is not a rank, or the job does not have ``n_ranks`` ranks; the
            interface does not exist; or NCCL lacks a GPU for each rank.
        SystemExit: other ranks do not come; the reason has been printed.
    """
    global _joined
    check_choice("backend", backend, BACKENDS)
    if not timeout > 0:
        raise UserError(f"timeout is a number of seconds above 0: got {timeout}")
    rank, size, local_rank = _place(n_ranks)
    if _joined is not None:
        return _joined
    if interface is not None:
        check_choice("interface", interface, [name for _, name in socket.if_nameindex()])
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    if backend != "gloo" and device != "cpu":
        # NCCL's channels have a stream each. A stream that shares one of a GPU's 8 queues with an
        # early receive waits as long as that. CUDA reads the variable as it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # Loading a kernel at its first use waits for such a receive, too.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    own_device = _device(device, local_rank)
    enter_device(own_device)
    meeting_place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout:g} s"
    with _meeting(rank, meeting_place):
        store = _meet(rank, size, timeout, _gpu(own_device))
        backend = _backend(backend, [store.get(f"came/{r}").decode() for r in range(size)])
        watch = Watch(store, rank, size, timeout)
        watch.start()
    script_has_group, patience = dist.is_initialized(), backend_timeout(timeout)
    groups: dict[str, Any] = {}
    with watch.waiting("connections to all ranks", range(size)):
        if not script_has_group:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=patience,
                device_id=own_device if backend == "nccl" else None,
            )
        else:  # messages start in other threads, and would mix with the script's own
            groups["group"] = dist.new_group(backend=backend, timeout=patience)
        if script_has_group or backend == "nccl":
            groups["object_group"] = dist.new_group(backend="gloo", timeout=patience)
    _joined = World(
        rank, size, own_device, backend, watch, store, **groups, script_made_group=script_has_group
    )
    if script_has_group:
        _leave_before_destruction()
    return _joined


def current_world() -> World | None:
    """Return the ranks that this process has joined, or None."""
    return _joined


def leave() -> None:
    """Leave the other ranks after the work is done; do nothing if this process did not join."""
    global _joined
    if _joined is not None:
        _joined.watch.stop()
        if not _joined.script_made_group:
            dist.destroy_process_group()
        _joined = None


def _leave_before_destruction() -> None:
    """Let the script's destroy_process_group, by whatever name it has it, call :func:`leave` first.

    Scripts call it as soon as their own work is done. Other ranks may still need what this one has.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def leave_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group == dist.group.WORLD:
            leave()
        destroy(group)

    for module in [*sys.modules.values()]:
        names = vars(module) if hasattr(module, "__dict__") else {}
        if names.get("destroy_process_group") is destroy:
            names["destroy_process_group"] = leave_and_destroy


def _command(n_ranks: int) -> str:
    """Return the command that starts this program on ``n_ranks`` ranks of one machine."""
    if _SUBMITIT in os.environ:
        return f"make hydra.launcher.nodes times hydra.launcher.tasks_per_node {n_ranks}"
    script, *arguments = sys.argv
    if not script.endswith(".py"):
        return f"toolkit.runtime.launch(function, {n_ranks})"
    program = shlex.join([os.path.relpath(script), *arguments])
    return f"torchrun --nproc-per-node {n_ranks} {program}"


def _place(n_ranks: int | None) -> tuple[int, int, int]:
    """Return this process's number, the number of ranks, and its number on its machine."""
    if "RANK" not in os.environ and _SUBMITIT in os.environ:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    if unset_variables := [name for name in _VARIABLES if name not in os.environ]:
        raise UserError(
            f"this process was not started as a rank ({', '.join(unset_variables)} not set):"
            f" {_command(n_ranks or 2)}"
        )
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise UserError(f"torchrun's variables are whole numbers: {error}") from error
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={size}: start with torchrun")
    if n_ranks is not None and size != n_ranks:
        raise UserError(
            f"the schedule has {n_ranks} ranks and {size} were started: {_command(n_ranks)}"
        )
    return rank, size, local_rank


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UserError(f"device={name}: a rank takes the GPU of its turn, so auto, cuda or cpu")
    if not torch.cuda.is_available():
        raise UserError("device=cuda cannot be used: there is no GPU; try device=auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _gpu(device: torch.device) -> str:
    """Return the GPU's identity, whatever its number in this process; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _backend(name: str, gpus: Sequence[str]) -> str:
    """Return the backend of ranks with these ``gpus``."""
    n_gpus = len({*gpus} - {""})
    if name == "nccl" and n_gpus < len(gpus):
        time.sleep(1)  # all have seen the store before rank 0 leaves
        raise UserError(
            f"backend=nccl takes a GPU a rank, and {len(gpus)} ranks have {n_gpus}: use"
            " backend=gloo, or fewer ranks a machine"
        )
    return ("nccl" if n_gpus == len(gpus) else "gloo") if name == "auto" else name


@contextmanager
def _meeting(rank: int, meeting_place: str) -> Iterator[None]:
    """End this rank with one sentence if the store of the ranks cannot be reached within."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.distributed's errors are RuntimeErrors
        watching.announce(
            f"rank {rank} cannot meet the others at {meeting_place}: {first_line(error)}; is rank 0"
            " running, and the port open?"
        )
        raise SystemExit(watching.EXIT_FAILED) from error


def _meet(rank: int, size: int, timeout: float, gpu: str) -> dist.Store:
    """Return the store that all ranks share, once all have written their GPU to it."""
    # Like torch.distributed's env://, which does not name the ranks that are missing.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + timeout
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_port(host, port, end)
    patience = timedelta(seconds=timeout)
    store: dist.Store = dist.TCPStore(
        host, port, None, hosts, patience, wait_for_workers=False, multi_tenant=hosts
    )
    if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        store = dist.PrefixStore(f"attempt_{attempt}", store)  # ignore earlier attempts' keys
    store.set(f"came/{rank}", gpu)
    came = [f"came/{r}" for r in range(size)]
    while not store.check(came):
        missing_ranks = [str(r) for r in range(size) if not store.check(came[r : r + 1])]
        if missing_ranks and time.monotonic() > end:  # the last may have come since the check above
            if store.add("missing", 1) == 1:
                watching.announce(
                    f"rank {', '.join(missing_ranks)} did not come to {host}:{port} within"
                    f" {timeout:g} s: look at its log, or start all ranks at the same time"
                )
            time.sleep(1)  # all have seen the store and the announcement before a rank leaves
            raise SystemExit(watching.EXIT_FAILED)
        time.sleep(0.05)
    return store


def _await_port(host: str, port: int, end: float) -> None:
    """Wait until the port listens; TCPStore itself tries for longer than its time-out."""
    while True:
        try:
            socket.create_connection((host, port), max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
