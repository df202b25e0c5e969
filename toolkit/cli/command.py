"""The command line of an experiment: Hydra's, with help on a page and errors in a line.

A user's mistake is what Hydra refuses to compose, or a ValueError raised by the toolkit or the
experiment itself. It ends the program with one message and status 2; anything else is a bug and
keeps its traceback. HYDRA_FULL_ERROR=1 shows every traceback. In a sweep neither ends the other
runs: see :mod:`toolkit.cli.sweeps`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import hydra
from omegaconf import DictConfig

from toolkit.cli import ranks, schema, sweeps
from toolkit.cli.errors import explain
from toolkit.cli.help import text
from toolkit.cli.hydra_args import MULTIRUN, flags_first
from toolkit.cli.interrupts import TerminatedError, handed_on
from toolkit.cli.resume import remembered, resumed
from toolkit.cli.run import FAILED, STOPPED, USAGE, Experiment, run
from toolkit.cli.shorthands import check_given
from toolkit.cli.streams import lossy
from toolkit.cli.sweeps import Sweep

_INTERRUPTED, _TERMINATED = 130, 143
_VERBOSE = "HYDRA_FULL_ERROR"


def entry_point(name: str, conf: Path) -> Callable[[Experiment], Callable[[], None]]:
    """Make a function of a configuration into the experiment ``name``.

    What it returns is the exit status, or how it has ended.

    Args:
        name: its configuration is ``conf/<name>.yaml``.
        conf: the folder of the configuration.
    """

    def command_line_of(function: Experiment) -> Callable[[], None]:
        return lambda: _CommandLine(name, conf, function).carry_out()

    return command_line_of


class _CommandLine:
    """The one of this process, and the exit status that has come of it so far."""

    def __init__(self, name: str, conf: Path, function: Experiment) -> None:
        self._name, self._conf, self._function = name, conf, function
        self._arguments = sys.argv[1:]
        self._verbose = _VERBOSE in os.environ
        self._status = 0
        self._put_back = remembered([])

    def carry_out(self) -> None:
        """Run what it asks for, or print help; ends the process unless all has gone well."""
        with lossy():
            self._carry_out()

    def _carry_out(self) -> None:
        schema.register()
        os.environ[_VERBOSE] = "1"  # errors reach us instead of Hydra's printer
        Sweep.folder, Sweep.options = None, ()
        if not ranks.is_rank_zero():
            sys.argv += ranks.elsewhere()
        try:
            if {"-h", "--help"} & set(self._arguments):
                print(sys.modules[self._function.__module__].__doc__)
                print(text(self._name, self._conf, self._arguments))
                return
            self._compose_and_run()
        except KeyboardInterrupt as how:
            if ranks.is_rank_zero():
                print(f"interrupted{_of_sweep(self._name)[0]}", file=sys.stderr)
            alone = _TERMINATED if isinstance(how, TerminatedError) else _INTERRUPTED
            sys.exit(alone if Sweep.folder is None else STOPPED)
        except Exception as error:
            self._refuse(error)
        told, complete = _of_sweep(self._name)
        if told:
            print(told)
        if not complete:
            self._status = max(self._status, FAILED)
        ranks.part()
        if self._status:
            sys.exit(self._status)

    def _compose_and_run(self) -> None:
        given = flags_first(resumed(flags_first(sys.argv[1:]), self._name))
        Sweep.options = sweeps.with_defaults(given)
        check_given(Sweep.options)
        sys.argv[1:] = Sweep.options
        self._put_back = remembered(Sweep.options)
        composed = hydra.main(
            version_base="1.3", config_path=str(self._conf), config_name=self._name
        )
        with handed_on(sweeps.under_way) if {*MULTIRUN} & {*given} else nullcontext():
            composed(self._job)()

    def _job(self, config: DictConfig) -> float | None:
        """One run; of a sweep for the best options, its objective."""
        try:
            if not self._verbose:
                os.environ.pop(_VERBOSE, None)  # what the run starts is not to have it
            ended = run(self._function, config, self._explained)
        except Exception as error:
            if isinstance(error, ValueError):
                self._put_back()
            self._refuse(error)
            return None
        finally:
            os.environ[_VERBOSE] = "1"
        self._status = max(self._status, ended.status)
        return ended.objective

    def _explained(self, error: Exception) -> str | None:
        """A user's mistake in a line or two; None for anything else."""
        if self._verbose:
            return None
        return explain(error, self._name, self._conf, self._arguments)

    def _refuse(self, error: Exception) -> None:
        """Print a user's mistake and remember it; raise anything else."""
        message = self._explained(error)
        if message is None:
            raise error
        ranks.exit_with_error(message)
        self._status = max(self._status, USAGE)


def _of_sweep(name: str) -> tuple[str, bool]:
    """What has become of the sweep's runs, if there are any, and whether all have finished."""
    if Sweep.folder is None or not any(Sweep.folder.glob("*/status.json")):
        return "", True
    lines, complete = sweeps.summary(Sweep.folder)
    go_on = f"\nto go on: python experiments/{name}.py -m resume={Sweep.folder}"
    return f"\n{lines}{'' if complete else go_on}", complete
