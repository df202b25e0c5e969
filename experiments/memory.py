"""Activation memory of N workers, together and shifted uniformly, on a real model.

    python experiments/memory.py model=resnet50 workers=[4,8,32] batch=32
    python experiments/memory.py model.target=my_package.my_model shape=[3,160,160]

Nothing is computed or allocated, except with axis=measured.
"""

import time

from omegaconf import DictConfig

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.errors import check_choice
from toolkit.format import size


@entry_point("memory")
def main(config: DictConfig) -> None:
    import torch

    from toolkit.cli import analysed_form, build_hardware, build_model, model_name
    from toolkit.cost import AXES, memory_curve
    from toolkit.figures import memory_curves, save
    from toolkit.format import reduction_cells, table
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
    curves = {axis: memory_curve(model, example, axis, hardware, config.precision) for axis in axes}

    shown = curves[config.axis]
    rows, records = {}, []
    for axis, curve in curves.items():
        reductions = {n: curve.reduction(n) for n in workers}
        of_machine = f" ({hardware.name})" if axis == "roofline" else ""
        cells = reduction_cells(reductions, curve.largest_reduction)
        rows[axis] = {"time axis": f"{axis}{of_machine}"} | cells
        for n, reduction in reductions.items():
            record = {"axis": axis, "workers": n, "peak_bytes_together": n * curve.peak}
            record["peak_bytes_shifted"] = float(curve.shifted(n)[1].max())
            record |= {"reduction": reduction, "largest_reduction": curve.largest_reduction}
            records.append(record)
    name = f"{model_name(config.model)} in {config.precision}"
    title = f"{name}, batch {config.batch}, time axis: {rows[config.axis]['time axis']}"
    folder = output_folder()
    figures = save(memory_curves(shown, workers, title), folder / "memory")
    where = describe(device) if measured else "meta tensors"
    write_result(folder, "memory", records, config, where, time.perf_counter() - start)
    print(f"\n{name}: one micro-batch of {config.batch} keeps {size(shown.peak)}\n")
    print("Peak of N workers shifted uniformly, below that of N workers together:\n")
    print(table([*rows.values()]))
    print(f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, ...")


if __name__ == "__main__":
    main()
