"""Compare DP with CDP in the paper's settings.

Each number is a formula, a count from programs, and, with measured=true, a measurement.

    cyclic-dp communication workers=8
    cyclic-dp communication workers=4 measured=true

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
MEASURED_AND_PREDICTED = """\
timeline.png: one rank per row; measured on the left; simulated on the right, where each op and
message takes its median time. They differ mostly where ranks share cores.
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
        record: dict[str, Any] = {"setting": row.setting, "rule": row.rule}
        for name, value in row.formula.items():
            record[f"{name}_formula"] = float(value)
        for name, value in asdict(row.counted).items():
            record[name] = float(value)
        records.append(record)
    counted_rows = [counted_cells(record) for record in records]
    print(f"\nN = {config.workers}\n\n{table(counted_rows)}\n\n{LEGEND}")
    mistakes = differences(rows, "by its formula", "as counted")
    if config.measured:
        measured_rows = measure(config, folder)
        for record, row in zip(records, measured_rows, strict=True):
            for name, value in row.measured.items():
                record[f"{name}_measured"] = float(value)
        cells = [
            measured_cells(record) | {"as counted": agreement(record, "_measured")}
            for record in records
        ]
        print(
            f"\nmeasured on processes, one per rank\n\n{table(cells)}\n\n{MEASURED_AND_PREDICTED}"
        )
        mistakes += differences(measured_rows, "as counted", "as measured")
    seconds = time.perf_counter() - start
    write_result(folder, "communication", records, config, describe_cpu(), seconds)
    print(f"written to {folder}")
    if mistakes:
        print(*mistakes, sep="\n", file=sys.stderr)
        return 1
    measurement = ", and its measurement" if config.measured else ""
    print(f"every formula equals its count{measurement}")
    return 0


def differences(rows: list[Any], first_words: str, second_words: str) -> list[str]:
    """Return a sentence for each number that a row has twice, with two values."""
    sentences = []
    for row in rows:
        for name, (first, second) in row.differences.items():
            values = f"{first} {first_words} and {second} {second_words}"
            sentences.append(f"{row.setting}, {row.rule}: {name} is {values}")
    return sentences


def measure(config: DictConfig, folder: Path) -> list[Any]:
    """Run every setting; draw one of them and its prediction."""
    from toolkit.figures import save, timelines
    from toolkit.runtime import launch
    from toolkit.runtime.meters import predicted_vs_measured as settings

    check_counts(config, "width", "batch")
    sizes = (config.workers, config.width, config.batch)
    n_ranks = settings.n_ranks(config.workers)
    with tqdm(total=len(settings.SETTINGS) * len(settings.RULES)) as progress:

        def show(rank: int, name: str) -> None:
            if rank == 0:
                progress.set_description(name)
                progress.update()

        rows_of_rank = launch(
            settings.measure,
            n_ranks,
            *sizes,
            config.timeout,
            on_report=show,
            timeout=config.timeout,
        )
    rows = rows_of_rank[0]
    drawn = next(row for row in rows if (row.setting, row.rule) == ("multi-device", "CDP-v2"))
    pair = settings.measured_and_predicted(drawn.measurements, *sizes)
    save(timelines(pair), folder / "timeline")
    pair[0].to_chrome_trace(folder / "trace.json")
    return rows


if __name__ == "__main__":
    main()
