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
from toolkit.format import Cells, agreement, counted_cells, measured_cells, table
from toolkit.terminal import show

LEGEND = """\
activations: the most that a rank holds (all ranks together); 1 is those of one
  micro-batch over the whole model
weights, kept, sent, slot: 1 is the parameters of the model
weights: the most that a rank holds; kept: by a rank from step to step
sent: by a rank in a step on average; slot: the most that a rank sends in a slot
rounds: of messages between two slots; collectives are a ring or a tree
"""
_HEADINGS = {"activations (all)": "activations", "in a slot": "slot"}
MEASURED_AND_PREDICTED = """\
timeline.png: one rank per row; measured on the left, simulated on the right,
where each op and message takes its median time. They differ mostly where ranks
share cores.
"""


@entry_point("communication")
def main(config: DictConfig) -> int:
    from toolkit.files import write_csv
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
    counted_rows = [terminal_cells(counted_cells(record)) for record in records]
    write_csv(folder / "communication.csv", records)
    show(f"\nN = {config.workers}\n\n{table(counted_rows)}\n\n{LEGEND}")
    # The table is printed before a mistake ends the command, since it shows where to look.
    mistakes = differences(rows, "by its formula", "as counted")
    if config.measured:
        measured_rows = measure(config, folder)
        for record, row in zip(records, measured_rows, strict=True):
            for name, value in row.measured.items():
                record[f"{name}_measured"] = float(value)
        cells = [
            terminal_cells(measured_cells(record))
            | {"as counted": agreement(record, "_measured")}
            for record in records
        ]
        show(
            f"\nmeasured on processes, one per rank\n\n{table(cells)}\n\n{MEASURED_AND_PREDICTED}"
        )
        mistakes += differences(measured_rows, "as counted", "as measured")
    seconds = time.perf_counter() - start
    write_result(folder, "communication", records, config, describe_cpu(), seconds)
    show(f"written to {folder}: communication.csv, result.json")
    if mistakes:
        show("\n".join(mistakes), file=sys.stderr)
        return 1
    measurement = ", and its measurement" if config.measured else ""
    show(f"every formula equals its count{measurement}")
    return 0


def terminal_cells(cells: Cells) -> Cells:
    """Return a row of the kept table as one of 80 columns: with its units in the legend."""
    short_cells: Cells = {}
    for heading, text in cells.items():
        if heading != "messages":
            short_cells[_HEADINGS.get(heading, heading)] = str(text).removesuffix(" P")
    short_cells["setting"] = str(cells["setting"]).replace(
        "with model parallelism", "model parallel"
    )
    short_cells["activations"] = str(cells["activations (all)"]).removesuffix(" A")
    return short_cells


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

        def show_setting(rank: int, name: str) -> None:
            if rank == 0:
                progress.set_description(name)
                progress.update()

        rows_of_rank = launch(
            settings.measure,
            n_ranks,
            *sizes,
            config.timeout,
            on_report=show_setting,
            timeout=config.timeout,
        )
    # The measurements of all ranks are gathered, and every rank returns the same.
    rows = rows_of_rank[0]
    drawn = next(
        row for row in rows if (row.setting, row.rule) == ("multi-device", "CDP-v2")
    )
    pair = settings.measured_and_predicted(drawn.measurements, *sizes)
    save(timelines(pair), folder / "timeline")
    pair[0].to_chrome_trace(folder / "trace.json")
    return rows


if __name__ == "__main__":
    main()
