"""Separate Hydra's flags from options, and quote values."""

import re
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from toolkit.errors import UserError


def parse(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's flags by name, and the options, in any order, as ``overrides``.

    Raises:
        UserError: there is no such flag, or its value is wrong.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args([*arguments])


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}: --hydra-help lists the flags, --help the options")


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Put flags before all options, since Hydra expects the options together."""
    options = parse(arguments).overrides
    return [*(argument for argument in arguments if argument not in options), *options]


def key_of(argument: str) -> str:
    """Name of an option: ``a.b`` of ``+a.b=c``."""
    return argument.partition("=")[0].lstrip("+~")


def value_of(argument: str) -> str:
    """Value of an option as it is written: ``c`` of ``+a.b=c``."""
    return argument.partition("=")[2]


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
