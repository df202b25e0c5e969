"""Python programs that start within milliseconds, since torch is imported once for all of them.

``Popen`` takes a command of this interpreter as subprocess's does, with the arguments that the
tests use. A process that has imported what most programs import, and has only one thread, forks
itself and runs the program. Its atexit functions run as usual.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.ports import free_port

OPTIONS = {"cwd", "env", "stdin", "stdout", "stderr", "pass_fds", "start_new_session"}
ROOT = Path(__file__).parents[1]
SERVE = "import sys; from tests.warm_python import serve; serve(int(sys.argv[1]))"
PRELOADED = (
    "torch._dynamo",
    "toolkit.runtime.process_group.rank_process",
    "toolkit.runtime",
)


@dataclass(frozen=True)
class Program:
    """What a forked process becomes.

    Attributes:
        arguments: those of the interpreter: ``-c CODE``, ``-m MODULE`` or a script, and its own.
        environment: all variables.
        folder: working directory.
        descriptors: numbers that its files get, in the order in which they are sent.
        new_session: whether it leads a session of its own.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    new_session: bool


def send_files(connection: Connection, files: Sequence[int]) -> None:
    with socket.fromfd(
        connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM
    ) as stream:
        sendfds(stream, files)


def receive_files(connection: Connection, n_files: int) -> list[int]:
    with socket.fromfd(
        connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM
    ) as stream:
        return recvfds(stream, n_files)


# In the process that forks.


def serve(descriptor: int) -> None:
    """Fork programs until the tests end."""
    tests = Connection(descriptor)
    # Process and who waits, by its pidfd.
    running: dict[int, tuple[int, Connection]] = {}
    for module in PRELOADED:
        importlib.import_module(module)
    plan_few_steps()
    analyse_a_model()
    gc.freeze()
    while True:
        for ready in wait([tests, *running]):
            if ready is not tests:
                process, waiting = running.pop(ready)
                _, status = os.waitpid(process, 0)
                os.close(ready)
                with contextlib.suppress(OSError), waiting:
                    waiting.send(os.waitstatus_to_exitcode(status))
                continue
            try:
                request = tests.recv()
            except EOFError:  # the tests have ended
                for process, _ in running.values():
                    os.kill(process, signal.SIGKILL)
                return
            if isinstance(request, str):
                importlib.import_module(request)
                continue
            waiting, *files = receive_files(tests, len(request.descriptors) + 1)
            process = os.fork()
            if process == 0:
                tests.close()
                os.close(waiting)
                for other, (_, connection) in running.items():
                    os.close(other)
                    connection.close()
                run_to_end(request, files)
            for file in files:
                os.close(file)
            connection = Connection(waiting)
            connection.send(process)
            running[os.pidfd_open(process)] = process, connection


def plan_few_steps() -> None:
    """Let loops lower and verify 400 ops at first: tests train few steps, on several ranks."""
    from toolkit.runtime import loop_runtime

    loop_runtime.FIRST_WINDOW = 400


def analyse_a_model() -> None:
    """Import, and fill the tables of, what the first analysis of a model uses."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from toolkit.model.trace import trace

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 8)
            self.norm = nn.LayerNorm(8)
            self.last = nn.Linear(8, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embedding(tokens))
            # Only torch.export traces this: symbolic tensors cannot be iterated over.
            query, key = (part.unsqueeze(1) for part in x.chunk(2, dim=-1))
            x = F.scaled_dot_product_attention(
                query, key, x.unsqueeze(1), is_causal=True
            )
            return self.last(F.gelu(x.squeeze(1)))

    # Not partitioned, since the backward of that starts a thread, which a fork would lose.
    trace(Block(), torch.zeros(2, 3, dtype=torch.long))


def run_to_end(program: Program, files: list[int]) -> NoReturn:
    """Run a program; end without freeing what was imported, which would take longer."""
    status: Any = 0
    try:
        become(program, files)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(program: Program, files: list[int]) -> None:
    """Run a program in this process."""
    if program.new_session:
        os.setsid()
    above = max(program.descriptors) + 1  # so that none takes the place of another
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, descriptor in zip(moved, program.descriptors, strict=True):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    kind, *rest = program.arguments
    if kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(rest[0], main.__dict__)
    elif kind == "-m":
        sys.path[0] = program.folder
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = program.arguments
        runpy.run_path(kind, run_name="__main__")


# In the tests.


_server: Connection | None = None


def server() -> Connection:
    """The connection to the process that forks, which starts with its first use."""
    global _server
    if _server is None:
        _server, other_end = Pipe()
        with other_end:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(other_end.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        atexit.register(process.wait)
        atexit.register(_server.close)
    return _server


def preload(module: str) -> None:
    """Import a module once for all programs that start from now on."""
    server().send(module)


class WarmPopen:
    """A program that runs, as subprocess.Popen; ``pid`` and ``returncode`` are its own."""

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        executable, *arguments = map(str, command)
        assert executable == sys.executable
        assert options.keys() <= OPTIONS
        pass_fds = options.get("pass_fds", ())
        program = Program(
            arguments,
            environment=dict(options.get("env") or os.environ),
            folder=str(options.get("cwd") or os.getcwd()),
            descriptors=[0, 1, 2, *pass_fds],
            new_session=options.get("start_new_session", False),
        )
        stdout, stderr = options.get("stdout"), options.get("stderr")
        self._status, other_end = Pipe()
        with other_end, open(os.devnull) as nothing:
            files = [nothing.fileno()]
            files.append(stdout.fileno() if stdout else 1)
            files.append(stderr.fileno() if stderr else 2)
            connection = server()
            connection.send(program)
            send_files(connection, [other_end.fileno(), *files, *pass_fds])
        self.pid: int = self._status.recv()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._status.poll(timeout):
                raise subprocess.TimeoutExpired("a program", timeout or 0.0)
            self.returncode = self._status.recv()
            self._status.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None and not self._status.poll(0):
            os.kill(self.pid, signal.SIGKILL)


def start_ranks_warm() -> None:
    """Fork the process that forks ranks, too."""
    from toolkit.runtime.process_group import machines

    warm = ModuleType("subprocess")
    vars(warm).update(vars(subprocess), Popen=Popen)
    machines.subprocess = warm  # type: ignore[attr-defined]


Popen: Any = WarmPopen if sys.platform == "linux" else subprocess.Popen


def run_ranks(
    n_ranks: int,
    command: Sequence[object],
    *,
    cwd: Path,
    env: dict[str, str],
    timeout: float = 300,
) -> str:
    """Run a script on ranks, as torchrun does; return what they print."""
    place = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "OMP_NUM_THREADS": 1}
    place |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = []
        for rank in range(n_ranks):
            variables = place | {"RANK": rank, "LOCAL_RANK": rank}
            environment = env | {name: str(value) for name, value in variables.items()}
            given = {"cwd": cwd, "env": environment, "stdout": output, "stderr": errors}
            started.append(Popen([sys.executable, *command], **given))
        try:
            statuses = [process.wait(timeout) for process in started]
        finally:
            for process in started:
                process.kill()
        output.seek(0)
        errors.seek(0)
        assert not any(statuses), errors.read()
        return output.read()
