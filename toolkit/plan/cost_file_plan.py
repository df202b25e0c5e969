"""Which schedule for stages whose costs a file gives, in place of a model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from toolkit.cost import Costs, Hardware
from toolkit.cost.cost_file import BATCH, FileCosts
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError
from toolkit.plan.candidates import Candidate
from toolkit.plan.measure import OnProgress
from toolkit.plan.plan_options import DEFAULT_PLAN_OPTIONS, PlanOptions
from toolkit.plan.plan_result import Plan
from toolkit.plan.planner import choose_plan, new_predictor, new_sweep, rank_numbers

_COMMAND_OPTIONS = "model.target=MY_PACKAGE.MY_MODEL data=MY_DATA"


def plan_costs(
    costs: FileCosts,
    hardware: Hardware,
    ranks: int | Sequence[int] = 8,
    *,
    batch: int = 256,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    on_progress: OnProgress = lambda activity, share: None,
) -> Plan:
    """Plan as :func:`plan` does, on costs of a file in place of a model.

    Stages are one or more rows of the file. All micro-batches are those that were measured.

    Args:
        costs: rows of :func:`toolkit.cost.cost_file.read_costs`.
        hardware: seconds of messages and updates; limits of memory.
        ranks: numbers of devices to choose from.
        batch: samples of a training step.
        options: limits, optimizer and searches; ``precision`` is that of the file.
        on_progress: called with the present activity, and the share of it that is done.

    Raises:
        UserError: the file does not say its micro-batch, ``batch`` is not 1, 2 or 4 of them for
            each rank, or ranks of several devices.
    """
    if costs.batch is None:
        raise UserError(
            f"costs={costs.path} do not say with which micro-batch they were measured: add a column"
            f" {BATCH} of its samples"
        )
    if {*options.widths} != {1}:
        raise UserError(
            f"costs={costs.path} are those of ranks of one device: got"
            f" widths={[*options.widths]}; leave out widths, or give a model"
        )
    if not options.command_options:
        options = replace(options, command_options=_COMMAND_OPTIONS)
    sizes = rank_numbers(ranks, batch)
    # Rows are the smallest parts of a bucket, so there are as many buckets as rows allow.
    n_buckets = len(costs(1, BUCKETS))
    predictor = new_predictor(hardware, options)
    costs_of = partial(_costs_of_candidates, costs)
    sweep = new_sweep(predictor, costs_of, options, on_progress)
    all_candidates = sweep.find_candidates(
        sizes, batch, n_buckets, microbatch=costs.batch
    )
    return choose_plan(sweep, all_candidates, options)


def _costs_of_candidates(
    costs: FileCosts, candidates: Sequence[Candidate]
) -> list[Costs | UserError]:
    """Return the costs of stages of a file's rows, or why it has too few rows."""
    costs_or_errors: list[Costs | UserError] = []
    for candidate in candidates:
        try:
            costs_or_errors.append(
                costs(candidate.schedule.n_stages, candidate.partition)
            )
        except UserError as error:
            costs_or_errors.append(error)
    return costs_or_errors
