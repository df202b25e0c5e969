"""``resume=FOLDER`` on a command line: the options of the run or sweep there, and its folder."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from toolkit.cli.hydra_args import MULTIRUN, OWN_FOLDER, key_of, quoted, unquoted
from toolkit.cli.sweeps import STATUS, sweep_options
from toolkit.errors import UserError
from toolkit.torchrun import is_rank_zero

_OVERRIDES = Path(".hydra") / "overrides.yaml"
_OWN = ("resume", "hydra.run.dir")  # options that are set here
_SAME = {"workers": "microbatches", "microbatches": "workers"}  # the later one counts
_UNREADABLE = OSError, UnicodeDecodeError, yaml.YAMLError


def resume_arguments(arguments: Sequence[str], experiment: str) -> list[str]:
    """The command line, after the options of the run that it resumes.

    Raises:
        UserError: the folder is not that of a run of the ``experiment``.
    """
    given = {key_of(argument): argument for argument in arguments}
    if "resume" not in given:
        return [*arguments]
    folder = given["resume"].partition("=")[2]
    if not Path(folder).is_dir():
        folder = unquoted(folder)
    if folder == "null":
        return [*arguments]
    if not Path(folder).is_dir() or not folder:
        raise UserError(f"resume={folder} is not a folder: give the output directory of a run")
    if (of_sweep := sweep_options(Path(folder))) is not None:
        return _sweep_resumed(arguments, of_sweep, folder)
    if given.keys() & {*MULTIRUN}:
        raise UserError(f"resume={folder} is one run: leave out -m")
    before = hydra = None
    with suppress(*_UNREADABLE):
        before = yaml.safe_load((Path(folder) / _OVERRIDES).read_text())
    if not isinstance(before, list) or not all(isinstance(o, str) for o in before):
        raise UserError(
            f"resume={folder} is not the output directory of a run or a sweep: it has no list of"
            f" options in {_OVERRIDES}"
        )
    with suppress(*_UNREADABLE, KeyError, TypeError):
        hydra = yaml.safe_load((Path(folder) / ".hydra" / "hydra.yaml").read_text())["hydra"]
        if (made_by := hydra["job"]["name"]) != experiment:
            raise UserError(
                f"resume={folder} was made by another experiment: python experiments/{made_by}.py"
                f" resume={folder}"
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
    rest = [a if key_of(a) != "resume" else f"resume={quoted(folder)}" for a in arguments]
    rest = [argument for argument in rest if key_of(argument) != "hydra.run.dir"]
    own_folder = [] if given.keys() & {*OWN_FOLDER} else _config_dir(hydra)
    return [*own_folder, *kept, *rest, f"hydra.run.dir={quoted(folder)}"]


def _config_dir(hydra: Any) -> list[str]:
    """The flag for the folder from which a run had choices of its user's own."""
    with suppress(KeyError, TypeError):
        for source in hydra["runtime"]["config_sources"]:
            if source["provider"] == "command-line":
                return [f"--config-dir={source['path']}"]
    return []


def snapshot(arguments: Sequence[str]) -> Callable[[], None]:
    """Remember the options and status of an existing run; return a function that restores them.

    Hydra writes the options before a resumed run can be refused.
    """
    given = {key_of(argument): argument.partition("=")[2] for argument in arguments}
    if "hydra.run.dir" not in given or not is_rank_zero():
        return lambda: None
    folder = Path(unquoted(given["hydra.run.dir"]))
    paths = [path for path in (*folder.glob(".hydra/*.yaml"), folder / STATUS) if path.is_file()]
    contents = {path: path.read_bytes() for path in paths}

    def put_back() -> None:
        for path, content in contents.items():
            with suppress(OSError):
                path.write_bytes(content)

    return put_back


def _sweep_resumed(arguments: Sequence[str], before: Sequence[str], folder: str) -> list[str]:
    own = (*_OWN, *MULTIRUN, "hydra.sweep.dir")
    given = [a for a in arguments if key_of(a) not in own and a not in before]
    if given:
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
    return ["-m", *kept, f"hydra.sweep.dir={quoted(folder)}"]
