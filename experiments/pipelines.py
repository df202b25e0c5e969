"""Which method: every one of the catalogue on the same ranks; a figure of the pipelines.

    cyclic-dp pipelines ranks=8 microbatches=[8,16,32]

    cyclic-dp pipelines ranks=8 microbatches=[16,32] costs=my_profile.csv

A backward takes twice as long as its forward; messages and updates take no time. With costs=FILE
stages take the times and the memory of your own profile, as for simulate; messages still take no
time. For a model and a machine: experiments/simulate.py.
"""

import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.errors import UserError
from toolkit.format import count, table
from toolkit.terminal import show, show_import

if TYPE_CHECKING:
    from toolkit.cost.cost_file import FileCosts
    from toolkit.schedule import Schedule

LEGEND = """\
activations, weights: the most that a rank holds (all ranks together)
A, P: the activations of one micro-batch, and the parameters, of the whole model
idle: share of a rank's time in the steady state; late: mean staleness (largest)
flush: each step ends before the next begins; what is sent is in pipelines.csv
"""
COSTS_LEGEND = """\
ms, GB: of a step and of the fullest rank, with the stages of costs=, without
optimizer state; activations and weights are still counted in equal stages
"""
_OTHER_HEADINGS = {"micro-batches": "m", "mean staleness (largest)": "late"}
_LEFT_OUT = ("sent (messages)", "boundaries")  # of 80 columns


def terminal_cells(cells: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a row that fit 80 columns."""
    return {
        _OTHER_HEADINGS.get(heading, heading): cell
        for heading, cell in cells.items()
        if heading not in _LEFT_OUT
    }


def with_more_stages(schedules: "dict[str, Schedule]", n_rows: int) -> dict[str, str]:
    """Return the methods with more stages than a file of costs has rows, and why they are out."""
    return {
        method: f"{schedule.n_stages} stages, and costs= has {count(n_rows, 'row')}"
        for method, schedule in schedules.items()
        if schedule.n_stages > n_rows
    }


def all_schedules(
    config: DictConfig, file_costs: "FileCosts | None"
) -> "tuple[list[tuple[int, str, Schedule]], list[dict[str, Any]]]":
    """Build every method for all numbers of micro-batches.

    Returns:
        number of micro-batches, method and schedule; and a row for each method that is left out.
    """
    from toolkit.cost.pipeline_table import PIPELINES, WORKERS, pipelines

    schedules: list[tuple[int, str, Schedule]] = []
    left_out = []
    for n_microbatches in dict.fromkeys(counts(config, "microbatches")):
        schedule_of_method, reasons = pipelines(
            config.ranks, n_microbatches, {**PIPELINES, **WORKERS}
        )
        if file_costs is not None:
            reasons |= with_more_stages(schedule_of_method, len(file_costs.rows))
        for method, schedule in schedule_of_method.items():
            if method not in reasons:
                schedules.append((n_microbatches, method, schedule))
        for method, reason in reasons.items():
            left_out.append(
                {"microbatches": n_microbatches, "method": method, "why": reason}
            )
    return schedules, left_out


@entry_point("pipelines")
def main(config: DictConfig) -> None:
    show_import()
    from toolkit.cost.cost_file import read_costs
    from toolkit.cost.pipeline_table import (
        PIPELINES,
        assess_pipeline,
        pipeline_cells,
    )
    from toolkit.figures import pipelines as draw
    from toolkit.figures import save
    from toolkit.results import describe_cpu, write_result

    start = time.perf_counter()
    check_counts(config, "ranks")
    file_costs = read_costs(Path(config.costs)) if config.costs else None
    schedules, left_out = all_schedules(config, file_costs)
    if not schedules:
        raise UserError(f"{left_out[0]['method']}: {left_out[0]['why']}")

    records = []
    bar = tqdm(schedules)
    for n_microbatches, method, schedule in bar:
        bar.set_description(f"{method}, {n_microbatches} micro-batches")
        row = assess_pipeline(method, schedule, file_costs)
        records.append(
            # Counts are exact fractions, and JSON has floats.
            {
                name: float(x) if isinstance(x, Fraction) else x
                for name, x in row.items()
            }
        )

    folder = output_folder()
    drawn = [record for record in records if record["method"] in PIPELINES]
    figures = save(draw(drawn), folder / "pipelines")
    seconds = time.perf_counter() - start
    write_result(
        folder, "pipelines", records, config, describe_cpu(), seconds, left_out=left_out
    )
    if file_costs is not None:
        show(f"\n{file_costs.in_words}")
    show(
        f"\n{table([terminal_cells(pipeline_cells(row)) for row in records])}\n\n{LEGEND}"
    )
    if file_costs is not None:
        show(COSTS_LEGEND)
    for missing in left_out:
        show("{microbatches} micro-batches, without {method}: {why}".format(**missing))
    show(f"written to {folder}: {', '.join(path.name for path in figures)}, ...")


if __name__ == "__main__":
    main()
