"""The other ranks' records: of this machine by shared memory, of other machines by the store."""

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from toolkit.runtime.process_group.diagnosis import Position, RankStatus, Record
from toolkit.runtime.process_group.shared_status import Process, SharedStatus, machine

BEAT = 0.5  # most seconds between two records of a rank


class Heartbeat:
    """Reads the other ranks' records.

    A store hangs if its host does. So a thread of its own publishes this rank's record and reads
    those of other machines.

    All ranks construct one at the same time, and wait for each other until ``timeout``.

    Attributes:
        local: processes of the other ranks of this machine, and their memory.
        listening: whether to read the records of other machines.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, own: SharedStatus, timeout: float
    ) -> None:
        self.store = dist.PrefixStore("watch", store.clone())
        self.listening = False
        self.local: dict[int, tuple[Process, SharedStatus]] = {}
        self._rank, self._own = rank, own
        self._heard: dict[int, Record] = {}
        process, here = Process(os.getpid()), machine()
        entry = [here, process.pid, process.started, own.fd]
        self.store.set(f"process/{rank}", json.dumps(entry))
        keys = [f"process/{r}" for r in range(size)]
        with contextlib.suppress(RuntimeError):  # the watch will name a rank that does not come
            self.store.wait(keys, timedelta(seconds=timeout))
        others = [r for r in range(size) if r != rank]
        for other in others:
            if self.store.check([keys[other]]):
                where, pid, started, fd = json.loads(self.store.get(keys[other]))
                shared = SharedStatus.of(pid, fd) if where == here else None
                if shared is not None:
                    self.local[other] = Process(pid, started), shared
        self.remote: Sequence[int] = [r for r in others if r not in self.local]
        self._wake, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        if self.remote:
            self._thread.start()

    def see(self) -> dict[int, Record]:
        """Return the latest record of each other rank."""
        unheard = Record(Position("start"), host="another machine")
        seen = {rank: self._heard.get(rank, unheard) for rank in self.remote}
        for rank, (process, shared) in self.local.items():
            gone, stopped = process.gone, process.stopped  # before its last record is read
            record = shared.read()._replace(host="")
            if record.status == RankStatus.RUNNING and (gone or stopped):
                record = record._replace(status=RankStatus.DEAD if gone else RankStatus.STOPPED)
            seen[rank] = record
        return seen

    def stop(self, seconds: float) -> None:
        """Publish the last record; wait for that at most ``seconds``."""
        self._stopping = True
        self._wake.set()
        if self.remote:
            self._thread.join(seconds)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # without a store, other machines fall silent
            last = False
            while not last:
                last = self._stopping
                self.store.set(f"beat/{self._rank}", self._own.read().encode())
                known = [r for r in self.remote if self.store.check([f"beat/{r}"])]
                if not self.listening:
                    self._heard = {}
                elif known:
                    beats = self.store.multi_get([f"beat/{rank}" for rank in known])
                    self._heard = dict(zip(known, map(Record.decode, beats), strict=True))
                if not last:
                    self._wake.wait(BEAT)
