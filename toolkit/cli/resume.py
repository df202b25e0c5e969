"""``resume=FOLDER`` on a command line: restore the options of the run or sweep in a folder."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.cli.hydra_args import key_of, parse, quoted, unquoted, value_of, values_of
from toolkit.cli.sweeps import sweep_options
from toolkit.cli.trust import check_links, check_options
from toolkit.errors import UserError
from toolkit.files import read_plain, started_by

_OWN = ("resume", "trust", "hydra.run.dir")  # options that are set here
_SAME = {"workers": "microbatches", "microbatches": "workers"}  # the later one counts


def resume_arguments(arguments: Sequence[str], experiment: str) -> list[str]:
    """Return the command line, preceded by the options of the run that it resumes.

    Raises:
        UserError: the folder is not that of a run of the ``experiment``.
    """
    # 1. The folder, and what has been made in it.
    argument_of_option = {key_of(argument): argument for argument in arguments}
    if value_of(argument_of_option.get("resume", "resume=null")) == "null":
        return [*arguments]
    folder = _resumed_folder(value_of(argument_of_option["resume"]))
    # A sweep's folder has the folders of its runs, and no options of a run.
    options_of_sweep = sweep_options(folder)
    if options_of_sweep is not None:
        return _sweep_resumed(arguments, options_of_sweep, folder, experiment)
    if parse(arguments).multirun:
        raise UserError(f"resume={folder} is one run: leave out -m")
    made_by_experiment, earlier_options, config_dir = _made_in(folder)
    if made_by_experiment != experiment:
        raise UserError(
            f"resume={folder} was made by another experiment: {started_by(made_by_experiment)}"
            f" {shlex.quote(f'resume={folder}')}"
        )

    # 2. Its options, without those that this command line replaces.
    kept_options = _kept_options(earlier_options, argument_of_option)

    # 3. This command line comes after them, since of an option that is set twice the last counts.
    new_arguments = [argument for argument in arguments if key_of(argument) not in _OWN]
    quoted_folder = quoted(str(folder))
    if parse(arguments).config_dir:
        config_dir = []
    _check_trusted([*config_dir, *kept_options], arguments, experiment, folder)
    return [
        *config_dir,
        *kept_options,
        *new_arguments,
        f"resume={quoted_folder}",
        f"hydra.run.dir={quoted_folder}",
    ]


def trust_option(folder: Path, experiment: str) -> str:
    """Return `` trust=true`` if a command that resumes the run in ``folder`` needs it, else "".

    A run of a user's model needs it: its options name code.
    """
    try:
        resume_arguments([f"resume={quoted(str(folder))}"], experiment)
    except UserError:
        return " trust=true"
    return ""


def resuming(folder: Path, experiment: str) -> str:
    """Return the options that resume the run in ``folder``, quoted for a shell."""
    return shlex.quote(f"resume={folder}") + trust_option(folder, experiment)


def _resumed_folder(name: str) -> Path:
    """Return the folder that ``resume=NAME`` means; raise UserError if there is none."""
    folder = Path(name)
    if not folder.is_dir():
        # The shell may have left Hydra's quotes, which a path with commas or brackets needs.
        folder = Path(unquoted(name))
    # Path("") is the current folder, which nobody has named.
    if not folder.is_dir() or not name:
        raise UserError(
            f"resume={name} is not a folder: give the output directory of a run"
        )
    return folder


def _kept_options(
    earlier_options: Sequence[str], argument_of_option: Mapping[str, str]
) -> list[str]:
    """Return the options of an earlier command line that a new one does not replace.

    Args:
        earlier_options: options of the earlier command line.
        argument_of_option: arguments of the new one, by the names of their options.
    """
    replaced_options = {*argument_of_option, *_OWN}
    for option, synonym in _SAME.items():
        if option in argument_of_option:
            replaced_options.add(synonym)
    for key in argument_of_option:
        if "@" in key:
            # schedule@rules.cdp_v1=... brings back a rule that ~rules.cdp_v1 has left out.
            replaced_options.add(key.partition("@")[2])
    # Options of a choice, such as schedule.delay, go with it when another takes its place.
    changed_groups = {
        group
        for group, argument in argument_of_option.items()
        if argument not in earlier_options
    }
    kept_options = []
    for option in earlier_options:
        group, separator, _ = key_of(option).partition(".")
        belongs_to_changed_group = bool(separator) and group in changed_groups
        if key_of(option) not in replaced_options and not belongs_to_changed_group:
            kept_options.append(option)
    return kept_options


def _check_trusted(
    options: Sequence[str], arguments: Sequence[str], experiment: str, folder: Path
) -> None:
    """Raise UserError if ``folder``, or its ``options``, need trust, unless ``trust=true``."""
    if values_of(arguments).get("trust", "").lower() != "true":
        check_options(options, arguments, experiment, folder)
        check_links(folder)


def _made_in(folder: Path) -> tuple[str, list[str], list[str]]:
    """Return the experiment of a run, its options, and its ``--config-dir`` flag."""
    if not (folder / ".hydra").exists():
        command_of_result = _of_result(folder)
        if command_of_result:
            return command_of_result
    try:
        hydra_config = read_plain(folder / ".hydra" / "hydra.yaml")["hydra"]
        sources: list[dict[str, Any]] = hydra_config["runtime"]["config_sources"]
        choice_folders = [
            source["path"] for source in sources if source["provider"] == "command-line"
        ]
        options = [str(option) for option in hydra_config["overrides"]["task"]]
        return (
            hydra_config["job"]["name"],
            options,
            [f"--config-dir={path}" for path in choice_folders],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"resume={folder} is not the output directory of a run or a sweep: its"
            " .hydra/hydra.yaml has no options"
        ) from error


def _of_result(folder: Path) -> tuple[str, list[str], list[str]] | None:
    """Return the same from the command in ``result.json`` of a comparison; else None."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        command = read_plain(folder / "result.json")["provenance"]["command"]
        # `cyclic-dp compare OPTIONS`, or `python compare.py OPTIONS` of older versions.
        _, script, *options = shlex.split(command)
        if Path(script).stem == "compare":
            return "compare", options, []
    return None


def _sweep_resumed(
    arguments: Sequence[str],
    sweep_arguments: Sequence[str],
    folder: Path,
    experiment: str,
) -> list[str]:
    folder_options = (*_OWN, "-m", "--multirun", "hydra.sweep.dir")
    other_options = [
        argument
        for argument in arguments
        if key_of(argument) not in folder_options and argument not in sweep_arguments
    ]
    if other_options:
        raise UserError(
            f"resume={folder} is a sweep, which continues with its own options: leave out"
            f" {' '.join(other_options)}"
        )
    # Each rank would look for itself which runs are left, and ranks might disagree.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"resume={folder} is a sweep, and under torchrun only single runs are resumed: give the"
            " folder of one"
        )
    kept_options = [
        option for option in sweep_arguments if key_of(option) not in folder_options
    ]
    _check_trusted(kept_options, arguments, experiment, folder)
    return ["-m", *kept_options, f"hydra.sweep.dir={quoted(str(folder))}"]
