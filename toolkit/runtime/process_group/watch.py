"""The failure watch: it ends the job with one sentence that names the rank at fault.

Each rank has a second thread, which watches while the main thread computes or waits::

    main thread     at("FORWARD ...")      waiting("RECV ...", [1]) ............... (blocked)
                          | record               | record
                          v                      v
    shared memory   [ rank 0: FORWARD ]    [ rank 0: RECV, waits for 1 ]
                                                 ^ reads all records, once its rank stands still
    watch's thread  ---- beat ---- beat ---- beat: diagnose ---- beat: diagnose -> announce, leave

The main thread may be blocked in C++ for ever, so only the watch's thread can end the process. The
first rank to find the reason prints it, and all ranks leave.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from toolkit.errors import first_line
from toolkit.runtime.process_group.diagnosis import Diagnosis, diagnose
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
SCRIPT_END = "the end of its script"
"""Activity of a rank that leaves: it may still give others what they wait for."""

_HURRY = 0.05  # seconds between looks once something is wrong
_GRACE = 0.3  # seconds in which a failure is looked for that explains a signal
# Most seconds in which a failure is looked for that explains a lost connection.
_PATIENCE = 5.0
_LINGER = 2.0  # most seconds that a rank waits for another one at the end

_BACKEND_WORDS = re.compile("gloo|nccl|connection|socket", re.IGNORECASE)
_GLOO_CLUTTER = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*")

_T = TypeVar("_T")


class JobFailedError(RuntimeError):
    """A rank died, stalled or did not join; the message names the rank and the place."""


def _print(message: str) -> None:
    # One write, since other ranks write too. The first newline ends the line of a progress bar.
    sys.stderr.write(f"\nerror: {message}\n")
    sys.stderr.flush()


announce: Callable[[str], None] = _print
"""Reports to the user why the job fails. One rank calls it, once."""


def is_backend_error(error: BaseException) -> bool:
    """Return whether ``error`` may be the consequence of another rank's end.

    torch raises most such errors as plain RuntimeErrors, like a user's mistake or a full memory.
    """
    if isinstance(error, RuntimeError) and not isinstance(
        error, dist.DistError | JobFailedError
    ):
        return _BACKEND_WORDS.search(str(error)) is not None
    return isinstance(error, ConnectionError | dist.DistError)


class Watch:
    """This rank's record, and a thread that watches over it and the others.

    Attributes:
        record: where the main thread is.
        timeout: seconds after which a rank that does not answer ends the job.
        on_failure: function that the watch's thread calls with the reason, as far as this rank
            knows it, before the process ends. It has 0.3 s.
        exit_hooks: functions that complete what others wait for, before this rank leaves.
        width: devices of a rank of the schedule, by which messages name processes.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.on_failure: Callable[[str], None] = lambda message: None
        self.exit_hooks: list[Callable[[], None]] = []
        self.width = 1
        self.record = Record()
        self._shared = SharedStatus()
        # The main thread and the watch's both change the record, and each has to keep what the
        # other wrote.
        self._write_lock = threading.Lock()
        self._beat = min(BEAT, timeout / 8)
        self._clock = 0.0  # seconds for which the watch has run
        self._well_at = 0.0  # when the backend had no error yet
        self._reason = ""  # for which the main thread ends the job
        # The signal that asks this rank to end, if one came, and when.
        self._signal = 0
        self._signal_at = 0.0
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        # A rank's clock, and when seen.
        self._last_change: dict[int, tuple[float, float]] = {}
        self._running = False

    # The main thread.

    def at(
        self, activity: object, step: int | None = None, peers: Iterable[int] = ()
    ) -> None:
        """Note what the main thread does.

        Args:
            activity: an instruction, or words.
            step: its training step; by default the previous one.
            peers: ranks that it waits for.
        """
        if step is None:
            step = self.record.step
        # The clock stands since the last look: a beat later, so that no time-out is too short.
        since = self._clock + self._beat
        self._write(activity=activity, step=step, peers=tuple(peers), since=since)

    def begin_training(self) -> None:
        """Forget the training before, in whose last step a rank lost now would be reported."""
        since = self._clock + self._beat
        self._write(
            activity="the start of a training", step=None, peers=(), since=since
        )

    def _write(self, **changes: Any) -> None:
        with self._write_lock:
            self.record = self.record._replace(now=self._clock, **changes)
            self._shared.write(self.record)

    @contextlib.contextmanager
    def waiting(
        self, activity: object, peers: Iterable[int], step: int | None = None
    ) -> Iterator[None]:
        """Wait for other ranks within; an error of the backend within ends the job.

        Args:
            activity: an instruction, or words.
            peers: the ranks.
            step: training step; by default the previous one.
        """
        self.at(activity, step, peers)
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
        message = (
            cause
            if isinstance(cause, str)
            else _GLOO_CLUTTER.sub("", first_line(cause))
        )
        if not self._running:
            raise JobFailedError(f"rank {self.rank}, {self.record.position}: {message}")
        if isinstance(cause, str):
            self._reason = message
        else:
            self._write(error=message)
        self._wake()
        while True:  # the watch's thread finds the reason, and ends the process
            time.sleep(60)

    def start(self) -> None:
        """Start to watch. In the main thread, also take over SIGTERM."""
        global _signalled
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._peers = Peers(
            self.store, self.rank, self.size, self._shared, self.timeout
        )
        self._running = True
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
        if not self._running:
            return
        has_crashed = hasattr(sys, "last_value")
        if not has_crashed:
            self.at(SCRIPT_END)
        # First, while the watch still sees to it that the hooks' waits end. The latest comes first.
        while self.exit_hooks and not has_crashed:
            self.exit_hooks.pop()()
        self._running = False
        self._wake()
        self._thread.join()
        if not has_crashed:
            self.at(SCRIPT_END)  # the hooks have left other places
            self._write(status=RankStatus.ENDED)  # otherwise the others see a dead rank
        _give_signals_back()
        self._peers.stop(_LINGER)
        for end in self._pipe:
            os.close(end)
        atexit.unregister(self.stop)

    def _wake(self) -> None:
        """End the sleep of the watch's thread."""
        os.write(self._pipe[1], b"\0")

    # The watch's thread.

    def _run(self) -> None:
        try:
            while self._running:
                self._look()
        except BaseException:  # without its watch this rank might wait for ever
            with contextlib.suppress(Exception):
                traceback.print_exc()
            _leave(EXIT_FAILED)

    def _look(self) -> None:
        """Show that this rank runs, end the job if there is a reason, and sleep for a beat."""
        self._write()
        # A killed torchrun takes the store with it, for which another rank would be blamed.
        if self._launcher and os.getppid() != self._launcher:
            reason = (
                f"torchrun (process {self._launcher}), which started the ranks, is gone"
            )
            self._end(
                Diagnosis(
                    None, f"{reason}: start it again; resume= continues a saved run"
                )
            )
        if self._reason:
            self._end(Diagnosis(None, self._reason))

        if not self.record.error:
            self._well_at = self._clock
        hurry = bool(self.record.error or self._signal)
        # A rank that moves reads nothing, so that the watch costs nothing while all is well.
        self._peers.listening = hurry or self.record.seconds > 2 * self._beat
        if self._peers.listening:
            self._judge()
        else:
            self._last_change.clear()
        if self._signal and self._clock - self._signal_at >= _GRACE:
            _leave(128 + self._signal)  # no failure of another rank explains the signal
        self._sleep(_HURRY if hurry else self._beat)

    def _sleep(self, seconds: float) -> None:
        """Sleep until something happens; note a signal that asks this rank to end."""
        began = time.monotonic()
        ready, _, _ = select.select(self._pipe[:1], [], [], seconds)
        # Bounded, so that a job that is stopped as a whole and continued blames nobody.
        self._clock += min(time.monotonic() - began, 2 * self._beat)
        received = os.read(self._pipe[0], 512) if ready else b""
        for number in filter(None, received):  # without the zeros of _wake()
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
        # This rank had stood still for up to 3 beats before it began to listen.
        silence = self.timeout - 3 * self._beat
        for rank, record in ranks.items():
            last_clock, _ = self._last_change.get(rank, (None, 0.0))
            if record.now != last_clock:
                self._last_change[rank] = record.now, self._clock
            silent_seconds = self._clock - self._last_change[rank][1]
            if record.status == RankStatus.RUNNING and silent_seconds >= silence:
                ranks[rank] = record._replace(status=RankStatus.SILENT)
        ranks[self.rank] = self.record._replace(status=RankStatus.RUNNING)
        patience = max(
            0.0, min(self.timeout, _PATIENCE) - (self._clock - self._well_at)
        )
        diagnosis = diagnose(ranks, self.rank, self.timeout, patience, self.width)
        if diagnosis is not None:
            self._end(diagnosis)

    def _see(self) -> dict[int, Record]:
        """Return what the ranks show; leave if one of them has a diagnosis."""
        ranks = self._peers.see()
        for record in ranks.values():
            if record.status == RankStatus.FAILED:
                self._leave_failed(record.error)
        return ranks

    def _end(self, diagnosis: Diagnosis) -> NoReturn:
        """Announce the diagnosis, unless another rank does, and leave."""
        # The first to lock a common memory announces; of several machines, the first in the store.
        local = self._peers.local
        is_first = local[min(local)][1].lock()
        if is_first and self._peers.remote:
            n_announcers = _within(
                _LINGER, lambda: self._peers.store.add("announcers", 1)
            )
            is_first = n_announcers in (1, None)  # None: the store does not answer
        # A rank that has left has announced, and its lock ends with its process.
        self._see()
        end = time.monotonic() + _LINGER
        while not is_first and time.monotonic() < end:
            time.sleep(_HURRY)
            self._see()
        if is_first:
            with contextlib.suppress(Exception):  # standard error may be closed
                announce(diagnosis.message)
            if diagnosis.blamed in local:
                process, shared = local[diagnosis.blamed]
                # It cannot leave on its own.
                if shared.read().status == RankStatus.RUNNING:
                    process.kill()
        self._leave_failed(diagnosis.message)

    def _leave_failed(self, message: str) -> NoReturn:
        """Report the failure, show it to the other ranks, and leave."""
        report_error(message)
        _within(_GRACE, lambda: self.on_failure(message))
        self._write(status=RankStatus.FAILED, error=message)
        if self._peers.remote:
            # This process may hold the store that they still read.
            time.sleep(3 * self._beat)
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
        # Also in a forked process, whose signals are not the rank's.
        _signalled._running = False
        _signalled = None


os.register_at_fork(after_in_child=_give_signals_back)
