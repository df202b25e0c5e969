"""What each rank is doing, and the end of the job when one of them no longer answers.

A rank whose main thread does not get on looks for the reason in a thread of its own. The first rank
to find it says so, and all leave.
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
from typing import NoReturn

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
"""The exit status of a rank that leaves because the job has failed."""

ECHO = 2.0
"""Seconds in which a signal that comes once more is the same one: what Slurm sends to every process
of a job, torchrun hands on to its ranks."""

_HURRY = 0.05  # seconds between looks once something is known to be wrong
_GRACE = 0.3  # seconds for which the reason of a signal is looked for
_PATIENCE = 5.0  # seconds for which the reason of a lost connection is looked for, or the time-out
_LINGER = 2.0  # seconds for which a rank waits at most for another one at the end


class JobFailedError(RuntimeError):
    """A rank has died, stalled or not come; the message says which and where."""


def _print(message: str) -> None:
    # On a line of its own, though some rank's progress bar may stand in the one before; and in one
    # piece, though other ranks write too.
    sys.stderr.write(f"\nerror: {message}\n")
    sys.stderr.flush()


announce: Callable[[str], None] = _print
"""Tells the user why the job fails. One rank calls it, once."""


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
        store: reaches all ranks.
        rank: of this process.
        size: how many ranks there are.
        timeout: seconds after which a rank that does not answer ends the job.

    Attributes:
        position: where the main thread is.
        on_failure: called by the watch's thread, with the reason as far as this rank knows it,
            before the process ends because the job has failed. It has a moment.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.position = Position("start", None, ())
        self.on_failure: Callable[[str], None] = lambda message: None
        self._told = "another rank has said why the ranks end"
        self._word = SharedStatus.make()
        self._beat = min(0.5, timeout / 8)
        self._reason: Diagnosis | None = None
        self._watching = False

    def at(self, what: object, step: int | None = None, peers: Iterable[int] = ()) -> None:
        """The main thread is at ``what`` from now on; it waits for ``peers``, if there are any.

        Args:
            what: an instruction, or words.
            step: the training step; that of before unless given.
            peers: the ranks that it waits for.
        """
        if step is None:
            step = self.position[1]
        self.position = Position(what, step, tuple(peers))
        self._word.say(what, step)

    @contextlib.contextmanager
    def waiting(self, what: object, peers: Iterable[int]) -> Iterator[None]:
        """Wait for ``peers`` within; an error of the backend within ends the job."""
        self.at(what, None, peers)
        with self.failing():
            yield
        self.at("between instructions")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An error of the backend within, at a position with peers, ends the job."""
        try:
            yield
        except Exception as error:
            ours = isinstance(error, JobFailedError)
            if self.position.peers and is_backend_error(error) and not ours:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> NoReturn:
        """End the job, because this rank cannot go on. Does not return.

        Raises:
            JobFailedError: nobody watches.
        """
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = re.sub(r"^\[\S+:\d+\] | This is typically caused by .*", "", reason)  # gloo's
        if not self._watching:
            raise JobFailedError(f"rank {self.rank} cannot go on, {self.position}: {reason}")
        self._error = reason
        self._await_end()

    def give_up(self, message: str) -> NoReturn:
        """End the job for a reason that this rank knows, such as a user's mistake.

        Does not return.

        Raises:
            JobFailedError: nobody watches.
        """
        if not self._watching:
            raise JobFailedError(message)
        self._reason = Diagnosis(None, message)
        self._await_end()

    def _await_end(self) -> NoReturn:
        self._wake()
        while True:  # the watch's thread finds out why, and ends the process
            time.sleep(60)

    def start(self) -> None:
        """Begin to watch. Called by the main thread, it also takes over SIGTERM."""
        self._host = socket.gethostname()
        self._error = ""
        self._since = self._now = 0.0  # seconds that this process has lived through
        self._seen = self.position
        self._well_at = 0.0  # when the backend had no error yet
        self._signal, self._signal_at = 0, 0.0  # that asks this rank to end
        self._rounds, self._rounds_at = -1, 0.0  # of the store's answers
        self._asked = -1  # the round since which the others are asked for
        self._silence: dict[int, tuple[int, float]] = {}
        self._heartbeat = Heartbeat(self.store, self.rank, self.size, self._word, self._mine)
        self._word.status = RankStatus.RUNNING
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
        """End to watch: this rank has done its part, and leaves."""
        self._close(RankStatus.DONE)

    def _at_exit(self) -> None:
        # After an exception the others shall not take this rank for one that has done its part.
        self._close(RankStatus.RUNNING if hasattr(sys, "last_value") else RankStatus.DONE)

    def _close(self, status: RankStatus) -> None:
        if not self._watching:
            return
        if status != RankStatus.RUNNING:
            self._word.status = status
        self._watching = False
        self._wake()
        self._thread.join()
        self._give_signals_back()
        self._heartbeat.stop(_LINGER)
        os.close(self._read_end)
        os.close(self._write_end)
        atexit.unregister(self._at_exit)

    # Signals. While the main thread is blocked in C++ no handler of Python's runs, but the number
    # of the signal goes to the pipe at once. Somebody else's handler, such as that of a training
    # that saves itself first, has the first signal to itself.

    def _take_signals(self) -> None:
        global _signalled
        self._old_pipe: int | None = None
        self._took_term = False
        # The handler that the last one of a kind was left to, and when.
        self._left_to: dict[int, tuple[object, float]] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        self._old_pipe = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # Who has a handler already means it: submitit's makes Slurm's first SIGTERM harmless.
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
        """Whether the watch acts on a signal: one that is its own, or the second of another's."""
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
        """Sleep until something happens; the numbers of signals that have come.

        Time counts only while this process runs, so that a job that is stopped as a whole and
        goes on later does not find that everybody has been silent.
        """
        before = time.monotonic()
        ready, _, _ = select.select([self._read_end], [], [], seconds)
        signals = os.read(self._read_end, 512) if ready else b""
        self._now += min(time.monotonic() - before, 2 * self._beat)
        return signals

    # The thread.

    def _run(self) -> None:
        try:
            self._look()
        except BaseException:  # without its watch this rank might wait for ever
            with contextlib.suppress(Exception):
                traceback.print_exc()
            self._leave(EXIT_FAILED)

    def _look(self) -> None:
        while self._watching:
            if self.position is not self._seen:
                self._seen, self._since = self.position, self._now
            mine = self._mine()
            stands = mine.seconds > 2 * self._beat
            lost = self._is_lost(stands)
            if self._heartbeat.diagnosis is not None:
                self._follow(self._heartbeat.diagnosis)
            if self._reason is not None:
                self._end(self._reason, lost)
            if not mine.error:
                self._well_at = self._now
            if mine.error or stands or self._signal:
                self._look_for_reason(mine, lost)
            else:
                self._heartbeat.curious = False
                self._silence.clear()
            if self._signal and self._now - self._signal_at >= _GRACE:
                self._obey(mine)
            urgent = bool(mine.error or self._signal)
            if urgent:
                self._heartbeat.call()
            for number in self._sleep(_HURRY if urgent else self._beat):
                if self._obeys(number):
                    self._signal, self._signal_at = number, self._now
                    self._word.status = RankStatus.TERMINATED

    def _is_lost(self, stands: bool) -> bool:
        """Whether the store is gone, or has not answered for the time-out while this rank stood."""
        if self._heartbeat.rounds != self._rounds or not stands:
            self._rounds, self._rounds_at = self._heartbeat.rounds, self._now
        return self._heartbeat.lost or self._now - self._rounds_at >= self.timeout

    def _look_for_reason(self, mine: Seen, lost: bool) -> None:
        """Ask what the others do; once they have been heard, end the job if there is a reason."""
        if not self._heartbeat.curious:
            self._heartbeat.curious, self._asked = True, self._rounds
            return
        if not lost and self._rounds < self._asked + 2:  # the round under way may not have listened
            return
        table = self._table(mine, lost)
        if any(seen.status == RankStatus.FAILED for seen in table.values()):
            self._leave(EXIT_FAILED)
        patience = max(0.0, min(self.timeout, _PATIENCE) - (self._now - self._well_at))
        diagnosis = diagnose(table, self.rank, self.timeout, patience)
        over = mine.seconds >= self.timeout or (mine.error and not patience)
        blamed = diagnosis is not None and diagnosis.blamed is not None
        if lost and not blamed and over and mine.position.peers:
            diagnosis = lost_store(table, self.rank, _address(self.store))
        if diagnosis is not None:
            self._end(diagnosis, lost)

    def _obey(self, mine: Seen) -> None:
        """Do as the signal says: no other rank's failure was the reason for it."""
        if self._signal == signal.SIGTERM or mine.position.peers:
            self._leave(128 + self._signal)
        elif self._now - self._signal_at <= 1:
            return  # the main thread is to have its KeyboardInterrupt
        self._signal, self._word.status = 0, RankStatus.RUNNING

    def _mine(self) -> Seen:
        """This rank."""
        position = self.position
        seconds = self._now - self._since if position is self._seen else 0.0
        return Seen(position, seconds, self._word.status, self._error, self._host)

    def _table(self, mine: Seen, lost: bool) -> dict[int, Seen]:
        """All ranks, as they are seen from here."""
        table = {self.rank: mine}
        enough = self.timeout - 3 * self._beat  # it is listened to only after this rank stands
        for rank in range(self.size):
            if rank != self.rank:
                number, seen = self._heartbeat.heard.get(
                    rank, (-1, Seen(Position("start", None, ())))
                )
                heard, since = self._silence.get(rank, (None, 0.0))
                if heard != number:
                    self._silence[rank] = number, self._now
                elif seen.status == RankStatus.RUNNING and not lost and self._now - since >= enough:
                    seen = replace(seen, status=RankStatus.SILENT, exact=False)
                if rank in self._heartbeat.local:
                    seen = self._see(rank, seen)
                if (
                    self._signal and seen.status == RankStatus.TERMINATED
                ):  # as this rank is, so that is no reason
                    seen = replace(seen, status=RankStatus.RUNNING)
                table[rank] = seen
        return table

    def _see(self, rank: int, seen: Seen) -> Seen:
        """A rank of this machine, with what can be seen from outside."""
        process, word = self._heartbeat.local[rank]
        status = word.status if word is not None else seen.status
        if status in (RankStatus.RUNNING, RankStatus.SILENT):
            status = (
                RankStatus.DEAD
                if process.gone
                else RankStatus.STOPPED
                if process.stopped
                else seen.status
            )
        if status == RankStatus.RUNNING or word is None:
            return replace(seen, status=status, exact=status == RankStatus.RUNNING)
        what, step = word.read()
        return replace(seen, status=status, exact=True, position=Position(what, step, ()))

    def _end(self, diagnosis: Diagnosis, lost: bool) -> NoReturn:
        """Say the diagnosis, if nobody else does, and leave."""
        if self._is_elected(lost):
            self._told = diagnosis.message
            with contextlib.suppress(Exception):  # nobody may listen any more
                announce(diagnosis.message)
            self._tell_failure()
            self._heartbeat.speak(diagnosis.blamed)
            self._word.status = RankStatus.FAILED
            self._kill(diagnosis.blamed)
            # The last to leave, since the store may be here.
            others = [process for process, _ in self._heartbeat.local.values()]
            least = 0.0 if len(others) == self.size - 1 else 3 * self._beat
            time.sleep(least)
            _until(lambda: all(process.gone for process in others), _LINGER - least)
        else:
            _until(lambda: self._heartbeat.diagnosis is not None or self._someone_failed(), _LINGER)
        self._leave(EXIT_FAILED)

    def _follow(self, blamed: int) -> NoReturn:
        """Leave on the diagnosis of another rank."""
        self._kill(blamed)
        self._leave(EXIT_FAILED)

    def _is_elected(self, lost: bool) -> bool:
        if not lost:
            self._heartbeat.stand()
            _until(lambda: self._heartbeat.elected is not None or self._heartbeat.lost, _LINGER / 2)
            if self._heartbeat.elected is False:
                return False
        # Where the store does not answer, one rank of each machine speaks: who has the first word.
        words = {
            rank: word for rank, (_, word) in self._heartbeat.local.items() if word is not None
        }
        words[self.rank] = self._word
        return words[min(words)].take()

    def _someone_failed(self) -> bool:
        words = (word for _, word in self._heartbeat.local.values())
        return any(word is not None and word.status == RankStatus.FAILED for word in words)

    def _kill(self, rank: int | None) -> None:
        """Kill a rank of this machine that cannot leave by itself."""
        if rank in self._heartbeat.local:
            process, word = self._heartbeat.local[rank]
            if word is None or word.status == RankStatus.RUNNING:
                process.kill()

    def _tell_failure(self) -> None:
        """Call ``on_failure``, once; who says the reason does so before all others."""
        told, self.on_failure = self.on_failure, lambda message: None
        failed = threading.Thread(target=told, args=(self._told,), daemon=True)
        failed.start()
        failed.join(_GRACE)

    def _leave(self, status: int) -> NoReturn:
        """End this process as it is: threads of a backend may hang for long in a clean end."""
        if status == EXIT_FAILED:
            self._word.status = RankStatus.FAILED
            self._tell_failure()
        printed = threading.Thread(target=_flush, daemon=True)
        printed.start()
        printed.join(_GRACE)  # the main thread may hold what that needs
        os._exit(status)


def _leave_to_watch(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM: the watch's thread acts on it."""


_signalled: Watch | None = None


def _forget_signals() -> None:
    """In a process that was forked from a rank: a signal to it is not one to the rank."""
    global _signalled
    if _signalled is not None:
        signal.set_wakeup_fd(-1)
        if _signalled._took_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(_signalled._at_exit)
        _signalled._watching = False
        _signalled = None


os.register_at_fork(after_in_child=_forget_signals)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _until(true: Callable[[], bool], seconds: float) -> None:
    """Wait until something is true, at most for so long."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(_HURRY / 2)


def _address(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else str(store)
