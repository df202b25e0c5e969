"""Runs that train at the same time: the signals that their processes get."""

import signal
from contextlib import nullcontext

import pytest

from toolkit.errors import UserError
from toolkit.results import parallel_runs
from toolkit.results.parallel_runs import _Failed, _Ready, _Stopped
from toolkit.training import StoppedError

KEYS = [("dp", 0), ("dp", 1), ("dp", 2), ("dp", 3)]


class ThreeProcesses:
    """Stands for processes that report ``script`` when each has a run."""

    def __init__(self, script):
        self.script = script
        self.sent = []

    def begin(self, function, *args):
        pass

    def reports(self):
        for process in range(3):
            yield process, _Ready()
        yield from self.script
        for process in range(3):
            yield process, _Ready()

    def send(self, key, processes):
        self.sent.append((key, *processes))


@pytest.mark.parametrize(
    ("first", "number", "raised"),
    [
        (_Failed(UserError("no such image")), signal.SIGTERM, UserError),
        (_Stopped(signal.SIGINT, saved=True), signal.SIGINT, StoppedError),
    ],
)
def test_others_get_one_signal_when_a_run_ends_early(
    monkeypatch, tmp_path, first, number, raised
):
    """A second one would end those at once that have not reached their pause."""
    last = _Stopped(number, saved=True)
    processes = ThreeProcesses([(1, first), (0, last), (2, last)])
    signalled = []
    monkeypatch.setattr(
        parallel_runs, "Processes", lambda n_processes: nullcontext(processes)
    )
    monkeypatch.setattr(
        parallel_runs,
        "_signal",
        lambda processes, running, number: signalled.append(({*running}, number)),
    )
    with pytest.raises(raised):
        [*parallel_runs.train_in_parallel({"epochs": 1}, None, tmp_path, KEYS, 3)]
    assert signalled == [({0, 2}, number)]
    keys_sent = [("dp", 0), ("dp", 1), ("dp", 2), None, None, None]
    assert processes.sent == [(key, k % 3) for k, key in enumerate(keys_sent)]
