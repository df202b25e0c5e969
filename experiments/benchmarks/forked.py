"""Command lines in forked processes, whose time, memory and reach are bounded."""

import importlib
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

TINY = (
    "model=resnet8 model.width=4 data=synthetic data.n_train=32 data.n_test=8 data.image_size=8"
    " batch=4 stages=2 microbatches=2 stability=false"
)
"""Options of a training that takes a second."""
MOST_SECONDS = 60.0
_MOST_LINES = 3  # of a message, without the rows of a schedule's grid
_MOST_CHARACTERS = 3000
_MOST_MEMORY = 64 * 2**30  # bytes of addresses
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn")
_PROGRAMS = ("git", "uname")  # of a result's provenance


def command(
    folder: Path, name: str, *options: str, seconds: float = MOST_SECONDS, watched: bool = False
) -> tuple[int | None, str]:
    """Run ``python experiments/<name>.py <options>`` in ``folder``; return status and output.

    Kill the process after ``seconds``, and return None as its status. It reuses imported modules.
    If ``watched``, starts of processes and files written outside the folder are printed.
    """

    def main() -> None:
        sys.argv = [f"experiments/{name}.py", *options]
        GlobalHydra.instance().clear()  # of the bench that has forked
        module = importlib.import_module(name)
        if watched:
            sys.addaudithook(_audit(folder))
        module.main()

    log = folder / "log.txt"
    sys.stdout.flush()
    sys.stderr.flush()
    if not (pid := os.fork()):
        _child(main, folder, log)
    end, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.005)
    with suppress(ProcessLookupError):  # also what the process has started
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status, log.read_text(errors="replace")


def _child(function: Callable[[], object], folder: Path, log: Path) -> None:
    """Call ``function`` and end this process."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        function()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _audit(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a hook that prints what a command must not do."""
    allowed = (f"{folder.resolve()}/", "/dev/", "/proc/", "/tmp/tmp")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS and os.path.basename(str(arguments[0])) not in _PROGRAMS:
            print("AUDIT", event, arguments[:2], flush=True)
        if event == "open" and isinstance(arguments[0], str | bytes | Path):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if writes and not path.startswith(allowed):
                print("AUDIT", event, path, flush=True)

    return hook


def judged(status: int | None, output: str) -> str:
    """Return the outcome; raise AssertionError on a failure."""
    if status is None:
        assert re.search(r"\d ?%\|", output), f"silent: {output[-300:]}"
        return "long"
    assert "Traceback" not in output, f"traceback: {output[-600:]}"
    if status == 0:
        return "ran"
    message = output[output.find("error: ") :]
    refused = "error: " in output and status in (1, 2)
    assert refused, f"status {status}: {output[-300:]}"
    lines = [line for line in message.strip().splitlines() if not line.startswith(("rank ", " "))]
    assert len(lines) <= _MOST_LINES, f"{len(lines)} lines: {message[:600]}"
    assert len(message) <= _MOST_CHARACTERS, f"{len(message)} characters: {message[:300]}"
    return "refused"
