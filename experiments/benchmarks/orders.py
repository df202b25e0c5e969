"""The ranks of a job from outside, each in a namespace of its own: orders, answers and the end."""

import json
import os
import re
import selectors
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.methods import Task
from benchmarks.network import INTERFACE, Network
from toolkit.runtime import JobFailedError

_PORT = 29500  # of namespaces of their own
_PARTING = 10.0  # seconds in which ranks without an order end
_LAST_WORDS = 2.0  # seconds in which a rank says why it ends


class Ranks:
    """One process a rank, which does as it is told by :meth:`order`.

    Used as a context, at whose end none of them is left.

    Args:
        network: has as many ranks as ``task`` has workers.
        task: what they train.
        timeout: seconds in which an order has to be carried out.
        log: what they print is added to this file.
    """

    def __init__(self, network: Network, task: Task, timeout: float, log: Path) -> None:
        self._timeout, self._log = timeout, log
        self._processes: list[subprocess.Popen[bytes]] = []
        experiments = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (experiments, os.environ.get("PYTHONPATH"))))
        common = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(_PORT),
            "WORLD_SIZE": str(task.workers),
            "LOCAL_WORLD_SIZE": str(task.workers),
        }
        # Ranks know more of what keeps them waiting: they are to speak first.
        what = json.dumps(asdict(task) | {"timeout": timeout / 2})
        command = [sys.executable, "-m", "benchmarks.links_rank", what]
        try:
            with log.open("ab") as file:
                for rank in range(task.workers):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    process = subprocess.Popen(
                        [*network.inside(rank), *command],
                        env=dict(os.environ) | common | place,
                        bufsize=0,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        start_new_session=True,  # Ctrl-C is the benchmark's
                    )
                    self._processes.append(process)
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._part()
        finally:
            self._kill()

    def order(self, do: str, **how: Any) -> list[Any]:
        """Have every rank ``do`` something; return their answers.

        Raises:
            JobFailedError: a rank has ended, or does not answer in time.
        """
        what = " ".join(map(str, [do, *how.values()]))
        line = json.dumps({"do": do} | how).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            try:
                _pipe(process.stdin).write(line)
            except BrokenPipeError:
                raise self._failure(what, rank) from None
        return [json.loads(answer) for answer in self._answers(what)]

    def _answers(self, what: str) -> list[bytes]:
        end = time.monotonic() + self._timeout
        answers = [b""] * len(self._processes)
        with selectors.DefaultSelector() as missing:
            for rank, process in enumerate(self._processes):
                missing.register(_pipe(process.stdout), selectors.EVENT_READ, rank)
            while missing.get_map():
                ready = missing.select(max(0.0, end - time.monotonic()))
                if not ready:
                    silent = sorted(key.data for key in missing.get_map().values())
                    raise JobFailedError(
                        f"{what}: rank {', '.join(map(str, silent))} has not answered within"
                        f" {self._timeout:g} s (bench.timeout); the ranks' words are in {self._log}"
                    )
                for key, _ in ready:
                    found = os.read(key.fd, 1 << 16)
                    if not found:
                        raise self._failure(what, key.data)
                    answers[key.data] += found
                    if found.endswith(b"\n"):
                        missing.unregister(key.fileobj)
        return answers

    def _failure(self, what: str, rank: int) -> JobFailedError:
        """What is known of a rank that has ended."""
        end = time.monotonic() + _LAST_WORDS
        while time.monotonic() < end and any(each.poll() is None for each in self._processes):
            time.sleep(0.05)
        status = self._processes[rank].poll()
        ended = "has ended" if status is None else f"has ended with status {status}"
        said = reason(self._log.read_text(errors="replace"))
        return JobFailedError(
            f"{what}: rank {rank} {ended}: {said}; the ranks' words are in {self._log}"
        )

    def _part(self) -> None:
        """Let them end by themselves."""
        for process in self._processes:
            _pipe(process.stdin).close()
        end = time.monotonic() + _PARTING
        while time.monotonic() < end and any(each.poll() is None for each in self._processes):
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def reason(text: str) -> str:
    """Of what ranks have printed, the line that says why."""
    errors = re.findall(r"^error: (.+)", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(iter(errors), lines[-1] if lines else "without a word")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    return cast(IO[bytes], pipe)
