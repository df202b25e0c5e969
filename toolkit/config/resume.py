"""``resume=FOLDER`` on a command line: the options of what is in FOLDER, and the same folder.

That is a run or a sweep.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from toolkit.config.sweeps import sweep_options

_OVERRIDES = Path(".hydra") / "overrides.yaml"
_OWN = ("resume", "hydra.run.dir")  # which it sets


def resumed(arguments: Sequence[str]) -> list[str]:
    """The command line with the options of the run that it resumes, but for those it gives itself.

    Raises:
        ValueError: the folder is not that of a run.
    """
    given = {_key(argument): argument for argument in arguments}
    folder = given.get("resume", "").partition("=")[2]
    if not folder or folder == "null":
        return [*arguments]
    if (before := sweep_options(Path(folder))) is not None:
        return _sweep_resumed(arguments, before, folder)
    path = Path(folder) / _OVERRIDES
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"resume={folder} is not the output directory of a run or a sweep: there is no"
            f" {_OVERRIDES} that can be read"
        ) from error
    if not isinstance(before, list) or not all(isinstance(o, str) for o in before):
        raise ValueError(f"resume={folder}: {_OVERRIDES} is not a list of options")
    kept = [option for option in before if _key(option) not in {*given, *_OWN}]
    rest = [argument for argument in arguments if _key(argument) not in ("hydra.run.dir",)]
    return [*kept, *rest, f"hydra.run.dir={folder}"]


def _sweep_resumed(arguments: Sequence[str], before: Sequence[str], folder: str) -> list[str]:
    own = (*_OWN, "hydra.sweep.dir", "-m", "--multirun")
    given = [argument for argument in arguments if _key(argument) not in own]
    if given:
        raise ValueError(
            f"resume={folder} is a sweep, which goes on with its own options: leave out"
            f" {' '.join(given)}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"resume={folder} is a sweep, and under torchrun only single runs are resumed: give the"
            " folder of one"
        )
    kept = [option for option in before if _key(option) not in own]
    return ["-m", *kept, f"hydra.sweep.dir={folder}"]


def _key(argument: str) -> str:
    """What an option is of: ``a.b`` of ``+a.b=c``."""
    return argument.partition("=")[0].lstrip("+~")
