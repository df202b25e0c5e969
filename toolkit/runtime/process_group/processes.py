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
from typing import Any

import torch.distributed as dist

from toolkit.errors import UserError, whole
from toolkit.model.pickling import dumps
from toolkit.runtime.process_group.machines import Machine, ray_machines, this_machine
from toolkit.runtime.process_group.rank_process import DIED, JOB_FAILED, LEAVE, LOST, RAISED
from toolkit.runtime.process_group.watch import JobFailedError

OnReport = Callable[[int, Any], object]

_LOOK = 0.05  # most seconds between looks at the time
_FAREWELL = 10.0  # most seconds to wait for the ends of ranks
_PATIENCE = {RAISED: 0.0, JOB_FAILED: 0.5, DIED: 3.0, LOST: 0.5}  # s to wait for a better reason


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

    def __init__(self, n_ranks: int, timeout: float = 120.0, hosts: Sequence[str] = ()) -> None:
        self.n_ranks = whole(n_ranks, "n_ranks, the number of processes,", 1)
        if not timeout > 0:
            raise UserError(f"timeout is a number of seconds above 0: got {timeout}")
        self.timeout = timeout
        self.n_starts = 0
        self.store: dist.TCPStore | None = None  # in which the ranks meet
        self._open_machines = partial(ray_machines, hosts) if hosts else this_machine
        self._machines: list[Machine] = []
        self.on_other_machines = bool(hosts)
        self._cut_short = False  # whether a message to or from a machine is
        self.alive: set[int] = set()
        self.process_ids: dict[int, int] = {}
        self._open: set[int] = set()  # neither with a result of the call nor failed

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
        """Begin a call on every rank; the caller then exhausts :meth:`reports`."""
        message = dumps((function, args, kwargs))
        if not self.ready():
            self._start()
        self._results: dict[int, Any] = {}
        self._open = {*range(self.n_ranks)}
        self._failure: tuple[int, Exception, Exception | None] | None = None
        self._decided_at = math.inf  # when to stop waiting for a better reason of the failure
        self._to_ranks(self._open, message)

    def send(self, value: Any, ranks: Collection[int]) -> None:
        """Send ``value`` to the ``receive()`` of ``ranks``, within a call."""
        self._to_ranks(ranks, dumps(value))

    def reports(self) -> Generator[tuple[int, Any], None, None]:
        """Yield what ranks report, with its rank, until all have returned; raise as ``call``."""
        try:
            end = time.monotonic() + self.timeout
            while self._open and time.monotonic() < self._decided_at:
                yield from self._take(_LOOK)
                if self._missing and self._failure is None and time.monotonic() > end:
                    missing_ranks = ", ".join(map(str, sorted(self._missing)))
                    raise JobFailedError(
                        f"rank {missing_ranks} has not started within {self.timeout:g} s: start"
                        " fewer ranks, or raise timeout"
                    )
            if self._failure is not None:
                _, error, cause = self._failure
                raise error from cause
        except BaseException:  # also if the caller leaves, since ranks still run the call
            self.kill()
            raise

    def results(self) -> list[Any]:
        """Return what each rank returned, ``[rank]``, once :meth:`reports` is exhausted."""
        return [self._results[rank] for rank in range(self.n_ranks)]

    def ready(self) -> bool:
        """Return whether all ranks wait for a call. If only some do, end them."""
        if self._open:  # by a call that nobody waited for
            self.kill()
        for _ in self._take(0.0):
            pass
        if 0 < len(self.alive) < self.n_ranks:
            self.kill()
        return bool(self.alive)

    def kill(self) -> None:
        """End the ranks at once."""
        alive, self.alive, self._open = self.alive, set(), set()
        if self._cut_short:
            self._end_machines()
        elif alive:
            with contextlib.suppress(JobFailedError):
                for machine in self._machines:
                    self._send(machine, "kill", None)
                if not all(map(self._killed, self._machines)):
                    self._end_machines()

    def _killed(self, machine: Machine) -> bool:
        while machine.connection.poll(_FAREWELL):
            if self._receive(machine)[0] == "killed":
                return True
        return False

    def close(self) -> None:
        """End all processes: ranks that wait for a call leave each other first."""
        with contextlib.suppress(JobFailedError):
            if self.ready():
                self._to_ranks(self.alive, LEAVE)
                end = time.monotonic() + _FAREWELL
                while self.alive and time.monotonic() < end:
                    for _ in self._take(_LOOK):
                        pass
        self._end_machines()
        self.store = None

    def _start(self) -> None:
        if not self._machines:
            self._machines = self._open_machines(self.n_ranks)
            self._finalizer = weakref.finalize(self, _end, self._machines)
        own_address = self._machines[0].parent
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
        print(end="", flush=True)  # what has been printed here comes before what ranks print
        ranks = range(self.n_ranks)
        self.process_ids = {}
        self._missing, self.alive = {*ranks}, {*ranks}
        for machine in self._machines:
            variables["LOCAL_WORLD_SIZE"] = str(len(machine.ranks))
            numbered_ranks = enumerate(machine.ranks)
            environments = {
                rank: variables | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                for local_rank, rank in numbered_ranks
            }
            self._send(machine, "start", environments)
        self.n_starts += 1

    def _to_ranks(self, ranks: Collection[int], message: bytes) -> None:
        for machine in self._machines:
            if machine_ranks := [rank for rank in ranks if rank in machine.ranks]:
                self._send(machine, "send", machine_ranks, message)

    def _send(self, machine: Machine, what: str, about: Any, message: bytes | None = None) -> None:
        with self._whole():
            machine.connection.send((what, about))
            if message is not None:
                machine.connection.send_bytes(message)

    def _receive(self, machine: Machine) -> tuple[str, int, int, bytes]:
        with self._whole():
            kind, rank, status = machine.connection.recv()
            message = machine.connection.recv_bytes() if kind == "said" else b""
        return kind, rank, status, message

    def _messages(self, seconds: float) -> Iterator[tuple[str, int, int, bytes]]:
        """Yield what the machines send; wait at most ``seconds`` for the first message."""
        while ready := wait([machine.connection for machine in self._machines], seconds):
            seconds = 0.0
            for machine in [m for m in self._machines if m.connection in ready]:
                yield self._receive(machine)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Know of a message that an interrupt within cuts short."""
        self._cut_short = True
        try:
            yield
        except (EOFError, OSError) as error:
            self._end_machines()
            raise JobFailedError("the process that starts ranks has died: start again") from error
        self._cut_short = False

    def _take(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Act on what ranks say; yield reports."""
        for kind, rank, status, message in self._messages(seconds):
            if kind == "ended":
                self.alive.discard(rank)
                if rank in self._open:
                    ending = f"ended with status {status} and no result"
                    if status < 0:
                        ending = f"was ended by signal {-status} ({signal.strsignal(-status)})"
                    self._fail(rank, DIED, JobFailedError(f"rank {rank} {ending}"))
                continue
            kind, value = pickle.loads(message)
            match kind:
                case "came":
                    self._missing.discard(rank)
                    self.process_ids[rank] = value
                case "reported":
                    yield rank, value
                case "announced":
                    self._fail(None, JOB_FAILED, JobFailedError(value))
                case "returned":
                    self._open.discard(rank)
                    self._results[rank] = value
                case "raised":
                    self._fail(rank, *value)

    def _fail(
        self, rank: int | None, reason: int, error: Exception, cause: Exception | None = None
    ) -> None:
        """Note a reason why the call fails; ``rank`` has no result then."""
        self._open -= {rank}
        if self._failure is None or reason < self._failure[0]:
            self._failure = reason, error, cause
        self._decided_at = min(self._decided_at, time.monotonic() + _PATIENCE[reason])

    def _end_machines(self) -> None:
        self.alive, self._open, self._cut_short = set(), set(), False
        if self._machines:
            self._finalizer()
            self._machines = []


def _end(machines: Collection[Machine]) -> None:
    for machine in machines:
        machine.connection.close()
    for machine in machines:
        machine.end()
