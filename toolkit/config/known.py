"""Options that a ``+`` has added, and that nothing reads."""

from dataclasses import fields, is_dataclass
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from toolkit.errors import UserError


def check_known(config: DictConfig, group: str = "") -> None:
    """Refuse options that a schema lacks, in ``config`` and in its groups.

    What a ``_target_`` is called with is left to what is called.

    Args:
        config: resolved.
        group: that it is, with a dot at its end.

    Raises:
        ValueError: with the first one.
    """
    kind = OmegaConf.get_type(config)
    if "_target_" in config or not is_dataclass(kind):
        return
    known = [field.name for field in fields(kind)]
    for name in map(str, config):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {group}{near[0]}?" if near else "--help lists the options"
            raise UserError(f"+{group}{name}: there is no option {group}{name}: {hint}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            check_known(config[name], f"{group}{name}.")
