"""Compare the catalogue's methods on equal ranks and equal stages.

A backward takes twice its forward, each half of it as long as the forward; messages and updates
take no time.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any

from toolkit.cost.hardware import UNIT
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError, whole
from toolkit.schedule import Action, Schedule, catalog
from toolkit.schedule.catalog import Method
from toolkit.schedule.steady_state import footprint, settled_steps, steps_to_time


def _pipeline(method: Method, p: int, m: int) -> Schedule:
    ranks = {"n_ranks": p} if "n_ranks" in method.options else {}
    return method(p * method.stages_per_rank, m, **ranks)


def _cyclic_pipeline(method: Method, p: int, m: int) -> Schedule:
    return method(p, placement="per_stage", accumulate=_rounds(p, m))


def _workers(method: Method, p: int, m: int) -> Schedule:
    takes = signature(method.factory).parameters
    if "n_stages" not in takes or "n" not in takes:  # one device
        return method(p, m)
    k = _rounds(p, m)
    if "accumulate" in takes:
        return method(p, n_stages=p, accumulate=k)
    if k > 1:
        raise UserError(f"each worker has one micro-batch: got {m} for {p} ranks")
    return method(p, n_stages=p)


def _rounds(p: int, m: int) -> int:
    if m % p:
        raise UserError(f"workers take as many micro-batches each: got {m} for {p} ranks")
    return m // p


_REPLICATED = {
    name: method for name, method in catalog.METHODS.items() if "state" not in method.options
}
METHODS: Mapping[str, Callable[[int, int], Schedule]] = {
    **{m.label: partial(_pipeline, m) for m in _REPLICATED.values() if m.kind == "pipeline"},
    **{m.label: partial(_cyclic_pipeline, m) for m in _REPLICATED.values() if m.kind == "cyclic"},
}
"""The pipelines, from ranks and micro-batches: every one, and CDP with a rank for each stage."""
WORKERS: Mapping[str, Callable[[int, int], Schedule]] = {
    m.label + ", whole models" * (m.label in METHODS): partial(_workers, m)
    for m in catalog.METHODS.values()
    if m.kind != "pipeline"
}
"""Methods whose ranks run whole models."""


def pipelines(
    n_ranks: int,
    n_microbatches: int,
    methods: Mapping[str, Callable[[int, int], Schedule]] = METHODS,
) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Return the methods' schedules by name, and the reason each other one is left out.

    Args:
        n_ranks: ranks p; methods use p stages, or 2p where a rank has two.
        n_microbatches: per training step.
        methods: :data:`METHODS`, the pipelines, or :data:`WORKERS`.

    Raises:
        UserError: a number is not an integer, or below 1.
    """
    p = whole(n_ranks, "the number of ranks", 1)
    m = whole(n_microbatches, "the number of micro-batches", 1)
    made: dict[str, Schedule] = {}
    left_out: dict[str, str] = {}
    for label, make in methods.items():
        try:
            made[label] = make(p, m)
        except UserError as error:
            left_out[label] = str(error)
    return made, left_out


def assess(method: str, schedule: Schedule) -> dict[str, Any]:
    """Count and simulate a schedule of :func:`pipelines` in its steady state.

    Returns:
        ``method``, ``microbatches`` of a training step and ``ranks``; ``activations``, the peak of
        one rank, and ``total_activations`` of all together, where 1 is what one micro-batch keeps
        over the whole model; ``idle``, the share of the ranks' time without compute; ``weights``,
        the peak of one rank over all versions, in models (updates hold a stage twice);
        ``staleness_mean`` and ``staleness_max`` in steps; ``flush``, whether all weights are fresh;
        what a rank sends in a step, on average: ``traffic``, parameters and gradients in models,
        their ``messages``, and ``boundaries``, messages of a stage's output or its gradient.
    """
    counted = footprint(schedule)
    step = settled_steps(schedule)
    settled = schedule.lower(2 * step + 1)
    boundaries = sum(
        i.action == Action.SEND and i.microbatch is not None and i.step == step
        for instructions in settled.ranks
        for i in instructions
    )
    program = schedule.lower(steps_to_time(schedule)).verify()
    return {
        "method": method,
        "microbatches": schedule.n_microbatches,
        "ranks": counted.ranks,
        "activations": counted.activations,
        "total_activations": counted.total_activations,
        "idle": simulate(program, unit_costs(schedule.n_stages, backward=2.0), UNIT).idle_share,
        "weights": counted.weights,
        "staleness_mean": schedule.mean_staleness,
        "staleness_max": schedule.max_staleness,
        "flush": schedule.max_staleness == 0,
        "traffic": counted.traffic,
        "messages": counted.messages,
        "boundaries": Fraction(boundaries, counted.ranks),
    }
