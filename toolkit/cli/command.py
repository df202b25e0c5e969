"""The command line of an experiment: Hydra's, with one-page help and one-line errors.

A user's mistake is what Hydra cannot compose, or a UserError. It ends the program with one message
and status 2. Anything else is a bug and keeps its traceback; HYDRA_FULL_ERROR=1 shows every
traceback. In a sweep neither ends the other runs.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import process, schema, sweeps
from toolkit.cli.check_options import check_given, resolve_options, use_threads
from toolkit.cli.errors import explain
from toolkit.cli.help import help_text
from toolkit.cli.hydra_args import MULTIRUN, flags_first
from toolkit.cli.resume import resume_arguments, snapshot
from toolkit.cli.sweeps import Status, Sweep, alone_in, write_status
from toolkit.errors import UserError
from toolkit.files import ROOT, resumable_in
from toolkit.options import STOPPED
from toolkit.torchrun import is_rank_zero, restarted

FAILED = 1
USAGE = 2
_INTERRUPTED, _TERMINATED = 130, 143
_VERBOSE = "HYDRA_FULL_ERROR"


@dataclass(frozen=True)
class Ended:
    """How an experiment has ended."""

    status: int = 0  # exit status
    objective: float | None = None  # value that a sweep optimizes


Experiment = Callable[[DictConfig], Ended | int | None]


def entry_point(name: str, conf: Path) -> Callable[[Experiment], Callable[[], None]]:
    """Make a function of a configuration into the experiment ``name``.

    The function returns the exit status, or an :class:`Ended`.

    Args:
        name: its configuration is ``conf/<name>.yaml``.
        conf: folder of the configuration.
    """

    def command_line_of(function: Experiment) -> Callable[[], None]:
        return lambda: _CommandLine(name, conf, function).execute()

    return command_line_of


def output_folder() -> Path:
    """Return the folder of the run that this process executes."""
    return Path(HydraConfig.get().runtime.output_dir)


@contextmanager
def command_of_job(name: str) -> Iterator[None]:
    """Let ``sys.argv`` be the job's own command if a launcher's script started this process."""
    before = sys.argv
    if Path(before[0]).stem != name:
        script = ROOT / "experiments" / f"{name}.py"
        sys.argv = [str(script), *HydraConfig.get().overrides.task]
    try:
        yield
    finally:
        sys.argv = before


class _CommandLine:
    """The command line of this process, and its exit status so far."""

    def __init__(self, name: str, conf: Path, function: Experiment) -> None:
        self._name, self._conf, self._function = name, conf, function
        self._arguments = sys.argv[1:]
        self._verbose = _VERBOSE in os.environ
        self._status = 0
        self._restore = snapshot([])

    def execute(self) -> None:
        """Run the experiment or print help; exit unless all has succeeded."""
        with process.lossy_output():
            schema.register()
            os.environ[_VERBOSE] = "1"  # Hydra then raises errors instead of printing them
            Sweep.folder, Sweep.options = None, ()
            if not is_rank_zero():
                sys.argv += process.scratch_options()
            try:
                if {"-h", "--help"} & set(self._arguments):
                    print(sys.modules[self._function.__module__].__doc__)
                    print(help_text(self._name, self._conf, self._arguments))
                    return
                given = flags_first(resume_arguments(flags_first(sys.argv[1:]), self._name))
                Sweep.options = sweeps.with_defaults(given)
                check_given(Sweep.options)
                sys.argv[1:] = Sweep.options
                self._restore = snapshot(Sweep.options)
                composed = hydra.main(
                    version_base="1.3", config_path=str(self._conf), config_name=self._name
                )
                is_sweep = {*MULTIRUN} & {*given}
                with process.forward_signals(sweeps.under_way) if is_sweep else nullcontext():
                    composed(self._job)()
            except KeyboardInterrupt as how:
                if is_rank_zero():
                    print(f"interrupted{sweeps.hint(self._name)[0]}", file=sys.stderr)
                alone = _TERMINATED if isinstance(how, process.TerminatedError) else _INTERRUPTED
                sys.exit(alone if Sweep.folder is None else STOPPED)
            except Exception as error:
                self._report(error)
            lines, complete = sweeps.hint(self._name)
            if lines:
                print(lines)
            process.leave_ranks()
            if status := max(self._status, 0 if complete else FAILED):
                sys.exit(status)

    def _job(self, config: DictConfig) -> float | None:
        """Execute one run; return its objective."""
        try:
            if not self._verbose:
                os.environ.pop(_VERBOSE, None)  # child processes must not inherit it
            is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
            ended = self._run_of_sweep(config) if is_sweep else self._run(config)
        except Exception as error:
            if isinstance(error, ValueError):
                self._restore()
            self._report(error)
            return None
        finally:
            os.environ[_VERBOSE] = "1"
        self._status = max(self._status, ended.status)
        return ended.objective

    def _run(self, config: DictConfig) -> Ended:
        """Execute a run in a folder that no other run uses or can be resumed from."""
        folder = output_folder()
        options = list(HydraConfig.get().overrides.task)
        first = is_rank_zero()  # other ranks of a resumed run have the same folder

        def write(state: str, message: str | None = None, objective: float | None = None) -> None:
            if first:
                write_status(folder, Status(state, options, message, objective))

        with alone_in(folder) if first else nullcontext():
            fresh = first and not config.get("resume") and not restarted()
            if fresh and (left := resumable_in(folder)):
                hint = f"resume={folder} continues it; " if "resume" in config else ""
                raise UserError(f"{folder} has {left}: {hint}give a new one another hydra.run.dir")
            write(sweeps.RUNNING)
            try:
                # Here too: joblib's processes do not pass through execute().
                with (
                    process.raise_on_sigterm(),
                    process.lossy_output(),
                    command_of_job(self._name),
                ):
                    resolve_options(config, options)
                    use_threads(config)
                    returned = self._function(config)
            except KeyboardInterrupt:
                write(sweeps.STOPPED)
                raise
            except Exception as error:
                write(sweeps.FAILED, self._explain(error) or f"{type(error).__name__}: {error}")
                raise
            ended = returned if isinstance(returned, Ended) else Ended(returned or 0)
            states = {0: sweeps.FINISHED, STOPPED: sweeps.STOPPED}
            state = states.get(ended.status, sweeps.FAILED)
            message = f"it ended with status {ended.status}" if state == sweeps.FAILED else None
            write(state, message, ended.objective)
            return ended

    def _run_of_sweep(self, config: DictConfig) -> Ended:
        """Skip a finished run, resume one with a checkpoint; report errors and continue."""
        folder = output_folder()
        try:
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # other ranks do not know the folder
                options = list(HydraConfig.get().overrides.task)
                if before := sweeps.finished_before(folder, options):
                    print(f"run {folder.name} has finished before")
                    return Ended(objective=before.objective)
                if "resume" in config and resumable_in(folder):
                    config.resume = str(folder)
            ended = self._run(config)
        except Exception as error:
            if (message := self._explain(error)) is not None:
                process.exit_with_error(message)
                return Ended(USAGE)
            if is_rank_zero():
                (folder / "error.txt").write_text(traceback.format_exc())
                print(
                    f"error: run {folder.name} has failed: see {folder}/error.txt", file=sys.stderr
                )
            else:
                traceback.print_exc()
            return Ended(FAILED)
        if ended.status == STOPPED:
            raise KeyboardInterrupt  # so that no other run begins
        return ended

    def _explain(self, error: Exception) -> str | None:
        if self._verbose:
            return None
        return explain(error, self._name, self._conf, self._arguments)

    def _report(self, error: Exception) -> None:
        """Print a user's mistake and set the status; raise anything else."""
        message = self._explain(error)
        if message is None:
            raise error
        process.exit_with_error(message)
        self._status = max(self._status, USAGE)
