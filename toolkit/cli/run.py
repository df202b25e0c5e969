"""A run of an experiment, alone or in a sweep, with its status in its folder."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import ranks, sweeps
from toolkit.cli import status as states
from toolkit.cli.interrupts import interrupted
from toolkit.cli.shorthands import settle, use_threads
from toolkit.cli.status import Status, alone_in, write_status
from toolkit.cli.streams import lossy
from toolkit.errors import UserError

FAILED = 1
USAGE = 2
STOPPED = 75
"""The exit status of a run or a sweep that a signal has ended, and that can be resumed."""


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
Explained = Callable[[Exception], str | None]
"""What makes a user's mistake a line or two; None for anything else."""


def run(function: Experiment, config: DictConfig, explained: Explained) -> Ended:
    """Run ``function``; in a sweep, what goes wrong is told in the run's folder."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _run_of_sweep(function, config, explained)
    return _run(function, config, explained)


def _run(function: Experiment, config: DictConfig, explained: Explained) -> Ended:
    """A run, in a folder that no other one is in, nor has left what it could go on from.

    The first rank sees to that: others, of a run that is resumed, have its folder, too.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    with alone_in(folder) if ranks.is_rank_zero() else nullcontext():
        fresh = ranks.is_rank_zero() and not config.get("resume") and not ranks.restarted()
        if fresh and (left := sweeps.left_in(folder)):
            way_on = f"resume={folder} goes on with it; " if "resume" in config else ""
            raise UserError(
                f"{folder} has {left}: {way_on}for another one give another hydra.run.dir"
            )
        return _told(function, config, explained, folder)


def _told(function: Experiment, config: DictConfig, explained: Explained, folder: Path) -> Ended:
    """A run, with its status in its folder."""
    options = list(HydraConfig.get().overrides.task)

    def tell(state: str, message: str | None = None, objective: float | None = None) -> None:
        if ranks.is_rank_zero():
            write_status(folder, Status(state, options, message, objective))

    tell(states.RUNNING)
    try:
        with interrupted(), lossy():  # here, too: joblib's processes have no command line
            settle(config, options)
            use_threads(config)
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
            if "resume" in config and sweeps.left_in(folder):
                config.resume = str(folder)
        ended = _run(function, config, explained)
    except Exception as error:
        if (message := explained(error)) is not None:
            ranks.exit_with_error(message)
            return Ended(USAGE)
        if ranks.is_rank_zero():
            (folder / "error.txt").write_text(traceback.format_exc())
            print(f"error: run {folder.name} has failed: see {folder}/error.txt", file=sys.stderr)
        else:
            traceback.print_exc()
        return Ended(FAILED)
    if ended.status == STOPPED:
        raise KeyboardInterrupt  # the other runs are not to begin
    return ended
