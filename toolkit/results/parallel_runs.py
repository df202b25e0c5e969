"""Runs of a comparison that train at the same time, each in a process, on one device.

::

    this process                          each of n processes
    folder of the run, its name      -->  builds it and trains
    bar                             <--   epochs so far
    tables of the comparison        <--   the run that has ended

A signal to this process is passed on. Each process then saves its run and ends.
"""

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from toolkit.errors import UserError
from toolkit.format import count
from toolkit.results.comparison import (
    Key,
    RuleRun,
    RunOptions,
    check_runs,
    folder_of_run,
    prepare_folder,
    train_one,
)
from toolkit.results.progress import ParallelProgress
from toolkit.results.wandb_run import environment
from toolkit.runtime.process_group.processes import Processes
from toolkit.runtime.process_group.rank_process import RankError, receive, report
from toolkit.runtime.process_group.watch import JobFailedError
from toolkit.training import StoppedError, TrainingRun, pick_device
from toolkit.training.run_memory import MemoryCheck
from toolkit.training.stop_signals import Signals

if TYPE_CHECKING:
    from toolkit.training import Step

_REPORT = 1.0  # least seconds between two reports of a run's epochs

MakeRun = Callable[[str, int], TrainingRun]
"""A function that builds the run of a rule with a seed, and can be pickled."""


@dataclass(frozen=True)
class _Ready:
    """Report that a process waits for its next run."""


@dataclass(frozen=True)
class _Trained:
    """Report of the epochs that a run has trained so far."""

    epochs: float


@dataclass(frozen=True)
class _Ended:
    """Report that a run has ended."""

    run: RuleRun
    note: str  # for the bar


@dataclass(frozen=True)
class _Stopped:
    """Report that the signal ``number`` has ended a run, which is ``saved`` or lost."""

    number: int
    saved: bool


@dataclass(frozen=True)
class _Failed:
    """Report that a run has raised an exception."""

    error: UserError | RuntimeError  # what the comparison raises
    number: ClassVar[int] = signal.SIGTERM  # saves the other runs


def check_parallel_runs(
    options: RunOptions, make_run: MakeRun, keys: Sequence[Key], n_processes: int
) -> list[str]:
    """Check that runs can train at the same time; return notes on memory and threads.

    Args:
        options: those of the comparison.
        make_run: function that builds a run.
        keys: rule and seed of each run.
        n_processes: most runs at the same time.

    Raises:
        UserError: a run cannot be trained with its options, or the device's memory is too small
            for so many.
    """
    memory = MemoryCheck(n_processes)
    check_runs(options, make_run, keys, memory.add)
    notes = memory.notes()
    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    if pick_device(options["device"]).type == "cpu" and n_processes * threads > cores:
        notes.append(
            f"{n_processes} runs with {count(threads, 'thread')} each share"
            f" {count(cores, 'core')}: threads={max(1, cores // n_processes)} or a smaller"
            " parallel may be faster"
        )
    return notes


def train_in_parallel(
    options: RunOptions,
    make_run: MakeRun,
    folder: Path,
    keys: Sequence[Key],
    n_processes: int,
) -> Iterator[RuleRun]:
    """Train ``keys``, at most ``n_processes`` at the same time; yield the runs as they end.

    Args:
        options: those of the comparison.
        make_run: function that builds a run, in the process that trains it.
        folder: folder of the comparison.
        keys: rule and seed of each run, in the order in which they begin.
        n_processes: number of processes.

    Raises:
        StoppedError: a signal has ended the runs under way, and with them the comparison.
        UserError: a run cannot be trained. The other runs under way are saved first.
        JobFailedError: a process has died, and all others are ended.
    """
    waiting = deque(keys)
    running: dict[int, Key] = {}  # by process
    unfinished: list[_Stopped | _Failed] = []
    n_epochs = options["epochs"]
    with (
        ParallelProgress(len(keys), n_epochs * len(keys)) as progress,
        Processes(n_processes) as processes,
        _ForwardedSignals(processes, running).heard() as signals,
    ):
        setting = _Setting(folder, n_processes, torch.get_num_threads(), sys.argv)
        processes.begin(_train_keys, make_run, setting)
        with _naming_running(running, folder, signals):
            # A process reports _Ready, trains the run that it is sent, reports how it ended, and so
            # on.
            for process, message in processes.reports():
                if isinstance(message, _Ready):
                    key = None
                    if waiting and not (signals.number or unfinished):
                        key = waiting.popleft()
                        # From here on a signal is passed on to the process.
                        running[process] = key
                        # Made by this process, not the one that trains: keep_runs, which runs here,
                        # removes empty folders, and would remove this one at the wrong moment.
                        prepare_folder(folder, *key)
                    # None ends the process.
                    processes.send(key, [process])
                elif isinstance(message, _Trained):
                    progress.trained(running[process], message.epochs)
                elif isinstance(message, _Ended):
                    progress.ended(running.pop(process), n_epochs, message.note)
                    yield message.run
                elif isinstance(message, _Stopped | _Failed):
                    del running[process]
                    # The other runs are saved too. They get one signal, since a second one would
                    # end them at once.
                    if not (unfinished or signals.number):
                        _signal(processes, running, message.number)
                    unfinished.append(message)
    _raise_unfinished(unfinished, signals.number, n_waiting=len(waiting))


def _raise_unfinished(
    unfinished: Sequence[_Stopped | _Failed], number: int, n_waiting: int
) -> None:
    """Raise the error of a run that has failed, or StoppedError if a signal has ended one.

    Args:
        unfinished: reports of the runs that have not reached their end.
        number: of the signal to this process; 0: none.
        n_waiting: runs that have not begun.
    """
    stopped = []
    for message in unfinished:
        if isinstance(message, _Failed):
            raise message.error
        stopped.append(message)
    if not number and stopped:
        number = stopped[0].number
    # A signal that came when all runs had ended has stopped nothing.
    if number and (n_waiting or stopped):
        raise StoppedError(number, saved=all(message.saved for message in stopped))


@contextmanager
def _naming_running(
    running: Mapping[int, Key], folder: Path, signals: Signals
) -> Iterator[None]:
    """Raise an error that names the runs under way, if a process dies inside the context.

    Args:
        running: key of the run of each process.
        folder: folder of the comparison, for the way out.
        signals: those that this process has received.

    Raises:
        StoppedError: a signal has ended the process.
        JobFailedError: something else has.
    """
    try:
        yield
    except (JobFailedError, RankError) as error:
        # A signal that came before a process could handle it has ended that process.
        if signals.number:
            raise StoppedError(signals.number, saved=False) from error
        runs = ", ".join(f"{rule} with seed {seed}" for rule, seed in running.values())
        raise JobFailedError(
            f"a process of the comparison has failed ({error}), while these runs trained: {runs};"
            f" continue with resume={folder}, and a smaller parallel if memory ran out"
        ) from error


class _ForwardedSignals(Signals):
    """Signals of this process, passed on to the ``processes`` that are ``running`` a run.

    Each process has its own session, so a terminal does not signal it.
    """

    def __init__(self, processes: Processes, running: Collection[int]) -> None:
        super().__init__()
        self.processes = processes
        self.running = running

    def _hear(self, number: int, frame: FrameType | None) -> None:
        super()._hear(number, frame)
        _signal(self.processes, self.running, number)


def _signal(processes: Processes, running: Collection[int], number: int) -> None:
    """Send a signal to the processes that train a run.

    Other processes do not get it: it would interrupt one that waits for its end.
    """
    for process in processes.alive.intersection(running):
        with suppress(ProcessLookupError):  # it ended in the meantime
            os.kill(processes.process_ids[process], number)


# In the processes that train


@dataclass(frozen=True)
class _Setting:
    """Settings that a training process gets from the process that started it."""

    folder: Path
    n_processes: int
    threads: int  # of torch; the same number gives the same bits
    argv: list[str]  # for the origin of tracked runs


class _ReportedProgress:
    """Progress bar of a training process: reports to the process that shows the bar."""

    def __init__(self) -> None:
        self._reported_at = time.monotonic()
        self.text = ""

    def run(self, name: str) -> None:
        """Begin a run. Nothing is reported, since the other process knows its name."""

    def trained(self, step: "Step") -> None:
        """Report the epochs so far, now and then."""
        now = time.monotonic()
        # A report is a message to another process, which thousands of steps a second would delay.
        if now >= self._reported_at + _REPORT:
            self._reported_at = now
            report(_Trained((step.result.step + 1) / step.n_steps))

    def ended(self, n_epochs: int) -> None:
        """End a run. Its report with the metrics follows."""

    def note(self, text: str) -> None:
        """Keep a short text for the bar."""
        self.text = text


def _train_keys(make_run: MakeRun, setting: _Setting) -> None:
    """Train the runs that the other process asks for, one after another."""
    torch.set_num_threads(setting.threads)
    sys.argv = setting.argv
    # Each run is a job of one process; `launch` has set the number of processes here.
    os.environ["WORLD_SIZE"] = "1"
    with Signals().heard() as signals:
        while True:
            # One process trains run after run, so torch is imported once, and the data are loaded
            # once.
            report(_Ready())
            key: Key | None = receive()
            if key is None:
                return
            report(_train_key(make_run, key, setting, signals))


def _train_key(make_run: MakeRun, key: Key, setting: _Setting, signals: Signals) -> Any:
    """Train a run; return the message that reports how it ended."""
    progress = _ReportedProgress()
    # A tracked run removes its cache when it ends, which others must not share.
    cache = folder_of_run(setting.folder, *key) / "wandb_cache"
    try:
        # The processes that read images divide the cores among LOCAL_WORLD_SIZE: the runs at once.
        os.environ["LOCAL_WORLD_SIZE"] = str(setting.n_processes)
        run = make_run(*key)
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        if signals.number:
            # The run has not begun to train, so nothing is lost.
            return _Stopped(signals.number, saved=True)
        with environment(WANDB_CACHE_DIR=str(cache)):
            ended = train_one(run, key, setting.folder, progress, signals)
        return _Ended(ended, progress.text)
    except StoppedError as stopped:
        return _Stopped(signals.agreed or signals.number, stopped.saved)
    except UserError as error:
        # A plain UserError can be pickled; subclasses with other arguments might not arrive whole.
        return _Failed(UserError(str(error)))
    except Exception:
        rule, seed = key
        return _Failed(RuntimeError(f"{rule}, seed {seed}:\n{traceback.format_exc()}"))
