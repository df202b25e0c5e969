"""The process that forks the ranks of a machine, passes their messages on, and ends them.

It imports torch once. So a rank starts within milliseconds, and ranks share the memory of what is
imported. It starts no thread and computes nothing: a forked process has only the thread that
forked it, and would wait for ever for a lock that another thread held. Ranks end with it, and it
ends with its parent.

From the parent come ``(command, subject)``: ``start`` with each rank's environment variables,
``send`` with ranks and then bytes for them, ``kill``. To it go ``(kind, rank, status)``: ``said``,
followed by the bytes that a rank sent; ``ended``; ``killed``.
"""

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

# Not -m, which would import a second copy of a module.
BOOT = """\
import sys
connection, *sys.path[:] = sys.argv[1:]
del sys.argv[1:]
for stream in sys.stdout, sys.stderr:  # whole lines, since other ranks write there too
    stream.reconfigure(line_buffering=True, write_through=False)
from toolkit.runtime.process_group.fork_server import main
main(int(connection))
"""

_SET_DEATH_SIGNAL = 1  # of prctl(2)

Ranks = dict[Connection, tuple[int, int]]
"""By the connection to a rank, its number and its process."""


def main(parent: int) -> None:
    """Serve the parent; in a forked process, run a rank.

    Args:
        parent: file descriptor of the connection to the parent.
    """
    # Here, so that it is not imported in each rank: also what torch imports at a first update.
    import torch._dynamo  # noqa: F401

    from toolkit.runtime.process_group import rank_process

    connection = Connection(parent)
    ranks = Ranks()
    try:
        while True:
            for ready in wait([connection, *ranks]):
                if ready is not connection:
                    _pass_on(ready, ranks, connection)
                    continue
                rank_connection = _obey(connection, ranks)
                if rank_connection is not None:  # this is a forked process
                    return rank_process.main(rank_connection)
    except (EOFError, OSError):  # the parent is gone
        _kill(ranks)


def _obey(parent: Connection, ranks: Ranks) -> Connection | None:
    """Do what the parent says; in a process that is forked for it, return its connection."""
    command, subject = parent.recv()
    if command == "start":
        for rank, variables in subject.items():
            server_end, rank_end = Pipe()
            process = os.fork()
            if process == 0:
                # A connection ends once no process has it, so a rank must not keep those of others.
                for connection in (parent, server_end, *ranks):
                    connection.close()
                _begin_rank(variables)
                return rank_end
            rank_end.close()
            ranks[server_end] = rank, process
    elif command == "send":
        message = parent.recv_bytes()
        for connection, (rank, _) in ranks.items():
            if rank in subject:
                with contextlib.suppress(OSError):  # its end is reported on its own
                    connection.send_bytes(message)
    else:
        _kill(ranks)
        parent.send(("killed", None, None))
    return None


def _begin_rank(variables: dict[str, str]) -> None:
    server = os.getppid()
    os.setsid()  # Ctrl-C in a terminal is for the parent
    if sys.platform == "linux":
        # A stopped rank has no running thread that could notice the server's end.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != server:  # it ended before the call above
            os._exit(1)
    os.environ.update(variables)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or every rank would draw the same numbers


def _pass_on(connection: Any, ranks: Ranks, parent: Connection) -> None:
    """Pass a message of a rank on, or its end."""
    if connection not in ranks:
        return  # killed since it was ready
    rank, process = ranks[connection]
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        _kill_group(process)  # also what it has started
        _, status = os.waitpid(process, 0)
        del ranks[connection]
        connection.close()
        parent.send(("ended", rank, os.waitstatus_to_exitcode(status)))
    else:
        parent.send(("said", rank, None))
        parent.send_bytes(message)


def _kill(ranks: Ranks) -> None:
    for _, process in ranks.values():
        _kill_group(process)
    for connection, (_, process) in ranks.items():
        os.waitpid(process, 0)
        connection.close()
    ranks.clear()


def _kill_group(process: int) -> None:
    for kill in (os.killpg, os.kill):  # the second, if it has no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
