"""The failure watch: it ends the job with one sentence that names the rank at fault.

Each rank shows the others where it is. A thread of a rank whose main thread stands still judges
what all ranks show. The first rank to find the reason prints it, and all ranks leave.
"""

import atexit
import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from toolkit.errors import first_line
from toolkit.runtime.process_group.shared_status import (
    BEAT,
    Peers,
    RankStatus,
    Record,
    SharedStatus,
)
from toolkit.torchrun import report_error

EXIT_FAILED = 70
"""Exit status of a rank that leaves because the job has failed."""

_HURRY = 0.05  # seconds between looks once something is wrong
_GRACE = 0.3  # seconds in which a failure is looked for that explains a signal
_PATIENCE = 5.0  # most seconds in which a failure is looked for that explains a lost connection
_LINGER = 2.0  # most seconds that a rank waits for another one at the end

_BACKEND_WORDS = re.compile("gloo|nccl|connection|socket", re.IGNORECASE)
_GLOO_CLUTTER = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*")

_T = TypeVar("_T")


class JobFailedError(RuntimeError):
    """A rank died, stalled or did not join; the message names the rank and the place."""


def _print(message: str) -> None:
    # One write, since other ranks write too; a line of its own, since a progress bar may be open.
    sys.stderr.write(f"\nerror: {message}\n")
    sys.stderr.flush()


announce: Callable[[str], None] = _print
"""Reports to the user why the job fails. One rank calls it, once."""


def is_backend_error(error: BaseException) -> bool:
    """Return whether ``error`` may be the consequence of another rank's end.

    torch raises most such errors as plain RuntimeErrors, like a user's mistake or a full memory.
    """
    if isinstance(error, RuntimeError) and not isinstance(error, dist.DistError | JobFailedError):
        return _BACKEND_WORDS.search(str(error)) is not None
    return isinstance(error, ConnectionError | dist.DistError)


class Diagnosis(NamedTuple):
    """Reason why the job ends: the rank at fault, None if no single one is, and a sentence."""

    blamed: int | None
    message: str


def diagnose(
    ranks: Mapping[int, Record], me: int, timeout: float, patience: float
) -> Diagnosis | None:
    """Find the rank that keeps rank ``me`` waiting; None while there is no reason to end.

    ``patience`` is the time left in which a better reason than a lost connection may appear.
    """
    own_record = ranks[me]
    is_late, is_lost = own_record.seconds >= timeout, bool(own_record.error) and not patience
    queue = [me]  # then the ranks that it waits for, directly or not; nearest first
    for waiter in queue:
        if ranks[waiter].status == RankStatus.RUNNING:
            queue += (r for r in ranks[waiter].peers if r in ranks and r not in queue)
    awaited = queue[1:]
    everyone = [*awaited, *(r for r in ranks if r not in queue)]
    stuck_ranks = [r for r in awaited if not ranks[r].peers and ranks[r].seconds >= timeout]
    stalled = f"has stalled: for {timeout:g} s it has not"
    # The best reason first: a dead rank explains all that others show.
    for status, candidates, enough, fault in (
        (RankStatus.DEAD, everyone, True, "has died (its process is gone)"),
        (RankStatus.ENDED, awaited, is_late or is_lost, "has ended (it finished, or by a signal)"),
        (
            RankStatus.SILENT,
            everyone,
            is_late,
            f"{stalled} answered (stopped, or its network hangs)",
        ),
        (
            RankStatus.RUNNING,
            stuck_ranks,
            is_late,
            f"{stalled} moved (it runs; if slow, raise timeout)",
        ),
    ):
        for rank in candidates if enough else ():
            if ranks[rank].status == status:
                waiter = next((r for r in queue if rank in ranks[r].peers), me)
                waits = "waited for it" if rank in ranks[waiter].peers else "was"
                on_host = f" (on {ranks[rank].host})" if ranks[rank].host else ""
                finding = f"rank {rank}{on_host} {fault}, {ranks[rank].position}"
                return Diagnosis(rank, f"{finding}; rank {waiter} {waits} {ranks[waiter].position}")
    jammed = all(ranks[r].peers and ranks[r].seconds >= timeout for r in queue)
    # At one place they wait for a sum of all, or compute meanwhile, as torch's wrappers do.
    places_differ = len({(str(ranks[r].what), ranks[r].step) for r in queue}) > 1
    if jammed and places_differ and not is_lost:
        positions = "; ".join(f"rank {r} {ranks[r].position}" for r in sorted(queue))
        return Diagnosis(
            None,
            f"for {timeout:g} s these ranks have waited for each other: {positions}. Make the same"
            " calls on every rank, or raise timeout if the links are slow",
        )
    if not is_lost:
        return None
    peers = [r for r in own_record.peers if r != me and r in ranks]
    ends = [r for r in peers if ranks[r].error and me in ranks[r].peers] or peers
    if not ends:
        return Diagnosis(
            None, f"rank {me} cannot continue, {own_record.position}: {own_record.error}"
        )
    subject = "rank " if len(ends) == 1 else "one of ranks "
    places = "".join(f"; rank {r} was {ranks[r].position}" for r in ends)
    return Diagnosis(
        None,
        f"the connection between rank {me} and {subject}{', '.join(map(str, ends))} is lost:"
        f" rank {me} was {own_record.position}{places} ({own_record.error})",
    )


class Watch:
    """This rank's record, and a thread that watches over it and the others.

    Attributes:
        record: where the main thread is.
        timeout: seconds after which a rank that does not answer ends the job.
        on_failure: function that the watch's thread calls with the reason, as far as this rank
            knows it, before the process ends. It has 0.3 s.
        exit_hooks: functions that complete what others wait for, before this rank leaves.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.on_failure: Callable[[str], None] = lambda message: None
        self.exit_hooks: list[Callable[[], None]] = []
        self.record = Record()
        self._shared, self._writing = SharedStatus(), threading.Lock()
        self._beat = min(BEAT, timeout / 8)
        self._clock = 0.0  # seconds for which the watch has run
        self._well_at = 0.0  # when the backend had no error yet
        self._reason = ""  # for which the main thread ends the job
        # The signal that asks this rank to end, if one came, and when.
        self._signal = 0
        self._signal_at = 0.0
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._changed: dict[int, tuple[float, float]] = {}  # a rank's last clock, and when seen
        self._watching = False

    def at(self, what: object, step: int | None = None, peers: Iterable[int] = ()) -> None:
        """Note that the main thread is at ``what``; at the previous step unless given."""
        step = self.record.step if step is None else step
        # The clock stands since the last look: a beat later, so that no time-out is too short.
        since = self._clock + self._beat
        self._write(what=what, step=step, peers=tuple(peers), since=since)

    def _write(self, **changes: Any) -> None:
        with self._writing:  # the main thread and the watch's write
            self.record = self.record._replace(now=self._clock, **changes)
            self._shared.write(self.record)

    @contextlib.contextmanager
    def waiting(
        self, what: object, peers: Iterable[int], step: int | None = None
    ) -> Iterator[None]:
        """Wait for ``peers`` within; an error of the backend within ends the job."""
        self.at(what, step, peers)
        try:
            yield
        except Exception as error:
            if self.record.peers and is_backend_error(error):
                self.fail(error)
            raise
        self.at("between instructions")

    def fail(self, cause: BaseException | str) -> NoReturn:
        """End the job: by an error of the backend, or with a message. Does not return.

        Raises:
            JobFailedError: the watch is not running.
        """
        message = cause if isinstance(cause, str) else _GLOO_CLUTTER.sub("", first_line(cause))
        if not self._watching:
            raise JobFailedError(f"rank {self.rank}, {self.record.position}: {message}")
        if isinstance(cause, str):
            self._reason = message
        else:
            self._write(error=message)
        os.write(self._pipe[1], b"\0")  # wakes the watch's thread
        while True:  # the watch's thread finds the reason, and ends the process
            time.sleep(60)

    def start(self) -> None:
        """Start to watch. In the main thread, also take over SIGTERM."""
        global _signalled
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._peers = Peers(self.store, self.rank, self.size, self._shared, self.timeout)
        self._watching = True
        if threading.current_thread() is threading.main_thread():
            # While the main thread is blocked in C++, no Python handler runs, but a signal's number
            # reaches the pipe at once.
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            # An existing handler stays: submitit's makes Slurm's first SIGTERM harmless.
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _leave_to_watch)
            _signalled = self
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop to watch: this rank leaves. After an uncaught exception its part is unfinished."""
        if not self._watching:
            return
        while self.exit_hooks and not hasattr(sys, "last_value"):
            self.exit_hooks.pop()()
        self._watching = False
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        if not hasattr(sys, "last_value"):
            self._write(status=RankStatus.ENDED)
        _give_signals_back()
        self._peers.stop(_LINGER)
        for end in self._pipe:
            os.close(end)
        atexit.unregister(self.stop)

    # The watch's thread.

    def _run(self) -> None:
        try:
            while self._watching:
                self._look()
        except BaseException:  # without its watch this rank might wait for ever
            with contextlib.suppress(Exception):
                traceback.print_exc()
            _leave(EXIT_FAILED)

    def _look(self) -> None:
        self._write()
        # A killed torchrun takes the store with it, for which another rank would be blamed.
        if self._launcher and os.getppid() != self._launcher:
            reason = f"torchrun (process {self._launcher}), which started the ranks, is gone"
            self._end(Diagnosis(None, f"{reason}: start it again; resume= continues a saved run"))
        if self._reason:
            self._end(Diagnosis(None, self._reason))
        if not self.record.error:
            self._well_at = self._clock
        hurry = bool(self.record.error or self._signal)
        self._peers.listening = hurry or self.record.seconds > 2 * self._beat
        if self._peers.listening:
            self._judge()
        else:
            self._changed.clear()
        if self._signal and self._clock - self._signal_at >= _GRACE:
            _leave(128 + self._signal)  # no failure of another rank explains the signal
        self._sleep(_HURRY if hurry else self._beat)

    def _sleep(self, seconds: float) -> None:
        """Sleep until something happens; note a signal that asks this rank to end."""
        began = time.monotonic()
        ready, _, _ = select.select(self._pipe[:1], [], [], seconds)
        # Bounded, so that a job that is stopped as a whole and continued blames nobody.
        self._clock += min(time.monotonic() - began, 2 * self._beat)
        for number in filter(None, os.read(self._pipe[0], 512) if ready else b""):
            handler = signal.getsignal(number)
            # A user's handler, such as a training's that saves itself, has the signal to itself. So
            # has Python's of Ctrl-C, unless the main thread waits where it cannot run.
            blocked = handler == signal.default_int_handler and self.record.peers
            if handler == _leave_to_watch or blocked:
                self._signal = number
                self._signal_at = self._clock
                self._write(status=RankStatus.ENDED)

    def _judge(self) -> None:
        """End the job if what the ranks show is a reason."""
        ranks = self._see()
        for rank, record in ranks.items():
            if record.now != self._changed.get(rank, (None, 0.0))[0]:
                self._changed[rank] = record.now, self._clock
            silent_seconds = self._clock - self._changed[rank][1]
            # This rank stood for a while before it listened.
            if (
                record.status == RankStatus.RUNNING
                and silent_seconds >= self.timeout - 3 * self._beat
            ):
                ranks[rank] = record._replace(status=RankStatus.SILENT)
        ranks[self.rank] = self.record._replace(status=RankStatus.RUNNING)
        patience = max(0.0, min(self.timeout, _PATIENCE) - (self._clock - self._well_at))
        if diagnosis := diagnose(ranks, self.rank, self.timeout, patience):
            self._end(diagnosis)

    def _see(self) -> dict[int, Record]:
        """Return what the ranks show; leave if one of them has a diagnosis."""
        ranks = self._peers.see()
        for record in ranks.values():
            if record.status == RankStatus.FAILED:
                self._leave_failed(record.error)
        return ranks

    def _end(self, found: Diagnosis) -> NoReturn:
        """Announce the diagnosis, unless another rank does, and leave."""
        # The first to lock a common memory announces; of several machines, the first in the store.
        local, store = self._peers.local, self._peers.store
        is_first = local[min(local)][1].lock()
        if is_first and self._peers.remote:
            is_first = _within(_LINGER, lambda: store.add("announcers", 1)) in (1, None)
        self._see()  # a rank that has left has announced, and its lock ends with its process
        end = time.monotonic() + _LINGER
        while not is_first and time.monotonic() < end:
            time.sleep(_HURRY)
            self._see()
        if is_first:
            with contextlib.suppress(Exception):  # standard error may be closed
                announce(found.message)
            if found.blamed in local:
                process, shared = local[found.blamed]
                if shared.read().status == RankStatus.RUNNING:  # it cannot leave on its own
                    process.kill()
        self._leave_failed(found.message)

    def _leave_failed(self, message: str) -> NoReturn:
        """Report the failure, show it to the other ranks, and leave."""
        report_error(message)
        _within(_GRACE, lambda: self.on_failure(message))
        self._write(status=RankStatus.FAILED, error=message)
        if self._peers.remote:
            time.sleep(3 * self._beat)  # this process may hold the store that they still read
        _leave(EXIT_FAILED)


def _leave(status: int) -> NoReturn:
    """End this process at once: a backend's threads may hang in a clean end."""
    for stream in (sys.stdout, sys.stderr):
        _within(_GRACE, stream.flush)  # the main thread may hold its lock
    os._exit(status)


def _within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Return what ``call`` returns; None if it fails or takes longer than ``seconds``."""
    with contextlib.suppress(Exception):
        return ThreadPoolExecutor(1).submit(call).result(seconds)
    return None


_signalled: Watch | None = None  # the watch that hears this process's signals


def _leave_to_watch(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the watch's thread acts on it."""


def _give_signals_back() -> None:
    global _signalled
    if _signalled is not None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == _leave_to_watch:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _signalled._watching = False  # also in a forked process, whose signals are not the rank's
        _signalled = None


os.register_at_fork(after_in_child=_give_signals_back)
