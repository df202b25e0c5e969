"""What the runs' schedules hold and send, as counted and as measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.errors import first_line
from toolkit.results.report_blocks import Block, Figure, Page, Table, Text
from toolkit.results.report_format import NONE, count, number, per_million
from toolkit.results.report_groups import Group
from toolkit.results.schedule_from_config import rebuild_schedule

if TYPE_CHECKING:
    from toolkit.schedule import Schedule, SteadyState

_GRIDS = 9  # schedules drawn
_ROWS = 12  # of the largest one drawn
_EXPLORED, _EXPLORED_SIZE = 3, 8  # schedules, stages and micro-batches of one
_MOST_OPS = 4096  # of the largest one counted, in stages times micro-batches


@dataclass
class Found:
    """The schedules of all groups by what they are called, and why others cannot be shown."""

    schedules: dict[str, "Schedule"] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def steady(self) -> "dict[str, SteadyState]":
        """What each of them comes to."""
        from toolkit.schedule import steady_state

        return {name: steady_state(schedule) for name, schedule in self.schedules.items()}


def schedules_of(groups: Sequence[Group]) -> Found:
    """Each schedule once, rebuilt from the runs' options."""
    found = Found()
    for group in groups:
        try:
            schedule = rebuild_schedule(group.config["schedule"])
        except ValueError as error:
            found.refused[group.label] = first_line(error)
            continue
        if schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
            found.refused[group.label] = "it is too large to be counted here"
            continue
        names = [
            schedule.name,
            f"{schedule.name}, {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches",
            f"{schedule.name} ({group.full_label(groups)})",
        ]
        if not any(schedule == known for known in found.schedules.values()):
            name = next((name for name in names if name not in found.schedules), names[-1])
            found.schedules[name] = schedule
    return found


def memory_blocks(groups: Sequence[Group], found: Found) -> Iterator[Block]:
    """The schedules' grids, their peaks, and what ranks were seen to hold."""
    from toolkit.figures import schedules as draw
    from toolkit.schedule.grid import rows

    for label, why in found.refused.items():
        yield Text(f"The schedule of {label} is left out: {why}.")
    schedules = found.schedules
    if not schedules:
        yield Text("No run tells of a schedule.")
        return
    drawn = [name for name, schedule in schedules.items() if rows(schedule.layout)[1] <= _ROWS][
        :_GRIDS
    ]
    peaks = {
        name: found.steady[name].peak_activations / schedule.n_stages
        for name, schedule in schedules.items()
    }
    if drawn:
        yield Text(
            "Which stage each rank runs in each slot of the first three training steps, and below"
            " it the activations that all ranks together keep."
        )
    for name in drawn:
        ranks = count(schedules[name].n_ranks, "rank")
        yield Figure(
            draw(schedules[name], beside=[schedules[other] for other in drawn]),
            f"{name}, {ranks}: {peaks[name]:.4g} micro-batches at most.",
            f"Grid of {name} on {ranks}, over its activation memory, which peaks at"
            f" {peaks[name]:.4g} micro-batches.",
        )
    yield from _explored({name: schedules[name] for name in drawn})
    left_out = [name for name in schedules if name not in drawn]
    if left_out:
        yield Text(f"Not drawn, to stay legible: {', '.join(left_out)}.")
    yield Table(
        [_held(name, schedule, found.steady[name]) for name, schedule in schedules.items()],
        "Activations that a schedule keeps, at most and in micro-batches (1 is all that one"
        " micro-batch keeps over the whole model), and how late its weights are.",
    )
    measured = [about | _rank_memory(row) for about, row in _measured(groups)]
    if measured:
        yield Table(measured, "Memory as measured, at most, on each rank.")


def _explored(schedules: Mapping[str, "Schedule"]) -> Iterator[Block]:
    """The first small ones, to point at."""
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


def communication_blocks(groups: Sequence[Group], found: Found) -> Iterator[Block]:
    """Traffic by slot, what ranks were seen to send, and when."""
    if found.schedules:
        yield Table(
            [_sent(name, steady) for name, steady in found.steady.items()],
            "What all ranks together send in a slot of the steady state, in stages' parameters,"
            " and the messages of one training step.",
        )
    else:
        yield Text("No run tells of a schedule.")
    measured = [about | _rank_traffic(row) for about, row in _measured(groups)]
    if measured:
        yield Table(measured, "Messages as measured, in the steps that were recorded.")
    yield from _timelines(groups)


def _held(name: str, schedule: "Schedule", steady: "SteadyState") -> dict[str, str]:
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


def _sent(name: str, steady: "SteadyState") -> dict[str, str]:
    units = steady.units_by_slot
    largest, average = float(max(units)), float(mean(units))
    messages = sum(sent.messages for slot in steady.traffic for sent in slot)
    return {
        "schedule": name,
        "mean in a slot": f"{average:.4g}",
        "largest in a slot": f"{largest:.4g}",
        "largest / mean": f"{largest / average:.2f}" if average else NONE,
        "messages a step": str(messages),
    }


def _measured(groups: Sequence[Group]) -> Iterator[tuple[dict[str, str], Mapping[str, float]]]:
    """What is measured of, and its row: of each group the first run that has any."""
    have = [group for group in groups if any(run.ranks for run in group.runs)]
    for group in have:
        run = next(run for run in group.runs if run.ranks)
        for row in run.ranks:
            if "rank" in row:
                about = {"rule": group.full_label(have), "folder": str(run.folder)}
                yield about | {"rank": f"{row['rank']:.0f}"}, row


def _rank_memory(row: Mapping[str, float]) -> dict[str, str]:
    return {
        "activations (MB)": per_million(row, "peak_activations"),
        "weights (MB)": per_million(row, "peak_weights"),
        "device (MB)": per_million(row, "device_peak", "{:.1f}"),
    }


def _rank_traffic(row: Mapping[str, float]) -> dict[str, str]:
    return {
        "messages sent": number(row.get("messages_sent", nan), "{:.0f}"),
        "MB sent": per_million(row, "bytes_sent"),
        "messages received": number(row.get("messages_received", nan), "{:.0f}"),
        "MB received": per_million(row, "bytes_received"),
    }


def _timelines(groups: Sequence[Group]) -> Iterator[Block]:
    from toolkit.results.report_spans import draw_spans

    for group in groups:
        run = next((run for run in group.runs if (run.folder / "spans.csv").exists()), None)
        if run is None:
            continue
        try:
            figure = draw_spans(run.folder / "spans.csv", group.label)
        except ValueError as error:
            yield Text(f"The timeline of {group.label} in {run.folder} is left out: {error}.")
            continue
        yield Figure(
            figure,
            f"{group.label} as measured in {run.folder}: what each rank computes, updates, sends"
            " and receives, over time.",
            f"Timeline of {group.label}: a row a rank, over what all of them send.",
        )
