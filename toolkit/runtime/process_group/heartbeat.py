"""What ranks say about themselves: beats in the store, and memory shared on one machine."""

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from toolkit.runtime.process_group.diagnosis import Position, RankStatus, Seen
from toolkit.runtime.process_group.shared_status import Process, SharedStatus, machine


class Heartbeat:
    """A thread that publishes this rank's state and reads that of the others.

    The store hangs if its host does, so the watch never reads from it in its own thread.

    Attributes:
        heard: last beat of each other rank, and the beat's number.
        local: processes of the other ranks of this machine, with their memory if readable.
        listening: whether to read the beats of others.
        rounds: how often the store has answered.
        lost: whether the store is gone.
        blamed: rank that the job's diagnosis blames, -1 for no single one, None before it.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, own: SharedStatus, state: Callable[[], Seen]
    ) -> None:
        self.heard: dict[int, tuple[int, Seen]] = {}
        self.local: dict[int, tuple[Process, SharedStatus | None]] = {}
        self.listening = False
        self.rounds = 0
        self.lost = False
        self.blamed: int | None = None
        self.store = dist.PrefixStore("watch", store.clone())
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._own, self._state = own, state
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, every: float, timeout: float) -> None:
        """Wait until all ranks start, so that those of this machine know each other."""
        self._every = every
        self.store.set_timeout(timedelta(seconds=timeout))
        here, process = f"on/{machine()}", Process(os.getpid())
        entry = f"{self._rank} {process.pid} {process.started} {self._own.fd}\n"
        self.store.append(here, entry)  # type: ignore[attr-defined]  # missing from torch's stub
        self.store.add("begun", 1)
        end = time.monotonic() + timeout
        while self.store.add("begun", 0) <= len(self._others) and time.monotonic() < end:
            time.sleep(0.02)
        for line in self.store.get(here).decode().splitlines():
            rank, pid, started, fd = line.split(" ")
            if int(rank) != self._rank:
                shared = SharedStatus.of(int(pid), int(fd))
                self.local[int(rank)] = Process(int(pid), started), shared
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Publish the last state; wait for that at most ``seconds``."""
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)

    def hurry(self) -> None:
        """Start the next round now."""
        self._wake.set()

    def _run(self) -> None:
        try:
            while True:
                last = self._stopping
                self._round()
                self.rounds += 1
                if last:
                    return
                self._wake.wait(self._every)
                self._wake.clear()
        except RuntimeError:  # includes torch.distributed's errors
            self.lost = True

    def _round(self) -> None:
        store = self.store
        store.set(f"beat/{self._rank}", _encode(self.rounds, self._state()))
        if store.check(["blamed"]):
            self.blamed = int(store.get("blamed"))
        if self.listening:
            ranks = [rank for rank in self._others if store.check([f"beat/{rank}"])]
            beats = store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
            self.heard |= zip(ranks, map(_decode, beats), strict=True)


def _encode(number: int, seen: Seen) -> str:
    what, step, peers = seen.position
    status = seen.seconds, seen.status, seen.error, seen.host
    return json.dumps([number, str(what), step, peers, *status])


def _decode(beat: bytes) -> tuple[int, Seen]:
    number, what, step, peers, seconds, status, error, host = json.loads(beat)
    position = Position(what, step, tuple(peers))
    return number, Seen(position, seconds, RankStatus(status), error, host)
