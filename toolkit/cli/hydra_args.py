"""Separate Hydra's flags from options, and quote values."""

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
    """Name of an option: ``a.b`` of ``+a.b=c``."""
    return argument.partition("=")[0].lstrip("+~")


def quoted(text: str) -> str:
    """Quote ``text``, so that Hydra reads it as it is."""
    if re.fullmatch(r"[A-Za-z0-9_./:+-]+", text):
        return text
    # Backslashes count only before a quote.
    inside = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{inside}'"


def unquoted(value: str) -> str:
    """Return what Hydra reads from ``value``, which may be quoted."""
    if not value.startswith(("'", '"')):
        return value
    try:
        return str(OverridesParser.create().parse_override(f"value={value}").value())
    except HydraException:
        return value


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Put flags before all options, since argparse expects them together."""
    flags: list[str] = []
    options: list[str] = []
    before = ""
    for argument in arguments:
        is_value = before in _WITH_A_VALUE or (before in _MAYBE_WITH_ONE and "=" not in argument)
        (flags if is_value or argument.startswith("-") else options).append(argument)
        before = argument
    return [*flags, *options]
