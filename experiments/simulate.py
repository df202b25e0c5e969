"""Time, memory and traffic of a schedule on a model and a machine, predicted.

    cyclic-dp simulate schedule=one_f_one_b model=vit_b_16 stages=4 microbatches=16
    cyclic-dp simulate schedule.file=my_schedule.csv hardware=ethernet_10

With costs=FILE the stages are your own profile: a CSV file with the columns forward_ms,
backward_inputs_ms, backward_weights_ms, activation_mb, output_mb and parameter_mb. A stage is a
row, or several consecutive ones; a column batch is the measured micro-batch.

With width=2 two devices share the stages of each rank, by tensor parallelism (gpt and vit_b_16).
Memory is then that of a device, and the baseline runs on as many devices.

With compression= messages are compressed, and what people use on slow links is simulated too: DDP
with the same compression, DDP with PowerSGD, and local SGD. With boundary_compression= activations
and their gradients are compressed where they go from rank to rank.

+schedule@also.gpipe=gpipe adds a schedule to the table. The trace opens in ui.perfetto.dev.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from tqdm.auto import tqdm

from toolkit.cli import entry_point, output_folder
from toolkit.cli.check_options import check_compressed, check_counts
from toolkit.errors import UserError, check_choice
from toolkit.terminal import show, show_import

if TYPE_CHECKING:
    import torch

    from toolkit.cost import Timeline
    from toolkit.cost.cost_file import FileCosts
    from toolkit.cost.simulation_table import SimulationRow, SimulationTable
    from toolkit.cost.tensor_width import Width
    from toolkit.cost.worker_forms import CostsOf
    from toolkit.model import InputSpec
    from toolkit.schedule import Schedule

_MAX_RANKS = 16  # more are written to ranks.csv only
_OPS_A_SECOND = 20_000  # lowered, verified and simulated, on one core; an estimate
_CHAINS = ("fastest", "given")
_PRINTED = (
    "schedule",
    "by DDP's time",
    "ms a step",
    "idle",
    "GiB, fullest rank",
    "fits",
    "form",
)
_PRINTED_COMPRESSED = (*_PRINTED[:-1], "MB a step, busiest rank", "accuracy")


@entry_point("simulate")
def main(config: DictConfig) -> None:
    show_import()
    import torch

    from toolkit.cli import (
        analysed_form,
        build_hardware,
        build_schedules,
        model_name,
        settle_delays,
    )
    from toolkit.cost.tensor_width import Width
    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    # 1. Check all options, and build the schedules.
    start = time.perf_counter()
    check(config)
    file_costs = costs_of_file(config) if config.costs else None
    form = analysed_form(config)
    settle_delays(config, lambda: form, file_costs)
    schedules = build_schedules(config)
    check_messages(config, schedules)
    device = pick_device(config.device) if config.measured else torch.device("meta")
    hardware = build_hardware(config.hardware)
    width = Width(config.width, hardware, config.width_efficiency)

    # 2. Simulate them.
    folder = output_folder()
    n_simulations = 2 * len(schedules)
    with tqdm(unit=" simulations", leave=False, total=n_simulations) as bar:
        bar.set_description("tracing the model")
        if file_costs is None:
            costs = costs_of_model(config, form, device, width)
        else:
            costs = file_costs, file_costs
        table_of_steps = table_of(config, width, *costs)
        simulation_rows = simulate_all(config, table_of_steps, schedules, folder, bar)

    # 3. Write and print.
    rows = [
        table_of_steps.cells(row)
        for row in [*simulation_rows, *table_of_steps.rivals()]
    ]
    rank_rows, figures = write_timelines(simulation_rows, folder)
    device_name = describe(device) if config.measured else "meta tensors"
    write_result(
        folder, "simulation", rows, config, device_name, time.perf_counter() - start
    )
    title = f"{model_name(config.model)} in {config.precision}, micro-batches of {config.batch}"
    if width.devices > 1:
        title += f", {width.devices} devices a rank"
    if file_costs is not None:  # then a rank is one device
        title = file_costs.in_words
    timed = f"stages timed on {device_name}, links of " if config.measured else ""
    show(f"\n{title}, {timed}{table_of_steps.hardware.name}\n")
    show(tables(rows, rank_rows))
    for note in size_notes(schedules):
        show(f"\nnote: {note}")
    show(
        f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, simulation.csv, ..."
    )


def table_of(
    config: DictConfig,
    width: "Width",
    costs_of: "CostsOf",
    baseline_costs_of: "CostsOf",
) -> "SimulationTable":
    """Return what simulates schedules with the costs of the model's stages."""
    from toolkit.cost.simulation_table import SimulationTable
    from toolkit.cost.worker_forms import CUTS
    from toolkit.schedule import CHAINS

    # Measured stages are timed once: one cut.
    given_cut = config.partition or ("flops" if config.measured else None)
    return SimulationTable(
        costs_of,
        baseline_costs_of,
        width,
        batch=config.batch,
        optimizer_words=config.optimizer_words,
        compression=config.compression,
        boundary_compression=config.boundary_compression,
        chains=CHAINS if config.chains == "fastest" else (),
        cuts=[given_cut] if given_cut else CUTS,
    )


def simulate_all(
    config: DictConfig,
    table_of_steps: "SimulationTable",
    schedules: "dict[str, Schedule]",
    folder: Path,
    bar: tqdm,
) -> "list[SimulationRow]":
    """Return the rows of all schedules and of their baselines; write the traces."""
    from toolkit.cost import write_chakra

    simulation_rows: list[SimulationRow] = []
    for index, (name, schedule) in enumerate(schedules.items()):
        bar.set_description(f"{name}, {seconds_of(schedule)}")
        simulation_rows += table_of_steps.rows_of(name, schedule)
        bar.update()
        # The steady state is timed over many steps, and fewer are drawn.
        drawn = table_of_steps.draw(simulation_rows[-1], config.steps)
        bar.update()
        # The first schedule's files have no number, so that one schedule alone has trace.json.
        write_traces(drawn, folder, str(index) if index else "", kineto=config.kineto)
        if config.chakra:
            chosen = simulation_rows[-1].form
            program = chosen.schedule.lower(config.steps)
            costs = table_of_steps.costs_of_program(
                schedule.n_stages, chosen.partition, schedule.state
            )
            chakra_folder = folder / f"chakra{index or ''}"
            write_chakra(program, costs, table_of_steps.hardware, chakra_folder)
    return simulation_rows


def write_timelines(
    simulation_rows: "Sequence[SimulationRow]", folder: Path
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Write the table of ranks and the figure; return the table's rows and the figure's files."""
    from toolkit.cost.timeline_rows import by_rank
    from toolkit.figures import save, timelines
    from toolkit.files import write_csv

    rank_rows = []
    for row in simulation_rows:
        rank_rows += by_rank(row.name, row.form.timeline)
    write_csv(folder / "ranks.csv", rank_rows)
    drawn = [row.drawn for row in simulation_rows if row.drawn]
    return rank_rows, save(timelines(drawn), folder / "timeline")


def costs_of_file(config: DictConfig) -> "FileCosts":
    """Return the costs of ``costs=``; raise UserError if they do not fit the other options."""
    from toolkit.cost.cost_file import read_costs

    if config.measured:
        raise UserError(
            "costs= are measured already: leave out measured=true, or costs="
        )
    file_costs = read_costs(Path(config.costs))
    file_costs.check_batch(config.batch)
    return replace(file_costs, checkpoint=config.checkpoint)


def check_messages(config: DictConfig, schedules: "dict[str, Schedule]") -> None:
    """Raise UserError if a schedule has no messages that could be compressed as asked."""
    from toolkit.cost.boundary_compression import check_boundary_compression

    check_compressed(schedules, config.compression, config.width)
    check_boundary_compression(
        config.boundary_compression, schedules.values(), config.width
    )


def check(config: DictConfig) -> None:
    """Raise UserError if an option has a value that it cannot have."""
    from toolkit.cost.boundary_compression import BOUNDARY_COMPRESSIONS
    from toolkit.cost.compression import COMPRESSIONS

    check_counts(config, "batch", "steps", "width")
    check_choice("chains", config.chains, _CHAINS)
    check_choice("compression", config.compression, COMPRESSIONS)
    check_choice(
        "boundary_compression", config.boundary_compression, BOUNDARY_COMPRESSIONS
    )
    if not config.optimizer_words >= 0:
        raise UserError(f"optimizer_words is 0 or more: got {config.optimizer_words}")
    if config.width > 1 and (config.costs or config.measured):
        raise UserError(
            f"width={config.width} takes the stages of a model by the roofline: leave out costs and"
            " measured"
        )


def costs_of_model(
    config: DictConfig, form: "InputSpec", device: "torch.device", width: "Width"
) -> "tuple[CostsOf, CostsOf]":
    """Return the costs of stages on a device of a rank, and those of whole models (baseline)."""
    import torch

    from toolkit.cli import build_model
    from toolkit.cost.worker_forms import ModelCosts

    with torch.device(device):
        model = build_model(config.model, form)
    example = form.example(config.batch, device)
    whole_costs = ModelCosts(model, example, config.precision, config.checkpoint)
    if width.devices == 1:
        return whole_costs, whole_costs
    # The baseline spends its devices on more workers, each with the whole model.
    costs_of = ModelCosts(model, example, config.precision, config.checkpoint, width)
    return costs_of, whole_costs


def write_traces(timeline: "Timeline", folder: Path, suffix: str, kineto: bool) -> None:
    """Write a timeline for ui.perfetto.dev, as a table, and, if asked, for torch's tools."""
    timeline.to_chrome_trace(folder / f"trace{suffix}.json")
    timeline.to_frame().to_csv(folder / f"spans{suffix}.csv", index=False)
    if kineto:
        timeline.to_kineto_traces(folder / f"kineto{suffix}")


def tables(rows: Sequence[dict[str, Any]], rank_rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of schedules; below it a table of ranks, if one schedule has few ranks."""
    from toolkit.format import table

    is_compressed = any(
        row["accuracy"] not in ("exact", "late weights") for row in rows
    )
    # With compressed messages, rows also differ in traffic and accuracy.
    headings = [*(_PRINTED_COMPRESSED if is_compressed else _PRINTED)]
    if all(row["fits"] == "yes" for row in rows):
        headings.remove("fits")
    printed_rows = [{heading: row[heading] for heading in headings} for row in rows]
    text = table(printed_rows)
    if (
        len({row["schedule"] for row in rank_rows}) == 1
        and len(rank_rows) <= _MAX_RANKS
    ):
        for rank_row in rank_rows:
            rank_row.pop("schedule")
        text += f"\n\n{table(rank_rows)}"
    return text


def size_notes(schedules: "dict[str, Schedule]") -> list[str]:
    """Return a note in a list if schedules differ in stages or micro-batches; else no note."""
    sizes = {name: (s.n_stages, s.n_microbatches) for name, s in schedules.items()}
    if len(set(sizes.values())) == 1:
        return []
    in_words = ", ".join(
        f"{name} {stages} and {m}" for name, (stages, m) in sizes.items()
    )
    n_stages, n_microbatches = next(iter(sizes.values()))
    hint = f"stages={n_stages} microbatches={n_microbatches}"
    return [
        f"stages and micro-batches differ ({in_words}); {hint} gives those of the first"
    ]


def seconds_of(schedule: "Schedule") -> str:
    """Return an estimate of how long the simulation of a schedule takes, such as about 3 s."""
    from toolkit.cost.worker_forms import TIMED_STEPS, has_forms
    from toolkit.schedule.steady_state import steps_to_time

    # Both chains with both cuts are simulated, and the fastest counts.
    n_forms = 4 if has_forms(schedule) else 1
    n_steps = n_forms * steps_to_time(schedule, TIMED_STEPS)
    n_ops = 2 * schedule.n_stages * schedule.n_microbatches * n_steps
    return f"about {max(1, round(n_ops / _OPS_A_SECOND))} s"


if __name__ == "__main__":
    main()
