"""The machines of ranks: a fork server on each, and the connection to it."""

import contextlib
import multiprocessing
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from toolkit.errors import UserError
from toolkit.runtime.process_group.fork_server import BOOT

_LAST_WAIT = 10.0  # most seconds to wait for the end of a fork server
_ARRIVAL = 60.0  # most seconds to wait for its start on another machine
_POLL = 0.05  # most seconds between looks at the time


@dataclass(frozen=True)
class Machine:
    """A fork server.

    Attributes:
        connection: to the fork server.
        ranks: those that it starts.
        parent: address by which they reach this process.
        end: ends it, and all its ranks with it, once the connection is closed.
    """

    connection: Any
    ranks: range
    parent: str
    end: Callable[[], object]


def this_machine(n_ranks: int) -> list[Machine]:
    """Start a fork server for all ranks here."""
    connection, server_end = multiprocessing.Pipe()
    with server_end:
        process = _serve(server_end, n_ranks, {"GLOO_SOCKET_IFNAME": "lo"}, sys.path)

    def end() -> None:
        try:
            process.wait(_LAST_WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return [Machine(connection, range(n_ranks), "127.0.0.1", end)]


def ray_machines(hosts: Sequence[str], n_ranks: int) -> list[Machine]:
    """Start a fork server on each of ``hosts`` by Ray, for equally many consecutive ranks.

    Ray only starts them. Calls and reports travel by a connection of this process to each, which
    both sides authenticate, and tensors between ranks as on one machine.

    Args:
        hosts: addresses of nodes of the running Ray cluster to which this process belongs. The
            toolkit is installed alike on all.
        n_ranks: number of ranks on all hosts together.

    Raises:
        UserError: no cluster runs here, a host is not in it or does not
            answer, or ranks cannot be divided.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if n_ranks % len(hosts):
        raise UserError(
            f"{n_ranks} ranks cannot be divided by {len(hosts)} hosts: use a multiple"
        )
    try:
        ray.init(
            "auto", ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR"
        )
    except ConnectionError as error:
        raise UserError(
            "hosts= needs a Ray cluster: run `ray start` on each machine"
        ) from error
    nodes = {
        node["NodeManagerAddress"]: node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
    }
    for host in hosts:
        if host not in nodes:
            raise UserError(
                f"hosts: {host} is not in the Ray cluster; it has {sorted(nodes)}"
            )
    own_address = ray.util.get_node_ip_address()
    # Which Ray hands to the hosts: nobody else can connect.
    key = secrets.token_bytes(32)
    ranks_per_host = n_ranks // len(hosts)
    machines = []
    with socket.create_server((own_address, 0)) as listening:
        address = listening.getsockname()
        for index, host in enumerate(hosts):
            on_host = NodeAffinitySchedulingStrategy(nodes[host], soft=False)
            task = ray.remote(_serve_there).options(
                num_cpus=0, max_retries=0, scheduling_strategy=on_host
            )
            task.remote(address, key, ranks_per_host, sys.path)
            try:
                connection = accept_host(listening, key, _ARRIVAL)
            except TimeoutError as error:
                raise UserError(
                    f"hosts: {host} did not answer within {_ARRIVAL:g} s"
                ) from error
            ranks = range(index * ranks_per_host, (index + 1) * ranks_per_host)
            machines.append(Machine(connection, ranks, own_address, lambda: None))
    return machines


def accept_host(listening: socket.socket, key: bytes, seconds: float) -> Connection:
    """Return a connection to the first caller that proves that it knows ``key``.

    Others are dropped. multiprocessing's Listener has no time-out, and a stranger that says nothing
    would block it. So each caller is authenticated in a thread of its own.

    Args:
        listening: socket to which the host connects.
        key: secret of both sides.
        seconds: how long to wait.

    Raises:
        TimeoutError: no caller knows the key.
    """
    authenticated: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    callers: list[socket.socket] = []
    end = time.monotonic() + seconds
    listening.settimeout(_POLL)
    try:
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                host = authenticated.get_nowait()
                callers.remove(host)
                return Connection(host.detach())
            # Nobody within _POLL, or one who has left again.
            with contextlib.suppress(OSError):
                caller, _ = listening.accept()
                callers.append(caller)
                arguments = (caller, key, authenticated)
                threading.Thread(
                    target=_authenticate, args=arguments, daemon=True
                ).start()
        raise TimeoutError
    finally:
        for stranger in callers:
            with contextlib.suppress(OSError):  # it has left
                stranger.shutdown(socket.SHUT_RDWR)  # which ends the wait of its thread
            stranger.close()


def _authenticate(
    caller: socket.socket, key: bytes, authenticated: queue.SimpleQueue[socket.socket]
) -> None:
    """Put ``caller`` among the ``authenticated`` if it knows ``key``; hang up if it does not."""
    try:
        with Connection(caller.dup().detach()) as connection:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        authenticated.put(caller)
    except (AuthenticationError, EOFError, OSError, ValueError):
        with contextlib.suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)


def _serve_there(
    address: tuple[str, int], key: bytes, n_ranks: int, path: list[str]
) -> None:
    with Client(address, authkey=key) as connection:
        process = _serve(connection, n_ranks, {}, path)
    process.wait()


def _serve(
    connection: Any, n_ranks: int, variables: dict[str, str], path: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a fork server at the other end of ``connection``; the user's variables win."""
    has_affinity = hasattr(os, "sched_getaffinity")
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # Ranks of a machine share its cores; each would otherwise start a thread a core.
    environment = {"OMP_NUM_THREADS": str(max(1, n_cores // n_ranks))}
    if sys.platform == "linux":
        environment |= variables
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(connection.fileno()), *path],
        stdin=subprocess.DEVNULL,
        env=environment | os.environ,
        pass_fds=[connection.fileno()],
        start_new_session=True,  # Ctrl-C in a terminal is for the parent
    )
