"""Separate Hydra's flags from options, and quote values."""

import re
import shlex
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
    # argparse would print its usage and exit; this error is shown as any other.
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


def values_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of a command line's options by name; of an option set twice, the last."""
    return {key_of(argument): value_of(argument) for argument in arguments}


def quoted(text: str) -> str:
    """Quote ``text``, so that Hydra reads it as it is."""
    if re.fullmatch(r"[A-Za-z0-9_./:+-]+", text):
        return text
    # Hydra reads \' within quotes as a quote, so ``it's`` becomes ``'it\'s'``.
    # Backslashes count only before a quote.
    escaped = re.sub(
        r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text
    )
    return f"'{escaped}'"


def unquoted(value: str) -> str:
    """Return what Hydra reads from ``value``, which may be quoted."""
    if not value.startswith(("'", '"')):
        return value
    try:
        return str(OverridesParser.create().parse_override(f"value={value}").value())
    except HydraException:
        return value


def shell_option(name: str, value: str) -> str:
    """Return option ``name`` with the text ``value`` as one word to paste into a shell.

    The value is quoted for Hydra, and the whole for the shell.
    """
    option = f"{name}={quoted(value)}"
    # Double quotes are easier to read around Hydra's single ones, where the shell keeps the rest.
    if "'" in option and not re.search(r'["$`\\!]', option):
        return f'"{option}"'
    return shlex.quote(option)
