"""The failure watch: it ends the job with one sentence that names the rank at fault.

A rank whose main thread stands still looks for the reason in a thread of its own. The first rank
to find it prints it, and all ranks leave.
"""

import atexit
import contextlib
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import NoReturn, TypeVar

import torch.distributed as dist

from toolkit.runtime.process_group.diagnosis import (
    Diagnosis,
    Position,
    RankStatus,
    Seen,
    diagnose,
    lost_store,
)
from toolkit.runtime.process_group.heartbeat import Heartbeat
from toolkit.runtime.process_group.shared_status import SharedStatus

EXIT_FAILED = 70
"""Exit status of a rank that leaves because the job has failed."""

ECHO = 2.0
"""Seconds in which a repeated signal counts as the same one: torchrun hands on to its ranks what
Slurm sends to every process."""

_HURRY = 0.05  # seconds between looks once something is wrong
_GRACE = 0.3  # seconds in which a failure is looked for that explains a signal
_PATIENCE = 5.0  # most seconds in which a failure is looked for that explains a lost connection
_LINGER = 2.0  # most seconds that a rank waits for another one at the end

_T = TypeVar("_T")


class JobFailedError(RuntimeError):
    """A rank has died, stalled or not come; the message says which and where."""


def _print(message: str) -> None:
    # One write, since other ranks write too; a line of its own, since a progress bar may be open.
    sys.stderr.write(f"\nerror: {message}\n")
    sys.stderr.flush()


announce: Callable[[str], None] = _print
"""Reports to the user why the job fails. One rank calls it, once."""

_BACKEND_WORDS = re.compile("gloo|nccl|connection|socket", re.IGNORECASE)


def is_backend_error(error: BaseException) -> bool:
    """Return whether ``error`` may be the consequence of another rank's end.

    torch raises most such errors as plain RuntimeErrors, like a user's mistake or a full memory.
    """
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _BACKEND_WORDS.search(str(error)) is not None


class Watch:
    """The position of this rank, and a thread that watches over it and the others.

    Args:
        store: store that all ranks share.
        rank: rank of this process.
        size: number of ranks.
        timeout: seconds after which a rank that does not answer ends the job.

    Attributes:
        position: where the main thread is.
        on_failure: function that the watch's thread calls with the reason, as far as this rank
            knows it, before the process ends. It has 0.3 s.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.position = Position("start", None, ())
        self.on_failure: Callable[[str], None] = lambda message: None
        self._message = "another rank has said why the ranks end"
        self._shared = SharedStatus.make()
        self._beat = min(0.5, timeout / 8)
        self._reason: Diagnosis | None = None
        self._watching = False

    def at(self, what: object, step: int | None = None, peers: Iterable[int] = ()) -> None:
        """Note that the main thread is at ``what`` from now on.

        Args:
            what: instruction, or words.
            step: training step; the previous one unless given.
            peers: ranks that this one waits for.
        """
        if step is None:
            step = self.position.step
        self.position = Position(what, step, tuple(peers))
        self._shared.write(what, step)

    @contextlib.contextmanager
    def waiting(self, what: object, peers: Iterable[int]) -> Iterator[None]:
        """Wait for ``peers`` within; an error of the backend within ends the job."""
        self.at(what, None, peers)
        with self.failing():
            yield
        self.at("between instructions")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """End the job on an error of the backend at a position with peers."""
        try:
            yield
        except Exception as error:
            ours = isinstance(error, JobFailedError)
            if self.position.peers and is_backend_error(error) and not ours:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> NoReturn:
        """End the job, because this rank cannot continue. Does not return.

        Raises:
            JobFailedError: the watch is not running.
        """
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = re.sub(r"^\[\S+:\d+\] | This is typically caused by .*", "", reason)  # gloo's
        if not self._watching:
            raise JobFailedError(f"rank {self.rank} cannot go on, {self.position}: {reason}")
        self._error = reason
        self._await_end()

    def give_up(self, message: str) -> NoReturn:
        """End the job with ``message``, such as a user's mistake. Does not return.

        Raises:
            JobFailedError: the watch is not running.
        """
        if not self._watching:
            raise JobFailedError(message)
        self._reason = Diagnosis(None, message)
        self._await_end()

    def _await_end(self) -> NoReturn:
        self._wake()
        while True:  # the watch's thread finds the reason, and ends the process
            time.sleep(60)

    def start(self) -> None:
        """Start to watch. In the main thread, also take over SIGTERM."""
        self._host = socket.gethostname()
        self._error = ""
        self._since = self._now = 0.0  # seconds for which this process has run
        self._seen = self.position
        self._well_at = 0.0  # when the backend had no error yet
        self._signal, self._signal_at = 0, 0.0  # signal that asks this rank to end
        self._answer = -1, 0.0  # the store's last answer: its number and when it came
        self._asked = -1  # the store's answer when this rank began to listen
        self._silence: dict[int, tuple[int, float]] = {}
        self._heartbeat = Heartbeat(self.store, self.rank, self.size, self._shared, self._own)
        self._shared.status = RankStatus.RUNNING
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._heartbeat.start(self._beat, self.timeout)
        self._watching = True
        self._take_signals()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Stop to watch: this rank has done its part, and leaves."""
        self._close(RankStatus.DONE)

    def _at_exit(self) -> None:
        # After an exception this rank has not done its part.
        self._close(RankStatus.RUNNING if hasattr(sys, "last_value") else RankStatus.DONE)

    def _close(self, status: RankStatus) -> None:
        if not self._watching:
            return
        if status != RankStatus.RUNNING:
            self._shared.status = status
        self._watching = False
        self._wake()
        self._thread.join()
        self._give_signals_back()
        self._heartbeat.stop(_LINGER)
        os.close(self._read_end)
        os.close(self._write_end)
        atexit.unregister(self._at_exit)

    # Signals. While the main thread is blocked in C++, no Python handler runs, but the signal's
    # number reaches the pipe at once. A user's handler, such as a training's that saves itself,
    # has the first signal to itself.

    def _take_signals(self) -> None:
        global _signalled
        self._old_pipe: int | None = None
        self._took_term = False
        self._left_to: dict[int, tuple[object, float]] = {}  # by signal: its handler, and when
        if threading.current_thread() is not threading.main_thread():
            return
        self._old_pipe = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # An existing handler stays: submitit's makes Slurm's first SIGTERM harmless.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave_to_watch)
            self._took_term = True
        _signalled = self

    def _give_signals_back(self) -> None:
        global _signalled
        if _signalled is self:
            if self._old_pipe is not None:
                signal.set_wakeup_fd(self._old_pipe)
            if self._took_term:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _signalled = None

    def _obeys(self, number: int) -> bool:
        """Return whether the watch acts on a signal: its own, or another handler's second."""
        if number != signal.SIGINT and not (number == signal.SIGTERM and self._took_term):
            return False
        handler = signal.getsignal(number)
        if handler in (signal.default_int_handler, _leave_to_watch):
            return True
        left_to, at = self._left_to.get(number, (None, 0.0))
        if left_to is handler:
            return self._now - at >= ECHO
        self._left_to[number] = handler, self._now
        return False

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def _sleep(self, seconds: float) -> bytes:
        """Sleep until something happens; return the numbers of signals that have come."""
        before = time.monotonic()
        ready, _, _ = select.select([self._read_end], [], [], seconds)
        signals = os.read(self._read_end, 512) if ready else b""
        # Bounded, so that a job that is stopped as a whole and continued blames nobody.
        self._now += min(time.monotonic() - before, 2 * self._beat)
        return signals

    # The watch's thread.

    def _run(self) -> None:
        try:
            while self._watching:
                self._look()
        except BaseException:  # without its watch this rank might wait for ever
            with contextlib.suppress(Exception):
                traceback.print_exc()
            self._leave(EXIT_FAILED)

    def _look(self) -> None:
        if self.position is not self._seen:
            self._seen, self._since = self.position, self._now
        own = self._own()
        stands = own.seconds > 2 * self._beat
        lost = self._store_is_lost(stands)
        if self._heartbeat.blamed is not None:  # another rank has printed its diagnosis
            self._kill(self._heartbeat.blamed)
            self._leave(EXIT_FAILED)
        if self._reason is not None:
            self._end(self._reason, lost)
        if not own.error:
            self._well_at = self._now
        if own.error or stands or self._signal:
            self._look_for_reason(own, lost)
        else:
            self._heartbeat.listening = False
            self._silence.clear()
        if self._signal and self._now - self._signal_at >= _GRACE:
            self._obey(own)
        urgent = bool(own.error or self._signal)
        if urgent:
            self._heartbeat.hurry()
        for number in self._sleep(_HURRY if urgent else self._beat):
            if self._obeys(number):
                self._signal, self._signal_at = number, self._now
                self._shared.status = RankStatus.TERMINATED

    def _store_is_lost(self, stands: bool) -> bool:
        """Return whether the store is gone, or silent for the time-out while this rank stands."""
        if self._heartbeat.rounds != self._answer[0] or not stands:
            self._answer = self._heartbeat.rounds, self._now
        return self._heartbeat.lost or self._now - self._answer[1] >= self.timeout

    def _look_for_reason(self, own: Seen, lost: bool) -> None:
        """Listen to the others, and end the job if what they say is a reason."""
        if not self._heartbeat.listening:
            self._heartbeat.listening, self._asked = True, self._answer[0]
            return
        if not lost and self._answer[0] < self._asked + 2:  # the first may have begun before
            return
        seen = self._see_all(own, lost)
        if any(each.status == RankStatus.FAILED for each in seen.values()):
            self._leave(EXIT_FAILED)
        patience = max(0.0, min(self.timeout, _PATIENCE) - (self._now - self._well_at))
        found = diagnose(seen, self.rank, self.timeout, patience)
        over = own.seconds >= self.timeout or (own.error and not patience)
        if lost and over and own.position.peers and (found is None or found.blamed is None):
            found = lost_store(seen, self.rank, _address(self.store))
        if found is not None:
            self._end(found, lost)

    def _obey(self, own: Seen) -> None:
        """Do as the signal says: no failure of another rank explains it."""
        if self._signal == signal.SIGTERM or own.position.peers:
            self._leave(128 + self._signal)
        if self._now - self._signal_at > 1:  # until then the main thread has its KeyboardInterrupt
            self._signal, self._shared.status = 0, RankStatus.RUNNING

    def _own(self) -> Seen:
        position = self.position
        seconds = self._now - self._since if position is self._seen else 0.0
        return Seen(position, seconds, self._shared.status, self._error, self._host)

    def _see_all(self, own: Seen, lost: bool) -> dict[int, Seen]:
        """Return all ranks, as this one sees them."""
        everyone = {self.rank: own}
        enough = self.timeout - 3 * self._beat  # this rank stood for a while before it listened
        unheard = -1, Seen(Position("start", None, ()))
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            number, seen = self._heartbeat.heard.get(rank, unheard)
            heard, since = self._silence.get(rank, (None, 0.0))
            if heard != number:
                self._silence[rank] = number, self._now
            elif seen.status == RankStatus.RUNNING and not lost and self._now - since >= enough:
                seen = replace(seen, status=RankStatus.SILENT, exact=False)
            if rank in self._heartbeat.local:
                seen = self._see_local(rank, seen)
            if self._signal and seen.status == RankStatus.TERMINATED:  # like this rank
                seen = replace(seen, status=RankStatus.RUNNING)
            everyone[rank] = seen
        return everyone

    def _see_local(self, rank: int, seen: Seen) -> Seen:
        """Return a rank of this machine, with what its process and memory show."""
        process, shared = self._heartbeat.local[rank]
        status = shared.status if shared is not None else seen.status
        if status in (RankStatus.RUNNING, RankStatus.SILENT):
            stopped = RankStatus.STOPPED if process.stopped else seen.status
            status = RankStatus.DEAD if process.gone else stopped
        if status == RankStatus.RUNNING or shared is None:
            return replace(seen, status=status, exact=status == RankStatus.RUNNING)
        what, step = shared.read()
        return replace(seen, status=status, exact=True, position=Position(what, step, ()))

    def _end(self, found: Diagnosis, lost: bool) -> NoReturn:
        """Announce the diagnosis, unless another rank does, and leave."""
        if not self._is_elected(lost):
            _until(lambda: self._heartbeat.blamed is not None or self._someone_failed(), _LINGER)
            self._leave(EXIT_FAILED)
        self._message = found.message
        with contextlib.suppress(Exception):  # standard error may be closed
            announce(found.message)
        self._report_failure()
        blamed = -1 if found.blamed is None else found.blamed
        _within(_GRACE, lambda: self._heartbeat.store.set("blamed", str(blamed)))
        self._shared.status = RankStatus.FAILED
        self._kill(blamed)
        # The last to leave, since this process may host the store that the others still read.
        others = [process for process, _ in self._heartbeat.local.values()]
        least = 0.0 if len(others) == self.size - 1 else 3 * self._beat
        time.sleep(least)
        _until(lambda: all(process.gone for process in others), _LINGER - least)
        self._leave(EXIT_FAILED)

    def _is_elected(self, lost: bool) -> bool:
        """Return whether this rank is the one to announce."""
        if not lost:
            store = self._heartbeat.store
            first = _within(_LINGER / 2, lambda: store.add("announcers", 1) == 1)
            if first is not None:
                return first
        # Without a store, one rank of each machine announces: the first to lock a common memory.
        local = {r: shared for r, (_, shared) in self._heartbeat.local.items() if shared}
        local[self.rank] = self._shared
        return local[min(local)].lock()

    def _someone_failed(self) -> bool:
        local = [shared for _, shared in self._heartbeat.local.values() if shared]
        return any(shared.status == RankStatus.FAILED for shared in local)

    def _kill(self, rank: int) -> None:
        """Kill a rank of this machine that cannot leave by itself."""
        if rank in self._heartbeat.local:
            process, shared = self._heartbeat.local[rank]
            if shared is None or shared.status == RankStatus.RUNNING:
                process.kill()

    def _report_failure(self) -> None:
        """Call ``on_failure``, once; the rank that announces does so before all others."""
        report, self.on_failure = self.on_failure, lambda message: None
        _within(_GRACE, lambda: report(self._message))

    def _leave(self, status: int) -> NoReturn:
        """End this process at once: a backend's threads may hang in a clean end."""
        if status == EXIT_FAILED:
            self._shared.status = RankStatus.FAILED
            self._report_failure()
        for stream in (sys.stdout, sys.stderr):
            _within(_GRACE, stream.flush)  # the main thread may hold its lock
        os._exit(status)


def _leave_to_watch(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the watch's thread acts on it."""


_signalled: Watch | None = None


def _forget_signals() -> None:
    """Detach a process forked from a rank: a signal to it is not one to the rank."""
    global _signalled
    if _signalled is not None:
        signal.set_wakeup_fd(-1)
        if _signalled._took_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(_signalled._at_exit)
        _signalled._watching = False
        _signalled = None


os.register_at_fork(after_in_child=_forget_signals)


def _within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Return what ``call`` returns; None if it fails or takes longer than ``seconds``."""
    results = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _until(true: Callable[[], bool], seconds: float) -> None:
    """Wait until ``true()``, at most ``seconds``."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(_HURRY / 2)


def _address(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else str(store)
