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
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args([*arguments])


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}: --hydra-help lists the flags, --help the options")


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Put flags before all options, since Hydra expects the options together."""
    options = parse(arguments).overrides
    return [*(argument for argument in arguments if argument not in options), *options]


def check_flags(flags: Namespace) -> None:
    """Refuse flags that Hydra ignores in this combination.

    Args:
        flags: of :func:`parse`.

    Raises:
        UserError: a flag lacks the one that it goes with, or contradicts another.
    """
    for name in ("resolve", "package"):
        if getattr(flags, name) and flags.cfg is None:
            raise UserError(
                f"--{name} goes with --cfg, which prints the configuration: add --cfg job"
            )
    value_of_mode = {
        "--run": flags.run,
        "--multirun": flags.multirun,
        "--cfg": flags.cfg,
        "--info": flags.info,
        "--shell-completion": flags.shell_completion,
    }
    modes_given = [mode for mode, value in value_of_mode.items() if value]
    if len(modes_given) > 1:
        raise UserError(f"{' and '.join(modes_given)} exclude each other: give one of them")


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
    # Backslashes count only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
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
