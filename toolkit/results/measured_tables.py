"""Write the measurements of a training run, and the simulator's predictions of them."""

from pathlib import Path
from typing import NamedTuple

from toolkit.cost import Costs, boundary_costs
from toolkit.cost.timeline import ACTIVATIONS, WEIGHTS, Timeline
from toolkit.errors import first_line
from toolkit.files import note_write_errors, write_csv
from toolkit.model import Stages
from toolkit.results.record import PlainRow
from toolkit.results.tracker import Tracker
from toolkit.results.wandb_measured import track_measured
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.process_group.columns import Column, width_of
from toolkit.training import TrainingRun
from toolkit.training.run_prediction import (
    beside_prediction,
    predict_bytes_sent,
    predict_optimizer_bytes,
    stages_and_costs,
)


class MeasuredTables(NamedTuple):
    """What a result says of a run's measurements.

    Attributes:
        ranks: a row per rank, with what is predicted.
        step_seconds: of a training step, ``measured`` and, if known, ``predicted``.
        notes: sentences on what is missing.
    """

    ranks: list[PlainRow]
    step_seconds: dict[str, float]
    notes: list[str]


def write_measured(
    measured: Measurements, run: TrainingRun, folder: Path, tracker: Tracker
) -> MeasuredTables:
    """Write tables and figures of what was measured and predicted, and track them.

    Args:
        measured: measurements of all ranks of ``run``.
        run: a run that has ended.
        folder: folder of the run.
        tracker: tracker of the run.
    """
    from toolkit.figures import save, timelines

    notes: list[str] = []
    rows: list[PlainRow] = [*measured.by_rank()]
    predicted: Timeline | None = None
    try:
        stages, costs = _stages_and_costs(measured, run)
        timeline, predicted = beside_prediction(measured, costs)
        _add_predictions(rows, run, measured, predicted)
        _add_optimizer_bytes(rows, run, stages, costs)
    except (ValueError, RuntimeError) as error:
        # What can run cannot always be analysed.
        notes.append(f"the measurements are without a prediction: {first_line(error)}")
        timeline = measured.timeline()
    compared = [timeline]
    step_seconds = {"measured": timeline.step_time}
    if predicted is not None:
        compared.append(predicted)
        step_seconds["predicted"] = predicted.step_time
    with note_write_errors(notes, folder):
        figure = timelines(compared)
        write_csv(folder / "ranks.csv", rows)
        save(figure, folder / "timeline")
        timeline.to_chrome_trace(folder / "trace.json")
        timeline.to_frame().to_csv(folder / "spans.csv", index=False)
        track_measured(tracker, figure, rows, timeline, predicted)
    return MeasuredTables(rows, step_seconds, notes)


def _stages_and_costs(measured: Measurements, run: TrainingRun) -> tuple[Stages, Costs]:
    """Return the stages of a run, and what they cost one device of a rank."""
    world = run.runtime.world
    # A process of a job has no process group of its own, but a mesh that moves nothing.
    mesh = world.row.trace if isinstance(world, Column) else None
    stages, costs = stages_and_costs(
        run.build_model(),
        measured.schedule,
        run.samples.form,
        run.options,
        width=width_of(getattr(run.runtime, "width", 1)),
        mesh=mesh,
    )
    options = run.recorded_options.get("runtime") or {}
    boundary_compression = options.get("boundary_compression", "none")
    return stages, boundary_costs(costs, boundary_compression)


def _add_predictions(
    rows: list[PlainRow],
    run: TrainingRun,
    measured: Measurements,
    predicted: Timeline,
) -> None:
    """Add to each rank's row what is predicted of it."""
    sent_bytes = predict_bytes_sent(predicted, measured.schedule, run.samples.form)
    options = run.recorded_options.get("runtime") or {}
    is_compressed = options.get("compression", "none") != "none"
    for rank, row in enumerate(rows):
        # With recomputation, activations live within ops, where none are measured.
        if run.options.checkpoint == "none":
            row["predicted_activations"] = predicted.peak_memory(rank, ACTIVATIONS)
        row["predicted_weights"] = predicted.peak_memory(rank, WEIGHTS)
        # Costs are those of whole messages of gradients and weights.
        if not is_compressed:
            row["predicted_bytes_sent"] = sent_bytes[rank]


def _add_optimizer_bytes(
    rows: list[PlainRow], run: TrainingRun, stages: Stages, costs: Costs
) -> None:
    """Add to each rank's row the predicted bytes of its optimizers' state, if they are known."""
    # Where the schedule changes, so may the stages that a rank updates.
    schedule = run.runtime.schedule.final
    optimizer_bytes = predict_optimizer_bytes(
        stages, costs, schedule, run.runtime.optimizer
    )
    for row, n_bytes in zip(rows, optimizer_bytes, strict=False):
        row["predicted_optimizer_state"] = n_bytes
