"""Options of an experiment and kept results, from whichever folder a notebook runs in."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.config import schema
from toolkit.config.shorthands import spell_out

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
"""The results that are kept with the code."""


def settings(experiment: str, *options: str) -> DictConfig:
    """The options of ``experiments/<experiment>.py``, as its command line would have them.

    Args:
        experiment: train, compare, memory, ...
        options: such as ``epochs=3`` or ``schedule=cdp_v1``.

    Raises:
        ValueError: there is no such experiment or option.
    """
    schema.register()
    try:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose(experiment, list(options))
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    spell_out(config)
    OmegaConf.resolve(config)
    return config


def hardware(name: str) -> Any:
    """A machine of ``conf/hardware``, such as ``a100_nvlink``."""
    return instantiate(settings("memory", f"hardware={name}").hardware)
