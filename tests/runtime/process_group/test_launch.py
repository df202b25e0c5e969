"""Ranks that ``launch`` starts; two tests start them in a new interpreter, as users do."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from toolkit.errors import UserError
from toolkit.runtime.process_group import join as world
from toolkit.runtime.process_group.launch import launch
from toolkit.runtime.process_group.processes import Processes
from toolkit.runtime.process_group.rank_process import RankError, report
from toolkit.runtime.process_group.shared_status import Process
from toolkit.runtime.process_group.watch import JobFailedError

ROOT = Path(__file__).parents[3]


def all_end(pids):
    """Whether the processes end within a minute."""
    processes, end = [Process(pid) for pid in pids], time.monotonic() + 60
    while not all(process.gone for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    return all(process.gone for process in processes)


@pytest.mark.usefixtures("new_interpreter")
def test_ranks_meet_report_print_and_return(monkeypatch, capfd):
    added, reports = 10, []

    def function(first, second):
        here = world.join()
        for number in range(3):
            report((number, torch.tensor(here.rank)))
        with pytest.raises(ValueError, match=f"rank {here.rank}: .* lock"):
            report(threading.Lock())
        if os.fork() == 0:
            report("from another process")
            os._exit(0)
        here.barrier()
        for _ in range(200):
            print("to the output")
        print("an error", file=sys.stderr)
        total = here.total(torch.tensor([1.0, here.rank])).tolist()
        variables = os.environ["OMP_NUM_THREADS"], os.environ["ADDED"]
        gathered = here.gather(here.rank)
        world.leave()
        threads = {thread.name for thread in threading.enumerate()}
        return first + second + added, here.rank, gathered, total, variables, threads

    def heard(rank, value):
        assert threading.current_thread() is threading.main_thread()
        reports.append((rank, value[0], value[1].item()))

    monkeypatch.setenv("ADDED", "yes")
    results = launch(function, 2, 1, second=2, on_report=heard)
    last = (
        [0, 1],
        [2.0, 1.0],
        (os.environ["OMP_NUM_THREADS"], "yes"),
        {"MainThread", "parent"},
    )
    assert results == [(13, rank, *last) for rank in range(2)]
    for rank in range(2):
        assert [r for r in reports if r[0] == rank] == [
            (rank, n, rank) for n in range(3)
        ]
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["to the output"] * 400
    assert printed.err.splitlines().count("an error") == 2


def test_report_does_nothing_outside_a_rank():
    report(object())


def test_a_mistake_is_raised_as_it_is_rather_than_what_follows_from_it(tmp_path):
    heard, ready = tmp_path / "heard", tmp_path / "ready"
    pids = {}

    def hear(rank, pid):
        pids[rank] = pid
        if len(pids) == 2:
            heard.touch()

    def function(rank_of_mistake):
        report(os.getpid())
        mistaken = int(os.environ["RANK"]) == rank_of_mistake
        while not (ready if mistaken else heard).exists():
            time.sleep(0.01)
        if mistaken:
            raise ValueError("batch=7 cannot be divided by 2: make it 8")
        ready.touch()
        raise JobFailedError("rank 1 does not answer")

    with pytest.raises(ValueError, match="batch=7") as caught:
        launch(function, 2, 1, on_report=hear)
    assert isinstance(caught.value.__cause__, RankError)
    assert "in function\n" in str(caught.value.__cause__)
    assert len(pids) == 2
    assert all(Process(pid).gone for pid in pids.values())


def test_another_exception_comes_with_its_traceback():
    def fail():
        return 1 + "1"

    with pytest.raises(RankError, match="rank 0: TypeError") as caught:
        launch(fail, 1)
    text = str(caught.value)
    assert "Traceback (most recent call last):" in text
    assert "in fail\n" in text
    assert "/rank_process.py" not in text


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (UserError, "n_ranks.* got 0", (print, 0), {}),
        (UserError, "n_ranks.* got 1.5", (print, 1.5), {}),
        (UserError, "cannot pickle", (print, 2, threading.Lock()), {}),
        (UserError, "timeout.* got 0", (print, 2), {"timeout": 0}),
        (JobFailedError, "rank 0 .* 3 ", (lambda: os._exit(3), 1), {}),
    ],
)
def test_what_cannot_be_launched_is_named(error, match, arguments, options):
    with pytest.raises(error, match=match):
        launch(*arguments, **options)


def test_ranks_that_do_not_start_are_named(monkeypatch):
    monkeypatch.setattr("toolkit.runtime.process_group.processes._POLL", 0.0)
    with pytest.raises(JobFailedError, match=r"rank 0, 1 .* 1e-06 s"):
        launch(print, 2, timeout=1e-6)


@pytest.mark.parametrize(
    ("fail", "match"),
    [
        (
            lambda watch: os.kill(os.getpid(), signal.SIGKILL),
            r"^rank 1 .* rank 0 waited for it",
        ),
        (lambda watch: watch.fail("batch=7 cannot be divided"), "batch=7"),
    ],
)
def test_the_watch_names_the_reason(fail, match):
    def function():
        here = world.join()
        here.gather(None)
        if here.rank == 1:
            fail(here.watch)
        here.gather(None)

    with pytest.raises(JobFailedError, match=match):
        launch(function, 2)


def test_ranks_that_exchange_different_things_say_so():
    def function():
        here = world.join()
        with pytest.raises(UserError, match=r"states.*weights|weights.*states"):
            here.gather(here.rank, "states" if here.rank else "weights")
        return here.gather(here.rank, "states")

    assert launch(function, 2) == [[0, 1]] * 2


def test_a_fork_server_that_died_while_idle_is_replaced_as_ranks_are():
    def pids():
        return os.getpid(), os.getppid()

    with Processes(1) as made:
        ((rank, server),) = made.call(pids)
        os.kill(server, signal.SIGKILL)
        assert all_end([rank, server])
        ((new_rank, new_server),) = made.call(pids)
        assert {new_rank, new_server}.isdisjoint((rank, server))
        os.kill(new_rank, signal.SIGKILL)
        # Its fork server reports that. A call before would lose a rank, which is another case.
        end = time.monotonic() + 60
        while made.ready() and time.monotonic() < end:
            time.sleep(0.02)
        assert made.call(pids)[0][1] == new_server
        assert made.n_starts == 3


def test_an_interrupt_leaves_no_process():
    pids = {}

    def function():
        if os.environ["RANK"] == "1":
            child = subprocess.Popen(["sleep", "1000"])
            report((os.getpid(), child.pid))
            os.kill(os.getpid(), signal.SIGSTOP)
        report((os.getpid(),))
        threading.Event().wait()

    def interrupt(rank, value):
        pids[rank] = value
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(function, 2, on_report=interrupt)
    assert all_end(itertools.chain(*pids.values()))


def test_the_end_of_the_parent_leaves_no_process(tmp_path):
    # No main guard: the ranks do not run the script.
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading\n"
        "from toolkit.runtime import launch, report\n"
        "def function():\n"
        "    report(os.getpid())\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    threading.Event().wait()\n"
        "launch(function, 2, on_report=lambda _, pid: print(pid, flush=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    assert all_end(pids)
