"""Train one model by one schedule.

python experiments/train.py schedule=cdp_v2 data=digits seed=3
python experiments/train.py -m schedule=dp,cdp_v1,cdp_v2 seed=0,1,2
"""

import time
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.config import entry_point


@entry_point("train", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> None:
    from toolkit.tracking import Progress, describe, provenance, table, write_csv, write_json
    from toolkit.training import Epoch, prepare

    start = time.perf_counter()
    job = prepare(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    with Progress(config.epochs) as progress:
        progress.run(f"{job.schedule.name}, seed {config.seed}")

        def report(epoch: Epoch) -> None:
            progress.note(
                f"loss {epoch.train_loss:.3f}, test {epoch.top1:.2%},"
                f" {epoch.images_per_second:.0f} images/s"
            )

        epochs = [asdict(epoch) for epoch in job.run(report, progress.step)]
    seconds = time.perf_counter() - start
    write_csv(folder / "epochs.csv", epochs)
    write_json(
        folder / "result.json",
        {
            "schedule": job.schedule.name,
            "metrics": epochs[-1],
            "provenance": provenance(config, describe(job.device), seconds),
        },
    )
    print(table([{"schedule": job.schedule.name, "seed": config.seed} | epochs[-1]]))
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    main()
