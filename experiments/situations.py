"""When CDP helps, and what it costs: memory, devices, step times and staleness beside DP.

    python experiments/situations.py workers=[2,4,8] ratios=[0.5,1,2]

Stages are equal, and a backward takes twice its forward. For a model and a machine:
experiments/simulate.py.
"""

import time

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import counts
from toolkit.format import table

LEGEND = """\
M/C: time in which all parameters cross a link once, by that of a training step of computation
activations: of the fullest device; 1 is what one micro-batch keeps over the whole model
CDP-v1, CDP-v2, affordable: step time by that of DP (mean staleness in steps), with the faster
chains; in a tenth more time than CDP-v1's no single weight of affordable could be fresher; a
machine is a group
"""


@entry_point("situations")
def main(config: DictConfig) -> None:
    from toolkit.cost.situations import assess_situation, situation_cells, situations
    from toolkit.results import describe_cpu, write_result

    start = time.perf_counter()
    rows = []
    bar = tqdm(situations(counts(config, "workers"), [*config.ratios]))
    for situation in bar:
        bar.set_description(f"{situation.name}, {situation.workers} workers")
        rows.append(assess_situation(situation))
    folder = output_folder()
    seconds = time.perf_counter() - start
    write_result(folder, "situations", rows, config, describe_cpu(), seconds)
    print(f"\n{table([situation_cells(row) for row in rows])}\n\n{LEGEND}")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
