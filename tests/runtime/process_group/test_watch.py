import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from tests.ports import free_port
from tests.thorough import more, thorough
from toolkit.runtime.process_group.diagnosis import RankStatus, Record
from toolkit.runtime.process_group.shared_status import Process, SharedStatus
from toolkit.runtime.process_group.watch import _GRACE, EXIT_FAILED, JobFailedError, Watch
from toolkit.schedule import Action, Buffer, Instruction

RING = Path(__file__).with_name("ring.py")
TIMEOUT = 3.0
RECEIVE = Instruction(12, Action.RECV, 1, 0, 7, None, Buffer.ACTIVATION, (0,))


class Job:
    """A ring of ranks, started by ``torchrun`` or a process each."""

    def __init__(
        self, tmp_path: Path, fault: str, *, faulty: int = 1, size: int = 3, machines: bool = False
    ) -> None:
        self.path = tmp_path / "output"
        self.folder = tmp_path / "ready"
        self.folder.mkdir()
        self.arguments = [str(RING), fault, str(TIMEOUT), str(faulty), str(self.folder)]
        self.size, self.machines = size, machines
        self.started: list[subprocess.Popen] = []

    def torchrun(self) -> "Job":
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.size)]
        self._start([*run, "--master-port", str(free_port())], {})
        return self

    def ranks(self, ranks: list[int] | None = None, port: int | None = None) -> "Job":
        """Some ranks, that meet at a store of this process unless another ``port`` is given."""
        agent = {}
        if port is None:
            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            port, agent = self.store.port, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = list(range(self.size)) if ranks is None else ranks
        for absent in set(range(self.size)) - set(ranks):
            (self.folder / str(absent)).touch()
        for rank in ranks:
            place = {"RANK": rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
            self._start([], agent | {"MASTER_ADDR": "localhost"} | place)
        return self

    def _start(self, options: list[str], environment: dict) -> None:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
        environment |= {"MACHINES": "1"} if self.machines else {}
        with self.path.open("a") as output:
            command = [sys.executable, *options, *self.arguments]
            env = {name: str(value) for name, value in environment.items()}
            self.started.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))

    def end(self) -> str:
        """The one message, once all processes have ended."""
        messages = self.wait()
        assert len(messages) == 1, self.path.read_text()
        return messages[0]

    def wait(self) -> list[str]:
        """The messages, once all processes have ended, which has to be in time."""
        deadline = time.monotonic() + 120
        processes = list(self.started)
        try:
            for process in processes:
                process.wait(deadline - time.monotonic())
        finally:
            ended = time.time()
            for process in processes:
                process.kill()
        output = self.path.read_text()
        for pid in re.findall(r"^pid (\d+)", output, re.MULTILINE):
            assert not Path(f"/proc/{pid}").exists(), output
        for fault in re.findall(r"^fault (\S+)", output, re.MULTILINE):
            # Some 1 s here, 5 s on a busy machine; 30 s where torchrun has to kill.
            assert ended < float(fault) + TIMEOUT + 20, output
        return re.findall(r"^error: (.*)", output, re.MULTILINE)

    @property
    def statuses(self) -> list[int]:
        return [process.returncode for process in self.started]


PLACE = r"in step 300 at BACKWARD stage 1 microbatch 0 step 300; rank \d .* in step 30\d at "
LEFT = EXIT_FAILED


@pytest.mark.parametrize(
    ("fault", "named"),
    more([("kill", "has died")], [("kill", "has died"), ("stop", "has stalled: for 3 s")]),
)
def test_a_fault_ends_the_job_of_torchrun(tmp_path, fault, named):
    job = Job(tmp_path, fault).torchrun()
    message = job.end()
    assert re.match(rf"rank 1 {named} .*{PLACE}", message), message
    reported = dict(re.findall(r"^reason (\d) (.*)", job.path.read_text(), re.MULTILINE))
    assert reported == {"0": message, "2": message}


@thorough
@pytest.mark.parametrize(
    ("fault", "options", "named", "places", "statuses"),
    [
        ("loop", {}, "rank 1 has stalled: ", PLACE, ([LEFT, -9, LEFT], [LEFT] * 3)),
        (
            "loop",  # on a machine of its own, whose record comes through the store
            {"machines": True},
            r"rank 1 \(on \S+\) has stalled: ",
            f"last seen {PLACE.split(';')[0]}",
            ([LEFT] * 3,),
        ),
        (
            "disconnect",
            {},
            r"the connection between rank \d and rank \d is lost",
            r"(in step 30\d at (SEND|RECV|BACKWARD) stage \d.*){2}",
            ([LEFT] * 3,),
        ),
        (
            "kill",  # the rank that holds the store
            {"faulty": 0},
            "rank 0 has died ",
            "in step 300 at BACKWARD stage 0",
            ([-9, LEFT, LEFT],),
        ),
    ],
)
def test_a_fault_ends_the_job_without_torchrun(tmp_path, fault, options, named, places, statuses):
    job = Job(tmp_path, fault, **options).ranks(port=free_port() if "faulty" in options else None)
    message = job.end()
    assert re.match(f"{named}.*{places}", message), message
    assert job.statuses in statuses


@thorough
@pytest.mark.parametrize("ranks", [[0, 2], [1]])
def test_a_meeting_that_fails_names_a_rank_and_the_port(tmp_path, ranks):
    """Rank 1 does not come; nobody listens where it comes."""
    port = free_port() if ranks == [1] else None
    job = Job(tmp_path, "none").ranks(ranks, port=port)
    assert re.match(rf"rank 1 .* localhost:{port or '[0-9]+'} within 3 s", job.end())
    assert job.statuses == [LEFT] * len(ranks)


@thorough
def test_all_ranks_may_end_in_the_normal_way(tmp_path):
    job = Job(tmp_path, "none", size=2).ranks()
    assert job.wait() == []
    assert job.statuses == [0, 0]
    assert job.path.read_text().count("finished with 1 thread") == 2


@pytest.mark.parametrize("what", [RECEIVE, "a sum over all ranks"])
@pytest.mark.parametrize("step", [None, 0, 7])
def test_a_record_is_read_as_it_was_written(what, step):
    shared = SharedStatus()
    shared.write(Record("a text that is longer than all others: " + 3000 * "x", 3))
    written = Record(what, step, (1, 2), 0.5, 2.5, RankStatus.ENDED, "an error", "b")
    shared.write(written)
    assert shared.read() == written._replace(what=str(what))


def test_a_record_outlives_its_process():
    code = (
        "import sys; from toolkit.runtime.process_group.shared_status import *;"
        "shared = SharedStatus(); shared.write(Record('BACKWARD', 3));"
        "print(shared.fd, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    shared = SharedStatus.of(child.pid, int(child.stdout.readline()))
    process = Process(child.pid)
    assert not process.gone
    child.kill()
    child.communicate()
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


def test_an_error_of_the_backend_is_raised_without_a_watch():
    here = watch()
    raised = pytest.raises(JobFailedError, match="a sum: reset")
    with raised, here.waiting("a sum", [1]):
        raise RuntimeError("[/gloo/pair.cc:5] reset")


def test_other_errors_are_the_users():
    here = watch()
    with pytest.raises(RuntimeError, match=r"^shapes$"), here.waiting("FORWARD", []):
        raise RuntimeError("shapes")
    with pytest.raises(torch.OutOfMemoryError), here.waiting("the gradients of all ranks", [1]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("what", more(["announce"], ["announce", "Watch._end"]))
def test_nothing_that_goes_wrong_in_the_watch_leaves_a_rank_waiting(what):
    """As when nobody reads standard error any more."""
    program = f"""
from tests.runtime.process_group.test_watch import watch
from toolkit.runtime.process_group import watch as module
def fail(*arguments):
    raise BrokenPipeError
module.{what} = fail
here = watch()
here.start()
here.fail("no reason")
"""
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == EXIT_FAILED, finished.stderr


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_stop_gives_the_signals_back(handler):
    """A user's handler of SIGTERM stays while the watch runs, too."""
    before = signal.signal(signal.SIGTERM, handler)
    here = watch()
    try:
        here.start()
        assert (signal.getsignal(signal.SIGTERM) == handler) == (handler == signal.SIG_IGN)
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
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # which Python 3.12 warns of where there are threads
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(2 * _GRACE)  # in which it would leave
    here.stop()
