"""One clear line for each user's mistake, with the nearest valid choice."""

import errno
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from toolkit.cli import schema
from toolkit.cli.hydra_args import key_of, shell_option, value_of
from toolkit.errors import UserError, first_line, shortened, suggest
from toolkit.extras import install_command, missing_message

_PLUGINS = {
    "optuna": "hydra-optuna-sweeper",
    "joblib": "hydra-joblib-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
# Hydra and OmegaConf say what is wrong only in the texts of their errors, so it is read from there.
# Where no pattern fits, the text itself is shown.
_LONG_WORD = re.compile(r"\S{400,}")
_TARGET = re.compile(r"Error (locating|in call to) target '([^']*)'")
_NO_MODULE = re.compile(r"Are you sure that module '(\w+)' is installed\?")
_NO_NAME = re.compile(
    r"Are you sure that '(\w+)' is importable from module '([\w.]+)'\?"
)
_UNLOCATED = re.compile(r"Error loading '|Empty path|Located non-")
_NOT_CALLABLE = re.compile(
    r"Expected a callable target, got .* of type '(\w+)'", re.DOTALL
)
_SEVERAL = re.compile(r"Ambiguous value for argument '(.*)'")
_ARGUMENTS = re.compile(
    r"unexpected keyword argument|missing \d+ required|takes at most"
)
_NO_OPTION = re.compile(r"Could not override '([^']+)'")
_VALUE = re.compile(r"Error merging override (.+)")
_OF_TYPE = re.compile(r"could not be converted to (\w+)$")
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
# Said of a list and of a group alike.
_OTHER_SHAPE = "Cannot merge DictConfig with ListConfig"
# Of group choices.
_COLLECTIONS = {"models": "model", "rules": "schedule", "also": "schedule"}
_WITHIN = re.compile(r"is not a subclass of|Cannot assign \w+ to Dict")
_FLAGS = re.compile(r"The --|Only one of --")  # ValueErrors of Hydra
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# torch, on the CPU and on a GPU.
_ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")


def explain(error: Exception, experiment: str) -> str | None:
    """Return the message for a user's mistake, its longest words cut; None for any other error.

    Args:
        error: the exception.
        experiment: name of the experiment.
    """
    message = _message(error, experiment)
    return message and _LONG_WORD.sub(lambda word: shortened(word[0]), message)


def _message(error: Exception, experiment: str) -> str | None:
    """Return the message of :func:`explain`, with words of any length."""
    # Hydra wraps the error of what it calls. The innermost one is the user's.
    while isinstance(error, InstantiationException) and isinstance(
        error.__cause__, Exception
    ):
        message = _of_target(error, error.__cause__)
        if message is not None:
            return message
        error = error.__cause__
    name = type(error).__name__  # by name where the class's package may not be loaded
    if isinstance(error, UserError) or name == "JobFailedError":
        return str(error)
    # Of submitit: a traceback whose last line is the message.
    if name == "FailedJobError":
        return str(error).strip().splitlines()[-1].partition("Error: ")[2] or None
    return _of_machine(error) or _of_values(error) or _of_composition(error, experiment)


# A mistyped name is nobody's package, or somebody's trap: pip install is advised for these only.
_INSTALLABLE = ("timm", "torchvision", "transformers")


def _of_target(error: InstantiationException, cause: Exception) -> str | None:
    """Return the message for a ``_target_`` that is not there, or that takes other options."""
    target_match = _TARGET.match(str(error))
    if target_match is None:
        return None
    # An error within the target's own code is not the user's mistake, and keeps its traceback.
    if target_match[1] != "locating" and not _ARGUMENTS.search(str(cause)):
        return None
    target = target_match[2]
    option = f"_target_: {target or repr('')}"
    if f"model.target={target}" in sys.argv:
        option = f"model.target={target}"
    reason = str(cause).strip().splitlines()[-1]
    if target_match[1] != "locating":
        return f"{option} takes other options: {reason}"
    missing_module = _NO_MODULE.search(reason)
    missing_name = _NO_NAME.search(reason)
    # Of the user's module; Hydra asks whether it is installed.
    import_error = cause.__cause__
    if (
        missing_module
        and import_error
        and not _is_missing(missing_module[1], import_error)
    ):
        return (
            f"{option} cannot be imported: {missing_module[1]} raises"
            f" {type(import_error).__name__}: {first_line(import_error)}"
        )
    if missing_module and missing_module[1] in _INSTALLABLE:
        reason = missing_message(missing_module[1])
    elif missing_module:
        reason = f"there is no module {missing_module[1]}"
    elif missing_name:
        reason = f"{missing_name[2]} has no {missing_name[1]}"
    return f"{option} cannot be imported from {Path.cwd()} or an installed package: {reason}"


def _is_missing(module: str, error: BaseException) -> bool:
    """Return whether there is no such module, rather than an error in it."""
    return isinstance(error, ModuleNotFoundError) and error.name == module


def _of_machine(error: Exception) -> str | None:
    """Return the message for what this machine lacks: memory, a scheduler, a file."""
    if isinstance(error, RuntimeError):
        allocation = _ALLOCATION.search(str(error))
        if allocation:
            return (
                f"out of memory: {allocation[1]} were asked for; try a smaller batch, or"
                " checkpoint=all"
            )
        if 'detect "srun"' in str(error):
            return (
                "hydra/launcher=slurm needs Slurm, and there is no srun here:"
                " log in to its cluster"
            )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{_argument_of(str(error.filename))}: {error.strerror}"
    # Of a write, which names no file.
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"a file cannot be written: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        if module != "toolkit":
            return missing_message(module)
    return None


def _of_values(error: Exception) -> str | None:
    """Return the message for a value that YAML, Optuna, OmegaConf or an import refuses."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name} line {mark.line + 1}: {error.problem}"
    if isinstance(error, ValueError) and _FLAGS.match(str(error)):
        return first_line(error)
    if isinstance(error, ValueError) and _raised_in(error, "optuna", "hydra_plugins"):
        return f"hydra/sweeper=optuna: {first_line(error)}"
    not_callable = _NOT_CALLABLE.match(str(error))
    if not_callable:
        return (
            f"{_target_argument()} is no function or class of a module, such as my_net.NAME: got"
            f" something of type {not_callable[1]}"
        )
    if _UNLOCATED.match(str(error)) and _raised_in(error, "hydra"):
        reason = " ".join(str(error).split())
        return f"a _target_ cannot be imported from {Path.cwd()} or an installed package: {reason}"
    is_value_error = isinstance(error, ValueError) and not isinstance(
        error, OmegaConfBaseException
    )
    if is_value_error and _raised_in(error, "omegaconf"):
        return f"an option names no item of a list or group: {first_line(error)}"
    return None


def _of_composition(error: Exception, experiment: str) -> str | None:
    """Return the message for options that Hydra cannot compose."""
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return _unparsed(error.override)
    if isinstance(error, ConfigCompositionException):
        return _composition(error, experiment)
    if isinstance(error, OmegaConfBaseException | HydraException):
        return " ".join(str(error).split())
    return None


def _unparsed(override: str) -> str:
    """Return the message for an option that Hydra cannot read."""
    option = key_of(override)
    value = value_of(override)
    hint = ""
    if "/" in value:
        hint = f"; a path is quoted twice: {shell_option(option, value)}"
    letter = _foreign_letter(override)
    if letter is None:
        return f"{override!r} is not OPTION=VALUE{hint}"
    if letter in option:
        return (
            f"{override!r}: names of options have letters from a to z: got {letter!r}"
        )
    if not hint and value[0] not in "[{":
        hint = f": {shell_option(option, value)}"
    return f"{override!r}: a text with the letter {letter!r} is quoted twice{hint}"


def _foreign_letter(override: str) -> str | None:
    """Return the first letter outside ASCII if Hydra cannot read ``override`` because of it."""
    letters = [letter for letter in override if not letter.isascii()]
    if not letters:
        return None
    try:
        # If the option can be read without such letters, they are what is wrong with it.
        ascii_override = re.sub(r"[^\x00-\x7f]", "x", override)
        OverridesParser.create().parse_override(ascii_override)
    except HydraException:
        return None
    return letters[0]


def _target_argument() -> str:
    """Return the argument of this command that names the user's model; else ``a _target_``."""
    for argument in sys.argv[1:]:
        if argument.startswith("model.target="):
            return argument
    return "a _target_"


def _argument_of(file_name: str) -> str:
    """Return the argument of this command that has a part of a file's path; else the path."""
    # The user knows the argument, but perhaps not the path that it has led to.
    for argument in sys.argv[1:]:
        value = value_of(argument)
        if len(value) > 1 and value in file_name:
            return argument
    return file_name


def _raised_in(error: BaseException, *packages: str) -> bool:
    """Return whether code of one of the packages raised the error."""
    # The last frame is that of the code that raised it.
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _missing_choice(error: MissingConfigException) -> str:
    """Return the message for a choice that a group does not have."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if choice in _PLUGINS:
        return f"{group}={choice} needs a plugin: {install_command(_PLUGINS[choice])}"
    if not error.options:
        return first_line(error)
    return f"{group}={choice} is unknown: {suggest(choice, error.options)}"


def _composition(error: ConfigCompositionException, experiment: str) -> str:
    message = first_line(error)
    cause = ""
    if isinstance(error.__cause__, Exception):
        cause = first_line(error.__cause__)
    several_values = _SEVERAL.match(message)
    if several_values:
        option, value = key_of(several_values[1]), value_of(several_values[1])
        return (
            f"{several_values[1]} has several values: {option}=[{value}] is a list, and -m"
            f" {several_values[1]} is a run for each"
        )
    option_names = schema.option_names(experiment)
    unknown_option = _NO_OPTION.match(message)
    if unknown_option:
        return _no_option(unknown_option[1], option_names)
    value_match = _VALUE.match(message)
    if value_match:
        return _refused_value(value_match[1], cause, option_names)
    one_line = " ".join(str(error).split())
    if cause:
        return f"{one_line}: {cause}"
    return one_line


def _refused_value(override: str, cause: str, option_names: list[str]) -> str:
    """Return the message for a value of another type than the option's."""
    option = key_of(override)
    value = value_of(override)
    expected_type = _OF_TYPE.search(cause)
    if expected_type and expected_type[1] in _TYPES:
        return f"{override}: {option} is {_TYPES[expected_type[1]]}: got {value!r}"
    is_list = "is not a ListConfig" in cause or _OTHER_SHAPE in cause
    if is_list and not value.startswith("["):
        return f"{override}: {option} is a list: expected {option}=[{value}]"
    if _OTHER_SHAPE not in cause and not _WITHIN.search(cause):
        return f"{override}: {cause}"
    if option in _COLLECTIONS:
        return (
            f"{override}: +{_COLLECTIONS[option]}@{option}.NAME=CHOICE adds one, '~{option}.NAME'"
            f" leaves one out, and {option}.NAME.OPTION=... sets an option of one"
        )
    inner_options = dict.fromkeys(
        name for name in option_names if name.startswith(f"{option}.")
    )
    return (
        f"{override}: {option} has {', '.join(inner_options) or f'+{option}.NAME=...'}"
    )


def _no_option(key: str, option_names: list[str]) -> str:
    if key == "sweep" or "@" in key or key.startswith(("model.arguments.", "own.")):
        return f"there is no {key} yet: +{key}=... adds it"
    # Rules have any name, so the schema calls it NAME; the message has the user's.
    rule = "rules.NAME"
    if key.startswith("rules."):
        rule = ".".join(key.split(".")[:2])
    option_names = [option.replace("rules.NAME", rule) for option in option_names]
    group = key.partition(".")[0]
    if key in option_names:
        return (
            f"{key} is not an option of this choice of {group}: choose another by {group}=CHOICE;"
            f" --help {group}=CHOICE lists its options"
        )
    has_rules = any(name.startswith("rules.") for name in option_names)
    if has_rules and group == "schedule":
        return (
            f"there is no option {key}: the schedules are rules here; +schedule@rules.NAME=CHOICE"
            " adds one, '~rules.NAME' leaves one out, rules.NAME.OPTION sets an option"
        )
    other_options = [
        option for option in option_names if option != group or key == group
    ]
    return f"there is no option {key}: {nearest(key, other_options)}"


def nearest(option: str, option_names: list[str]) -> str:
    """Return advice for an unknown option: the most similar name, if there is one."""
    matches = get_close_matches(option, option_names, n=1)
    if matches:
        return f"did you mean {matches[0]}?"
    return "--help lists the options"
