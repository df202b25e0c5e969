"""Which schedule for a model, on given machines, within limits of memory, staleness and time.

    cyclic-dp plan model=resnet50 hardware=ethernet_10 ranks=8 batch=1536 memory=32GiB
    cyclic-dp plan model.target=my_lab.net shape=[3,160,160] ranks=[4,8] staleness=1
    cyclic-dp plan model=resnet8 data=digits ranks=4 batch=64 pilot=true
    cyclic-dp plan costs=my_profile.csv ranks=8 batch=64
    cyclic-dp plan model=gpt2 hardware=machines_of_8 ranks=8 batch=64 precision=bf16 widths=[1,2,4]

Every method of the catalogue is simulated with several stages, groups, micro-batches and cuts. The
machine is a file of conf/hardware. With pilot=true, the best is then measured here beside data
parallelism: memory, computing times, and accuracy by short trainings. Links are the hardware's.
widths are the devices of a rank, to choose from: they share its stages by tensor parallelism. A
candidate then has ranks times width devices, at most as many as ranks=.
costs=FILE has your own profile in place of a model, as for simulate; its column batch says of how
many samples a micro-batch is.

With compressions=[none,bf16,int8,int4] messages may be compressed. The best has exact messages;
what coarser ones would gain stands below the table, with how they change training.
"""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.errors import UserError, check_seconds
from toolkit.format import bytes_in
from toolkit.terminal import show, show_activity, show_import

if TYPE_CHECKING:
    from toolkit.cost.cost_file import FileCosts

FILE_NOTE = """\
Stages are rows of costs=; by flops is by their seconds. To train so, give the
names of the modules that begin the stages: partition=[NAMES]."""


def check_options(config: DictConfig) -> None:
    """Raise UserError for numbers out of range, and a pilot without samples."""
    check_counts(config, "batch", "widths")
    if config.jobs is not None:
        check_counts(config, "jobs")
    if not config.optimizer_words >= 0:
        raise UserError(f"optimizer_words is 0 or more: got {config.optimizer_words}")
    if config.search:
        check_seconds("search_seconds", config.search_seconds)
    if config.pilot:
        check_seconds("pilot_seconds", config.pilot_seconds)
        widths = counts(config, "widths")
        if max(widths) > 1:
            raise UserError(
                f"pilot=true measures ranks of one device: got widths={widths}; leave out one of"
                " them"
            )
        if not config.data:
            raise UserError(
                "pilot=true trains for a while: choose samples, such as data=digits"
            )


def limits_of(config: DictConfig) -> dict[str, float]:
    """Return the arguments of :class:`toolkit.plan.Limits` that are set."""
    limits = {
        name: config[name]
        for name in ("staleness", "seconds")
        if config[name] is not None
    }
    if config.memory is not None:
        limits["memory"] = bytes_in(config.memory)
    return limits


def costs_of_file(config: DictConfig) -> "FileCosts":
    """Return the costs of ``costs=``; raise UserError if they do not fit the other options."""
    from toolkit.cost.cost_file import read_costs

    if config.pilot or config.data:
        raise UserError(
            "costs= are in place of a model and its data: leave out pilot= and data="
        )
    return read_costs(Path(config.costs))


def compressions_of(config: DictConfig) -> list[str]:
    """Return the compressions of messages; the option may be one name or a list of names."""
    if isinstance(config.compressions, str):
        return [config.compressions]
    return [*map(str, config.compressions or ())]


@entry_point("plan")
def main(config: DictConfig) -> None:
    show_import()
    import torch

    from toolkit.cli import (
        analysed_form,
        build_hardware,
        build_model,
        chosen,
        described_samples,
        model_name,
    )
    from toolkit.figures import save
    from toolkit.files import write_csv
    from toolkit.plan import Limits, PilotOptions, PlanOptions, plan, plan_costs
    from toolkit.plan.candidates import data_options
    from toolkit.results import describe_cpu, write_result
    from toolkit.schedule.plain_options import ORDERS_FILE
    from toolkit.training import pick_device

    start = time.perf_counter()
    check_options(config)
    groups = ["model", "hardware"]
    samples = described_samples(config)
    if samples:
        groups.append("data")
    file_costs = costs_of_file(config) if config.costs else None
    form = samples.form if samples else analysed_form(config)
    show_activity("tracing the model")
    with torch.device("meta"):
        model = build_model(config.model, form)
    options = f"{chosen(*groups)} precision={config.precision}"
    if not samples:
        options += f" {data_options(form)}"
    if file_costs is not None:
        options = ""
    plan_options = PlanOptions(
        limits=Limits(**limits_of(config)),
        precision=config.precision,
        optimizer_words=config.optimizer_words,
        search_seconds=config.search_seconds if config.search else 0.0,
        jobs=config.jobs,
        command_options=options,
        widths=counts(config, "widths"),
        width_efficiency=config.width_efficiency,
        compressions=compressions_of(config),
    )
    device = pick_device(config.device)
    # A CPU computes so slowly that messages weigh nothing: the pilot would contradict the plan.
    compute = config.pilot_compute or (
        "roofline" if device.type == "cpu" else "measured"
    )
    pilot_options = PilotOptions(compute=compute, budget=config.pilot_seconds)
    pilot = None
    with tqdm(
        total=100, bar_format="{desc}: {percentage:3.0f} %|{bar}| {elapsed}"
    ) as bar:

        def show_progress(activity: str, share: float) -> None:
            bar.set_description_str(activity, refresh=share == 0)
            bar.update(100 * share - bar.n)

        make_plan = partial(plan, model, form)
        if file_costs is not None:
            make_plan = partial(plan_costs, file_costs)
        result = make_plan(
            build_hardware(config.hardware),
            counts(config, "ranks"),
            batch=config.batch,
            options=plan_options,
            on_progress=show_progress,
        )
        if config.pilot:
            pilot = result.pilot(
                lambda: build_model(config.model, form).to(device),
                samples,
                options=pilot_options,
                on_progress=show_progress,
            )
    folder = output_folder()
    seconds = time.perf_counter() - start
    rows = [result.row(prediction) for prediction in result.predictions]
    write_csv(folder / "candidates.csv", rows)
    result_fields = {"pilot": pilot.record()} if pilot else {}
    write_result(
        folder, "plan", result.rows(), config, describe_cpu(), seconds, **result_fields
    )
    figures = save(result.figure(), folder / "plan")

    text = str(result)
    if pilot:
        rules = "".join(f", {rule.rule}" for rule in pilot.rules)
        text += f"\n\nMeasured on this machine{rules}: {pilot}"
    for prediction in result.predictions:
        if prediction.candidate.spec.orders:
            (folder / ORDERS_FILE).write_text(prediction.schedule.to_csv())
            text = text.replace(ORDERS_FILE, str(folder / ORDERS_FILE))
    title = f"{model_name(config.model)} in {config.precision}, {config.batch} {form.samples}"
    if file_costs is not None:
        title = f"{file_costs.in_words}, {config.batch} samples"
        text += f"\n{FILE_NOTE}"
    show(f"\n{title} a step, {result.hardware.name}\n\n{text}")
    show(
        f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, candidates.csv, ..."
    )


if __name__ == "__main__":
    main()
