"""Check the options of a run's folder before they are used: anybody may have written them.

Hydra imports and calls what a ``_target_`` names, reads a folder of choices that a flag names, and
its own options name files and callbacks. So the options of a folder are those of a list, and
``trust=true`` takes all others too.
"""

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from toolkit.cli import schema
from toolkit.cli.help import choices, folders, groups
from toolkit.cli.hydra_args import key_of, parse, value_of
from toolkit.errors import UserError, shortened
from toolkit.files import conf

_OF_SWEEPS = re.compile(
    r"hydra/(launcher|sweeper(/sampler)?)=\w+"
    r"|hydra\.launcher\.n_jobs=-?\d+"
    r"|hydra\.sweeper\.(n_trials|n_jobs|direction|max_failure_rate|sampler\.seed)=[\w.]+"
)
_PLACES = ("", "rules", "also", "own")  # of GROUP@PLACE.NAME
_CALLED = re.compile(r"[+\w.]*\btarget=([\w.]+)|[+\w.]*\b_target_=([\w.]+)")
_UPLOADS = ("tracking", "tracking.entity", "tracking.project", "tracking.mode")
_OPTIMIZER = re.compile(r"torch\.optim\.[A-Z]\w*")


def check_options(
    options: Sequence[str], arguments: Sequence[str], experiment: str, folder: Path
) -> None:
    """Raise UserError if an option could run code or reach a file that the experiment does not.

    Args:
        options: flags and options that ``folder`` holds.
        arguments: this command line, whose own folder of choices is trusted.
        experiment: train, compare, ...
        folder: the folder, for the message.
    """
    flags = vars(parse(options))
    overrides = flags.pop("overrides")
    # 1. Flags. Only -m is safe: --config-dir, for example, names a folder of choices.
    refused_options = [
        f"--{name.replace('_', '-')}"
        for name in flags
        if flags[name] and name != "multirun"
    ]
    group_names = {name.partition(".")[0] for name in schema.option_names(experiment)}
    group_names |= {*groups(conf())}
    # 2. Options: those of the experiment's groups with values that run nothing new.
    refused_options += [
        option
        for option in overrides
        if not _is_safe(option, group_names, folders(arguments))
    ]
    if refused_options:
        raise UserError(
            f"resume={folder}: its options have {shortened(refused_options[0])}, which could run"
            " code of whoever wrote the folder: add trust=true if you trust it"
        )


def check_links(folder: Path) -> None:
    """Raise UserError if a link leads out of ``folder``, where a resumed run would write."""
    root = folder.resolve()
    for parent, folder_names, file_names in os.walk(folder):
        for path in (Path(parent, name) for name in (*folder_names, *file_names)):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UserError(
                    f"resume={folder}: {path} is a link to {path.resolve()}, where the run would"
                    " write: remove it, or add trust=true if you trust who made it"
                )
        # It links to its logs.
        folder_names[:] = [name for name in folder_names if name != "wandb"]


def _is_safe(
    option: str, group_names: set[str], config_folders: Sequence[Path]
) -> bool:
    # One refusal after another; what none of them applies to only sets values of this project.
    key, value = key_of(option), value_of(option)
    group, _, package = key.partition("@")
    # An interpolation could read the environment, and with it a secret.
    if "${" in option:
        return False
    if key.startswith("hydra"):
        return bool(_OF_SWEEPS.fullmatch(option))
    if (
        group.partition(".")[0] not in group_names
        or package.partition(".")[0] not in _PLACES
    ):
        return False
    # These say whose account a key of this machine uploads to.
    if key in _UPLOADS and value not in ("offline", "disabled"):
        return False
    # Anywhere in the option: a value may be a mapping with a `_target_` within.
    if "target" in option:
        target_match = _CALLED.fullmatch(option)
        target = target_match and (target_match[1] or target_match[2])
        return target in _targets() or bool(target and _OPTIMIZER.fullmatch(target))
    if group in groups(conf()) and not option.startswith("~"):
        offered_choices = [*choices(config_folders, group), "null"]
        return all(choice.strip() in offered_choices for choice in value.split(","))
    return True


@cache
def _targets() -> set[str]:
    """Return the functions and classes that the files of conf/ name as ``_target_``."""
    targets = set()
    for path in conf().rglob("*.yaml"):
        targets |= {*re.findall(r"^ *_target_: (\S+)", path.read_text(), re.M)}
    return targets
