"""Which method: every one of the catalogue on the same ranks; a figure of the pipelines.

    python experiments/pipelines.py ranks=8 microbatches=[8,16,32]

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

LEGEND = """\
activations, weights: the most that a rank holds (all ranks together), all versions
A, P: the activations of one micro-batch, and the parameters, of the whole model
idle: the share of a rank's time in the steady state
staleness: steps by which weights are late; flush: each step ends before the next begins
sent: parameters and gradients that a rank sends in a step, and their messages, on average
boundaries: messages of outputs of stages and their gradients, likewise
"""


@entry_point("pipelines")
def main(config: DictConfig) -> None:
    from toolkit.cost.pipeline_table import METHODS, WORKERS, assess, pipeline_cells, pipelines
    from toolkit.figures import pipelines as draw
    from toolkit.figures import save
    from toolkit.results import describe_cpu, write_result

    start = time.perf_counter()
    check_counts(config, "ranks")
    found: dict[tuple[int, str], Any] = {}
    left_out = []
    for m in dict.fromkeys(counts(config, "microbatches")):
        made, refused = pipelines(config.ranks, m, {**METHODS, **WORKERS})
        found |= {(m, method): schedule for method, schedule in made.items()}
        left_out += [{"microbatches": m, "method": k, "why": why} for k, why in refused.items()]
    rows = []
    for (m, method), schedule in (bar := tqdm(found.items())):
        bar.set_description(f"{method}, {m} micro-batches")
        rows.append(assess(method, schedule))

    folder = output_folder()
    records = [{k: float(v) if isinstance(v, Fraction) else v for k, v in r.items()} for r in rows]
    figures = save(draw([r for r in records if r["method"] in METHODS]), folder / "pipelines")
    seconds = time.perf_counter() - start
    write_result(folder, "pipelines", records, config, describe_cpu(), seconds, left_out=left_out)
    print(f"\n{table([pipeline_cells(row) for row in records])}\n\n{LEGEND}")
    for missing in left_out:
        print("{microbatches} micro-batches, without {method}: {why}".format(**missing))
    print(f"written to {folder}: {', '.join(path.name for path in figures)}, ...")


if __name__ == "__main__":
    main()
