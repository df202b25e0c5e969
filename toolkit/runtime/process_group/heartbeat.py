"""What the ranks tell each other of themselves: beats in the store, and words on one machine."""

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
    """Tells the others of this rank, and hears of them, in a thread of its own.

    Only this thread talks to the store, which may hang if its host does.

    Attributes:
        heard: of each other rank that has been heard of: its last beat and the beat's number.
        local: the other ranks of this machine, and their words where they can be read.
        curious: whether to read the beats of others too.
        rounds: how often the store has answered.
        lost: whether the store is gone.
        diagnosis: whom somebody's diagnosis blames, -1 if nobody; None as long as there is none.
        elected: whether this rank is the one to speak; None as long as that is not known.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, word: SharedStatus, mine: Callable[[], Seen]
    ) -> None:
        self.heard: dict[int, tuple[int, Seen]] = {}
        self.local: dict[int, tuple[Process, SharedStatus | None]] = {}
        self.curious = False
        self.rounds = 0
        self.lost = False
        self.diagnosis: int | None = None
        self.elected: bool | None = None
        self._store = dist.PrefixStore("watch", store.clone())
        self._rank, self._size = rank, size
        self._mine, self._word = mine, word
        self._machine = f"on/{machine()}"
        self._candidate = False
        self._spoken: int | None = None
        self._stopping = False
        self._called = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-beats", daemon=True)

    def start(self, every: float, timeout: float) -> None:
        """Begin, when all ranks do: those of this machine know each other from then on."""
        self._every = every
        self._store.set_timeout(timedelta(seconds=timeout))
        process = Process(os.getpid())
        entry = f"{self._rank} {process.pid} {process.started} {self._word.fd}\n"
        self._store.append(self._machine, entry)  # type: ignore[attr-defined]  # not in its stub
        self._store.add("begun", 1)
        end = time.monotonic() + timeout
        while self._store.add("begun", 0) < self._size and time.monotonic() < end:
            time.sleep(0.02)
        self._find_local(self._store.get(self._machine).decode())
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Tell the last, and end; whether it has within ``patience`` seconds."""
        self._stopping = True
        self._called.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def call(self) -> None:
        """Do a round now."""
        self._called.set()

    def stand(self) -> None:
        """Ask to be the one to speak: see ``elected``."""
        self._candidate = True
        self._called.set()

    def speak(self, blamed: int | None) -> None:
        """Let the others know that there is a diagnosis."""
        self._spoken = -1 if blamed is None else blamed
        self._called.set()

    def _run(self) -> None:
        try:
            while True:
                last = self._stopping
                self._round()
                self.rounds += 1
                if last:
                    return
                self._called.wait(self._every)
                self._called.clear()
        except RuntimeError:  # as the errors of torch.distributed are
            self.lost = True

    def _round(self) -> None:
        store = self._store
        store.set(f"beat/{self._rank}", _encode(self.rounds, self._mine()))
        if self._candidate and self.elected is None:
            me = str(self._rank)
            self.elected = store.compare_set("speaker", "", me).decode() == me
        if self._spoken is not None and self.diagnosis is None:
            store.set("diagnosis", str(self._spoken))
        if store.check(["diagnosis"]):
            self.diagnosis = int(store.get("diagnosis"))
        if self.curious:
            self._listen()

    def _listen(self) -> None:
        keys = {rank: f"beat/{rank}" for rank in range(self._size) if rank != self._rank}
        if keys and not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        if keys:
            for rank, beat in zip(keys, self._store.multi_get(list(keys.values())), strict=True):
                self.heard[rank] = _decode(beat)

    def _find_local(self, entries: str) -> None:
        for entry in entries.splitlines():
            rank, pid, started, fd = entry.split(" ")
            if int(rank) != self._rank:
                self.local[int(rank)] = (
                    Process(int(pid), started),
                    SharedStatus.of(int(pid), int(fd)),
                )


def _encode(number: int, seen: Seen) -> str:
    what, step, peers = seen.position
    return json.dumps(
        [number, str(what), step, peers, seen.seconds, seen.status, seen.error, seen.host]
    )


def _decode(beat: bytes) -> tuple[int, Seen]:
    number, what, step, peers, seconds, status, error, host = json.loads(beat)
    return number, Seen(
        Position(what, step, tuple(peers)), seconds, RankStatus(status), error, host
    )
