"""When CDP helps, and what it costs: memory, devices, step times and staleness next to DP.

    cyclic-dp situations workers=[2,4,8] ratios=[0.5,1,2]

In the first table stages are equal, and a backward takes twice its forward. The second has models
on machines, as experiments/simulate.py has them; +model@models.mine=MODEL and batches.mine=[32]
add one. With compressions=[none,int8,int4] a third table compares compressed messages, with and
without late weights, with PowerSGD and local SGD; with accuracies=FOLDER of a comparison by
study=compression a fourth has their accuracies, too.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import counts
from toolkit.format import table
from toolkit.terminal import show, show_import

if TYPE_CHECKING:
    from toolkit.results.time_to_accuracy import TrainedMethod

LEGEND = """\
M/C: time in which all parameters cross a link once, by a step's computing time
activations: of the fullest device; 1 is what one micro-batch keeps in all
CDP-v1, CDP-v2, affordable: step time by DP's (mean staleness in steps), with
the faster chains; a machine is a group
affordable: no single weight could be fresher in a tenth more time than CDP-v1's
"""
MODEL_LEGEND = """\
M/C: time in which all parameters cross a link once, by a step's computing time
DDP: buckets of 25 MB
CDP-v1, CDP-v2: step time by DDP's, in the fastest chains and cut
"""
SLOW_LINK_LEGEND = """\
Step times by that of DDP with whole messages; CDP in the fastest chains and cut.
Errors of rounding are fed back. Accuracies may differ from row to row.
"""
ACCURACY_LEGEND = """\
time: of a step by that of DDP with whole messages; all train for equal epochs
on the front: no other method is at least as fast and as accurate
"""


@entry_point("situations")
def main(config: DictConfig) -> None:
    show_import()
    from toolkit.cost.situations import (
        assess_situation,
        model_cells,
        situation_cells,
        situations,
    )
    from toolkit.cost.slow_links import slow_link_cells
    from toolkit.results import describe_cpu, write_result
    from toolkit.results.time_to_accuracy import accuracy_cells, time_to_accuracy

    start = time.perf_counter()
    workers = counts(config, "workers")
    trained = trained_methods_of(config)
    # Refuses wrong numbers before the models, which take minutes.
    table_situations = situations(workers, [*config.ratios])
    model_rows = []
    compressed_rows = []
    for row, compressed in assess_models(config, max(workers)):
        model_rows.append(row)
        compressed_rows += compressed
    rows = []
    bar = tqdm(table_situations)
    for situation in bar:
        bar.set_description(f"{situation.name}, {situation.workers} workers")
        rows.append(assess_situation(situation))
    accuracy_rows = time_to_accuracy(trained, compressed_rows)
    folder = output_folder()
    seconds = time.perf_counter() - start
    more = {"models": model_rows, "compressed": compressed_rows}
    if accuracy_rows:
        from toolkit.figures.style import save
        from toolkit.figures.time_to_accuracy_figure import draw_time_to_accuracy

        more["accuracies"] = accuracy_rows
        save(draw_time_to_accuracy(accuracy_rows), folder / "time_to_accuracy")
    write_result(folder, "situations", rows, config, describe_cpu(), seconds, **more)
    show(f"\n{table([situation_cells(row) for row in rows])}\n\n{LEGEND}")
    if model_rows:
        show(f"{table([model_cells(row) for row in model_rows])}\n\n{MODEL_LEGEND}")
    if compressed_rows:
        cells = [slow_link_cells(row) for row in compressed_rows]
        show(f"{table(cells)}\n\n{SLOW_LINK_LEGEND}")
    if accuracy_rows:
        cells = [accuracy_cells(row) for row in accuracy_rows]
        show(f"{table(cells)}\n\n{ACCURACY_LEGEND}")
    show(f"written to {folder}")


def trained_methods_of(config: DictConfig) -> "list[TrainedMethod]":
    """Return the methods of the comparisons in ``accuracies``; none without them."""
    from toolkit.errors import UserError
    from toolkit.results.time_to_accuracy import trained_methods

    folders = config.accuracies
    if isinstance(folders, str):
        folders = [folders]
    if folders and not config.compressions:
        raise UserError(
            f"accuracies={config.accuracies} needs the compressions to simulate, such as"
            " compressions=[none,int8,int4,topk]"
        )
    return trained_methods(folders)


def assess_models(
    config: DictConfig, n_workers: int
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield for each model, micro-batch and machine a row, and rows of compressed messages."""
    import torch

    from toolkit.cli import analysed_form, build_model
    from toolkit.cost import Hardware
    from toolkit.cost.compression import COMPRESSIONS
    from toolkit.cost.situations import assess_model
    from toolkit.cost.slow_links import assess_slow_links
    from toolkit.cost.worker_forms import ModelCosts
    from toolkit.errors import check_choice

    for compression in config.compressions:
        check_choice("compressions", compression, COMPRESSIONS)
    all_hardware = [Hardware.preset(name) for name in config.machines]
    for name in config.batches:
        check_choice("batches", name, [*config.models])
    # All batches are checked before the first model, which takes minutes.
    models_and_batches = []
    for name in config.models:
        for batch in counts(config.batches, name, "batches."):
            models_and_batches.append((name, batch))
    bar = tqdm(models_and_batches)
    for name, batch in bar:
        bar.set_description(f"{name}, micro-batches of {batch}")
        form = analysed_form(
            OmegaConf.create(
                {"model": config.models[name], "shape": None, "classes": None}
            )
        )
        with torch.device("meta"):
            model = build_model(config.models[name], form)
        # One analysis serves all machines.
        costs_of = ModelCosts(model, form.example(batch, "meta"))
        for hardware in all_hardware:
            labels = {"model": name, "batch": batch, "samples": form.samples}
            row = labels | assess_model(costs_of, hardware, n_workers)
            compressed_rows = []
            if config.compressions:
                for compressed_row in assess_slow_links(
                    costs_of, hardware, n_workers, config.compressions
                ):
                    compressed_rows.append(labels | compressed_row)
            yield row, compressed_rows


if __name__ == "__main__":
    main()
