"""Memory and communication of the runs' schedules, counted and measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.errors import first_line
from toolkit.format import DASH, MB, count, number
from toolkit.results.report_groups import Group
from toolkit.results.report_page import Block, Figure, Page, Table, Text
from toolkit.results.schedule_from_config import rebuild_schedule

if TYPE_CHECKING:
    from toolkit.schedule import Schedule, SteadyState

_GRIDS = 9  # schedules drawn
_ROWS = 12  # of the largest one drawn
_EXPLORED, _EXPLORED_SIZE = 3, 8  # schedules, stages and micro-batches of one
_MOST_OPS = 4096  # stages times micro-batches of a schedule to count

Cells = dict[str, str]


@dataclass
class Schedules:
    """The groups' schedules by name, and why others cannot be shown, by group."""

    found: dict[str, "Schedule"] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def steady(self) -> "dict[str, SteadyState]":
        """The steady state of each schedule."""
        from toolkit.schedule import steady_state

        return {name: steady_state(schedule) for name, schedule in self.found.items()}


def schedules_of(groups: Sequence[Group]) -> Schedules:
    """Rebuild each schedule once from the runs' options."""
    schedules = Schedules()
    for group in groups:
        try:
            schedule = rebuild_schedule(group.config["schedule"])
        except ValueError as error:
            schedules.refused[group.label] = first_line(error)
            continue
        if schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
            schedules.refused[group.label] = "it is too large to count"
            continue
        names = [
            schedule.name,
            f"{schedule.name}, {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches",
            f"{schedule.name} ({group.full_label(groups)})",
        ]
        known = schedules.found
        if schedule not in known.values():
            known[next((name for name in names if name not in known), names[-1])] = schedule
    return schedules


def memory_blocks(groups: Sequence[Group], schedules: Schedules) -> Iterator[Block]:
    """The schedules' grids, their peaks, and the memory measured on ranks."""
    from toolkit.figures import schedules as draw
    from toolkit.schedule.grid import rows

    for label, why in schedules.refused.items():
        yield Text(f"The schedule of {label} is left out: {why}.")
    found = schedules.found
    if not found:
        yield Text("No run has a schedule.")
        return
    small = [name for name, schedule in found.items() if rows(schedule.layout)[1] <= _ROWS]
    drawn = {name: found[name] for name in small[:_GRIDS]}
    if drawn:
        yield Text(
            "The stage that each rank runs in each slot of the first three training steps, above"
            " the activations that all ranks together keep."
        )
    for name, schedule in drawn.items():
        ranks = count(schedule.n_ranks, "rank")
        peak = schedules.steady[name].peak_activations / schedule.n_stages
        yield Figure(
            draw(schedule, beside=[*drawn.values()]),
            f"{name}, {ranks}: {peak:.4g} micro-batches at most.",
            f"Grid of {name} on {ranks}, over its activation memory, which peaks at"
            f" {peak:.4g} micro-batches.",
        )
    yield from _explored(drawn)
    if left_out := [name for name in found if name not in drawn]:
        yield Text(f"Not drawn, to stay legible: {', '.join(left_out)}.")
    yield Table(
        [_peaks(name, schedule, schedules.steady[name]) for name, schedule in found.items()],
        "Activations that a schedule keeps, at most and in micro-batches (1 is all that one"
        " micro-batch keeps over the whole model), and how late its weights are.",
    )
    if measured := _measured(groups, _rank_memory):
        yield Table(measured, "Memory as measured, at most, on each rank.")


def _explored(schedules: Mapping[str, "Schedule"]) -> Iterator[Block]:
    """The first small schedules as a page to explore."""
    from toolkit.figures.explorer.choice import Choice, choice_of
    from toolkit.figures.explorer.page import explored

    choices: dict[str, Choice] = {}
    for name, schedule in schedules.items():
        small = max(schedule.n_stages, schedule.n_microbatches) <= _EXPLORED_SIZE
        if small and len(choices) < _EXPLORED and (choice := choice_of(schedule)) is not None:
            choices[name] = choice
    if choices:
        caption = "The same to explore: point at an op for what it waits for and what it frees"
        others = ", ".join(name for name in schedules if name not in choices)
        yield Page(explored([*choices.values()]), caption + (f" (not {others})" if others else ""))


def communication_blocks(groups: Sequence[Group], schedules: Schedules) -> Iterator[Block]:
    """Traffic by slot, and the messages and timelines measured on ranks."""
    if schedules.found:
        yield Table(
            [_traffic(name, steady) for name, steady in schedules.steady.items()],
            "What all ranks together send in a slot of the steady state, in stages' parameters,"
            " and the messages of one training step.",
        )
    else:
        yield Text("No run has a schedule.")
    if measured := _measured(groups, _rank_traffic):
        yield Table(measured, "Messages as measured, in the steps that were recorded.")
    for group in groups:
        files = (run.folder / "timeline.png" for run in group.runs)
        if file := next((file for file in files if file.exists()), None):
            yield Figure(
                file,
                f"{group.label} as measured in {file.parent}: what each rank computes, updates,"
                " sends and receives, over time.",
                f"Timeline of {group.label}: a row a rank, over what all of them send.",
            )


def _peaks(name: str, schedule: "Schedule", steady: "SteadyState") -> Cells:
    peak = steady.peak_activations / schedule.n_stages
    fullest = max(map(max, steady.activations)) / schedule.n_stages
    return {
        "schedule": name,
        "stages": str(schedule.n_stages),
        "micro-batches": str(schedule.n_microbatches),
        "ranks": str(schedule.n_ranks),
        "peak, all ranks": f"{peak:.4g}",
        "peak, fullest rank": f"{fullest:.4g}",
        "steps late, mean": f"{schedule.mean_staleness:.2f}",
        "largest": str(schedule.max_staleness),
    }


def _traffic(name: str, steady: "SteadyState") -> Cells:
    units = steady.units_by_slot
    largest, average = float(max(units)), float(mean(units))
    messages = sum(sent.messages for slot in steady.traffic for sent in slot)
    return {
        "schedule": name,
        "mean in a slot": f"{average:.4g}",
        "largest in a slot": f"{largest:.4g}",
        "largest / mean": f"{largest / average:.2f}" if average else DASH,
        "messages a step": str(messages),
    }


def _measured(
    groups: Sequence[Group], cells: Callable[[Mapping[str, float]], Cells]
) -> list[Cells]:
    """A row per rank of the first run of each group that has measurements."""
    have = [group for group in groups if any(run.ranks for run in group.runs)]
    rows = []
    for group in have:
        run = next(run for run in group.runs if run.ranks)
        about = {"rule": group.full_label(have), "folder": str(run.folder)}
        rows += [
            about | {"rank": f"{row['rank']:.0f}"} | cells(row)
            for row in run.ranks
            if "rank" in row
        ]
    return rows


def _rank_memory(row: Mapping[str, float]) -> Cells:
    return {
        "activations (MB)": _megabytes(row, "peak_activations"),
        "weights (MB)": _megabytes(row, "peak_weights"),
        "device (MB)": _megabytes(row, "device_peak", "{:.1f}"),
    }


def _rank_traffic(row: Mapping[str, float]) -> Cells:
    return {
        "messages sent": number(row.get("messages_sent", nan), "{:.0f}"),
        "MB sent": _megabytes(row, "bytes_sent"),
        "messages received": number(row.get("messages_received", nan), "{:.0f}"),
        "MB received": _megabytes(row, "bytes_received"),
    }


def _megabytes(row: Mapping[str, float], name: str, form: str = "{:.3f}") -> str:
    return number(row.get(name, nan) / MB, form)
