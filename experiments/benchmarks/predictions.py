"""How well a plan predicts: candidates of a plan run on two ranks, against their simulation.

Stages are timed on the ranks, in turn as in training, links by messages of two sizes, the memory
by copies, and the runtime itself by models that compute almost nothing. Nothing is fitted to the
runs that are compared. Other work of the machine slows both by turns: stages and steps are timed
in alternating rounds, and medians count.
"""

import random
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.checks import check_cpu
from benchmarks.training_steps import N_CLASSES, momentum_sgd, random_images
from toolkit.cli.check_options import check_counts
from toolkit.cost import Costs, Hardware, Timeline, profile, recomputing, simulate
from toolkit.cost.timeline import ACTIVATIONS
from toolkit.errors import UserError
from toolkit.format import MB
from toolkit.model import build, partition
from toolkit.plan.candidates import Candidate, candidates
from toolkit.plan.measured_machine import measure_hardware
from toolkit.plan.runtime_overhead import (
    measure_overhead,
    measured_costs,
    step_seconds,
)
from toolkit.runtime import Distributed, StepOptions, join, launch
from toolkit.runtime.meters.measurements import Measurements
from toolkit.schedule.instruction import Action
from toolkit.schedule.program import Program
from toolkit.schedule.steady_state import steps_to_time

_RANKS = 2
_RECORDED = 6  # training steps whose memory is measured, before those that are timed
_ROUNDS = 3  # of timing stages and training steps
_SUMMING = Action.BACKWARD, Action.BACKWARD_WEIGHT


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each candidate: predicted and measured step time and memory.

    Memory is the fullest rank's, of weights, gradient sums and activations: at most that of all the
    weights that messages can bring, activations, and one sum a stage.
    """
    check_cpu("predictions", device)
    check_counts(config, "image_size", "batch", "steps", "configurations", of="bench.")
    return launch(measure, _RANKS, dict(config), seed)[0]


def draw_candidates(options: dict[str, Any], seed: int) -> list[tuple[str, Candidate]]:
    """Return models and candidates, drawn from all that use the ranks."""
    pairs = [
        (name, candidate)
        for name in options["models"]
        for candidate in candidates(_RANKS, options["batch"])
        if candidate.schedule.n_ranks == _RANKS
    ]
    return random.Random(seed).sample(pairs, min(options["configurations"], len(pairs)))


def measure(options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Run all candidates on this rank, one after another; return a row for each."""
    world = join(device="cpu")
    size = options["image_size"]
    hardware = measure_hardware(world)
    overhead = measure_overhead(world, hardware)
    inputs, targets = random_images(options["batch"], size)
    rows = []
    for name, candidate in tqdm(draw_candidates(options, seed), disable=world.rank > 0):
        torch.manual_seed(seed)
        schedule = candidate.schedule
        example = inputs[: candidate.batch]
        model = build(name, N_CLASSES, size)
        try:
            stages = partition(
                model, schedule.n_stages, example, candidate.partition, check=False
            )
        except UserError:  # the model has fewer stages
            continue
        # 1. What is predicted from: the program, and stages of the same weights to time apart.
        program = schedule.lower(steps_to_time(schedule, 8)).verify()
        timed_stages = deepcopy(stages)  # the runtime takes the weights of the others
        bytes_of_stage = profile(stages, example, repeats=1)

        runtime = Distributed(
            stages,
            schedule,
            momentum_sgd,
            F.cross_entropy,
            options=StepOptions(checkpoint=candidate.checkpoint),
            world=world,
            record=_RECORDED,
        )
        # 2. Memory first: a step that is recorded takes longer, and is not timed.
        list(runtime.run([(inputs, targets)] * _RECORDED))
        measurements = runtime.measurements()
        # 3. Stages and steps in turn, so that a slow minute of the machine meets both.
        costs_of_round, seconds_of_round = [], []
        for _ in range(_ROUNDS):
            costs_of_round.append(
                measured_costs(world, timed_stages, bytes_of_stage, example)
            )
            seconds_of_round.append(
                step_seconds(world, runtime, (inputs, targets), options["steps"])
            )
        # 4. Compare. The medians leave out a round that other work has slowed.
        costs = overhead.added_to(_medians(costs_of_round), program, timed_stages)
        costs = recomputing(costs, candidate.checkpoint)
        seconds = median(seconds_of_round)

        row = {"model": name, "schedule": candidate.label}
        rows.append(row | _errors(program, costs, hardware, measurements, seconds))
    return rows


def _errors(
    program: Program,
    costs: Costs,
    hardware: Hardware,
    measurements: Measurements,
    seconds: float,
) -> dict[str, Any]:
    """Return the step time and the memory, predicted and measured, as cells of a row."""
    weight_bytes = [cost.parameter_bytes for cost in costs]
    predicted = simulate(program, costs, hardware, weight_bytes)
    measured = measurements.timeline()
    measured_kinds = {change.kind for change in measured.changes}
    predicted_peak = max(_peaks(predicted, measured_kinds))
    measured_peak = max(_peaks(measured, measured_kinds))
    # Of each rank: activations, all weights that messages can bring, and one sum a stage.
    bounds = zip(
        _peaks(predicted, {ACTIVATIONS} & measured_kinds),
        measurements.most_weights(),
        _gradient_bytes(program, costs),
        strict=True,
    )
    return {
        "predicted ms": round(predicted.step_time * 1e3, 2),
        "measured ms": round(seconds * 1e3, 2),
        "error (%)": round(100 * (predicted.step_time / seconds - 1), 1),
        "predicted MB": round(predicted_peak / MB, 3),
        "measured MB": round(measured_peak / MB, 3),
        "at most MB": round(max(map(sum, bounds)) / MB, 3),
        "memory error (%)": round(100 * (predicted_peak / measured_peak - 1), 1),
    }


def _medians(costs_of_round: Sequence[Costs]) -> Costs:
    """Return costs, one entry per stage, with the medians of all rounds' seconds."""
    median_costs = []
    for costs_of_stage in zip(*costs_of_round, strict=True):
        forwards = [cost.forward_seconds for cost in costs_of_stage]
        backwards = [cost.backward_seconds for cost in costs_of_stage]
        median_costs.append(
            replace(
                costs_of_stage[0],
                forward_seconds=median(forwards),
                backward_seconds=median(backwards),
            )
        )
    return median_costs


def _gradient_bytes(program: Program, costs: Costs) -> list[float]:
    """Return of each rank the bytes of one gradient sum a stage."""
    n_bytes = []
    for order in program.ranks:
        summed_stages = {i.stage for i in order if i.action in _SUMMING}
        n_bytes.append(sum(costs[stage].gradient_bytes for stage in summed_stages))
    return n_bytes


def _peaks(timeline: Timeline, kinds: Collection[str]) -> list[float]:
    """Return each rank's peak memory of some kinds."""
    changes = [change for change in timeline.changes if change.kind in kinds]
    timeline = replace(timeline, changes=changes)
    return [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
