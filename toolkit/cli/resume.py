"""``resume=FOLDER`` on a command line: the options of the run or sweep there, and its folder."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.cli.hydra_args import key_of, parse, quoted, unquoted, value_of
from toolkit.cli.sweeps import STATUS, sweep_options
from toolkit.cli.trust import check_links, check_options
from toolkit.errors import UserError
from toolkit.files import read_plain, started_by
from toolkit.torchrun import is_rank_zero

_OWN = ("resume", "trust", "hydra.run.dir")  # options that are set here
_SAME = {"workers": "microbatches", "microbatches": "workers"}  # the later one counts


def resume_arguments(arguments: Sequence[str], experiment: str) -> list[str]:
    """The command line, after the options of the run that it resumes.

    Raises:
        UserError: the folder is not that of a run of the ``experiment``.
    """
    given = {key_of(argument): argument for argument in arguments}
    if value_of(given.get("resume", "resume=null")) == "null":
        return [*arguments]
    name = value_of(given["resume"])
    folder = Path(name if Path(name).is_dir() else unquoted(name))
    if not folder.is_dir() or not name:
        raise UserError(f"resume={name} is not a folder: give the output directory of a run")
    if (of_sweep := sweep_options(folder)) is not None:
        return _sweep_resumed(arguments, of_sweep, folder, experiment)
    if parse(arguments).multirun:
        raise UserError(f"resume={folder} is one run: leave out -m")
    made_by, before, own_folder = _before(folder)
    if made_by != experiment:
        raise UserError(
            f"resume={folder} was made by another experiment: {started_by(made_by)}"
            f" {shlex.quote(f'resume={folder}')}"
        )
    replaced = {*given, *_OWN}
    replaced |= {other for one, other in _SAME.items() if one in given}
    replaced |= {key.partition("@")[2] for key in given if "@" in key}  # a rule that was left out
    # Options of a choice, such as schedule.delay, go with it when another takes its place.
    changed = {group for group, argument in given.items() if argument not in before}
    kept = []
    for option in before:
        group, dot, _ = key_of(option).partition(".")
        if key_of(option) not in replaced and not (dot and group in changed):
            kept.append(option)
    rest = [argument for argument in arguments if key_of(argument) not in _OWN]
    where = quoted(str(folder))
    own_folder = [] if parse(arguments).config_dir else own_folder
    _check_trusted([*own_folder, *kept], arguments, experiment, folder)
    return [*own_folder, *kept, *rest, f"resume={where}", f"hydra.run.dir={where}"]


def _check_trusted(
    options: Sequence[str], arguments: Sequence[str], experiment: str, folder: Path
) -> None:
    """Raise UserError if ``folder``, or its ``options``, need trust, unless ``trust=true``."""
    given = {key_of(argument): value_of(argument) for argument in arguments}
    if given.get("trust", "").lower() != "true":
        check_options(options, arguments, experiment, folder)
        check_links(folder)


def _before(folder: Path) -> tuple[str, list[str], list[str]]:
    """The experiment of a run, its options, and the flag for a folder of its user's own choices."""
    if not (folder / ".hydra").exists() and (of_result := _of_result(folder)):
        return of_result
    try:
        found = read_plain(folder / ".hydra" / "hydra.yaml")["hydra"]
        sources: list[dict[str, Any]] = found["runtime"]["config_sources"]
        own = [s["path"] for s in sources if s["provider"] == "command-line"]
        options = [str(option) for option in found["overrides"]["task"]]
        return found["job"]["name"], options, [f"--config-dir={path}" for path in own]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"resume={folder} is not the output directory of a run or a sweep: its"
            " .hydra/hydra.yaml has no options"
        ) from error


def _of_result(folder: Path) -> tuple[str, list[str], list[str]] | None:
    """The same of a comparison that was kept, whose result has the command; None without one."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        command = read_plain(folder / "result.json")["provenance"]["command"]
        _, script, *options = shlex.split(command)
        if Path(script).stem == "compare":
            return "compare", options, []
    return None


def snapshot(arguments: Sequence[str]) -> dict[Path, bytes]:
    """Options and status of the run whose folder is given; Hydra replaces them at its start."""
    given = {key_of(argument): value_of(argument) for argument in arguments}
    if "hydra.run.dir" not in given or not is_rank_zero():
        return {}
    folder = Path(unquoted(given["hydra.run.dir"]))
    paths = [*folder.glob(".hydra/*.yaml"), *folder.glob(STATUS)]
    return {path: path.read_bytes() for path in paths}


def restore(files: dict[Path, bytes]) -> None:
    """Write back what :func:`snapshot` has kept, after the run was refused."""
    for path, content in files.items():
        with suppress(OSError):
            path.write_bytes(content)


def _sweep_resumed(
    arguments: Sequence[str], before: Sequence[str], folder: Path, experiment: str
) -> list[str]:
    own = (*_OWN, "-m", "--multirun", "hydra.sweep.dir")
    if given := [a for a in arguments if key_of(a) not in own and a not in before]:
        raise UserError(
            f"resume={folder} is a sweep, which continues with its own options: leave out"
            f" {' '.join(given)}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"resume={folder} is a sweep, and under torchrun only single runs are resumed: give the"
            " folder of one"
        )
    kept = [option for option in before if key_of(option) not in own]
    _check_trusted(kept, arguments, experiment, folder)
    return ["-m", *kept, f"hydra.sweep.dir={quoted(str(folder))}"]
