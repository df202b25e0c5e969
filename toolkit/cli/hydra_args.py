"""What of a command line are Hydra's flags, and of what the options are."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

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


def quoted(text: str) -> str:
    """``text`` as a value that Hydra reads as it is, whatever is in it."""
    if re.fullmatch(r"[A-Za-z0-9_./:+-]+", text):
        return text
    # Backslashes count only before a quote.
    inside = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{inside}'"


def unquoted(value: str) -> str:
    """What Hydra reads of a ``value`` that is quoted; another one as it is."""
    if not value.startswith(("'", '"')):
        return value
    try:
        return str(OverridesParser.create().parse_override(f"value={value}").value())
    except HydraException:
        return value


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
