"""Benchmarks, each against what a user would do without the toolkit.

cyclic-dp bench grouped
cyclic-dp bench grouped device=cuda bench.batch=64
"""

import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.cli import entry_point
from toolkit.errors import UserError
from toolkit.format import table
from toolkit.terminal import show, show_activity


@entry_point("bench")
def main(config: DictConfig) -> int:
    from hydra.utils import get_method

    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    start = time.perf_counter()
    show_activity(
        f"measuring {HydraConfig.get().runtime.choices['bench']}, minutes without output"
    )
    device = pick_device(config.device)
    rows = get_method(config.bench._target_)(config.bench, device, config.seed)
    hydra = HydraConfig.get().runtime
    if not rows:
        raise UserError(
            f"bench={hydra.choices['bench']} has nothing to measure: a list is empty"
        )
    folder = Path(hydra.output_dir)
    seconds = time.perf_counter() - start
    write_result(folder, "bench", rows, config, describe(device), seconds)
    short_rows = [
        {column: shorten(cell) for column, cell in row.items()} for row in rows
    ]
    show(f"\n{table(short_rows)}\n\n{describe(device)}\nwritten to {folder}")
    # Benches that judge what they measure have a column `failed`.
    return int(any(row.get("failed") for row in rows))


def shorten(cell: object) -> object:
    """Return a cell of a table, a long text without its end."""
    if isinstance(cell, str) and len(cell) > 60:
        return f"{cell[:57]}..."
    return cell


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    # `bench links` is short for `bench bench=links`.
    if sys.argv[1].isidentifier():
        sys.argv[1] = f"bench={sys.argv[1]}"
    main()
