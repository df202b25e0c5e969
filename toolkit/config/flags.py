"""What of a command line are Hydra's flags, and of what the options are."""

from collections.abc import Sequence

MULTIRUN = ("-m", "--multirun")
OWN_FOLDER = ("--config-dir", "-cd")
_WITH_A_VALUE = (
    *OWN_FOLDER,
    *("--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p"),
    "--experimental-rerun",
)
_MAYBE_WITH_ONE = ("--info", "-i")


def key_of(argument: str) -> str:
    """What an option is of: ``a.b`` of ``+a.b=c``."""
    return argument.partition("=")[0].lstrip("+~")


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The command line with its flags before all options, which argparse wants together."""
    flags: list[str] = []
    options: list[str] = []
    before = ""
    for argument in arguments:
        is_value = before in _WITH_A_VALUE or (before in _MAYBE_WITH_ONE and "=" not in argument)
        (flags if is_value or argument.startswith("-") else options).append(argument)
        before = argument
    return [*flags, *options]
