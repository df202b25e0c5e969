"""The paper's comparison, measured: run every setting on processes, and compare with the count."""

from dataclasses import asdict, dataclass
from fractions import Fraction
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
from toolkit.schedule.steady_state import belongs_to, footprint, settled_steps, steady_slots
from toolkit.schedule.traffic import traffic_of

_PARAMETERS = (Buffer.GRADIENT, Buffer.WEIGHTS)


@dataclass(frozen=True)
class MeasuredRow:
    """One setting of the paper under one rule (DP, CDP-v1 or CDP-v2), measured."""

    setting: str
    rule: str
    measured: dict[str, Fraction]  # in the units of schedule.steady_state.Footprint
    differences: dict[str, tuple[Any, Any]]  # (counted, measured), or cells that differ
    measurements: Measurements


def n_ranks(n: int) -> int:
    """Return the number of processes of :func:`measure` for ``n`` workers."""
    return max(make(rule, n).n_ranks for make in SETTINGS.values() for rule in RULES)


def measure(n: int, width: int = 256, batch: int = 64, timeout: float = 120.0) -> list[MeasuredRow]:
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
            if (part_world := world.part(schedule.n_ranks)) is not None:
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
    found: Measurements, n: int, width: int, batch: int
) -> tuple[Timeline, Timeline]:
    """Return the measured timeline, and the simulation with the measured durations."""
    timeline = found.timeline()
    example = torch.empty(batch, width, device="meta")
    costs = profile(equal_stages(n, width, batch), example)
    return timeline, predict_calibrated(timeline, found.schedule, costs)


def equal_stages(n: int, width: int, batch: int) -> Stages:
    """Return ``n`` stages with ``width * width`` parameters each."""
    layers = [layer for _ in range(n) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())]
    names = [str(2 * stage) for stage in range(1, n)]
    return partition(nn.Sequential(*layers), n, torch.empty(batch, width), names, check=False)


def make_row(setting: str, rule: str, found: Measurements, width: int, batch: int) -> MeasuredRow:
    """Compare measurements with the count; see :func:`measure`."""
    schedule = found.schedule
    item_bytes = torch.get_default_dtype().itemsize
    stage_bytes = item_bytes * width * width  # bytes of its parameters
    measured = _footprint(found, stage_bytes, item_bytes * width * batch)
    counted = asdict(footprint(schedule))
    differences: dict[str, tuple[Any, Any]] = {
        name: (counted[name], value) for name, value in measured.items() if value != counted[name]
    }
    traffic = schedule.lower(2 * settled_steps(schedule) + 1).traffic()
    cells = sum(
        (expected.messages, expected.units * stage_bytes) != sent
        for slots in zip(traffic, found.sent(*_PARAMETERS), strict=True)
        for expected, sent in zip(*slots, strict=True)
    )
    if cells:
        differences["messages and bytes by slot and rank"] = (0, cells)
    return MeasuredRow(setting, rule, measured, differences, found)


def _footprint(
    measurements: Measurements, stage_bytes: int, activation_bytes: int
) -> dict[str, Fraction]:
    """Return the measurable part of a footprint in the steady state.

    ``stage_bytes`` are the bytes of a stage's parameters; ``activation_bytes``, those that it keeps
    of a micro-batch.
    """
    schedule, ranks = measurements.schedule, len(measurements.records)
    settled = settled_steps(schedule)
    slots = steady_slots(schedule, settled)
    stage_share = Fraction(1, schedule.n_stages)
    activations = [rank_activations[slots] for rank_activations in measurements.activations()]
    sent = measurements.sent(*_PARAMETERS)[slots]
    messages = [
        (traffic_of(event.instruction, record.rank), event.bytes)
        for record in measurements.records
        for event in record.events
        if belongs_to(event.instruction, settled)
    ]
    return {
        "ranks": Fraction(ranks),
        "activations": Fraction(max(map(max, activations)), activation_bytes) * stage_share,
        "total_activations": Fraction(
            max(map(sum, zip(*activations, strict=True))), activation_bytes
        )
        * stage_share,
        "weights": Fraction(max(measurements.peak_weights()), stage_bytes) * stage_share,
        "traffic": sum(traffic.units * n_bytes for traffic, n_bytes in messages)
        / Fraction(stage_bytes * ranks)
        * stage_share,
        "messages": Fraction(sum(traffic.messages for traffic, _ in messages), ranks),
        "traffic_in_slot": max(cell.units for slot in sent for cell in slot)
        / stage_bytes
        * stage_share,
    }
