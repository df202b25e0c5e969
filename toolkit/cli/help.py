"""What ``--help`` prints: the groups and their choices, the options and their values."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from toolkit.cli import schema
from toolkit.cli.hydra_args import parse
from toolkit.files import conf, started_by
from toolkit.options import flat


def help_text(name: str, arguments: Sequence[str]) -> str:
    """The help of experiment ``name``, with the values that a command line gives."""
    found = folders(arguments)
    more = [f"file://{own.resolve()}" for own in found[1:]]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf())):
        given = [*parse(arguments).overrides, f"hydra.searchpath={more}"]
        config = compose(name, given, return_hydra_config=True)
    lines = [
        f"{started_by(name)} [OPTION=VALUE ...]    set options",
        f"{started_by(name)} -m OPTION=A,B ...     one run for each combination",
        "",
        "Groups (GROUP=CHOICE, and GROUP.OPTION=VALUE):",
        *dict.fromkeys(_groups(config.hydra.runtime.choices, found)),
        "",
        "Options, as they stand:",
        *_options(config),
        "",
        "--config-dir FOLDER adds choices of your own, such as FOLDER/optimizer/mine.yaml;",
        "--cfg job prints the configuration; --hydra-help lists Hydra's flags.",
    ]
    return "\n".join(lines)


def folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folder of the configuration, and that which ``--config-dir`` names."""
    own = parse(arguments).config_dir
    return [conf()] if own is None else [conf(), Path(own)]


def choices(found: Sequence[Path], group: str) -> list[str]:
    """What a group offers in some folders, nested choices with their folder."""
    files = [
        (path, folder / group) for folder in found for path in (folder / group).rglob("[!_]*.yaml")
    ]
    return sorted({str(path.relative_to(folder))[: -len(".yaml")] for path, folder in files})


def groups(folder: Path) -> list[str]:
    """The project's own groups; those of Hydra itself are not among them."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "hydra")


def _groups(chosen: DictConfig, found: Sequence[Path]) -> Iterator[str]:
    """Lines on the groups of an experiment; ``group@place.NAME`` for one with several choices."""
    for key in map(str, chosen):
        if not key.startswith("hydra/"):
            shown = re.sub(r"\..*", ".NAME", key)
            yield f"  {shown:<19} {', '.join(choices(found, key.partition('@')[0]))}"


def _options(config: DictConfig) -> Iterator[str]:
    with open_dict(config):
        del config.hydra
    options: Any = OmegaConf.to_container(config)
    for name, value in flat(options).items():
        group, _, last = name.rpartition(".")
        node = OmegaConf.select(config, group) if group else config
        if last != "_target_" and not str(value).startswith("${"):
            text = schema.helps(OmegaConf.get_type(node)).get(last, "")
            yield f"  {f'{name}={_plain(value)}':<30} {text}".rstrip()


def _plain(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
