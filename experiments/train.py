"""Train one model by one schedule.

python experiments/train.py schedule=cdp_v2 data=digits seed=3
python experiments/train.py -m schedule=dp,cdp_v1,cdp_v2 seed=0,1,2
torchrun --nproc-per-node 4 experiments/train.py runtime=distributed schedule=cdp_v2
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.config import entry_point, leads


@entry_point("train", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> None:
    from toolkit.tracking import Progress, describe, provenance, table, write_csv, write_json
    from toolkit.training import Epoch, prepare

    start = time.perf_counter()
    job = prepare(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    with Progress(config.epochs, shown=leads()) as progress:
        progress.run(f"{job.schedule.name}, seed {config.seed}")

        def report(epoch: Epoch) -> None:
            progress.note(
                f"loss {epoch.train_loss:.3f}, test {epoch.top1:.2%},"
                f" {epoch.images_per_second:.0f} images/s"
            )

        epochs = [asdict(epoch) for epoch in job.run(report, progress.step)]
    measured = job.measurements()
    if not leads():
        return
    seconds = time.perf_counter() - start
    write_csv(folder / "epochs.csv", epochs)
    write_json(
        folder / "result.json",
        {
            "schedule": job.schedule.name,
            "metrics": epochs[-1],
            "ranks": measured.by_rank() if measured else [{"rank": r} for r in range(job.n_ranks)],
            "provenance": provenance(config, describe(job.device), seconds),
        },
    )
    print(table([{"schedule": job.schedule.name, "seed": config.seed} | epochs[-1]]))
    if measured:
        write_measured(measured, folder)
        print(f"\nmeasured in the first {config.runtime.record} training steps:\n")
        print(table([readable(row) for row in measured.by_rank()]))
    print(f"\nwritten to {folder}")


def write_measured(measured: Any, folder: Path) -> None:
    """Tables, a figure and a trace of the steps that were measured."""
    from toolkit.figures import save, timelines
    from toolkit.tracking import write_csv

    timeline = measured.timeline()
    write_csv(folder / "ranks.csv", measured.by_rank())
    save(timelines([timeline]), folder / "timeline")
    timeline.to_chrome_trace(folder / "trace.json")
    timeline.to_frame().to_csv(folder / "spans.csv", index=False)


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """A rank's row as the terminal shows it."""
    return {
        "rank": row["rank"],
        "peak activations (MB)": round(row["peak_activations"] / 1e6, 3),
        "peak weights (MB)": round(row["peak_weights"] / 1e6, 3),
        "messages sent": row["messages_sent"],
        "MB sent": round(row["bytes_sent"] / 1e6, 3),
    }


if __name__ == "__main__":
    main()
