"""Time, memory and traffic of a schedule on a model and a machine, predicted.

    cyclic-dp simulate schedule=one_f_one_b model=vit_b_16 stages=4 microbatches=16
    cyclic-dp simulate schedule.file=my_schedule.csv hardware=ethernet_10

With costs=FILE the stages are your own profile: a CSV file with the columns forward_ms,
backward_inputs_ms, backward_weights_ms, activation_mb, output_mb and parameter_mb. A stage is a
row, or several consecutive ones; a column batch is the measured micro-batch.

With width=2 two devices share the stages of each rank, by tensor parallelism (gpt and vit_b_16).
Memory is then that of a device, and the baseline runs on as many devices.

With compression= messages are compressed, and what people use on slow links is simulated too: DDP
with the same compression, DDP with PowerSGD, and local SGD.

+schedule@also.gpipe=gpipe adds a schedule to the table. The trace opens in ui.perfetto.dev.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

    from toolkit.cost import Costs, Hardware, Timeline
    from toolkit.cost.cost_file import FileCosts
    from toolkit.cost.slow_link_rivals import Averaging
    from toolkit.cost.tensor_width import Width
    from toolkit.cost.worker_forms import CostsOf, Cut, DataParallelJob, Form
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
    from toolkit.cost import write_chakra
    from toolkit.cost.tensor_width import Width
    from toolkit.cost.timeline_rows import by_rank
    from toolkit.figures import save, timelines
    from toolkit.files import write_csv
    from toolkit.results import describe, write_result
    from toolkit.training import pick_device

    start = time.perf_counter()
    check(config)
    file_costs = costs_of_file(config) if config.costs else None
    form = analysed_form(config)
    settle_delays(config, lambda: form, file_costs)
    schedules = build_schedules(config)
    check_compressed(schedules, config.compression, config.width)
    device = pick_device(config.device) if config.measured else torch.device("meta")
    width = Width(
        config.width, build_hardware(config.hardware), config.width_efficiency
    )

    folder = output_folder()
    predicted: list[Prediction] = []
    n_predictions = 2 * len(schedules) + 1
    with tqdm(unit=" simulations", leave=False, total=n_predictions) as bar:
        bar.set_description("tracing the model")
        costs_of: CostsOf
        baseline_costs_of: CostsOf
        if file_costs is not None:
            costs_of = baseline_costs_of = file_costs
        else:
            costs_of, baseline_costs_of = costs_of_model(config, form, device, width)
        comparison = Comparison(config, costs_of, baseline_costs_of, width)
        for index, (name, schedule) in enumerate(schedules.items()):
            bar.set_description(f"{name}, {seconds_of(schedule)}")
            predicted += comparison.predict(name, schedule)
            bar.update()
            # The steady state is timed over many steps, and fewer are drawn.
            drawn = comparison.draw(predicted[-1], config.steps)
            bar.update()
            write_traces(
                drawn, folder, str(index) if index else "", kineto=config.kineto
            )
            if config.chakra:
                chosen = predicted[-1].form
                program = chosen.schedule.lower(config.steps)
                costs = comparison.costs_of_program(
                    schedule.n_stages, chosen.partition, schedule.state
                )
                chakra_folder = folder / f"chakra{index or ''}"
                write_chakra(program, costs, comparison.hardware, chakra_folder)
    timelines_drawn = [prediction.drawn for prediction in predicted if prediction.drawn]
    figures = save(timelines(timelines_drawn), folder / "timeline")
    rows = [
        comparison.row(prediction) for prediction in [*predicted, *comparison.rivals()]
    ]
    rank_rows = []
    for prediction in predicted:
        rank_rows += by_rank(prediction.name, prediction.form.timeline)
    write_csv(folder / "ranks.csv", rank_rows)
    device_name = describe(device) if config.measured else "meta tensors"
    write_result(
        folder, "simulation", rows, config, device_name, time.perf_counter() - start
    )

    title = f"{model_name(config.model)} in {config.precision}, micro-batches of {config.batch}"
    if file_costs is not None:
        title = file_costs.in_words
    if width.devices > 1:
        title += f", {width.devices} devices a rank"
    timed = f"stages timed on {device_name}, links of " if config.measured else ""
    show(f"\n{title}, {timed}{comparison.hardware.name}\n")
    show(tables(rows, rank_rows))
    for note in size_notes(schedules):
        show(f"\nnote: {note}")
    show(
        f"\nwritten to {folder}: {', '.join(path.name for path in figures)}, simulation.csv, ..."
    )


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


@dataclass
class Prediction:
    """A row of the table: a schedule in its fastest form, the baseline, or a rival of it.

    Attributes:
        name: label in tables.
        form: schedule, cut of the model, and simulated timeline.
        n_samples: of a training step.
        accuracy: how training differs from plain data parallelism.
        drawn: timeline of the steps that the figure shows; None for the baseline and rivals.
        baseline: step seconds of DistributedDataParallel on as many ranks; None if it would need
            micro-batches of another size.
        width: devices of a rank.
        averaging: what averages of the weights add to a step; None: weights are not averaged.
    """

    name: str
    form: "Form"
    n_samples: int
    accuracy: str
    drawn: "Timeline | None" = None
    baseline: float | None = None
    width: int = 1
    averaging: "Averaging | None" = None

    @property
    def seconds(self) -> float:
        """Seconds of a training step."""
        if self.averaging is None:
            return self.form.seconds
        return self.form.seconds + self.averaging.seconds


@dataclass
class Comparison:
    """Simulates schedules in their fastest form, and DistributedDataParallel as their baseline.

    Attributes:
        config: options of the command.
        costs_of: costs of the model's stages, on one of the devices of a rank.
        baseline_costs_of: costs of the whole model on each device.
        width: devices of a rank, and the machines.
    """

    config: DictConfig
    costs_of: "CostsOf"
    baseline_costs_of: "CostsOf"
    width: "Width"
    _baselines: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def hardware(self) -> "Hardware":
        """The machines as one device of every rank sees them."""
        return self.width.hardware_of_ranks

    def predict(self, name: str, schedule: "Schedule") -> list[Prediction]:
        """Return the prediction of a schedule; before it that of its baseline, if that is new."""
        from toolkit.cost.compression import accuracy_class
        from toolkit.cost.worker_forms import CUTS, fastest_form
        from toolkit.schedule import CHAINS

        config = self.config
        # Measured stages are timed once: one cut.
        given_cut = config.partition or ("flops" if config.measured else None)
        best_form = fastest_form(
            schedule,
            partial(self.costs_of_program, state=schedule.state),
            self.hardware,
            chains=CHAINS if config.chains == "fastest" else (),
            cuts=[given_cut] if given_cut else CUTS,
            optimizer_words=config.optimizer_words,
        )
        predictions = self._baseline_of(schedule)
        is_late = best_form.schedule.max_staleness > 0
        prediction = Prediction(
            name,
            best_form,
            n_samples=config.batch * schedule.n_microbatches,
            accuracy=accuracy_class(
                config.compression, is_late=is_late, state=schedule.state
            ),
            baseline=self._baselines.get(self._baseline_key(schedule)),
            width=self.width.devices,
        )
        return [*predictions, prediction]

    def _baseline_key(self, schedule: "Schedule") -> tuple[int, int]:
        """Return the numbers of devices and of micro-batches."""
        return schedule.n_ranks * self.width.devices, schedule.n_microbatches

    def costs_of_program(self, n_stages: int, cut: "Cut", state: str) -> "Costs":
        """Return the costs of stages whose messages are compressed as the options say.

        Args:
            n_stages: of the schedule.
            cut: of the model.
            state: of the schedule.
        """
        from toolkit.cost import compressed_costs

        compression = self.config.compression
        return compressed_costs(self.costs_of(n_stages, cut), compression, state=state)

    def _baseline_of(self, schedule: "Schedule") -> list[Prediction]:
        """Return the baseline of a schedule in a list, which is empty if there is no new one.

        There is none for one device, or if workers would have unequal numbers of micro-batches.
        """
        from toolkit.cost.compression import accuracy_class

        key = self._baseline_key(schedule)
        n_ranks, n_microbatches = key
        if n_ranks == 1 or n_microbatches % n_ranks or key in self._baselines:
            return []
        form = self._job(n_ranks, n_microbatches).form()
        self._baselines[key] = form.seconds
        prediction = Prediction(
            form.schedule.name,
            form,
            n_samples=self.config.batch * n_microbatches,
            accuracy=accuracy_class("none", is_late=False),
            baseline=form.seconds,
        )
        return [prediction]

    def _job(self, n_ranks: int, n_microbatches: int) -> "DataParallelJob":
        """Return the training of the whole model on every device."""
        from toolkit.cost.worker_forms import DataParallelJob

        return DataParallelJob(
            self.baseline_costs_of,
            self.width.hardware,
            n_ranks,
            accumulate=n_microbatches // n_ranks,
            optimizer_words=self.config.optimizer_words,
        )

    def draw(self, prediction: Prediction, n_steps: int) -> "Timeline":
        """Simulate the ``n_steps`` that the figure and traces show."""
        from toolkit.cost import simulate

        form = prediction.form
        schedule = form.schedule
        costs = self.costs_of_program(schedule.n_stages, form.partition, schedule.state)
        state_bytes = [
            self.config.optimizer_words * cost.parameter_bytes for cost in costs
        ]
        program = schedule.lower(n_steps).verify()
        timeline = simulate(program, costs, self.hardware, state_bytes)
        prediction.drawn = replace(timeline, name=prediction.name)
        return prediction.drawn

    def row(self, prediction: Prediction) -> dict[str, Any]:
        """Return a row of the table."""
        from toolkit.cost.timeline_rows import summary

        form = prediction.form
        ratio = (
            f"{prediction.seconds / prediction.baseline:.2f}"
            if prediction.baseline
            else "-"
        )
        row: dict[str, Any] = {"schedule": prediction.name, "by DDP's time": ratio}
        row |= summary(
            form.timeline,
            prediction.n_samples,
            self.hardware,
            averaging=prediction.averaging,
        )
        row["devices"] = row["ranks"] * prediction.width
        row["mean staleness"] = round(form.schedule.mean_staleness, 3)
        return row | {"form": form.words, "accuracy": prediction.accuracy}

    def rivals(self) -> list[Prediction]:
        """Return what people use on slow links, if messages are compressed."""
        from toolkit.cost.slow_link_rivals import rivals_on_slow_links

        if self.config.compression == "none":
            return []
        predictions = []
        for (n_ranks, n_microbatches), baseline in self._baselines.items():
            job = self._job(n_ranks, n_microbatches)
            for rival in rivals_on_slow_links(job, self.config.compression):
                prediction = Prediction(
                    rival.name,
                    rival.form,
                    n_samples=self.config.batch * n_microbatches,
                    accuracy=rival.accuracy,
                    baseline=baseline,
                    averaging=rival.averaging,
                )
                predictions.append(prediction)
        return predictions


def check(config: DictConfig) -> None:
    """Raise UserError if an option has a value that it cannot have."""
    from toolkit.cost.compression import COMPRESSIONS

    check_counts(config, "batch", "steps", "width")
    check_choice("chains", config.chains, _CHAINS)
    check_choice("compression", config.compression, COMPRESSIONS)
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

    n_forms = 4 if has_forms(schedule) else 1
    n_steps = n_forms * steps_to_time(schedule, TIMED_STEPS)
    n_ops = 2 * schedule.n_stages * schedule.n_microbatches * n_steps
    return f"about {max(1, round(n_ops / _OPS_A_SECOND))} s"


if __name__ == "__main__":
    main()
