"""What a schedule promises of each op of a program, which its verification compares."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from toolkit.schedule.instruction import Buffer

if TYPE_CHECKING:
    from toolkit.schedule.program import Program

OpKey = tuple
"""Kind, stage, micro-batch and step of an op."""

Promise = tuple[int, int | None, Buffer | None]
"""Tick of an op, the weight version that it reads, and the buffer that it reads instead."""


def promises(program: "Program") -> Iterator[tuple[OpKey, Promise]]:
    """Yield each op of a program and what its schedule promises of it."""
    # Each span of steps has one schedule; its ticks begin where the span before has finished.
    first_steps = [program.first_step, *program.schedule.changes(program.steps)]
    spans = pairwise([*first_steps, program.steps.stop])
    for first_tick, (first_step, stop) in zip(
        (0, *program.changes), spans, strict=True
    ):
        schedule = program.schedule.at(first_step)
        is_corrected = schedule.corrected.kind != "none"
        step_start = first_tick
        for step in range(first_step, stop):
            versions = []
            for stage, delays in enumerate(schedule.delays(step)):
                first_version = schedule.first_version(stage)
                versions.append([max(first_version, step - delay) for delay in delays])
            for op, op_start in schedule.timing.starts.items():
                kind, stage, microbatch = op
                version = versions[stage][microbatch]
                buffer = schedule.read_by(op, version, step) if is_corrected else None
                promise = (step_start + op_start, version, buffer)
                yield (kind, stage, microbatch, step), promise
            step_start += schedule.timing.period
