"""One clear line for each user's mistake, with the nearest valid choice."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from toolkit.cli import schema
from toolkit.cli.help import choices, folders, groups
from toolkit.cli.hydra_args import key_of, quoted
from toolkit.errors import UserError, first_line, last_line, suggest

_PLUGINS = {
    ("hydra/sweeper", "optuna"): "hydra-optuna-sweeper",
    ("hydra/launcher", "joblib"): "hydra-joblib-launcher",
}
_NO_TARGET = re.compile(r"Error locating target '([^']+)'")
_NOT_TAKEN = re.compile(
    r"Error in call to target '([^']+)'.*(?:unexpected keyword argument|missing \d+ required)", re.S
)
_SWEEP = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'")
_EXISTS = re.compile(r"An item is already at '([^']+)'")
_NO_OPTION = re.compile(r"Could not override '([^']+)'")
_VALUE = re.compile(r"Error merging override (.+)")
_IN_PRESET = re.compile(r"In '([^']+)': \w+ raised while composing config")
_NOT_IN_CHOICE = re.compile(r"not in '\w+'.*full_key: (\w+\.[\w.]+)", re.DOTALL)
_WITHIN = re.compile(r"is not a subclass of|Cannot assign \w+ to Dict")
_TYPES = {
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a valid bool": "true or false",
    "is not Optional": "never null",
    "is not a ListConfig": "a list, such as [a,b]",
    "to string": "one word, or a quoted text",
}


def explain(error: Exception, experiment: str, conf: Path, arguments: list[str]) -> str | None:
    """Return the message for a user's mistake; None for any other error.

    Args:
        error: the exception.
        experiment: name of the experiment.
        conf: folder of the configuration.
        arguments: of the command line.
    """
    while isinstance(error, InstantiationException) and isinstance(error.__cause__, Exception):
        if found := _NO_TARGET.match(str(error)):
            return (
                f"_target_: {found[1]} cannot be imported: {last_line(error.__cause__)} Give"
                f" package.module.name, from the current folder ({Path.cwd()}) or an installed"
                " package"
            )
        if (wrong := _NOT_TAKEN.search(str(error))) and isinstance(error.__cause__, TypeError):
            return f"_target_: {wrong[1]} cannot be called so: {error.__cause__}"
        error = error.__cause__
    name = type(error).__name__  # by name where the class's package may not be loaded
    if isinstance(error, UserError) or name == "JobFailedError":
        return str(error)
    if name == "FailedJobError":  # of submitit: a traceback whose last line is the message
        return str(error).strip().splitlines()[-1].partition("Error: ")[2] or None
    if isinstance(error, RuntimeError) and "Storage size calculation overflowed" in str(error):
        return "tensors would be larger than any memory: lower batch, or the sizes of the model"
    if isinstance(error, RuntimeError) and 'detect "srun"' in str(error):
        return "hydra/launcher=slurm needs Slurm, and there is no srun here: log in to its cluster"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, yaml.MarkedYAMLError) and (where := error.problem_mark):
        return f"{where.name} line {where.line + 1}: {error.problem}"
    if isinstance(error, ValueError) and _raised_in(error, "optuna", "hydra_plugins"):
        none_ended = "No trials are completed" in str(error)
        hint = "no run has finished: give hydra.sweeper.n_trials=1 or more, and mend failed ones"
        return f"hydra/sweeper=optuna: {hint if none_ended else first_line(error)}"
    found_in = folders(conf, arguments)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error, conf, found_in)
    if isinstance(error, OverrideParseException):
        option, _, value = error.override.partition("=")
        hint = f'; a path is quoted twice: "{option}={quoted(value)}"' if "/" in value else ""
        return f"{error.override!r} is not OPTION=VALUE{hint}"
    if isinstance(error, ConfigCompositionException):
        return _composition(error, experiment, conf, arguments)
    if isinstance(error, OmegaConfBaseException | HydraException):
        for path in _own_files(found_in[1:], arguments):
            if isinstance(yaml.safe_load(path.read_text()), list):
                return f"{path}: it is a list; a choice has options by name, such as lr: 0.1"
        return first_line(error)
    if isinstance(error, ValueError) and _raised_in(error, "hydra"):
        # Hydra does not name a group that is set to null or to a number.
        for argument in arguments:
            group, _, choice = argument.partition("=")
            if not group:
                return f"{argument!r} is not OPTION=VALUE"
            if group in groups(conf) and choice not in (known := choices(found_in, group)):
                return f"{argument} is unknown: {suggest(choice, known)}"
        return first_line(error)
    return None


def _raised_in(error: BaseException, *packages: str) -> bool:
    """Whether code of one of the packages raised the error."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _missing_choice(error: MissingConfigException, conf: Path, found_in: Sequence[Path]) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if choice.startswith("submitit_"):
        return "hydra/launcher=slurm needs submitit: pip install hydra-submitit-launcher"
    if plugin := _PLUGINS.get((group, choice)):
        return f"{group}={choice} needs a plugin: pip install {plugin}"
    if group.startswith("hydra/") and error.options:
        return f"{group}={choice} is unknown: {suggest(choice, error.options)}"
    while group and group not in groups(conf):
        group, _, nested = group.rpartition("/")
        choice = f"{nested}/{choice}"
    known = choices(found_in, group) if group else []
    return f"{group}={choice} is unknown: {suggest(choice, known)}" if group else first_line(error)


def _composition(
    error: ConfigCompositionException, experiment: str, conf: Path, arguments: list[str]
) -> str:
    message = first_line(error)
    cause = first_line(error.__cause__) if isinstance(error.__cause__, Exception) else ""
    if found := _SWEEP.match(message):
        return f"{found[1]} gives several values: add -m for one run of each"
    if found := _EXISTS.search(message):
        return f"{found[1]} has a value already: change it without the +"
    if found := _NO_OPTION.match(message):
        return _no_option(found[1], experiment, conf, arguments)
    if found := _VALUE.match(message):
        option = key_of(found[1])
        for part, expected in _TYPES.items():
            if part in cause:
                return f"{found[1]}: {option} is {expected}"
        if _WITHIN.search(cause):
            return f"{found[1]}: {option} has options of its own{_within(option, experiment)}"
    if found := _IN_PRESET.match(message):
        preset, lines = found[1], str(error).splitlines()
        if wrong := _NOT_IN_CHOICE.search(str(error)):
            group = wrong[1].partition(".")[0]
            return (
                f"{preset} sets {wrong[1]}, which this choice of {group} does not have: take the"
                f" preset without {group}=..., or its options without the preset"
            )
        return f"{preset}: {next(filter(None, map(str.strip, lines[1:])), str(error))}"
    return f"{message}: {cause}" if cause else message


def _within(option: str, experiment: str) -> str:
    """How to set what ``option`` holds."""
    if option == "rules":
        return ": +schedule@rules.NAME=... adds a rule, ~rules.NAME leaves one out"
    known = dict.fromkeys(schema.option_names(experiment))
    inner = [name for name in known if name.startswith(f"{option}.")]
    return f", {', '.join(inner)}" if inner else f": +{option}.NAME=... sets one"


def _no_option(key: str, experiment: str, conf: Path, arguments: list[str]) -> str:
    rule = ".".join(key.split(".")[:2]) if key.startswith("rules.") else "rules.NAME"
    known = [option.replace("rules.NAME", rule) for option in schema.option_names(experiment)]
    group, _, name = key.rpartition(".")
    missing = f"there is no option {key}: "
    if group and key in known and group.startswith("rules."):
        return f"{missing}there is no such rule; write +schedule@{rule}=... to add it"
    if group and key in known:
        return f"{key} is not an option of this choice of {group}; --help GROUP=CHOICE lists them"
    if group == "rules":
        return f"there is no rule {name} yet: write +schedule@{key}=cdp_v2, or another schedule"
    if key == "sweep" or "@rules." in key or key.startswith("model.arguments."):
        return f"there is no {key} yet: write +{key}=... to add it"
    if key in groups(conf):
        return f"{experiment} cannot take {key}=... here; --help lists what it takes"
    if (experiment, group) == ("compare", "schedule"):
        return f"a comparison has a schedule a rule: write rules.NAME.{name}"
    siblings = [option.rpartition(".")[2] for option in known if option.startswith(f"{group}.")]
    for path in _own_files(folders(conf, arguments)[1:], arguments, group):
        own = yaml.safe_load(path.read_text())
        if isinstance(own, dict) and "defaults" not in own:
            siblings = [str(name) for name in own if name != "_target_"]
    if near := get_close_matches(name, siblings, n=1):
        return f"{missing}did you mean {group}.{near[0]}?"
    if siblings:
        return f"{missing}{group} has {', '.join(siblings)}"
    near = get_close_matches(key, known, n=1)
    return missing + (f"did you mean {near[0]}?" if near else "--help lists the options")


def _own_files(own: Sequence[Path], arguments: list[str], group: str = "") -> list[Path]:
    """Files from --config-dir that ``arguments`` choose, for ``group`` or for all groups."""
    found = []
    for argument in arguments:
        where, choice = key_of(argument), argument.partition("=")[2]
        if group in ("", where):
            found += [folder / where / f"{choice}.yaml" for folder in own]
    return [path for path in found if path.is_file()]
