"""``resume=FOLDER`` on a command line: the options of what is in FOLDER, and the same folder.

That is a run or a sweep.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from toolkit.cli.hydra_args import MULTIRUN, OWN_FOLDER, key_of, quoted, unquoted
from toolkit.cli.process import is_rank_zero
from toolkit.cli.sweeps import STATUS, sweep_options
from toolkit.errors import UserError

_OVERRIDES = Path(".hydra") / "overrides.yaml"
_OWN = ("resume", "hydra.run.dir")  # which it sets
_SAME = {"workers": "microbatches", "microbatches": "workers"}  # of which the later one counts


def resume_arguments(arguments: Sequence[str], experiment: str) -> list[str]:
    """The command line with the options of the run that it resumes, but for those it gives itself.

    Raises:
        ValueError: the folder is not that of a run of the ``experiment``.
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
    if (before := sweep_options(Path(folder))) is not None:
        return _sweep_resumed(arguments, before, folder)
    if given.keys() & {*MULTIRUN}:
        raise UserError(f"resume={folder} is one run: leave out -m")
    path = Path(folder) / _OVERRIDES
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"resume={folder} is not the output directory of a run or a sweep: there is no"
            f" {_OVERRIDES} that can be read"
        ) from error
    if not isinstance(before, list) or not all(isinstance(o, str) for o in before):
        raise UserError(f"resume={folder}: {_OVERRIDES} is not a list of options")
    made_by = _made_by(Path(folder))
    if made_by not in (None, experiment):
        raise UserError(
            f"resume={folder} was made by another experiment: python experiments/{made_by}.py"
            f" resume={folder}"
        )
    replaced = {*given, *_OWN}
    replaced |= {other for one, other in _SAME.items() if one in given}
    replaced |= {key.partition("@")[2] for key in given if "@" in key}  # a rule that was left out
    kept = [o for o in before if key_of(o) not in replaced and not _of_another(o, given, before)]
    own = {name: f"{name}={quoted(folder)}" for name in _OWN}
    rest = [own.get(key_of(argument), argument) for argument in arguments]
    rest = [argument for argument in rest if argument != own["hydra.run.dir"]]
    return [*_own_folder(Path(folder), given), *kept, *rest, own["hydra.run.dir"]]


def _own_folder(folder: Path, given: Mapping[str, str]) -> list[str]:
    """Where a run had choices of its user's own from, unless that is given anew."""
    if given.keys() & {*OWN_FOLDER}:
        return []
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        found = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())
        for source in found["hydra"]["runtime"]["config_sources"]:
            if source["provider"] == "command-line":
                return [f"--config-dir={source['path']}"]
    return []


def _of_another(option: str, given: Mapping[str, str], before: Sequence[str]) -> bool:
    """Whether an option is of a choice, such as a schedule, that another now takes the place of."""
    group, dot, _ = key_of(option).partition(".")
    return bool(dot) and group in given and given[group] not in before


def _made_by(folder: Path) -> str | None:
    """The experiment whose folder it is, if that is told."""
    try:
        found = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())
        return str(found["hydra"]["job"]["name"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def snapshot(arguments: Sequence[str]) -> Callable[[], None]:
    """What puts the options and the status of a run that is there already back as they are now.

    A run that is refused is then what it was before.
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
            f"resume={folder} is a sweep, which goes on with its own options: leave out"
            f" {' '.join(given)}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"resume={folder} is a sweep, and under torchrun only single runs are resumed: give the"
            " folder of one"
        )
    kept = [option for option in before if key_of(option) not in own]
    return ["-m", *kept, f"hydra.sweep.dir={quoted(folder)}"]
