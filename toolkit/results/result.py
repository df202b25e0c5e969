"""The result of an experiment: a table, and it with its origin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from toolkit.files import write_csv, write_json
from toolkit.results.provenance import provenance


def write_result(
    folder: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    config: DictConfig,
    device: str,
    seconds: float,
    **more: Any,
) -> dict[str, Any]:
    """Write ``rows`` to ``folder/name.csv``, and with their origin to ``folder/result.json``.

    Args:
        rows: the metrics, all with the same keys.
        config: of the experiment.
        device: on which it ran, in words.
        seconds: that it took.
        more: what else the result has.

    Returns:
        what ``result.json`` holds.
    """
    result = {"metrics": rows, **more, "provenance": provenance(config, device, seconds)}
    write_csv(folder / f"{name}.csv", rows)
    write_json(folder / "result.json", result)
    return result
