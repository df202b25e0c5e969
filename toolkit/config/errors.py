"""A user's mistake in one or two lines, with the nearest valid choice."""

import re
import traceback
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from toolkit.config import schema
from toolkit.config.help import choices, groups

_TOOLKIT = Path(__file__).resolve().parents[1]


def explain(error: Exception, experiment: str, conf: Path) -> str | None:
    """The message for a user's mistake; None for anything else."""
    while isinstance(error, InstantiationException) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, ValueError | FloatingPointError) and _ours(error, conf):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error, conf)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not OPTION=VALUE"
    if isinstance(error, ConfigCompositionException):
        return _composition(error, experiment)
    if isinstance(error, OmegaConfBaseException | HydraException):
        return _first_line(error)
    return None


def _ours(error: Exception, conf: Path) -> bool:
    """Whether the toolkit or an experiment raised it, rather than a library that they call."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return raised.is_relative_to(_TOOLKIT) or raised.is_relative_to(conf.resolve().parent)


def _missing_choice(error: MissingConfigException, conf: Path) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    while group and group not in groups(conf):
        group, _, nested = group.rpartition("/")
        choice = f"{nested}/{choice}"
    if not group:
        return _first_line(error)
    valid = choices(conf, group)
    return f"{group}={choice} is unknown: {_nearest(choice, valid)}choose one of {', '.join(valid)}"


def _composition(error: ConfigCompositionException, experiment: str) -> str:
    """Hydra's own words, but for what it says at length: an option that does not exist."""
    message = _first_line(error)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    if not (
        found := re.search(
            r"[Cc]ould not (?:override|append to config\. An item is"
            r" already at) '([^']+)'",
            message,
        )
    ):
        why = f": {_first_line(cause)}" if cause else ""
        return f"{message}{why}"
    key = found[1]
    known = schema.options(experiment)
    if key in known:
        group = key.split(".")[0]
        return f"{key} is not an option of this choice of {group}; --help GROUP=CHOICE lists them"
    hint = _nearest(key, known) or "--help lists the options"
    return f"there is no option {key}: {hint.strip()}"


def _nearest(word: str, valid: list[str]) -> str:
    near = get_close_matches(word, valid, n=1, cutoff=0.4)
    return f"did you mean {near[0]}? " if near else ""


def _first_line(error: Exception) -> str:
    return next(line.strip() for line in str(error).splitlines() if line.strip())
