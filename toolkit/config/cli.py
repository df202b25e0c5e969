"""The command line of an experiment: Hydra's, with help on a page and errors in a line.

A user's mistake is what Hydra refuses to compose, or a ValueError raised by the toolkit or the
experiment itself. It ends the program with one message and status 2; anything else is a bug and
keeps its traceback. HYDRA_FULL_ERROR=1 shows every traceback. In a sweep neither ends the other
runs: see :mod:`toolkit.config.sweeps`.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from toolkit.config import ranks, schema, sweeps
from toolkit.config import status as states
from toolkit.config.errors import explain
from toolkit.config.help import text
from toolkit.config.resume import remembered, resumed
from toolkit.config.shorthands import check_given, spell_out
from toolkit.config.status import Status, write_status
from toolkit.config.sweeps import Sweep

_FAILED = 1
_USAGE = 2
STOPPED = 75
"""The exit status of a run or a sweep that a signal has ended, and that can be resumed."""
_INTERRUPTED = 130


@dataclass(frozen=True)
class Ended:
    """How an experiment has ended.

    Attributes:
        status: of the process.
        objective: of a sweep that looks for the best options.
    """

    status: int = 0
    objective: float | None = None


Experiment = Callable[[DictConfig], Ended | int | None]


def entry_point(name: str, conf: Path) -> Callable[[Experiment], Callable[[], None]]:
    """Make a function of a configuration into the experiment ``name``.

    What it returns is the exit status, or how it has ended.

    Args:
        name: its configuration is ``conf/<name>.yaml``.
        conf: the folder of the configuration.
    """

    def decorate(function: Experiment) -> Callable[[], None]:
        def main() -> None:
            schema.register()
            arguments = sys.argv[1:]
            verbose = "HYDRA_FULL_ERROR" in os.environ
            os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of Hydra's printer
            Sweep.folder, Sweep.options = None, ()
            status = 0
            if not ranks.leads():
                sys.argv += ranks.elsewhere()

            put_back = remembered([])

            def explained(error: Exception) -> str | None:
                """A user's mistake in a line or two; None for anything else."""
                return None if verbose else explain(error, name, conf, arguments)

            def refuse(error: Exception) -> None:
                """Print a user's mistake and remember it; raise anything else."""
                nonlocal status
                message = explained(error)
                if message is None:
                    raise error
                ranks.refuse(message)
                status = max(status, _USAGE)

            def job(config: DictConfig) -> float | None:
                nonlocal status
                try:
                    if HydraConfig.get().mode == RunMode.MULTIRUN:
                        ended = _run_of_sweep(function, config, explained)
                    else:
                        ended = _run(function, config, explained)
                except Exception as error:
                    if isinstance(error, ValueError):
                        put_back()
                    refuse(error)
                    return None
                status = max(status, ended.status)
                return ended.objective

            try:
                if {"-h", "--help"} & set(arguments):
                    print(sys.modules[function.__module__].__doc__)
                    print(text(name, conf, arguments))
                    return
                Sweep.options = sweeps.with_defaults(resumed(sweeps.flag_first(sys.argv[1:]), name))
                check_given(Sweep.options)
                sys.argv[1:] = Sweep.options
                put_back = remembered(Sweep.options)
                hydra.main(version_base="1.3", config_path=str(conf), config_name=name)(job)()
            except KeyboardInterrupt:
                if ranks.leads():
                    print(f"interrupted{_of_sweep(name)[0]}", file=sys.stderr)
                sys.exit(_INTERRUPTED if Sweep.folder is None else STOPPED)
            except BrokenPipeError:  # the reader, such as head, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except Exception as error:
                refuse(error)
            told, complete = _of_sweep(name)
            if told:
                print(told)
            if not complete:
                status = max(status, _FAILED)
            ranks.part()
            if status:
                sys.exit(status)

        return main

    return decorate


Explained = Callable[[Exception], str | None]


def _run(function: Experiment, config: DictConfig, explained: Explained) -> Ended:
    """A run, with its status in its folder."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    options = list(hydra_config.overrides.task)

    def tell(state: str, message: str | None = None, objective: float | None = None) -> None:
        if ranks.leads():
            write_status(folder, Status(state, options, message, objective))

    tell(states.RUNNING)
    try:
        _settle(config)
        returned = function(config)
    except KeyboardInterrupt:
        tell(states.STOPPED)
        raise
    except Exception as error:
        tell(states.FAILED, explained(error) or f"{type(error).__name__}: {error}")
        raise
    ended = returned if isinstance(returned, Ended) else Ended(returned or 0)
    state = {0: states.FINISHED, STOPPED: states.STOPPED}.get(ended.status, states.FAILED)
    message = f"it ended with status {ended.status}" if state == states.FAILED else None
    tell(state, message, ended.objective)
    return ended


def _run_of_sweep(function: Experiment, config: DictConfig, explained: Explained) -> Ended:
    """A run that finished before is passed over, one with a checkpoint goes on from there.

    What goes wrong in one is told in its folder, and the others go on.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # other ranks do not know the folder
            options = list(HydraConfig.get().overrides.task)
            if before := sweeps.finished_before(folder, options):
                print(f"run {folder.name} has finished before")
                return Ended(objective=before.objective)
            if "resume" in config and sweeps.has_checkpoint(folder):
                config.resume = str(folder)
        ended = _run(function, config, explained)
    except Exception as error:
        if (message := explained(error)) is not None:
            ranks.refuse(message)
            return Ended(_USAGE)
        if ranks.leads():
            (folder / "error.txt").write_text(traceback.format_exc())
            print(f"error: run {folder.name} has failed: see {folder}/error.txt", file=sys.stderr)
        else:
            traceback.print_exc()
        return Ended(_FAILED)
    if ended.status == STOPPED:
        raise KeyboardInterrupt  # the other runs are not to begin
    return ended


def _of_sweep(name: str) -> tuple[str, bool]:
    """What has become of the sweep's runs, if there are any, and whether all have finished."""
    if Sweep.folder is None or not any(Sweep.folder.glob("*/status.json")):
        return "", True
    lines, complete = sweeps.summary(Sweep.folder)
    go_on = f"\nto go on: python experiments/{name}.py -m resume={Sweep.folder}"
    return f"\n{lines}{'' if complete else go_on}", complete


def _settle(config: DictConfig) -> None:
    """Shorthands spelt out, and what holds for the whole process set."""
    spell_out(config)
    OmegaConf.resolve(config)
    if not 0 <= config.get("seed", 0) < 2**63:
        raise ValueError(f"seed is 0 or more, and below 2**63: got {config.seed}")
    if config.get("threads") is not None:
        if config.threads < 1:
            raise ValueError(f"threads is 1 or more: got {config.threads}")
        import torch

        torch.set_num_threads(config.threads)
