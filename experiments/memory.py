"""Activation memory of N workers, together and shifted uniformly, on a real model.

    cyclic-dp memory model=resnet50 workers=[4,8,32] batch=32
    cyclic-dp memory model.target=my_package.my_model shape=[3,160,160]
    cyclic-dp memory model=vit_b_16 extra_time=0.1 stages=24

Nothing is computed or allocated, except with axis=measured. With extra_time, also the least memory
of shifted micro-batches some of whose stages compute their forward again, and how to train so.
"""

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.cli.hydra_args import shell_option
from toolkit.errors import check_choice
from toolkit.format import size
from toolkit.terminal import show, show_import

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from toolkit.cost import Hardware, MemoryCurve


LEGEND = """\
together: all workers run the same op at the same moment, as in DP
shifted uniformly: worker i starts i/N of a step later, as in CDP
1 - mean/peak: what infinitely many shifted workers save
time axis: how long each op takes"""

AGAIN_LEGEND = """\
together: as in DP; at once: workers shifted, computing at the same time
op after op: shifted, one op at a time, as runtime.order=scheduled runs them
below: saved of "together"; limit: of infinitely many workers"""


@entry_point("memory")
def main(config: DictConfig) -> None:
    show_import()
    import torch

    from toolkit.cli import analysed_form, build_hardware, build_model, model_name
    from toolkit.cost import AXES, memory_curve
    from toolkit.figures import memory_curves, save
    from toolkit.format import again_cells, table
    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    start = time.perf_counter()
    workers = counts(config, "workers")
    check_counts(config, "batch")
    check_choice("axis", config.axis, AXES)
    hardware = build_hardware(config.hardware)
    measured = config.axis == "measured"
    device = pick_device(config.device) if measured else torch.device("meta")
    form = analysed_form(config)
    example = form.example(config.batch, device)
    with torch.device(device):
        model = build_model(config.model, form)
    axes = [axis for axis in AXES if axis != "measured" or measured]
    curves = {
        axis: memory_curve(model, example, axis, hardware, config.precision)
        for axis in axes
    }

    curve_rows, records = summary(curves, workers, hardware)
    folder = output_folder()
    curve = curves[config.axis]
    name = f"{model_name(config.model)} in {config.precision}"
    title = f"{name}, batch {config.batch}, time axis: {curve_rows[config.axis]['time axis']}"
    device_name = describe(device) if measured else "meta tensors"
    least_peaks: list[dict[str, Any]] = []
    if config.extra_time is not None:
        # The choice needs shapes only, also where the time axis was measured.
        meta_example = form.example(config.batch, "meta")
        least_peaks, commands = compute_again(
            config, model.to("meta"), meta_example, workers, hardware, folder
        )
        records += [{"axis": "stages", **row} for row in least_peaks]
        columns = dict.fromkeys(column for record in records for column in record)
        records = [columns | record for record in records]
    # Only now, since the options of stages may be refused above.
    figures = save(memory_curves(curve, workers, title), folder / "memory")
    write_result(
        folder, "memory", records, config, device_name, time.perf_counter() - start
    )

    show(f"\n{name}: one micro-batch of {config.batch} keeps {size(curve.peak)}\n")
    show("Peak of N workers shifted uniformly, below that of N workers together:\n")
    show(table([*curve_rows.values()]))
    show(f"\n{LEGEND}")
    if least_peaks:
        show("\nThe same, where stages also compute their forward again:\n")
        show(table([again_cells(row) for row in least_peaks]))
        show(f"\n{AGAIN_LEGEND}")
        show("\ntrain so, with data=... and the same model and batch:\n")
        show("\n".join(commands))
    show(f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, ...")


def summary(
    curves: "dict[str, MemoryCurve]", workers: Sequence[int], hardware: "Hardware"
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return a row of the table by time axis, and the records of the result."""
    from toolkit.format import reduction_cells

    curve_rows, records = {}, []
    for axis, curve in curves.items():
        reductions = {n_workers: curve.reduction(n_workers) for n_workers in workers}
        axis_name = f"roofline ({hardware.name})" if axis == "roofline" else axis
        cells = reduction_cells(reductions, curve.largest_reduction)
        curve_rows[axis] = {"time axis": axis_name} | cells
        for n_workers, reduction in reductions.items():
            records.append(
                {
                    "axis": axis,
                    "workers": n_workers,
                    "peak_bytes_together": n_workers * curve.peak,
                    "peak_bytes_shifted": float(curve.shifted(n_workers)[1].max()),
                    "reduction": reduction,
                    "largest_reduction": curve.largest_reduction,
                }
            )
    return curve_rows, records


def compute_again(
    config: DictConfig,
    model: "nn.Module",
    example: Any,
    workers: Sequence[int],
    hardware: "Hardware",
    folder: "Path",
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row and a command for each number of workers; write their schedules to ``folder``.

    Args:
        config: options of the experiment.
        model: the model, on the meta device.
        example: inputs of a micro-batch, on the meta device.
        workers: numbers of workers.
        hardware: machine whose roofline gives the times.
        folder: output folder.
    """
    from toolkit.cost import profile
    from toolkit.files import started_by, write_text
    from toolkit.model import partition
    from toolkit.plan.one_device import least_peak, peak_in_turn

    stages = partition(model, config.stages, example, config.partition)
    costs = profile(stages, example, precision=config.precision)
    rows, commands = [], []
    for n_workers in workers:
        choice = least_peak(costs, n_workers, config.extra_time, hardware)
        schedule = choice.schedule(hardware)
        path = folder / f"least_peak_{n_workers}.csv"
        write_text(path, schedule.to_csv())
        rows.append(
            {
                "workers": n_workers,
                "recomputed": [*choice.recomputed],
                "extra_time": choice.extra_time,
                "offsets": [*choice.offsets],
                "peak_bytes_together": choice.simultaneous,
                "peak_bytes_shifted": choice.peak,
                "reduction": choice.reduction,
                "largest_reduction": 1 - choice.bound / choice.simultaneous,
                "peak_bytes_in_turn": peak_in_turn(choice.costs, schedule),
            }
        )
        by = "" if config.partition == "flops" else f" partition={config.partition}"
        recomputed = ",".join(map(str, choice.recomputed))
        checkpoint = shlex.quote(f"checkpoint=[{recomputed}]")
        commands.append(
            f"  {started_by('train')} {shell_option('schedule.file', str(path))}"
            f" schedule.delay=freshest{by} {checkpoint} runtime.order=scheduled"
        )
    return rows, commands


if __name__ == "__main__":
    main()
