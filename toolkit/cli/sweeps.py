"""Sweeps, and the status file of each run.

``status.json`` in a run's folder says whether it runs, has ended, and how. A sweep that is started
again in its folder skips runs that have finished and resumes those that have a checkpoint.
"""

import fcntl
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from toolkit.cli.hydra_args import key_of, shell_option, value_of
from toolkit.cli.sweep_logs import make_logs_readable
from toolkit.errors import UserError
from toolkit.files import read_plain, started_by, write_json
from toolkit.format import count, table
from toolkit.results.run_files import STATUS
from toolkit.terminal import show
from toolkit.torchrun import is_rank_zero

FINISHED, FAILED, STOPPED, RUNNING = "finished", "failed", "stopped", "running"
_SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Status:
    """State of a run."""

    state: str  # finished, failed, stopped, or running; a killed run still says running
    options: Sequence[str] = ()  # its command line
    message: str | None = None  # why it failed
    objective: float | None = None  # value that a sweep optimizes
    diverged: bool = False  # whether it failed because its loss diverged


def write_status(folder: Path, status: Status) -> None:
    """Write ``status.json`` if possible."""
    with suppress(OSError):  # a full disk does not end the run; the result reports it
        write_json(folder / STATUS, asdict(status))


def mark_failed(folder: Path, message: str) -> None:
    """Set the status to failed, if it is running."""
    status = read_status(folder)
    if status is not None and status.state == RUNNING:
        write_status(folder, replace(status, state=FAILED, message=message))


def read_status(folder: Path) -> Status | None:
    """Read ``status.json``; None if it is missing or unreadable."""
    try:
        return Status(**read_plain(folder / STATUS))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock ``folder``, so that no other process runs in it.

    Raises:
        UserError: another process has the lock.
    """
    # The system releases the lock when the descriptor closes, also if the process is killed.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process is at work in {folder}: wait until it has ended, or give"
                    " another hydra.run.dir"
                ) from None
        yield
    finally:
        os.close(descriptor)


class Sweep(Callback):
    """Hydra callback that writes a sweep's command line to its folder.

    Hydra makes the instance and gives it to nobody, so the state is on the class. It describes the
    command that this process carries out now.
    """

    folder: ClassVar[Path | None] = None
    """Folder of the sweep that this process has launched last."""
    options: ClassVar[Sequence[str]] = ()
    """Options of the command line."""
    run_folder: ClassVar[Path | None] = None
    """Folder of the single run that this process has launched last."""
    is_new: ClassVar[bool] = False
    """Whether the folder of the sweep was not there before."""

    @classmethod
    def begin(cls, options: Sequence[str]) -> None:
        """Forget an earlier command of this process; keep the options of the next."""
        cls.folder = None
        cls.run_folder = None
        cls.is_new = False
        cls.options = options

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the folder of a single run, in which Hydra may fail to write."""
        Sweep.run_folder = Path(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the command line to the sweep's folder, on rank 0."""
        make_logs_readable()
        if is_rank_zero():
            Sweep.folder = folder = Path(config.hydra.sweep.dir)
            # A refused sweep removes its folder only if it has made it.
            Sweep.is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / _SWEEP_FILE, {"options": list(Sweep.options)})
            for option in Sweep.options:
                # Brackets hold commas that do not separate values, so such options are not judged.
                values = value_of(option).split(",")
                if len({*values}) < len(values) and not re.search(r"[\[{(]", option):
                    show(f"warning: {option} runs the same more than once", sys.stderr)


def under_way() -> bool:
    """Return whether a process runs in a folder of this process's sweep."""
    for folder, status in _statuses().items():
        if status.state == RUNNING:
            try:
                # The lock of a process that was killed is free, though its status says it runs.
                with alone_in(folder):
                    pass
            except UserError:
                return True
    return False


def _statuses() -> dict[Path, Status]:
    """Return the statuses of the runs of this process's sweep, if any, by folder."""
    if Sweep.folder is None:
        return {}
    status_of_folder = {}
    for folder in sorted(Sweep.folder.iterdir()):
        status = read_status(folder)
        if status is not None:
            status_of_folder[folder] = status
    return status_of_folder


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Add defaults for Optuna's sweeper to a command line.

    It maximizes accuracy, continues when a run fails, and draws from a seed: an interrupted sweep
    draws the same options again.
    """
    if "hydra/sweeper=optuna" not in arguments:
        return [*arguments]
    defaults = {"direction": "maximize", "max_failure_rate": "1.0", "sampler.seed": "0"}
    if "hydra/sweeper/sampler=grid" in arguments:
        del defaults["sampler.seed"]
    option_names = {key_of(argument) for argument in arguments}
    # Options that the user sets are kept as they are.
    with_missing = [*arguments]
    for name, value in defaults.items():
        option = f"hydra.sweeper.{name}"
        if option not in option_names:
            with_missing.append(f"{option}={value}")
    return with_missing


def sweep_options(folder: Path) -> list[str] | None:
    """Return the command line of the sweep in ``folder``; None if it is not a sweep's."""
    try:
        return [str(option) for option in read_plain(folder / _SWEEP_FILE)["options"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def status_if_finished(folder: Path, options: Sequence[str]) -> Status | None:
    """Return the status of a run that an earlier start of the sweep has finished; else None.

    Raises:
        UserError: the run had other options.
    """
    earlier_status = read_status(folder)
    if earlier_status is None:
        return None
    if list(earlier_status.options) != list(options):
        raise UserError(
            f"{folder} holds the run of other options ({' '.join(earlier_status.options)}): start"
            " the sweep again as it was with -m resume=FOLDER, or in a folder of its own"
        )
    if earlier_status.state != FINISHED:
        return None
    return earlier_status


def summary(experiment: str, resumable: bool = True) -> tuple[str, bool]:
    """Return lines on this process's sweep, if any, and whether all of its runs have finished.

    Args:
        experiment: train, compare, ...
        resumable: whether to say how the sweep continues, if not all have finished.
    """
    runs = _statuses()
    if not runs:
        return "", True
    states = [status.state for status in runs.values()]
    word_of_state = {
        FINISHED: "finished",
        FAILED: "failed",
        STOPPED: "stopped",
        RUNNING: "broken off",
    }
    counts = [
        f"{states.count(state)} {word}"
        for state, word in word_of_state.items()
        if state in states
    ]
    where = f" in {Sweep.folder}" if resumable else ""
    lines = ["", f"{count(len(states), 'run')}{where}: {', '.join(counts)}"]
    # Job 10 comes after job 9: sorted by length, within which the order of the names stays.
    for path, status in sorted(runs.items(), key=lambda item: len(item[0].name)):
        if status.state != FINISHED:
            line = f"  {word_of_state[status.state]}: {path.name} ({' '.join(status.options)})"
            if status.message:
                line += f": {status.message}"
            lines.append(line)
    # Only then is there a best run to report.
    all_finished = all(state == FINISHED for state in states)
    if not all_finished and resumable:
        command = f"{started_by(experiment)} -m {shlex.quote(f'resume={Sweep.folder}')}"
        lines.append(f"to continue: {command}")
    elif all_finished and any(status.objective is not None for status in runs.values()):
        report = f"{started_by('report')} {shell_option('runs', str(Sweep.folder))}"
        lines += ["", _objectives(runs), "", report]
        if Sweep.folder and any(Sweep.folder.glob("*/wandb/offline-run-*")):
            lines.append(
                f"wandb sync {shlex.quote(str(Sweep.folder))}/*/wandb/offline-run-*"
            )
    return "\n".join(lines), all_finished


def _objectives(runs: Mapping[Path, Status]) -> str:
    """Return a table of each run's objective and the options in which the runs differ."""
    options_of_run = {
        path: dict.fromkeys(status.options) for path, status in runs.items()
    }
    shared_options = set.intersection(
        *(set(options) for options in options_of_run.values())
    )
    rows = []
    for path, options in sorted(
        options_of_run.items(), key=lambda item: len(item[0].name)
    ):
        values_of_options = {
            key_of(option): value_of(option)
            for option in options
            if option not in shared_options
        }
        rows.append(
            {"run": path.name, **values_of_options, "objective": runs[path].objective}
        )
    return table(rows)
