"""Benchmarks, each against what a user would do without the toolkit.

python experiments/bench.py grouped
python experiments/bench.py grouped device=cuda bench.batch=64
"""

import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.cli import entry_point
from toolkit.errors import UserError
from toolkit.format import table


@entry_point("bench")
def main(config: DictConfig) -> int:
    from hydra.utils import get_method

    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    start = time.perf_counter()
    device = pick_device(config.device)
    rows = get_method(config.bench._target_)(config.bench, device, config.seed)
    hydra = HydraConfig.get().runtime
    if not rows:
        raise UserError(f"bench={hydra.choices['bench']} has nothing to measure: a list is empty")
    folder, seconds, where = Path(hydra.output_dir), time.perf_counter() - start, describe(device)
    write_result(folder, "bench", rows, config, where, seconds)
    shown = [
        {k: f"{v[:57]}..." if isinstance(v, str) and len(v) > 60 else v for k, v in row.items()}
        for row in rows
    ]
    print(f"\n{table(shown)}\n\n{where}\nwritten to {folder}")
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if sys.argv[1].isidentifier():
        sys.argv[1] = f"bench={sys.argv[1]}"
    main()
