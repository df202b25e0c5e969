"""The command line of an experiment: Hydra's, with one-page help and one-line errors.

A user's mistake is what Hydra cannot compose, or a UserError. It ends the program with one message
and status 2. Anything else is a bug and keeps its traceback; HYDRA_FULL_ERROR=1 shows every
traceback. In a sweep neither ends the other runs.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import process, schema, sweeps
from toolkit.cli.check_options import check_given, resolve_options
from toolkit.cli.explain import explain
from toolkit.cli.help import description, help_text
from toolkit.cli.hydra_args import flags_first, parse
from toolkit.cli.refused_folders import (
    EarlierFolder,
    discard,
    discard_sweep,
    restore,
    snapshot,
    sweep_refused,
)
from toolkit.cli.resume import resume_arguments, resuming
from toolkit.cli.sweeps import Status, Sweep, alone_in, write_status
from toolkit.errors import UserError, suggest
from toolkit.files import EXPERIMENTS, conf, started_by
from toolkit.lossy_output import lossy_output
from toolkit.options import EXIT_STOPPED
from toolkit.results.run_files import CONTINUED_FILE, resumable_in
from toolkit.terminal import show
from toolkit.torchrun import is_rank_zero, restarted

EXIT_FAILED = 1
EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_VERBOSE = "HYDRA_FULL_ERROR"


@dataclass(frozen=True)
class Ended:
    """How an experiment has ended.

    Attributes:
        status: exit status of the process: 0, :data:`toolkit.options.EXIT_STOPPED` after a signal,
            or another number for a failure.
        objective: value that a sweep optimizes, such as the final accuracy, or None.
    """

    status: int = 0
    objective: float | None = None


Experiment = Callable[[DictConfig], Ended | int | None]


def entry_point(name: str) -> Callable[[Experiment], Callable[[], None]]:
    """Make a function of ``conf/<name>.yaml`` into the experiment ``name``.

    Args:
        name: stem of the experiment's file in ``conf``, and of its script.

    Returns:
        a decorator. The function that it takes returns the exit status, or an :class:`Ended`.
    """

    def command_line_of(function: Experiment) -> Callable[[], None]:
        return lambda: _CommandLine(name, function).execute()

    return command_line_of


def output_folder() -> Path:
    """Return the folder of the run that this process executes."""
    return Path(HydraConfig.get().runtime.output_dir)


def chosen(*groups: str) -> str:
    """Return the options of the running command that choose in some groups, for another command.

    Args:
        groups: names of groups, such as ``model`` and ``data``.

    Returns:
        options such as ``model=resnet18 model.width=32``, quoted for a shell.
    """
    config = HydraConfig.get()
    named_arguments = []
    for argument in config.overrides.task:
        name, equals, _ = argument.lstrip("+").partition("=")
        if equals and name.partition(".")[0] in groups:
            named_arguments.append((name, argument))
    names = [name for name, _ in named_arguments]
    arguments = []
    # Choices of the user need their folder on the other command, too.
    for source in config.runtime.config_sources:
        if source.provider == "command-line":
            arguments.append(f"--config-dir={source.path}")
    for group in groups:
        # The user's own model takes no option of the group's default, such as resnet50.
        if group in names or f"{group}.target" not in names:
            arguments.append(f"{group}={config.runtime.choices[group]}")
    arguments += [argument for name, argument in named_arguments if name not in groups]
    return shlex.join(arguments)


def settings(experiment: str, *options: str) -> DictConfig:
    """Compose the options of ``cyclic-dp <experiment>`` as its command line does.

    Args:
        experiment: train, compare, memory, ...
        options: such as ``epochs=3`` or ``schedule=cdp_v1``.

    Raises:
        UserError: there is no such experiment or option, or no configuration.
    """
    experiments = [*schema.schemas()["experiment"]]
    if experiment not in experiments:
        raise UserError(
            f"unknown experiment {experiment!r}: {suggest(experiment, experiments)}"
        )
    schema.register()
    try:
        check_given(experiment, options)
        with hydra.initialize_config_dir(str(conf()), version_base="1.3"):
            config = hydra.compose(experiment, list(options))
        resolve_options(config, options)
    except Exception as error:
        message = explain(error, experiment)
        if message is None:
            raise
        raise UserError(message) from error
    return config


def command_of_job(name: str) -> list[str]:
    """Return this process's command; the job's own if a launcher's script started the process."""
    if Path(sys.argv[0]).stem == name:
        return sys.argv
    return [str(EXPERIMENTS / f"{name}.py"), *HydraConfig.get().overrides.task]


def _let_hydra_raise() -> None:
    """Let Hydra raise errors, which it otherwise prints before it ends the process."""
    os.environ[_VERBOSE] = "1"


def _check_new_run(config: DictConfig, folder: Path) -> None:
    """Raise UserError if a new run in ``folder`` would overwrite one that can be resumed."""
    resumable_files = resumable_in(folder)
    if not resumable_files:
        return
    hint = ""
    if "resume" in config:
        hint = f"{shlex.quote(f'resume={folder}')} continues it; "
    raise UserError(
        f"{folder} has {resumable_files}: {hint}give a new one another hydra.run.dir"
    )


class _CommandLine:
    """The command line of this process, and its exit status so far."""

    def __init__(self, name: str, function: Experiment) -> None:
        self._name = name
        self._function = function
        self._verbose = _VERBOSE in os.environ
        self._status = 0
        self._continuation: str | None = None  # of a run that was interrupted
        self._earlier_folder = EarlierFolder()

    def execute(self) -> None:
        """Run the experiment or print help; exit unless all has succeeded."""
        with lossy_output(), process.interruptible(sweeps.under_way):
            # Without c10d's warnings and their frames: the watch of a rank says why it ends.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            _let_hydra_raise()
            # A process may execute several commands, as tests do: nothing of the last one may stay.
            Sweep.begin([])
            try:
                schema.register()  # takes long enough to be interrupted

                # 1. Help needs no valid options of a resumed run.
                arguments = flags_first(sys.argv[1:])
                if parse(arguments).help:
                    self._print_help(arguments)
                    return

                # 2. A wrong option is refused before Hydra composes any configuration.
                process.check_working_directory()
                arguments = flags_first(resume_arguments(arguments, self._name))
                check_given(self._name, arguments)

                # 3. The run, or the runs of a sweep.
                self._run_hydra(sweeps.with_defaults(arguments))
            except KeyboardInterrupt:
                process.end_pool()
                if is_rank_zero():
                    reason = f"; {self._continuation}" if self._continuation else ""
                    show(
                        f"interrupted{reason}{sweeps.summary(self._name)[0]}",
                        sys.stderr,
                    )
                sys.exit(_EXIT_INTERRUPTED if Sweep.folder is None else EXIT_STOPPED)
            except Exception as error:
                if Sweep.run_folder is not None:
                    self._undo_folder(error, Sweep.run_folder)
                self._report(error)
            lines, all_finished = sweeps.summary(
                self._name, resumable=not sweep_refused()
            )
            if lines:
                show(lines)
            discard_sweep()
            process.leave_ranks()
            status = self._status
            if not all_finished:
                status = max(status, EXIT_FAILED)
            if status:
                sys.exit(status)

    def _print_help(self, arguments: list[str]) -> None:
        """Print the script's docstring, and its options with the values that are set."""
        check_given(self._name, arguments)
        docstring = sys.modules[self._function.__module__].__doc__ or ""
        print(description(docstring))
        print(help_text(self._name, arguments))

    def _run_hydra(self, options: list[str]) -> None:
        """Let Hydra read the options from sys.argv, and call :meth:`_job` for each run."""
        if not is_rank_zero():
            # Every rank runs the command, but only the first may write to the run's folder.
            options += process.scratch_options()
        Sweep.begin(options)
        sys.argv[1:] = options
        self._earlier_folder = snapshot(options)
        run = hydra.main(
            version_base="1.3", config_path=str(conf()), config_name=self._name
        )
        run(self._job)()

    def _job(self, config: DictConfig) -> float | None:
        """Execute one run; return its objective."""
        try:
            if not self._verbose:
                # Child processes get what the user has set.
                os.environ.pop(_VERBOSE, None)
            is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
            ended = self._run_of_sweep(config) if is_sweep else self._run(config)
        except Exception as error:
            self._undo_folder(error, output_folder())
            self._report(error)
            return None
        finally:
            _let_hydra_raise()
        self._status = max(self._status, ended.status)
        return ended.objective

    def _run(self, config: DictConfig) -> Ended:
        """Execute a run in a folder that no other run uses or can be resumed from."""
        folder, options = output_folder(), list(HydraConfig.get().overrides.task)
        # Other ranks of a resumed run have the same folder.
        is_first_rank = is_rank_zero()

        def write(state: str, message: str | None = None, **fields: Any) -> None:
            if is_first_rank:
                write_status(folder, Status(state, options, message, **fields))

        # The lock is taken before the status is written: two processes with one folder would
        # overwrite each other's.
        with alone_in(folder) if is_first_rank else nullcontext():
            if is_first_rank and not config.get("resume") and not restarted():
                _check_new_run(config, folder)
            # Before the options are resolved: a run that is killed from here on says that it was
            # running.
            write(sweeps.RUNNING)
            # Results and runs that are resumed name the command by sys.argv.
            # In a sweep sys.argv is the command of all runs, so each run sets its own for a while.
            earlier_argv = sys.argv
            sys.argv = command_of_job(self._name)
            try:
                # Lossy here too: joblib's processes do not pass through execute().
                with lossy_output():
                    resolve_options(config, options)
                    returned = self._function(config)
            except KeyboardInterrupt:
                self._continuation = self._continues(config, folder)
                write(sweeps.STOPPED, self._continuation)
                raise
            except Exception as error:
                # Ctrl-C within an import may arrive as another error: see was_interrupted.
                if process.was_interrupted():
                    self._continuation = self._continues(config, folder)
                    write(sweeps.STOPPED, self._continuation)
                    raise KeyboardInterrupt from error
                reason = self._explain(error) or f"{type(error).__name__}: {error}"
                # DivergedError is a FloatingPointError; importing it here would load torch.
                write(
                    sweeps.FAILED,
                    reason,
                    diverged=isinstance(error, FloatingPointError),
                )
                raise
            finally:
                sys.argv = earlier_argv
            ended = returned if isinstance(returned, Ended) else Ended(returned or 0)
            states = {0: sweeps.FINISHED, EXIT_STOPPED: sweeps.STOPPED}
            # Other statuses are of experiments that report a failure without an exception.
            state = states.get(ended.status, sweeps.FAILED)
            message = None
            if state == sweeps.FAILED:
                message = f"it ended with status {ended.status}"
            elif state == sweeps.STOPPED:
                message = self._continues(config, folder)
            write(state, message, objective=ended.objective)
            return ended

    def _continues(self, config: DictConfig, folder: Path) -> str | None:
        """Return how a stopped run continues; None in a sweep, whose summary says it."""
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return None
        if (folder / CONTINUED_FILE).exists():
            return f"the same command with 'hydra.run.dir={folder}' continues it"
        if "resume" not in config or not resumable_in(folder):
            return "nothing is saved: start it again"
        return f"it continues by:\n  {started_by(self._name)} {resuming(folder, self._name)}"

    def _run_of_sweep(self, config: DictConfig) -> Ended:
        """Skip a finished run, resume one with a checkpoint; report errors and continue."""
        folder = output_folder()
        try:
            # Under torchrun each rank would look on its own, and other ranks have other folders.
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                options = list(HydraConfig.get().overrides.task)
                # A sweep that is started again repeats its runs in the same folders.
                earlier_status = sweeps.status_if_finished(folder, options)
                if earlier_status:
                    show(f"run {folder.name} has finished before")
                    return Ended(objective=earlier_status.objective)
                if "resume" in config and resumable_in(folder):
                    config.resume = str(folder)
            ended = self._run(config)
        except Exception as error:
            message = self._explain(error)
            if message is not None:
                process.report_mistake(message)
                return Ended(EXIT_USAGE)
            if is_rank_zero():
                (folder / "error.txt").write_text(traceback.format_exc())
                show(
                    f"error: run {folder.name} has failed: see {folder}/error.txt",
                    sys.stderr,
                )
            else:
                traceback.print_exc()
            return Ended(EXIT_FAILED)
        if ended.status == EXIT_STOPPED:
            raise KeyboardInterrupt  # so that no other run begins
        return ended

    def _undo_folder(self, error: Exception, folder: Path) -> None:
        """Put Hydra's files back after a refusal; remove the new folder of a run refused early."""
        # What a user can mend: a UserError is a ValueError, and so are the mistakes that torch and
        # OmegaConf find.
        is_refusal = isinstance(
            error, ValueError | HydraException | ModuleNotFoundError
        )
        # After a bug the files stay, since they help to find it.
        if is_refusal:
            restore(self._earlier_folder)
        # Not by self._explain: the folder is removed also where tracebacks are shown.
        is_new_folder = self._earlier_folder.path is None
        if is_new_folder and explain(error, self._name) is not None:
            discard(folder)

    def _explain(self, error: Exception) -> str | None:
        if self._verbose:
            return None
        return explain(error, self._name)

    def _report(self, error: Exception) -> None:
        """Print a user's mistake and set the status; raise anything else."""
        message = self._explain(error)
        if message is None:
            raise error
        process.report_mistake(message)
        self._status = max(self._status, EXIT_USAGE)
