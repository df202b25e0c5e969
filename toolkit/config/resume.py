"""``resume=FOLDER`` on a command line: the options of the run in FOLDER, and the same folder."""

from collections.abc import Sequence
from pathlib import Path

import yaml

_OVERRIDES = Path(".hydra") / "overrides.yaml"
_OWN = ("resume", "hydra.run.dir")


def resumed(arguments: Sequence[str]) -> list[str]:
    """The command line with the options of the run that it resumes, but for those it gives itself.

    Raises:
        ValueError: the folder is not that of a run.
    """
    given = {_key(argument): argument for argument in arguments}
    folder = given.get("resume", "").partition("=")[2]
    if not folder or folder == "null":
        return [*arguments]
    path = Path(folder) / _OVERRIDES
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"resume={folder} is not the output directory of a run: there is no {_OVERRIDES} that"
            " can be read"
        ) from error
    if not isinstance(before, list) or not all(isinstance(o, str) for o in before):
        raise ValueError(f"resume={folder}: {_OVERRIDES} is not a list of options")
    kept = [option for option in before if _key(option) not in {*given, *_OWN}]
    rest = [argument for argument in arguments if _key(argument) not in ("hydra.run.dir",)]
    return [*kept, *rest, f"hydra.run.dir={folder}"]


def _key(argument: str) -> str:
    """What an option is of: ``a.b`` of ``+a.b=c``."""
    return argument.partition("=")[0].lstrip("+~")
