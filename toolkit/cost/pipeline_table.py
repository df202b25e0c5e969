"""Compare the catalogue's methods on equal ranks and equal stages.

A backward takes twice its forward, each half of it as long as the forward; messages and updates
take no time.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any

from toolkit.cost.cost_file import FileCosts
from toolkit.cost.hardware import UNIT
from toolkit.cost.stage_costs import Costs, unit_costs
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.errors import UserError, whole
from toolkit.format import digits, fraction, staleness_cells
from toolkit.schedule import Action, Schedule, ScheduleSpec, catalog
from toolkit.schedule.catalog import Method
from toolkit.schedule.method_sizes import pipeline_sizes, worker_sizes
from toolkit.schedule.steady_state import footprint, settled_steps

MakeOnRanks = Callable[[int, int], Schedule]
"""Builds a schedule from ranks and micro-batches; raises UserError if there is none."""


def _pipeline(method: Method, n_ranks: int, n_microbatches: int) -> Schedule:
    sizes = pipeline_sizes(method, n_ranks, n_microbatches)
    return ScheduleSpec(method.name, **sizes).build()


def _workers(method: Method, n_ranks: int, n_microbatches: int) -> Schedule:
    sizes = worker_sizes(method, n_ranks, n_microbatches, n_stages=n_ranks)
    return ScheduleSpec(method.name, **sizes).build()


def _pipelines() -> dict[str, MakeOnRanks]:
    makers: dict[str, MakeOnRanks] = {}
    for kind in ("pipeline", "cyclic"):
        for method in catalog.METHODS.values():
            if method.kind == kind and "state" not in method.options:
                makers[method.label] = partial(_pipeline, method)
    return makers


def _whole_models() -> dict[str, MakeOnRanks]:
    makers: dict[str, MakeOnRanks] = {}
    for method in catalog.METHODS.values():
        if method.kind != "pipeline":
            label = method.label
            if label in PIPELINES:
                # The method is in both tables: with a rank for each stage, and with whole models.
                label += ", whole models"
            makers[label] = partial(_workers, method)
    return makers


PIPELINES: Mapping[str, MakeOnRanks] = _pipelines()
"""The pipelines, from ranks and micro-batches: every one, and CDP with a rank for each stage."""
WORKERS: Mapping[str, MakeOnRanks] = _whole_models()
"""Methods whose ranks run whole models."""


def pipelines(
    n_ranks: int,
    n_microbatches: int,
    methods: Mapping[str, MakeOnRanks] = PIPELINES,
) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Return the methods' schedules by name, and the reason each other one is left out.

    Args:
        n_ranks: ranks p; methods use p stages, or 2p where a rank has two.
        n_microbatches: per training step.
        methods: :data:`PIPELINES`, or :data:`WORKERS`.

    Raises:
        UserError: a number is not an integer, or below 1.
    """
    n_ranks = whole(n_ranks, "the number of ranks", 1)
    n_microbatches = whole(n_microbatches, "the number of micro-batches", 1)
    schedule_of_label: dict[str, Schedule] = {}
    reason_of_label: dict[str, str] = {}
    for label, make_schedule in methods.items():
        try:
            schedule_of_label[label] = make_schedule(n_ranks, n_microbatches)
        except UserError as error:
            reason_of_label[label] = str(error)
    return schedule_of_label, reason_of_label


def assess_pipeline(
    method: str, schedule: Schedule, file_costs: FileCosts | None = None
) -> dict[str, Any]:
    """Count and simulate a schedule of :func:`pipelines` in its steady state.

    Args:
        method: its label.
        schedule: the schedule.
        file_costs: a profile; by default stages are equal, and backwards take twice their forwards.

    Returns:
        ``method``, ``microbatches`` of a training step and ``ranks``; ``activations``, the peak of
        one rank, and ``total_activations`` of all together, where 1 is what one micro-batch keeps
        over the whole model; ``idle``, the share of the ranks' time without compute; ``weights``,
        the peak of one rank over all versions, in models (updates hold a stage twice);
        ``staleness_mean`` and ``staleness_max`` in steps; ``flush``, whether all weights are fresh;
        what a rank sends in a step, on average: ``traffic``, parameters and gradients in models,
        their ``messages``, and ``boundaries``, messages of a stage's output or its gradient.
        With ``file_costs``, also ``seconds`` of a step and ``bytes`` of the fullest rank.
    """
    counted_footprint = footprint(schedule)
    step = settled_steps(schedule)
    # A step in the middle has as many steps before it as after it, so that all its messages are
    # there.
    settled_program = schedule.lower(2 * step + 1)
    boundaries = 0
    for instruction in chain.from_iterable(settled_program.ranks):
        is_boundary = (
            instruction.action == Action.SEND and instruction.microbatch is not None
        )
        boundaries += is_boundary and instruction.step == step
    costs: Costs = unit_costs(schedule.n_stages, backward=2.0)
    if file_costs is not None:
        costs = file_costs(schedule.n_stages)
    # Links take no time here, as in the tables that papers print.
    timeline = simulate_steady_steps(schedule, costs, UNIT)
    row = {
        "method": method,
        "microbatches": schedule.n_microbatches,
        "ranks": counted_footprint.ranks,
        "activations": counted_footprint.activations,
        "total_activations": counted_footprint.total_activations,
        "idle": timeline.idle_share,
        "weights": counted_footprint.weights,
        "staleness_mean": schedule.mean_staleness,
        "staleness_max": schedule.max_staleness,
        "flush": schedule.max_staleness == 0,
        "traffic": counted_footprint.traffic,
        "messages": counted_footprint.messages,
        "boundaries": Fraction(boundaries, counted_footprint.ranks),
    }
    if file_costs is not None:
        row["seconds"] = timeline.step_time
        row["bytes"] = max(map(timeline.peak_memory, range(timeline.n_ranks)))
    return row


def pipeline_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of :func:`assess_pipeline` as the cells of a printed table, by heading."""
    cells = {
        "micro-batches": row["microbatches"],
        "method": row["method"],
        "activations (all)": (
            f"{float(row['activations']):.4g} ({float(row['total_activations']):.4g}) A"
        ),
        "idle": f"{row['idle']:z.1%}",
        "weights": f"{fraction(row['weights'])} P",
        **staleness_cells(row),
        "flush": "yes" if row["flush"] else "no",
        "sent (messages)": f"{fraction(row['traffic'])} P ({float(row['messages']):.4g})",
        "boundaries": f"{float(row['boundaries']):.4g}",
    }
    if "seconds" in row:
        cells["ms"] = digits(row["seconds"] * 1e3)
        cells["GB"] = f"{row['bytes'] / 1e9:.3g}"
    return cells
