"""Compare DP with CDP in the paper's settings.

Each number is a formula, a count from programs, and, with measured=true, a measurement.

    python experiments/communication.py workers=8
    python experiments/communication.py workers=4 measured=true

Fails if formula, count and measurement differ.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts
from toolkit.format import agreement, counted_cells, measured_cells, table

LEGEND = """\
A: activations of one micro-batch over the whole model; P: parameters of the model
activations, weights: the most that a rank holds (all ranks together); kept: from step to step
sent: by a rank in a step on average; in a slot: the most by any rank
messages: collectives are a ring (all-reduce) or a tree; rounds: of them between two slots
"""
BESIDE = """\
timeline.png: a rank a row, measured on the left; on the right what the simulator makes of the same
program if each op and message takes its median time. They differ mostly where ranks share cores.
"""


@entry_point("communication")
def main(config: DictConfig) -> int:
    from toolkit.results import describe_cpu, write_result
    from toolkit.schedule.paper_table import RULES, SETTINGS, each_row

    start = time.perf_counter()
    n_rows = len(SETTINGS) * len(RULES)
    rows = [*tqdm(each_row(config.workers), "counting", n_rows, leave=False, delay=1)]
    folder = output_folder()
    records: list[dict[str, Any]] = []
    for row in rows:
        formula = {f"{name}_formula": float(value) for name, value in row.formula.items()}
        counted = {name: float(value) for name, value in asdict(row.counted).items()}
        records.append({"setting": row.setting, "rule": row.rule} | formula | counted)
    shown = [counted_cells(r) | {"as by formula": agreement(r, "_formula")} for r in records]
    print(f"\nN = {config.workers}\n\n{table(shown)}\n\n{LEGEND}")
    wrong = differences(rows, "by its formula", "as counted")
    if config.measured:
        ran = measure(config, folder)
        for record, row in zip(records, ran, strict=True):
            record |= {f"{name}_measured": float(value) for name, value in row.measured.items()}
        shown = [measured_cells(r) | {"as counted": agreement(r, "_measured")} for r in records]
        print(f"\nmeasured on processes, one a rank\n\n{table(shown)}\n\n{BESIDE}")
        wrong += differences(ran, "as counted", "as measured")
    seconds = time.perf_counter() - start
    write_result(folder, "communication", records, config, describe_cpu(), seconds)
    print(f"written to {folder}")
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
    else:
        print(f"every formula equals its count{', and its measurement' * config.measured}")
    return int(bool(wrong))


def differences(rows: list[Any], expected: str, found: str) -> list[str]:
    return [
        f"{row.setting}, {row.rule}: {name} is {one} {expected} and {other} {found}"
        for row in rows
        for name, (one, other) in row.differences.items()
    ]


def measure(config: DictConfig, folder: Path) -> list[Any]:
    """Run every setting; draw one of them and its prediction."""
    from toolkit.figures import save, timelines
    from toolkit.runtime import launch
    from toolkit.runtime.meters import predicted_vs_measured as settings

    check_counts(config, "width", "batch")
    n_ranks, sizes = settings.n_ranks(config.workers), (config.workers, config.width, config.batch)
    with tqdm(total=len(settings.SETTINGS) * len(settings.RULES)) as progress:

        def show(rank: int, name: str) -> None:
            if rank == 0:
                progress.set_description(name)
                progress.update()

        options: dict[str, Any] = {"on_report": show, "timeout": config.timeout}
        rows = launch(settings.measure, n_ranks, *sizes, config.timeout, **options)[0]
    shown = next(r for r in rows if (r.setting, r.rule) == ("multi-device", "CDP-v2"))
    pair = settings.measured_and_predicted(shown.measurements, *sizes)
    save(timelines(pair), folder / "timeline")
    pair[0].to_chrome_trace(folder / "trace.json")
    return rows


if __name__ == "__main__":
    main()
