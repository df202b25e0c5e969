"""Make what a choice of a group describes: samples, hardware, or anything with a _target_."""

import os
import sys
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.cost import Hardware
    from toolkit.training.data import SampleSet


_LEAST_BANDWIDTH = 1e4  # bytes a second; a smaller number is of gigabits or gigabytes


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as nested dicts and lists."""
    options: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return options


def make(config: Any, group: str, such_as: str, **arguments: Any) -> Any:
    """Instantiate a choice of ``group``; raise UserError if it has no ``_target_``."""
    if config.get("_target_") is None:
        raise UserError(
            f"this choice of {group} has no _target_: add to its file what makes it, such as"
            f" _target_: {such_as}"
        )
    import_from_here()
    return instantiate(config, **arguments)


def import_from_here() -> None:
    """Add the current folder to the import path, so that a ``_target_`` can name a user's file."""
    if os.getcwd() not in sys.path:
        # First, as Python does for a script in this folder.
        sys.path.insert(0, os.getcwd())


def load_samples(config: DictConfig) -> "SampleSet":
    """Load the samples that options of the group ``data`` describe.

    Args:
        config: options of the group, with a ``_target_`` and its arguments.

    Returns:
        samples for training and for the test.

    Raises:
        UserError: the ``_target_`` does not return a set of samples, or refuses its arguments.
    """
    samples: SampleSet = make(config, "data", "toolkit.training.data.digits")
    if not all(hasattr(samples, name) for name in ("form", "train", "test")):
        raise UserError(
            f"data: {config._target_} gives a {type(samples).__name__}; expected a set with form,"
            " train() and test(), such as toolkit.training.data.Datasets (see conf/README.md)"
        )
    return samples


def build_hardware(config: DictConfig) -> "Hardware":
    """Build the machine that options of the group ``hardware`` describe.

    Args:
        config: options of the group: FLOP/s, bytes/s, memory in bytes, ... as the fields of
            :class:`toolkit.cost.Hardware`.

    Raises:
        UserError: a field is impossible, or a link is as slow as if its unit were another.
    """
    hardware: Hardware = make(config, "hardware", "toolkit.cost.Hardware")
    # The usual mistake: a number of Gbit/s, which would make every schedule look hopeless.
    for name in ("link_bandwidth", "local_bandwidth"):
        bandwidth = getattr(hardware, name)
        if bandwidth < _LEAST_BANDWIDTH:
            raise UserError(
                f"hardware.{name} is in bytes a second, {_LEAST_BANDWIDTH:g} or more: got"
                f" {bandwidth:g}; 10 Gbit/s are hardware.{name}=1.25e9"
            )
    return hardware
