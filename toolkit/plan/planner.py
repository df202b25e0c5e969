"""Choose a schedule for a model, machines and limits, by simulating all that may be the best."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from torch import nn

from toolkit.cost import Hardware
from toolkit.cost.hardware import check_hardware
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError, whole
from toolkit.model import InputSpec
from toolkit.model.node_costs import meta_copy
from toolkit.model.partition import MEASURES, Traced
from toolkit.plan.candidate_sweep import CandidateSweep, CostsOf
from toolkit.plan.candidates import Candidate, data_options
from toolkit.plan.compressed_candidates import with_compressions
from toolkit.plan.measure import OnProgress
from toolkit.plan.plan_options import DEFAULT_PLAN_OPTIONS, PlanOptions, checked_widths
from toolkit.plan.plan_result import Plan
from toolkit.plan.predictions import Prediction, Predictor, front, stage_costs


def plan(
    model: nn.Module,
    form: InputSpec,
    hardware: Hardware,
    ranks: int | Sequence[int] = 8,
    *,
    batch: int = 256,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    on_progress: OnProgress = lambda activity, share: None,
) -> Plan:
    """Simulate the methods of the catalogue that may be the best on given machines; choose one.

    Stages, groups, chains, micro-batches, cuts, and whether activations are computed again vary as
    well. Fast schedules with late weights are also tried with a fresher delay: weights are made
    fresh one by one while a step takes at most 10 % longer than before.

    Args:
        model: any module that :func:`toolkit.model.partition` cuts; on any device.
        form: its samples.
        hardware: seconds of messages, and of kernels by the roofline; limits of memory.
        ranks: numbers of devices to choose from.
        batch: samples of a training step.
        options: limits, precision, optimizer and searches.
        on_progress: called with the present activity, and the share of it that is done.

    Raises:
        UserError: the model cannot be cut, workers' shares of the batch differ, an invalid number,
            or a width that the model or the machines cannot have.
    """
    # 1. Refuse what cannot be planned at once, before minutes of simulation.
    sizes = rank_numbers(ranks, batch)
    # On the meta device analysis takes no memory, and the user's model is not touched.
    meta_model = meta_copy(model)
    # Buckets depend on the parameters alone, so any example will do.
    n_buckets = len(Traced.of(meta_model, form.example(2, "meta")).cut_in_buckets())
    predictor = new_predictor(hardware, options)
    widths = checked_widths(options, sizes[0], predictor, meta_model)
    costs_of = partial(
        stage_costs, meta_model, form, options.precision, predictor=predictor
    )
    if not options.command_options:
        default_options = f"model.target=MY_PACKAGE.MY_MODEL {data_options(form)}"
        options = replace(options, command_options=default_options)
    # 2. Analyse the stages, simulate the candidates, and choose.
    sweep = new_sweep(predictor, costs_of, options, on_progress)
    all_candidates = sweep.find_candidates(sizes, batch, n_buckets, widths=widths)
    return choose_plan(sweep, all_candidates, options)


def rank_numbers(ranks: int | Sequence[int], batch: int) -> list[int]:
    """Return the numbers of ranks, the largest first."""
    numbers = ranks if isinstance(ranks, Sequence) else [ranks]
    if not numbers:
        raise UserError("ranks is empty: give a number of ranks, or several")
    sizes = [whole(n_ranks, "ranks", 1) for n_ranks in numbers]
    n_samples = whole(batch, "batch", 1)
    if any(n_samples % n_ranks for n_ranks in sizes):
        option = f"ranks=[{','.join(map(str, sizes))}]"
        if len(sizes) == 1:
            option = f"ranks={sizes[0]}"
        raise UserError(
            f"batch={batch} must be a multiple of ranks: got {option}; change either"
        )
    return sorted(set(sizes), reverse=True)


def new_sweep(
    predictor: Predictor,
    costs_of: CostsOf,
    options: PlanOptions,
    on_progress: OnProgress,
) -> CandidateSweep:
    """Return a sweep over the machines and limits of a plan, which ``predictor`` knows."""
    return CandidateSweep(
        predictor, costs_of, options.jobs or os.cpu_count() or 1, on_progress
    )


def new_predictor(hardware: Hardware, options: PlanOptions) -> Predictor:
    """Return what predicts candidates on the machines, and within the limits, of a plan."""
    return Predictor(
        hardware=check_hardware(hardware),
        limits=options.limits,
        optimizer_words=options.optimizer_words,
        width_efficiency=options.width_efficiency,
    )


def choose_plan(
    sweep: CandidateSweep, all_candidates: Sequence[Candidate], options: PlanOptions
) -> Plan:
    """Simulate all candidates that may be the best, and choose."""
    predictor = sweep.predictor
    # 1. Plain stages of all methods, then other stages of the fast ones.
    all_candidates = with_compressions(all_candidates, options.compressions)
    _simulate_candidates(sweep, all_candidates)
    # 2. Fresher delays. Only now is it known which schedules with late weights deserve a search.
    sweep.find_affordable_delays()
    # 3. Rank orders that no method has. They compete with all predictions so far.
    searched = None
    if options.search_seconds > 0:
        searched = sweep.search_rank_orders(options.search_seconds)
    # 4. The choice, and what it is compared with.
    baseline = _fastest_plain_cut(sweep, all_candidates[0])
    best_of_classes = sweep.confirm_choice(baseline)
    best_prediction = best_of_classes[0] if best_of_classes else None
    ddp_alike = None
    if best_prediction is not None:
        ddp_alike = _ddp_alike(sweep, best_prediction, all_candidates)
    return Plan(
        predictions=tuple(sweep.done.values()),
        front=tuple(front(sweep.done.values())),
        baseline=baseline,
        best=best_prediction,
        limits=predictor.limits,
        hardware=predictor.hardware,
        command_options=options.command_options,
        n_candidates=len(all_candidates),
        left_out=sweep.left_out,
        searched=searched,
        ddp_alike=ddp_alike,
        coarser=tuple(best_of_classes[1:]),
    )


def _simulate_candidates(
    sweep: CandidateSweep, all_candidates: Sequence[Candidate]
) -> None:
    """Simulate plain stages of every method, and then other stages of the fast methods."""
    plainest_candidate = all_candidates[0]
    plain_candidates = [candidate for candidate in all_candidates if candidate.is_plain]
    sweep.simulate("simulating schedules", plain_candidates, plainest_candidate)

    # Other cuts and recomputation are tried only of those methods that are not much slower than
    # the fastest.
    near_methods = sweep.near_methods()
    more_candidates = [
        candidate
        for candidate in all_candidates
        if (candidate.spec, candidate.compression) in near_methods
        and candidate not in sweep.done
    ]
    sweep.simulate(
        "simulating cuts and recomputation", more_candidates, plainest_candidate
    )


def _ddp_alike(
    sweep: CandidateSweep, best: Prediction, all_candidates: Sequence[Candidate]
) -> Prediction | None:
    """Return DDP with the ranks, micro-batches and recomputation of ``best``."""
    candidate = best.candidate
    for ddp in all_candidates:
        if (
            ddp.partition == BUCKETS
            and ddp.compression == "none"
            and ddp.batch == candidate.batch
            and ddp.checkpoint == candidate.checkpoint
            and ddp.schedule.n_ranks == best.devices
        ):
            sweep.simulate("simulating DDP with the same micro-batches", [ddp], ddp)
            return sweep.done[ddp]
    return None


def _fastest_plain_cut(
    sweep: CandidateSweep, plainest_candidate: Candidate
) -> Prediction:
    """Return the prediction of the plainest candidate, with the fastest cut if it has several."""
    cuts = [plainest_candidate]
    if plainest_candidate.partition != BUCKETS:
        cuts = [
            replace(plainest_candidate, partition=measure_name)
            for measure_name in MEASURES
        ]
    predictions = [
        sweep.done[candidate] for candidate in cuts if candidate in sweep.done
    ]
    return min(predictions, key=attrgetter("seconds"))
