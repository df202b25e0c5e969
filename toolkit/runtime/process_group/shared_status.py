"""The ranks' records: on one machine in shared memory, between machines in the store."""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import threading
import weakref
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

BEAT = 0.5  # most seconds between two records of a rank
_SLOT = 1 << 16  # bytes; only the pages that are written take memory

# The memory of a rank: a byte that says which slot is the newest, then two slots, each a record as
# JSON that ends with a zero.


class RankStatus(IntEnum):
    """State of a rank. It reports the first three itself; others observe the last two."""

    RUNNING = 0
    ENDED = 1  # it has finished, or was asked to end by a signal
    FAILED = 2  # it has a diagnosis
    DEAD = 3  # its process is gone
    SILENT = 4  # its record is old


class Record(NamedTuple):
    """What a rank reports about itself, or what another rank sees of it."""

    activity: object = "start"  # instruction that it is at, or words
    step: int | None = None
    peers: tuple[int, ...] = ()  # ranks that it waits for there
    since: float = 0.0  # when it came there, in seconds of its own clock
    now: float = 0.0  # its clock when it wrote this
    status: int = RankStatus.RUNNING
    error: str = ""  # of the backend where it waited; the diagnosis if it has failed
    host: str = ""  # its machine, if that is not the reader's own

    def encode(self) -> str:
        """Return the record as JSON."""
        return json.dumps(self._replace(activity=str(self.activity)[:2000]))

    @classmethod
    def decode(cls, text: str | bytes) -> "Record":
        """Return the record that :meth:`encode` wrote."""
        activity, step, peers, *further_fields = json.loads(text)
        return cls(activity, step, tuple(peers), *further_fields)

    @property
    def seconds(self) -> float:
        """Seconds for which the rank has been there."""
        return self.now - self.since

    @property
    def position(self) -> str:
        """Step and instruction; on another machine, where it was last seen."""
        place = str(self.activity)
        if self.step is not None:
            place = f"in step {self.step} at {place}"
        if self.host:
            place = f"last seen {place}"
        return place


class Process:
    """A process of this machine. Its start time distinguishes it from a later one of its number."""

    def __init__(self, pid: int, started: str = "") -> None:
        self.pid = pid
        self.started = started or self._start()

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        started = self._start()
        return not started or started != self.started

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        with contextlib.suppress(OSError):
            if not self.gone:
                os.kill(self.pid, signal.SIGKILL)

    def _start(self) -> str:
        """Return when it started, by proc(5); empty if it has ended."""
        with contextlib.suppress(OSError):
            fields = (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            )
            return "" if fields[0] in ("Z", "X") else fields[19]
        return ""


class SharedStatus:
    """A rank's record in memory that outlives it and that the ranks of its machine read.

    Each instruction writes it, so that must be quick. Only Linux shares it.
    """

    def __init__(self, fd: int | None = None) -> None:
        is_new = fd is None
        if fd is None:
            # Without memfd_create the memory is this process's own (-1).
            fd = os.memfd_create("watch") if hasattr(os, "memfd_create") else -1
            if fd >= 0:
                os.ftruncate(fd, 1 + 2 * _SLOT)
        self.fd = fd
        self._memory = mmap.mmap(fd, 1 + 2 * _SLOT)
        if fd >= 0:
            weakref.finalize(self, os.close, fd)
        if is_new:
            self.write(Record())

    @classmethod
    def of(cls, pid: int, fd: int) -> "SharedStatus | None":
        """Open another process's; None if it is not readable."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        except (OSError, ValueError):
            return None

    def write(self, record: Record) -> None:
        """Write the record. Two threads must not do so at the same time."""
        # Into the unused slot, so that a rank that is killed here leaves its last record.
        slot = 1 - self._memory[0]
        text = record.encode().encode() + b"\0"
        start = 1 + slot * _SLOT
        self._memory[start : start + len(text)] = text
        # Last, so that the newest slot always has a whole record.
        self._memory[0] = slot

    def read(self) -> Record:
        """Return the latest record."""
        while True:
            start = 1 + self._memory[0] * _SLOT
            # A running rank may write to this slot meanwhile: then the text is no record.
            with contextlib.suppress(ValueError, TypeError):
                return Record.decode(
                    self._memory[start : self._memory.find(b"\0", start)]
                )

    def lock(self) -> bool:
        """Return whether no other process has locked the memory; its lock ends with it."""
        with contextlib.suppress(OSError):
            if self.fd >= 0:  # or the memory is this process's own
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


class Peers:
    """All ranks: processes and memory of ``local`` ones, latest records of ``remote`` ones.

    All ranks construct it at the same time. If ranks are on several machines, a thread publishes
    this rank's record and, while ``listening``, reads those of other machines. The watch does not
    do so itself, since a store hangs if its host does.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        own_status: SharedStatus,
        timeout: float,
    ) -> None:
        # A connection of its own: a wait in another thread would block its calls.
        self.store = dist.PrefixStore("watch", store.clone())
        self.listening = False
        self.local: dict[int, tuple[Process, SharedStatus]] = {}
        self.remote: dict[int, Record] = {}
        self._rank = rank
        self._own_status = own_status
        self._publish()  # before the process can be found
        own_process = Process(os.getpid())
        entry = [machine(), own_process.pid, own_process.started, own_status.fd]
        self.store.set(f"process/{rank}", json.dumps(entry))
        self.local[rank] = own_process, own_status

        keys = [f"process/{r}" for r in range(size)]
        self.store.wait(keys, timedelta(seconds=timeout))
        for peer, key in enumerate(keys):
            if peer != rank:
                process, shared = _open_status(self.store.get(key))
                if shared is None:
                    self.remote[peer] = Record(host="another machine")
                else:
                    self.local[peer] = process, shared
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._exchange, name="heartbeat", daemon=True
        )
        if self.remote:
            self._thread.start()

    def see(self) -> dict[int, Record]:
        """Return the latest record of each rank."""
        latest_records = dict(self.remote)
        for rank, (process, shared) in self.local.items():
            # In this order: a rank that ends in between has written that it does.
            is_gone = process.gone
            record = shared.read()
            if is_gone and record.status == RankStatus.RUNNING:
                record = record._replace(status=RankStatus.DEAD)
            latest_records[rank] = record
        return latest_records

    def stop(self, seconds: float) -> None:
        """Publish the last record; wait for that at most ``seconds``."""
        self._stopping.set()
        if self.remote:
            self._thread.join(seconds)

    def _publish(self) -> None:
        record = self._own_status.read()._replace(host=socket.gethostname())
        self.store.set(f"beat/{self._rank}", record.encode())

    def _exchange(self) -> None:
        # Without a store, other machines fall silent.
        with contextlib.suppress(RuntimeError):
            is_last = False
            while not is_last:
                is_last = self._stopping.is_set()
                self._publish()
                if self.listening:
                    beats = self.store.multi_get(
                        [f"beat/{rank}" for rank in self.remote]
                    )
                    self.remote = dict(
                        zip(self.remote, map(Record.decode, beats), strict=True)
                    )
                self._stopping.wait(BEAT)


def _open_status(entry: str | bytes) -> tuple[Process, SharedStatus | None]:
    """Return a rank's process and its memory; None if it is not readable from here."""
    its_machine, pid, started, fd = json.loads(entry)
    shared = SharedStatus.of(pid, fd) if its_machine == machine() else None
    return Process(pid, started), shared


def records(store: dist.Store, size: int) -> dict[int, Record]:
    """Return the latest records of the ranks that meet in ``store``, as far as they have come."""
    store = dist.PrefixStore("watch", store)
    latest_records = {}
    for rank in range(size):
        if store.check([f"process/{rank}"]):
            process, shared = _open_status(store.get(f"process/{rank}"))
            if shared is not None and not process.gone:
                latest_records[rank] = shared.read()
            else:
                latest_records[rank] = Record.decode(store.get(f"beat/{rank}"))
    return latest_records


def machine() -> str:
    """Return a name that only processes share that have the same clock and process numbers."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename
