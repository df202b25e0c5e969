import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests import warm_python
from tests.ports import free_port
from tests.thorough import more, thorough
from toolkit.runtime.process_group.shared_status import (
    Process,
    RankStatus,
    Record,
    SharedStatus,
)
from toolkit.runtime.process_group.watch import (
    _GRACE,
    EXIT_FAILED,
    SCRIPT_END,
    JobFailedError,
    Watch,
)
from toolkit.schedule import Action, Buffer, Instruction

RING = Path(__file__).with_name("ring.py")
TIMEOUT = 3.0
RECEIVE = Instruction(12, Action.RECV, 1, 0, 7, None, Buffer.ACTIVATION, (0,))


class Job:
    """A ring of ranks, started by ``torchrun`` or a process each."""

    def __init__(
        self,
        tmp_path: Path,
        fault: str,
        *,
        faulty: int = 1,
        size: int = 3,
        machines: bool = False,
    ) -> None:
        self.path = tmp_path / "output"
        self.folder = tmp_path / "ready"
        self.folder.mkdir()
        self.arguments = [str(RING), fault, str(TIMEOUT), str(faulty), str(self.folder)]
        self.size, self.machines = size, machines
        self.started: list[Any] = []

    def torchrun(self) -> "Job":
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.size)]
        self._start(subprocess.Popen, [*run, "--master-port", str(free_port())])
        return self

    def ranks(self, *ranks: int, port: int | None = None) -> "Job":
        """Some ranks, that meet at a store of this process unless another ``port`` is given."""
        agent = {}
        if port is None:
            self.store = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False
            )
            port, agent = self.store.port, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for absent in {*range(self.size)} - {*ranks}:
            (self.folder / str(absent)).touch()
        for rank in ranks:
            place = {"RANK": rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
            self._start(
                warm_python.Popen, [], MASTER_ADDR="localhost", **agent, **place
            )
        return self

    def _start(
        self, start: Callable, options: list[str], **environment: object
    ) -> None:
        environment |= {"OMP_NUM_THREADS": 1} | (
            {"MACHINES": 1} if self.machines else {}
        )
        env = os.environ | {name: str(value) for name, value in environment.items()}
        with self.path.open("a") as output:
            command = [sys.executable, *options, *self.arguments]
            self.started.append(start(command, env=env, stdout=output, stderr=output))

    def end(self) -> str:
        """The one message, once all processes have ended, which has to be in time."""
        deadline = time.monotonic() + 120
        try:
            for process in self.started:
                process.wait(deadline - time.monotonic())
        finally:
            ended = time.time()
            for process in self.started:
                process.kill()
        output = self.path.read_text()
        for pid in re.findall(r"^pid (\d+)", output, re.MULTILINE):
            assert not Path(f"/proc/{pid}").exists(), output
        for fault in re.findall(r"^fault (\S+)", output, re.MULTILINE):
            # Some 1 s here, 5 s on a busy machine; 30 s where torchrun has to kill.
            assert ended < float(fault) + TIMEOUT + 20, output
        messages = re.findall(r"^error: (.*)", output, re.MULTILINE)
        assert len(messages) == 1, output
        return messages[0]

    @property
    def statuses(self) -> list[int]:
        return [process.returncode for process in self.started]


PLACE = r"in step 300 at BACKWARD stage 1 microbatch 0 step 300"
LEFT = EXIT_FAILED


@pytest.mark.parametrize(
    ("fault", "named"),
    more(
        [("kill", "has died")], [("kill", "has died"), ("stop", "has stalled: for 3 s")]
    ),
)
def test_a_fault_ends_the_job_of_torchrun(tmp_path, fault, named):
    job = Job(tmp_path, fault).torchrun()
    message = job.end()
    places = rf"{PLACE}; rank \d .* in step 30\d at "
    assert re.match(f"rank 1 {named} .*{places}", message), message
    reported = dict(
        re.findall(r"^reason (\d) (.*)", job.path.read_text(), re.MULTILINE)
    )
    assert reported == {"0": message, "2": message}


@thorough
def test_a_launcher_that_is_killed_is_named(tmp_path):
    job = Job(tmp_path, "launcher").torchrun()
    deadline = time.monotonic() + 60
    while "error: " not in job.path.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    message = rf"^error: torchrun \(process {job.started[0].pid}\), .* is gone"
    assert re.search(message, job.path.read_text(), re.MULTILINE)
    assert job.started[0].wait() == -signal.SIGKILL


@thorough
@pytest.mark.parametrize(
    ("fault", "options", "message", "statuses"),
    [
        (
            "loop",  # on a machine of its own, whose record comes through the store
            {"machines": True},
            rf"rank 1 \(on \S+\) has stalled: .*last seen {PLACE}",
            [LEFT] * 3,
        ),
        (
            "disconnect",
            {},
            r"the connection between rank \d and rank \d is lost"
            r".*(in step 30\d at (SEND|RECV|BACKWARD) stage \d.*){2}",
            [LEFT] * 3,
        ),
        (
            "kill",  # the rank that holds the store
            {"faulty": 0},
            "rank 0 has died .*in step 300 at BACKWARD stage 0",
            [-9, LEFT, LEFT],
        ),
    ],
)
def test_a_fault_ends_the_job_without_torchrun(
    tmp_path, fault, options, message, statuses
):
    port = free_port() if "faulty" in options else None
    job = Job(tmp_path, fault, **options).ranks(0, 1, 2, port=port)
    assert re.match(message, job.end())
    assert job.statuses == statuses


@thorough
def test_a_meeting_that_fails_names_the_absent_rank_and_the_port(tmp_path):
    job = Job(tmp_path, "none").ranks(0, 2)
    assert re.match(r"rank 1 .* localhost:[0-9]+ within 3 s", job.end())
    assert job.statuses == [LEFT] * 2


@pytest.mark.parametrize("what", [RECEIVE, "a sum over all ranks"])
@pytest.mark.parametrize("step", [None, 0, 7])
def test_a_record_is_read_as_it_was_written(what, step):
    shared = SharedStatus()
    shared.write(Record("a text that is longer than all others: " + 3000 * "x", 3))
    written = Record(what, step, (1, 2), 0.5, 2.5, RankStatus.ENDED, "an error", "b")
    shared.write(written)
    assert shared.read() == written._replace(activity=str(what))


def forked(run: Callable[[], object]) -> int:
    """The number of a process forked from this one, that calls ``run``."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # which Python 3.12 warns of where there are threads
    if child == 0:
        run()
        os._exit(0)
    return child


def test_a_record_outlives_its_process():
    ours, theirs = os.pipe()

    def child() -> None:
        shared = SharedStatus()
        shared.write(Record("BACKWARD", 3))
        os.write(theirs, str(shared.fd).encode())
        signal.pause()

    process = Process(forked(child))
    shared = SharedStatus.of(process.pid, int(os.read(ours, 20)))
    assert not process.gone
    process.kill()
    os.waitpid(process.pid, 0)
    assert process.gone
    assert shared is not None
    assert shared.read() == Record("BACKWARD", 3)


def test_a_number_that_another_process_has_now_is_not_the_process():
    assert not Process(os.getpid()).gone
    assert Process(os.getpid(), "1").gone


def watch(size: int = 1) -> Watch:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return Watch(store, 0, size, TIMEOUT)


def test_a_wait_keeps_the_step_and_ends():
    here = watch()
    here.at(RECEIVE, 7, (0,))
    with here.waiting("a sum", [0, 1]):
        assert here.record[:3] == ("a sum", 7, (0, 1))
    assert here.record.peers == ()
    # Without a thread that watches, an error of the backend is raised.
    raised = pytest.raises(JobFailedError, match="a sum: reset")
    with raised, here.waiting("a sum", [1]):
        raise RuntimeError("[/gloo/pair.cc:5] reset")


def test_a_rank_that_leaves_is_at_the_end_of_its_script():
    here = watch()
    places = []

    def complete_messages():
        places.append(here.record.activity)
        here.at(RECEIVE, 8)

    here.at(RECEIVE, 7, (0,))
    here.exit_hooks.append(complete_messages)
    here.start()
    here.stop()
    assert places == [SCRIPT_END]
    assert here.record[:3] == (SCRIPT_END, 8, ())
    assert here.record.status == RankStatus.ENDED


def test_other_errors_are_the_users():
    here = watch()
    with pytest.raises(RuntimeError, match=r"^shapes$"), here.waiting("FORWARD", []):
        raise RuntimeError("shapes")
    with (
        pytest.raises(torch.OutOfMemoryError),
        here.waiting("the gradients of all ranks", [1]),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_rank_that_fails_late_leaves_the_report_to_the_one_that_has_left():
    """Two ranks find one mistake: the lock of the first ends with its process."""
    program = """
import sys
from toolkit.runtime.process_group.watch import Watch
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[2]), is_master=False)
here = Watch(store, int(sys.argv[1]), 2, 60.0)
here.start()
print("started", flush=True)
sys.stdin.readline()
here.fail("the mistake")
"""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", program]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], text=True, **pipes)
        for rank in range(2)
    ]
    assert [rank.stdout.readline() for rank in ranks] == ["started\n"] * 2
    reports = [rank.communicate("\n", timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [EXIT_FAILED] * 2
    assert reports == ["\nerror: the mistake\n", ""]


BLOCKED = """\
threading.Timer(0.5, os.kill, [os.getpid(), signal.{}]).start()
with here.waiting("a sum", [1]):
    here.store.wait(["what never comes"])
"""


@pytest.mark.parametrize(
    ("status", "program"),
    [
        # As when nobody reads standard error any more.
        (EXIT_FAILED, "module.announce = broken; here.fail('no reason')"),
        *more(
            [], [(EXIT_FAILED, "module.Watch._end = broken; here.fail('no reason')")]
        ),
        (128 + signal.SIGTERM, BLOCKED.format("SIGTERM")),
        *more([], [(128 + signal.SIGINT, BLOCKED.format("SIGINT"))]),
    ],
)
def test_a_rank_that_is_blocked_ends(status, program):
    """By a signal, and also if something goes wrong in the watch."""
    program = f"""
import os, signal, threading
from tests.runtime.process_group.test_watch import watch
from toolkit.runtime.process_group import watch as module
def broken(*arguments):
    raise BrokenPipeError
here = watch()
here.start()
{program}
"""
    process = warm_python.Popen([sys.executable, "-c", program])
    assert process.wait(60) == status


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_stop_gives_the_signals_back(handler):
    """A user's handler of SIGTERM stays while the watch runs, too."""
    before = signal.signal(signal.SIGTERM, handler)
    here = watch()
    try:
        here.start()
        assert (signal.getsignal(signal.SIGTERM) == handler) == (
            handler == signal.SIG_IGN
        )
        here.stop()
        assert signal.getsignal(signal.SIGTERM) == handler
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_users_handler_has_a_signal_to_itself(number):
    here = watch()
    here.start()
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with here.waiting("a sum", [1]):
            os.kill(os.getpid(), number)
            time.sleep(3 * _GRACE)  # this process would have ended by now
        assert heard == [number]
    finally:
        signal.signal(number, before)
        here.stop()


def test_a_signal_to_a_forked_process_is_not_one_to_the_rank():
    here = watch()
    here.start()
    child = forked(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(2 * _GRACE)  # in which it would leave
    here.stop()
