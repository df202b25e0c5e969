"""Ranks that stay alive from call to call, seen from the process that uses them."""

import contextlib
import math
import pickle
import signal
import socket
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch.distributed as dist

from toolkit.errors import UserError, whole
from toolkit.extras import check_installed
from toolkit.model.pickling import dumps
from toolkit.runtime.process_group.machines import Machine, ray_machines, this_machine
from toolkit.runtime.process_group.rank_process import (
    DIED,
    JOB_FAILED,
    LEAVE,
    LOST,
    RAISED,
)
from toolkit.runtime.process_group.watch import JobFailedError

OnReport = Callable[[int, Any], object]

_POLL = 0.05  # most seconds between looks at the time
_LAST_WAIT = 10.0  # most seconds to wait for the ends of ranks
# S to wait for a better reason.
_PATIENCE = {RAISED: 0.0, JOB_FAILED: 0.5, DIED: 3.0, LOST: 0.5}


class _Failure(NamedTuple):
    """Why a call fails."""

    reason: int  # the best first, see rank_process
    error: Exception
    cause: Exception | None


class Processes:
    """``n_ranks`` processes, each a rank, which carry out calls.

    They start with the first call, and again with the first after a failure, an interrupt or a call
    that was not waited for: each of these ends all of them. Use it as a context.

    Args:
        n_ranks: number of processes.
        timeout: seconds within which all ranks have to start.
        hosts: machines of the ranks, as in :func:`ray_machines`; none: this machine.

    Attributes:
        on_other_machines: whether ranks may be on other machines.
        n_starts: how often the ranks have started.
        store: where the ranks meet.
        alive: ranks whose processes run.
        process_ids: by rank.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self, n_ranks: int, timeout: float = 120.0, hosts: Sequence[str] = ()
    ) -> None:
        self.n_ranks = whole(n_ranks, "n_ranks, the number of processes,", 1)
        if not timeout > 0:
            raise UserError(f"timeout is a number of seconds above 0: got {timeout}")
        self.timeout = timeout
        self.n_starts = 0
        self.store: dist.TCPStore | None = None
        self._open_machines = this_machine
        if hosts:
            check_installed("ray", "hosts=")
            self._open_machines = partial(ray_machines, hosts)
        self._machines: list[Machine] = []
        self.on_other_machines = bool(hosts)
        self._message_cut_short = False  # to or from a machine, by an interrupt
        self.alive: set[int] = set()
        self.process_ids: dict[int, int] = {}
        self._not_started: set[int] = set()
        # Of the present call:
        self._pending: set[int] = set()  # ranks neither with a result nor failed
        self._results: dict[int, Any] = {}
        self._failure: _Failure | None = None
        # When to stop waiting for a better reason of the failure.
        self._decided_at = math.inf

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        on_report: OnReport = lambda rank, value: None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; return the values, ``[rank]``.

        Args:
            function: function that each rank calls; it and its arguments are pickled.
            *args: positional arguments of ``function``.
            on_report: function that is called here with the rank and the value of each report.
            **kwargs: keyword arguments of ``function``.

        Raises:
            UserError: the function or an argument cannot be pickled.
            ValueError: a rank raised it.
            RankError: a rank raised another exception.
            JobFailedError: a rank died, stalled or did not start.
        """
        self.begin(function, *args, **kwargs)
        for rank, value in self.reports():
            on_report(rank, value)
        return self.results()

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin a call on every rank; the caller then exhausts :meth:`reports`.

        Args:
            function: function that each rank calls; it and its arguments are pickled.
            *args: positional arguments of ``function``.
            **kwargs: keyword arguments of ``function``.
        """
        # Before any rank gets a message, so that an error of pickling leaves the ranks alive.
        message = dumps((function, args, kwargs))
        if not self.ready():
            self._start()
        self._results = {}
        self._pending = {*range(self.n_ranks)}
        self._failure = None
        self._decided_at = math.inf
        self._to_ranks(self._pending, message)

    def send(self, value: Any, ranks: Collection[int]) -> None:
        """Send a value to the ``receive()`` of some ranks, within a call.

        Args:
            value: an object that can be pickled, which is done once for all.
            ranks: the receivers.
        """
        self._to_ranks(ranks, dumps(value))

    def reports(self) -> Generator[tuple[int, Any], None, None]:
        """Yield what ranks report, with its rank, until all have returned; raise as ``call``."""
        try:
            end = time.monotonic() + self.timeout
            while self._pending and time.monotonic() < self._decided_at:
                yield from self._take_messages(_POLL)
                if (
                    self._not_started
                    and self._failure is None
                    and time.monotonic() > end
                ):
                    missing_ranks = ", ".join(map(str, sorted(self._not_started)))
                    raise JobFailedError(
                        f"rank {missing_ranks} has not started within {self.timeout:g} s: start"
                        " fewer ranks, or raise timeout"
                    )
            if self._failure is not None:
                raise self._failure.error from self._failure.cause
        except BaseException:
            # Also if the caller leaves, since ranks still run the call.
            self.kill()
            raise

    def results(self) -> list[Any]:
        """Return what each rank returned, ``[rank]``, once :meth:`reports` is exhausted."""
        return [self._results[rank] for rank in range(self.n_ranks)]

    def ready(self) -> bool:
        """Return whether all ranks wait for a call. If only some do, end them."""
        if self._pending:  # by a call that nobody waited for
            self.kill()
        # The process that starts ranks has died, too.
        with contextlib.suppress(JobFailedError):
            self._take_all_messages(0.0)
        # The others would wait for a rank that has ended.
        if 0 < len(self.alive) < self.n_ranks:
            self.kill()
        return bool(self.alive)

    def kill(self) -> None:
        """End the ranks at once; the fork servers stay, so that the next ranks start soon."""
        had_ranks = bool(self.alive)
        self.alive = set()
        self._pending = set()
        if self._message_cut_short:
            # The next message would be taken for the rest of the one that an interrupt cut short.
            self._end_machines()
        elif had_ranks:
            with contextlib.suppress(JobFailedError):
                for machine in self._machines:
                    self._send(machine, "kill", None)
                if not all(map(self._await_killed, self._machines)):
                    self._end_machines()

    def _await_killed(self, machine: Machine) -> bool:
        """Discard what a machine still sends, until it has killed its ranks."""
        while machine.connection.poll(_LAST_WAIT):
            if self._receive(machine)[0] == "killed":
                return True
        return False

    def close(self) -> None:
        """End all processes: ranks that wait for a call leave each other first."""
        with contextlib.suppress(JobFailedError):
            if self.ready():
                self._to_ranks(self.alive, LEAVE)
                end = time.monotonic() + _LAST_WAIT
                while self.alive and time.monotonic() < end:
                    self._take_all_messages(_POLL)
        self._end_machines()
        self.store = None

    def _start(self) -> None:
        if not self._machines:
            self._machines = self._open_machines(self.n_ranks)
            self._finalizer = weakref.finalize(self, _end, self._machines)
        own_address = self._machines[0].parent
        # The socket listens before the store takes it: no other process can take the port between.
        listening = socket.create_server((own_address, 0))
        port = listening.getsockname()[1]
        self.store = dist.TCPStore(
            own_address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # only machines of ranks reach it
        )
        variables = {
            "WORLD_SIZE": str(self.n_ranks),
            "MASTER_ADDR": own_address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # What has been printed here comes before what ranks print.
        print(end="", flush=True)
        self.process_ids = {}
        self._not_started = {*range(self.n_ranks)}
        self.alive = {*range(self.n_ranks)}
        for machine in self._machines:
            variables["LOCAL_WORLD_SIZE"] = str(len(machine.ranks))
            environments = {}
            for local_rank, rank in enumerate(machine.ranks):
                environments[rank] = variables | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                }
            self._send(machine, "start", environments)
        self.n_starts += 1

    # Messages.

    def _to_ranks(self, ranks: Collection[int], message: bytes) -> None:
        for machine in self._machines:
            machine_ranks = [rank for rank in ranks if rank in machine.ranks]
            if machine_ranks:
                self._send(machine, "send", machine_ranks, message)

    def _send(
        self, machine: Machine, command: str, subject: Any, message: bytes | None = None
    ) -> None:
        with self._whole_message():
            machine.connection.send((command, subject))
            if message is not None:
                machine.connection.send_bytes(message)

    def _receive(self, machine: Machine) -> tuple[str, int, int, bytes]:
        with self._whole_message():
            kind, rank, status = machine.connection.recv()
            message = machine.connection.recv_bytes() if kind == "said" else b""
        return kind, rank, status, message

    @contextlib.contextmanager
    def _whole_message(self) -> Iterator[None]:
        """Note that a message was cut short, if an interrupt leaves the context."""
        self._message_cut_short = True
        try:
            yield
        except (EOFError, OSError) as error:
            self._end_machines()
            raise JobFailedError(
                "the process that starts ranks has died: start again"
            ) from error
        self._message_cut_short = False

    def _take_all_messages(self, seconds: float) -> None:
        """Act on what ranks say, without their reports."""
        for _ in self._take_messages(seconds):
            pass

    def _take_messages(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Act on what ranks say; yield reports. Wait at most ``seconds`` for the first message."""
        while ready := wait(
            [machine.connection for machine in self._machines], seconds
        ):
            seconds = 0.0
            for machine in [
                machine for machine in self._machines if machine.connection in ready
            ]:
                kind, rank, status, message = self._receive(machine)
                if kind == "ended":
                    self._note_end(rank, status)
                elif kind == "said":
                    yield from self._take_message(rank, *pickle.loads(message))

    def _take_message(
        self, rank: int, kind: str, value: Any
    ) -> Iterator[tuple[int, Any]]:
        """Act on what a rank says; see :mod:`toolkit.runtime.process_group.rank_process`."""
        match kind:
            case "came":
                self._not_started.discard(rank)
                self.process_ids[rank] = value
            case "reported":
                yield rank, value
            case "announced":
                self._note_failure(None, JOB_FAILED, JobFailedError(value))
            case "returned":
                self._pending.discard(rank)
                self._results[rank] = value
            case "raised":
                self._note_failure(rank, *value)

    def _note_end(self, rank: int, status: int) -> None:
        """Note that a rank's process has ended; a failure, unless it had its result."""
        self.alive.discard(rank)
        if rank in self._pending:
            ending = f"ended with status {status} and no result"
            if status < 0:
                ending = f"was ended by signal {-status} ({signal.strsignal(-status)})"
            self._note_failure(rank, DIED, JobFailedError(f"rank {rank} {ending}"))

    def _note_failure(
        self,
        rank: int | None,
        reason: int,
        error: Exception,
        cause: Exception | None = None,
    ) -> None:
        """Note a reason why the call fails; ``rank`` has no result then.

        One rank's end makes others fail, which may be heard of first. So the best reason that
        comes within a while is raised.
        """
        self._pending -= {rank}
        if self._failure is None or reason < self._failure.reason:
            self._failure = _Failure(reason, error, cause)
        self._decided_at = min(self._decided_at, time.monotonic() + _PATIENCE[reason])

    def _end_machines(self) -> None:
        self.alive = set()
        self._pending = set()
        self._message_cut_short = False
        if self._machines:
            self._finalizer()
            self._machines = []


def _end(machines: Collection[Machine]) -> None:
    for machine in machines:
        machine.connection.close()
    for machine in machines:
        machine.end()
