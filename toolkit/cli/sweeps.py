"""Sweeps: many runs of one command line, which go on where they were broken off.

Each run has a folder below the sweep's, and its status there. Started again in the same folder, a
sweep passes over the runs that have finished and resumes those that have saved a checkpoint.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from toolkit.cli.hydra_args import key_of
from toolkit.cli.ranks import is_rank_zero
from toolkit.cli.status import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    Status,
    is_under_way,
    read_status,
)
from toolkit.errors import UserError
from toolkit.files import has_checkpoint
from toolkit.options import ENDED, UNDER_WAY

_NAME = "sweep.json"


class Sweep(Callback):
    """Keeps a sweep's command line in its folder, which Hydra tells nobody else."""

    folder: ClassVar[Path | None] = None
    """Of the sweep that this process has launched last."""
    options: ClassVar[Sequence[str]] = ()
    """Of the command line."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from toolkit.files import write_json

        if not is_rank_zero():
            return
        Sweep.folder = folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _NAME, {"options": list(Sweep.options)})


def under_way() -> bool:
    """Whether a run of the sweep that this process has launched has not ended."""
    return Sweep.folder is not None and any(map(is_under_way, Sweep.folder.iterdir()))


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """A command line with what Optuna's sweeper should do here unless told otherwise.

    It looks for the best accuracy, goes on when a run fails, and draws from a seed, so that a sweep
    that was broken off draws the same options again.
    """
    if "hydra/sweeper=optuna" not in arguments:
        return [*arguments]
    defaults = {"direction": "maximize", "max_failure_rate": "1.0", "sampler.seed": "0"}
    if "hydra/sweeper/sampler=grid" in arguments:
        del defaults["sampler.seed"]
    given = set(map(key_of, arguments))
    named = {f"hydra.sweeper.{name}": value for name, value in defaults.items()}
    return [*arguments, *(f"{name}={value}" for name, value in named.items() if name not in given)]


def sweep_options(folder: Path) -> list[str] | None:
    """The command line of the sweep in ``folder``; None if there is none."""
    try:
        options = json.loads((folder / _NAME).read_text())["options"]
        return [str(option) for option in options]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def finished_before(folder: Path, options: Sequence[str]) -> Status | None:
    """The status of a run of an earlier start of the sweep, if it has finished.

    Args:
        folder: of the run.
        options: that it is to have now.

    Raises:
        ValueError: it had others.
    """
    before = read_status(folder)
    if before is None:
        return None
    if list(before.options) != list(options):
        raise UserError(
            f"{folder} holds the run of other options ({' '.join(before.options)}): start the"
            " sweep again as it was with -m resume=FOLDER, or in a folder of its own"
        )
    return before if before.state == FINISHED else None


def left_in(folder: Path) -> str:
    """What ``folder`` has that a run, or a comparison, can go on from; "" if nothing."""
    if has_checkpoint(folder):
        return "the checkpoints of a run"
    begun = (folder / UNDER_WAY).glob("*")
    compared = (folder / ENDED).is_file() or any(map(has_checkpoint, begun))
    return "the runs of a comparison" if compared else ""


def summary(folder: Path) -> tuple[str, bool]:
    """What has become of a sweep's runs, and whether all of them have finished.

    Returns:
        a line, and one more for each run that has not finished.
    """
    found = {path.parent: read_status(path.parent) for path in folder.glob("**/status.json")}
    runs = {path: status for path, status in found.items() if status is not None}
    states = [status.state for status in runs.values()]
    words = {FINISHED: "finished", FAILED: "failed", STOPPED: "stopped", RUNNING: "broken off"}
    counts = [f"{states.count(s)} {word}" for s, word in words.items() if s in states]
    lines = [f"{len(runs)} run{'s' * (len(runs) != 1)} in {folder}: {', '.join(counts)}"]
    for path, status in sorted(runs.items(), key=lambda item: _order(item[0])):
        if status.state != FINISHED:
            why = f": {status.message}" if status.message else ""
            name = f"{path.relative_to(folder)} ({' '.join(status.options)})"
            lines.append(f"  {words[status.state]}: {name}{why}")
    return "\n".join(lines), all(state == FINISHED for state in states)


def _order(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdecimal() else (-1, str(path))
