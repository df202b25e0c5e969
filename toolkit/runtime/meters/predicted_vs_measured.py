"""The paper's comparison, measured: run every setting on processes, and compare with the count."""

from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from toolkit.cost import Timeline, predict_calibrated, profile
from toolkit.model import Stages, partition
from toolkit.runtime.distributed import Distributed
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.rank_process import report
from toolkit.schedule import Buffer
from toolkit.schedule.paper_table import RULES, SETTINGS
from toolkit.schedule.steady_state import (
    belongs_to,
    footprint,
    settled_steps,
    steady_slots,
)
from toolkit.schedule.traffic import traffic_of

_PARAMETERS = (Buffer.GRADIENT, Buffer.WEIGHTS)


@dataclass(frozen=True)
class MeasuredRow:
    """One setting of the paper under one rule, measured.

    Attributes:
        setting: name of the setting.
        rule: DP, CDP-v1 or CDP-v2.
        measured: in the units of :class:`toolkit.schedule.steady_state.Footprint`.
        differences: (counted, measured) of what differs, by name.
        measurements: those of all ranks.
    """

    setting: str
    rule: str
    measured: dict[str, Fraction]
    differences: dict[str, tuple[Any, Any]]
    measurements: Measurements


def n_ranks(n: int) -> int:
    """Return the number of processes of :func:`measure` for ``n`` workers."""
    sizes = []
    for make in SETTINGS.values():
        sizes += [make(rule, n).n_ranks for rule in RULES]
    return max(sizes)


def measure(
    n: int, width: int = 256, batch: int = 64, timeout: float = 120.0
) -> list[MeasuredRow]:
    """Run every setting under every rule. Every rank calls it; rank 0 gets the rows.

    Nothing overlaps, so that the weights held are those of the program's ticks. The model has
    ``n`` equal stages, a linear layer and a tanh each, so that bytes convert to stages.

    Args:
        n: number of workers, stages and micro-batches.
        width: width of a layer.
        batch: samples of a micro-batch.
        timeout: seconds after which a rank that does not answer ends the job.
    """
    world = join(n_ranks(n), device="cpu", timeout=timeout)
    rows = []
    for setting, make in SETTINGS.items():
        for rule in RULES:
            report(f"{setting}, {rule}")
            schedule = make(rule, n)
            part_world = world.part(schedule.n_ranks)
            if part_world is not None:
                # The step in the middle is steady: steps before it fill the pipeline, those after
                # drain it.
                n_steps = 2 * settled_steps(schedule) + 1
                runtime = Distributed(
                    equal_stages(n, width, batch),
                    schedule,
                    lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                    mse_loss,
                    world=part_world,
                    record=n_steps,
                    overlap=False,
                )
                samples = torch.ones(n * batch, width)
                list(runtime.run([(samples, samples)] * n_steps))
                measurements = runtime.measurements()
                if world.rank == 0:
                    rows.append(make_row(setting, rule, measurements, width, batch))
            world.barrier()
    return rows


def measured_and_predicted(
    measurements: Measurements, n: int, width: int, batch: int
) -> tuple[Timeline, Timeline]:
    """Return the measured timeline, and the simulation with the measured durations."""
    timeline = measurements.timeline()
    example = torch.empty(batch, width, device="meta")
    costs = profile(equal_stages(n, width, batch), example)
    return timeline, predict_calibrated(timeline, measurements.schedule, costs)


def equal_stages(n: int, width: int, batch: int) -> Stages:
    """Return ``n`` stages with ``width * width`` parameters each."""
    layers: list[nn.Module] = []
    for _ in range(n):
        layers += [nn.Linear(width, width, bias=False), nn.Tanh()]
    # Layers are numbered: the linear layer of stage j is number 2 * j.
    names = [str(2 * stage) for stage in range(1, n)]
    return partition(
        nn.Sequential(*layers), n, torch.empty(batch, width), names, check=False
    )


def make_row(
    setting: str, rule: str, measurements: Measurements, width: int, batch: int
) -> MeasuredRow:
    """Compare measurements with the count; see :func:`measure`."""
    schedule = measurements.schedule
    item_bytes = torch.get_default_dtype().itemsize
    stage_bytes = item_bytes * width * width  # bytes of its parameters
    # Of a stage autograd keeps the output of tanh. The input of the linear layer is that of the
    # stage, which counts where it was made.
    measured = _footprint(measurements, stage_bytes, item_bytes * width * batch)
    counted = asdict(footprint(schedule))
    differences: dict[str, tuple[Any, Any]] = {}
    for name, value in measured.items():
        if value != counted[name]:
            differences[name] = (counted[name], value)

    # Compare what each rank sends in each slot.
    expected_traffic = schedule.lower(2 * settled_steps(schedule) + 1).traffic()
    n_different = 0
    for expected_slot, slot in zip(
        expected_traffic, measurements.sent(*_PARAMETERS), strict=True
    ):
        for expected, sent in zip(expected_slot, slot, strict=True):
            n_different += (expected.messages, expected.units * stage_bytes) != sent
    if n_different:
        differences["messages and bytes by slot and rank"] = (0, n_different)
    return MeasuredRow(setting, rule, measured, differences, measurements)


def _footprint(
    measurements: Measurements, stage_bytes: int, activation_bytes: int
) -> dict[str, Fraction]:
    """Return the measurable part of a footprint in the steady state.

    ``stage_bytes`` are the bytes of a stage's parameters; ``activation_bytes``, those that it keeps
    of a micro-batch.
    """
    schedule = measurements.schedule
    n_ranks = len(measurements.records)
    settled = settled_steps(schedule)
    slots = steady_slots(schedule, settled)

    # Bytes of a whole model; each stage is an equal share of it.
    model_bytes = stage_bytes * schedule.n_stages
    model_activation_bytes = activation_bytes * schedule.n_stages

    activations = [
        rank_activations[slots] for rank_activations in measurements.activations()
    ]
    total_activations = map(sum, zip(*activations, strict=True))
    sent = measurements.sent(*_PARAMETERS)[slots]
    n_messages = 0
    sent_bytes = Fraction(0)
    for record in measurements.records:
        for event in record.events:
            if belongs_to(event.instruction, settled):
                traffic = traffic_of(event.instruction, record.rank)
                n_messages += traffic.messages
                sent_bytes += traffic.units * event.bytes
    return {
        "ranks": Fraction(n_ranks),
        "activations": Fraction(max(map(max, activations)), model_activation_bytes),
        "total_activations": Fraction(max(total_activations), model_activation_bytes),
        "weights": Fraction(max(measurements.peak_weights()), model_bytes),
        "traffic": sent_bytes / (model_bytes * n_ranks),
        "messages": Fraction(n_messages, n_ranks),
        "traffic_in_slot": max(cell.units for cell in chain.from_iterable(sent))
        / model_bytes,
    }
