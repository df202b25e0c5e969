"""Checks of options that several benchmarks share."""

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.errors import UserError


def check_cpu(bench: str, device: torch.device) -> None:
    """Raise UserError unless ``device`` is the CPU, the only one that ``bench`` knows."""
    if device.type != "cpu":
        raise UserError(
            f"bench={bench} computes on the CPU: got {device}; give device=cpu"
        )


def check_rules(config: Mapping[Any, Any], *rules: tuple[str, Any, str]) -> None:
    """Raise UserError for the first option that breaks its rule.

    Args:
        config: options of the benchmark.
        rules: names of options, whether they hold, and what holds in words.
    """
    for name, holds, rule in rules:
        if not holds:
            raise UserError(f"bench.{name} {rule}: got {config[name]}")


def check_above_zero(config: Mapping[Any, Any], *names: str) -> None:
    """Raise UserError unless these options are above 0."""
    check_rules(config, *((name, config[name] > 0, "is above 0") for name in names))
