"""What ``--help`` prints: the groups and their choices, the options and their values."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from toolkit.cli import schema
from toolkit.cli.hydra_args import OWN_FOLDER
from toolkit.options import flat, without


def help_text(name: str, conf: Path, arguments: Sequence[str]) -> str:
    """The help of experiment ``name``, with the values that a command line gives."""
    conf_and_own = folders(conf, arguments)
    found = [f"file://{own.resolve()}" for own in conf_and_own[1:]]
    flags = [k for k, a in enumerate(arguments) if a in OWN_FOLDER]
    overrides = [a for k, a in enumerate(arguments) if not a.startswith("-") and k - 1 not in flags]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
        config = compose(name, [*overrides, f"hydra.searchpath={found}"])
    described = schema.helps(schema.schemas()["experiment"][name])
    lines = [
        f"python experiments/{name}.py [OPTION=VALUE ...]    set options",
        f"python experiments/{name}.py -m OPTION=A,B ...     one run for each combination",
        "",
        "Groups (GROUP=CHOICE, and GROUP.OPTION=VALUE):",
        *(
            f"  {shown:<19} {', '.join(choices(conf_and_own, g))}"
            for shown, g in _groups(name, conf).items()
        ),
        "",
        "Options:",
        *(_option(key, config, described[key]) for key in described),
        "",
        "Options of the groups, as they stand:",
        *(f"  {line}" for line in _values(config, described)),
        "",
        "--config-dir FOLDER adds choices of your own, such as FOLDER/optimizer/mine.yaml;",
        "--cfg job prints the configuration; --hydra-help lists Hydra's flags.",
    ]
    return "\n".join(lines)


def folders(conf: Path, arguments: Sequence[str]) -> list[Path]:
    """Return ``conf`` and the folder that ``--config-dir`` names."""
    found = [conf]
    for k, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag in OWN_FOLDER:
            found += map(Path, [value] if given else arguments[k + 1 : k + 2])
    return found


def choices(found: Sequence[Path], group: str) -> list[str]:
    """What a group offers in some folders, nested choices with their folder."""
    files = [
        (path, folder / group) for folder in found for path in (folder / group).rglob("[!_]*.yaml")
    ]
    return sorted({str(path.relative_to(folder))[: -len(".yaml")] for path, folder in files})


def groups(conf: Path) -> list[str]:
    """The project's own; those of Hydra itself are not among them."""
    return sorted(path.name for path in conf.iterdir() if path.is_dir() and path.name != "hydra")


def _groups(name: str, conf: Path) -> dict[str, str]:
    """The groups that the experiment's defaults name, directly or through another file.

    Returns:
        the group by how it is written: as itself, or ``group@place.NAME`` where it stands often.
    """
    known = groups(conf)
    found: dict[str, str] = {}
    for entry in yaml.safe_load((conf / f"{name}.yaml").read_text())["defaults"]:
        if isinstance(entry, str):
            if (conf / f"{entry}.yaml").is_file() and entry != "output":
                found |= _groups(entry, conf)
        else:
            group = next(iter(entry)).removeprefix("override ")
            plain, _, place = group.partition("@")
            if plain in known:
                parent = place.rpartition(".")[0]
                found[f"{plain}@{parent}.NAME" if parent else plain] = plain
    return found


def _option(key: str, config: DictConfig, description: str) -> str:
    return f"  {f'{key}={_plain(config[key])}':<20} {description}"


def _values(config: DictConfig, described: dict[str, str]) -> Iterator[str]:
    options: Any = OmegaConf.to_container(config)
    for name, value in without(flat(options), described).items():
        group, _, last = name.rpartition(".")
        if group and last != "_target_" and not str(value).startswith("${"):
            helps = schema.helps(OmegaConf.get_type(OmegaConf.select(config, group)))
            yield f"{f'{name}={_plain(value)}':<30} {helps.get(last, '')}".rstrip()


def _plain(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
