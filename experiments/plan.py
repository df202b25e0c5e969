"""Which schedule for a model, on given machines, within limits of memory, staleness and time.

    cyclic-dp plan model=resnet50 hardware=ethernet_10 ranks=8 batch=1536 memory=32GiB
    cyclic-dp plan model.target=my_lab.net shape=[3,160,160] ranks=[4,8] staleness=1
    cyclic-dp plan model=resnet8 data=digits ranks=4 batch=64 pilot=true
    cyclic-dp plan costs=my_profile.csv ranks=8 batch=64
    cyclic-dp plan model=gpt2 hardware=machines_of_8 ranks=8 batch=64 precision=bf16 widths=[1,2,4]
    torchrun --nnodes 2 --nproc-per-node 1 ... -m toolkit plan model=resnet50 measure_links=true

Every method of the catalogue is simulated with several stages, groups, micro-batches and cuts. The
machine is a file of conf/hardware. With pilot=true, the best is then measured here beside data
parallelism: memory, computing times, and accuracy by short trainings. Links are the hardware's, or
with measure_links=true those between the processes of torchrun, one on each machine.
widths are the devices of a rank, to choose from: they share its stages by tensor parallelism. A
candidate then has ranks times width devices, at most as many as ranks=.
costs=FILE has your own profile in place of a model, as for simulate; its column batch says of how
many samples a micro-batch is.

With compressions=[none,bf16,int8,int4] messages may be compressed. The best has exact messages;
what coarser ones would gain stands below the table, with how they change training.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_counts, counts
from toolkit.errors import UserError, check_seconds
from toolkit.format import MIB, bytes_in
from toolkit.terminal import show, show_activity, show_import

if TYPE_CHECKING:
    import torch

    from toolkit.cost import Hardware
    from toolkit.cost.cost_file import FileCosts
    from toolkit.model import InputSpec
    from toolkit.plan import Pilot, Plan, PlanOptions
    from toolkit.training.data import SampleSet

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
        # Stages of a file may be a toy's; those of a model are not.
        if limits["memory"] < MIB and config.costs is None:
            raise UserError(
                f"memory={config.memory} is less than a MiB; expected the memory of a rank with its"
                f" unit, such as memory={config.memory}GiB"
            )
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


def name_model(config: DictConfig, form: "InputSpec") -> str:
    """Return the options with which the plan's command names the model and its data."""
    from toolkit.cli import chosen
    from toolkit.plan.candidates import data_options

    if config.data:
        return f"{chosen('model', 'hardware', 'data')} precision={config.precision}"
    options = f"{chosen('model', 'hardware')} precision={config.precision}"
    return f"{options} {data_options(form)}"


def options_of(config: DictConfig, command_options: str) -> "PlanOptions":
    """Return the options of a plan.

    Args:
        config: options of the experiment.
        command_options: with which the plan's command names the model and its data.
    """
    from toolkit.plan import Limits, PlanOptions

    return PlanOptions(
        limits=Limits(**limits_of(config)),
        precision=config.precision,
        optimizer_words=config.optimizer_words,
        search_seconds=config.search_seconds if config.search else 0.0,
        jobs=config.jobs,
        command_options=command_options,
        widths=counts(config, "widths"),
        width_efficiency=config.width_efficiency,
        compressions=compressions_of(config),
    )


def measured_here(
    config: DictConfig,
    result: "Plan",
    form: "InputSpec",
    samples: "SampleSet | None",
    device: "torch.device",
    on_progress: Callable[[str, float], None],
) -> "Pilot":
    """Measure the best of a plan and data parallelism on this machine."""
    from toolkit.cli import build_model
    from toolkit.plan import PilotOptions

    # A CPU computes so slowly that messages weigh nothing: the pilot would contradict the plan.
    compute = "roofline" if device.type == "cpu" else "measured"
    return result.pilot(
        lambda: build_model(config.model, form).to(device),
        samples,
        options=PilotOptions(
            compute=config.pilot_compute or compute,
            overhead=True,
            budget=config.pilot_seconds,
        ),
        on_progress=on_progress,
    )


def hardware_of(config: DictConfig) -> "Hardware | None":
    """Return the machines; None in a process that only takes part in the measurement of links.

    With measured links it writes them as a file of the group ``hardware``.
    """
    from toolkit.cli import build_hardware
    from toolkit.plan.measured_links import with_measured_links

    hardware = build_hardware(config.hardware)
    if not config.measure_links:
        return hardware
    show_activity("measuring links")
    measured = with_measured_links(
        hardware, "cpu" if config.device == "cpu" else "auto"
    )
    if measured is not None:
        # In a folder named as the group, so that --config-dir can name the folder above it.
        path = output_folder() / "hardware" / "measured.yaml"
        path.parent.mkdir()
        fields = {name: value for name, value in vars(measured).items() if value}
        text = yaml.safe_dump({"defaults": ["_base"], **fields}, sort_keys=False)
        path.write_text(f"# As measured: --config-dir={path.parent.parent}\n{text}")
        show(
            f"links: {measured.link_latency * 1e6:.0f} µs,"
            f" {measured.link_bandwidth / 1e9:.3g} GB/s each way, written to {path}"
        )
    return measured


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar in per cent, and the function that moves it to a share of an activity."""
    layout = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}"
    with tqdm(total=100, bar_format=layout) as bar:

        def show_progress(activity: str, share: float) -> None:
            bar.set_description_str(activity, refresh=share == 0)
            bar.update(100 * share - bar.n)

        yield show_progress


@entry_point("plan")
def main(config: DictConfig) -> None:
    show_import()
    import torch

    from toolkit.cli import (
        analysed_form,
        build_model,
        described_samples,
        model_name,
    )
    from toolkit.plan import plan, plan_costs
    from toolkit.training import pick_device

    # 1. Check all options.
    start = time.perf_counter()
    check_options(config)
    samples = described_samples(config)
    file_costs = costs_of_file(config) if config.costs else None
    form = samples.form if samples else analysed_form(config)
    show_activity("tracing the model")
    with torch.device("meta"):
        model = build_model(config.model, form)
    make_plan = partial(plan, model, form)
    command_options = name_model(config, form)
    # A profile replaces the model, which stays the default and is not looked at.
    if file_costs is not None:
        make_plan = partial(plan_costs, file_costs)
        command_options = ""
    device = pick_device(config.device)
    hardware = hardware_of(config)
    if hardware is None:
        return

    # 2. Simulate all candidates, and measure the best if asked.
    pilot = None
    with progress_bar() as show_progress:
        result = make_plan(
            hardware,
            counts(config, "ranks"),
            batch=config.batch,
            options=options_of(config, command_options),
            on_progress=show_progress,
        )
        if config.pilot:
            pilot = measured_here(config, result, form, samples, device, show_progress)

    # 3. Write and print.
    seconds = time.perf_counter() - start
    figures = write(config, result, pilot, seconds)
    if file_costs is None:
        title = f"{model_name(config.model)} in {config.precision}, {config.batch} {form.samples}"
        note = ""
    else:
        title = f"{file_costs.in_words}, {config.batch} samples"
        note = f"\n{FILE_NOTE}"
    text = in_words(result, pilot)
    show(f"\n{title} a step, {result.hardware.name}\n\n{text}{note}")
    names = ", ".join(path.name for path in figures)
    show(f"\nwritten to {output_folder()}: {names}, candidates.csv, ...")


def write(
    config: DictConfig, result: "Plan", pilot: "Pilot | None", seconds: float
) -> list[Path]:
    """Write the result, its tables and its figure; return the figure's files."""
    from toolkit.figures import save
    from toolkit.files import write_csv
    from toolkit.results import describe_cpu, write_result

    folder = output_folder()
    # All candidates, and not those of the table alone.
    rows = [result.row(prediction) for prediction in result.predictions]
    write_csv(folder / "candidates.csv", rows)
    result_fields = {"pilot": pilot.record()} if pilot else {}
    write_result(
        folder, "plan", result.rows(), config, describe_cpu(), seconds, **result_fields
    )
    return save(result.figure(), folder / "plan")


def in_words(result: "Plan", pilot: "Pilot | None") -> str:
    """Return a plan and its pilot as text; write the orders that the commands name."""
    from toolkit.schedule.plain_options import ORDERS_FILE

    text = str(result)
    if pilot:
        rules = "".join(f", {rule.rule}" for rule in pilot.rules)
        text += f"\n\nMeasured on this machine{rules}: {pilot}"
    path = output_folder() / ORDERS_FILE
    for prediction in result.predictions:
        # Orders that a search has found are in no catalogue: commands name a file of them.
        if prediction.candidate.spec.orders:
            path.write_text(prediction.schedule.to_csv())
            text = text.replace(ORDERS_FILE, str(path))
    return text


if __name__ == "__main__":
    main()
