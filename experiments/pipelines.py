"""Which method: every one of the catalogue on the same ranks; a figure of the pipelines.

    cyclic-dp pipelines ranks=8 microbatches=[8,16,32]

A backward takes twice as long as its forward; messages and updates take no time. For a model and a
machine: experiments/simulate.py.
"""

import time
from fractions import Fraction
from typing import Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.format import table
from toolkit.terminal import show

LEGEND = """\
activations, weights: the most that a rank holds (all ranks together), all versions
A, P: the activations of one micro-batch, and the parameters, of the whole model
idle: the share of a rank's time in the steady state; late: mean staleness (largest)
flush: each step ends before the next begins; what is sent is in pipelines.csv
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


@entry_point("pipelines")
def main(config: DictConfig) -> None:
    from toolkit.cost.pipeline_table import (
        PIPELINES,
        WORKERS,
        assess_pipeline,
        pipeline_cells,
        pipelines,
    )
    from toolkit.figures import pipelines as draw
    from toolkit.figures import save
    from toolkit.results import describe_cpu, write_result

    start = time.perf_counter()
    check_counts(config, "ranks")
    schedules: list[tuple[int, str, Any]] = []
    left_out = []
    for n_microbatches in dict.fromkeys(counts(config, "microbatches")):
        made_schedules, reasons = pipelines(config.ranks, n_microbatches, {**PIPELINES, **WORKERS})
        for method, schedule in made_schedules.items():
            schedules.append((n_microbatches, method, schedule))
        for method, reason in reasons.items():
            left_out.append({"microbatches": n_microbatches, "method": method, "why": reason})

    records = []
    bar = tqdm(schedules)
    for n_microbatches, method, schedule in bar:
        bar.set_description(f"{method}, {n_microbatches} micro-batches")
        row = assess_pipeline(method, schedule)
        records.append(
            {name: float(x) if isinstance(x, Fraction) else x for name, x in row.items()}
        )

    folder = output_folder()
    drawn = [record for record in records if record["method"] in PIPELINES]
    figures = save(draw(drawn), folder / "pipelines")
    seconds = time.perf_counter() - start
    write_result(folder, "pipelines", records, config, describe_cpu(), seconds, left_out=left_out)
    show(f"\n{table([terminal_cells(pipeline_cells(row)) for row in records])}\n\n{LEGEND}")
    for missing in left_out:
        show("{microbatches} micro-batches, without {method}: {why}".format(**missing))
    show(f"written to {folder}: {', '.join(path.name for path in figures)}, ...")


if __name__ == "__main__":
    main()
