"""What a run was asked for: its experiment and its options, as Hydra has written them."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.cli.validate import expand_workers
from toolkit.results.reader import read_yaml, text_or_none

_RESOLVER = re.compile(r"\$\{[^}]*:")  # as of the environment, which is nobody else's


def options_in(folder: Path) -> dict[str, Any]:
    """Options as Hydra has written them; empty where it wrote none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config: Any = read_yaml(folder / ".hydra" / "config.yaml")
    if not isinstance(config, dict):
        config = {}
    expand_workers(config)
    if not _RESOLVER.search(str(config)):
        with suppress(OmegaConfBaseException, ValueError):  # else as it was written
            config = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    return config


def job_in(folder: Path) -> tuple[str, str | None]:
    """The experiment, and its choice of a schedule; empty where Hydra wrote none."""
    hydra = read_yaml(folder / ".hydra" / "hydra.yaml")
    kind = choice = None
    with suppress(KeyError, TypeError, AttributeError):
        kind = text_or_none(hydra["hydra"]["job"]["name"])
        choice = text_or_none(hydra["hydra"]["runtime"]["choices"].get("schedule"))
    return kind or "", choice


def kind_of(command: Any, config: Mapping[str, Any]) -> str:
    """The experiment, from its command or from what its options are; empty if neither tells."""
    if isinstance(command, str) and (found := re.search(r"(?:^|[\s/])(\w+)\.py\b", command)):
        return found[1]
    if "optimizer" not in config:
        return ""
    if "rules" in config:
        return "compare"
    return "train" if "schedule" in config else ""
