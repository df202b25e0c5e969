"""The paper's comparison of DP with CDP, each number as a formula, as counted from programs, and,
if asked, as measured on processes of this machine.

    python experiments/communication.py workers=8
    python experiments/communication.py workers=4 measured=true

Fails if formula, count and measurement differ.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from toolkit.cli import entry_point
from toolkit.cli.validate import check_counts

LEGEND = """\
A: activations of one micro-batch over the whole model; P: parameters of the model
activations: the most that a rank holds; in brackets all ranks together
kept: parameters that a rank keeps from step to step; weights: the most that it holds at once, all
versions
sent: parameters and gradients, by a rank in a step on average; in a slot: the most by any rank
messages: in which they go; collectives as a ring (all-reduce) or a tree
rounds: messages of a stage that wait for each other between two slots
"""


@entry_point("communication", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> int:
    from toolkit.format import agreement, counted_cells, measured_cells, table
    from toolkit.results import describe_cpu, write_result
    from toolkit.schedule.paper_table import compare

    start = time.perf_counter()
    rows = compare(config.workers)
    folder = Path(HydraConfig.get().runtime.output_dir)
    records = [
        {"setting": row.setting, "rule": row.rule}
        | {f"{name}_formula": float(value) for name, value in row.formula.items()}
        | {name: float(value) for name, value in asdict(row.counted).items()}
        for row in rows
    ]
    shown = [counted_cells(r) | {"as by formula": agreement(r, "_formula")} for r in records]
    print(f"\nN = {config.workers}\n\n{table(shown)}\n\n{LEGEND}")
    ran = measure(config, folder) if config.measured else []
    if ran:
        for record, row in zip(records, ran, strict=True):
            record |= {f"{name}_measured": float(value) for name, value in row.measured.items()}
        shown = [
            measured_cells(record) | {"as counted": "no" if row.differences else "yes"}
            for record, row in zip(records, ran, strict=True)
        ]
        print(f"\nmeasured on processes, one a rank\n\n{table(shown)}\n")
    seconds = time.perf_counter() - start
    write_result(folder, "communication", records, config, describe_cpu(), seconds)
    print(f"written to {folder}")
    wrong = 0
    for words, found in (("by its formula", rows), ("as counted", ran)):
        for row in found:
            for name, (expected, value) in row.differences.items():
                wrong += 1
                how = "as counted" if found is rows else "as measured"
                told = f"{name} is {expected} {words} and {value} {how}"
                print(f"{row.setting}, {row.rule}: {told}", file=sys.stderr)
    if not wrong:
        print("every formula equals its count" + (", and its measurement" if ran else ""))
    return int(wrong > 0)


def measure(config: DictConfig, folder: Path) -> list[Any]:
    """Run every setting, and draw one beside its prediction."""
    from toolkit.figures import save, timelines
    from toolkit.results import Progress
    from toolkit.runtime import launch
    from toolkit.runtime.meters import predicted_vs_measured

    check_counts(config, "width", "batch")
    n = config.workers
    n_ranks = predicted_vs_measured.n_ranks(n)
    n_settings = len(predicted_vs_measured.SETTINGS) * len(predicted_vs_measured.RULES)
    with Progress(n_settings, unit="settings") as progress:
        progress.run(f"starting {n_ranks} processes")

        def show(rank: int, name: str) -> None:
            if rank == 0:
                progress.run(name)
                progress.step(1, 1)

        rows = launch(
            predicted_vs_measured.measure,
            n_ranks,
            n,
            config.width,
            config.batch,
            config.timeout,
            on_report=show,
            timeout=config.timeout,
        )[0]
    shown = next(r for r in rows if (r.setting, r.rule) == ("multi-device", "CDP-v2"))
    pair = predicted_vs_measured.beside_prediction(
        shown.measurements, n, config.width, config.batch
    )
    save(timelines(pair), folder / "timeline")
    pair[0].to_chrome_trace(folder / "trace.json")
    return rows


if __name__ == "__main__":
    main()
