"""Benchmarks, each against what a user would do without the toolkit.

python experiments/bench.py grouped
python experiments/bench.py grouped device=cuda bench.batch=64
"""

import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.config import entry_point


@entry_point("bench", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> None:
    from hydra.utils import get_method

    from toolkit.tracking import describe, provenance, table, write_csv, write_json
    from toolkit.training import pick_device

    start = time.perf_counter()
    device = pick_device(config.device)
    rows = get_method(config.bench._target_)(config.bench, device, config.seed)
    folder = Path(HydraConfig.get().runtime.output_dir)
    source = provenance(config, describe(device), time.perf_counter() - start)
    write_csv(folder / "bench.csv", rows)
    write_json(folder / "result.json", {"metrics": rows, "provenance": source})
    print(f"\n{table(rows)}\n\n{source['device']}\nwritten to {folder}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isidentifier():
        sys.argv[1] = f"bench={sys.argv[1]}"
    main()
