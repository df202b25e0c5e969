"""Help text of ``--help``: groups with their choices, and options with their values."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from toolkit.cli import schema
from toolkit.cli.hydra_args import parse
from toolkit.files import CONSOLE, conf, started_by
from toolkit.options import flat
from toolkit.terminal import wrapped


def help_text(name: str, arguments: Sequence[str]) -> str:
    """Return the help of experiment ``name``, with the values that a command line sets."""
    config_folders = folders(arguments)
    # compose() does not read --config-dir, so the folder goes into the search path.
    search_path = [f"file://{folder.resolve()}" for folder in config_folders[1:]]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf())):
        overrides = [*parse(arguments).overrides, f"hydra.searchpath={search_path}"]
        config = compose(name, overrides, return_hydra_config=True)
    lines = [
        f"{started_by(name)} [OPTION=VALUE ...]    set options",
        f"{started_by(name)} -m OPTION=A,B ...     one run for each combination",
        "",
        "Groups (GROUP=CHOICE, and GROUP.OPTION=VALUE):",
        *dict.fromkeys(_groups(config.hydra.runtime.choices, config_folders)),
        "",
        "Options, as they stand:",
        *_options(config),
        "",
        "--config-dir FOLDER adds choices of your own, such as FOLDER/optimizer/mine.yaml;",
        "--cfg job prints the configuration; --hydra-help lists Hydra's flags.",
    ]
    return wrapped("\n".join(lines))


def description(text: str) -> str:
    """Return a script's docstring in lines of the terminal's width.

    Paragraphs are filled; commands, which are indented or alone, stay lines of their own.
    """
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        if not paragraph.startswith((" ", CONSOLE)):
            paragraph = " ".join(paragraph.splitlines())
        paragraphs.append(wrapped(paragraph))
    return "\n\n".join(paragraphs) + "\n"


def folders(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration folder, and the folder of ``--config-dir`` if it is set."""
    config_dir = parse(arguments).config_dir
    if config_dir is None:
        return [conf()]
    return [conf(), Path(config_dir)]


def choices(config_folders: Sequence[Path], group: str) -> list[str]:
    """Return the choices of a group in several folders; nested choices include their folder."""
    names = set()
    for config_folder in config_folders:
        folder = config_folder / group
        # Files that begin with an underscore are bases of others, and no choices.
        for path in folder.rglob("[!_]*.yaml"):
            names.add(str(path.relative_to(folder)).removesuffix(".yaml"))
    return sorted(names)


def groups(folder: Path) -> list[str]:
    """Return the project's groups, whose choices an option names."""
    # Hydra's own, and the tables of papers, which ``only=`` selects.
    others = ("hydra", "papers")
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and path.name not in others
    )


def _groups(
    choice_of_group: DictConfig, config_folders: Sequence[Path]
) -> Iterator[str]:
    """Yield a line per group; ``group@place.NAME`` for a group with several choices."""
    for key in map(str, choice_of_group):
        if not key.startswith("hydra/"):
            group_label = re.sub(r"\..*", ".NAME", key)
            yield f"  {group_label:<19} {', '.join(choices(config_folders, key.partition('@')[0]))}"


def _options(config: DictConfig) -> Iterator[str]:
    """Yield a line per option: name, value and help text."""
    # Hydra's own options are none of the experiment's.
    with open_dict(config):
        del config.hydra
    options: Any = OmegaConf.to_container(config)
    for name, value in flat(options).items():
        group, _, option = name.rpartition(".")
        node = config
        if group:
            node = OmegaConf.select(config, group)
        if option != "_target_" and not str(value).startswith("${"):
            text = schema.helps(OmegaConf.get_type(node)).get(option, "")
            yield f"  {f'{name}={_plain(value)}':<30} {text}".rstrip()


def _plain(value: object) -> str:
    """Return a value as a command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    return str(value)
