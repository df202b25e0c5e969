"""Sections of a report on its schedules: their memory and their communication."""

from collections.abc import Iterator
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.errors import UserError, first_line
from toolkit.format import rank_cells, staleness_cells
from toolkit.results.collect import Tasks, each_group
from toolkit.results.report_page import Block, Figure, Table, Text
from toolkit.results.run_schedule import rebuild_schedule

if TYPE_CHECKING:
    from toolkit.schedule import Schedule

Schedules = dict[str, "Schedule"]

_GRIDS = 3  # schedules in one figure
_MOST_ROWS = 12  # of a schedule that is drawn
_MOST_OPS = 4096  # stages times micro-batches of a schedule to count


def rebuild_all(tasks: Tasks) -> tuple[Schedules, list[Text]]:
    """Return the groups' schedules by name, each once, and why others cannot be shown."""
    schedule_of_name: Schedules = {}
    left_out = []
    for task, group in each_group(tasks):
        try:
            schedule = rebuild_schedule(group.runs[0].config["schedule"])
            if schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
                raise UserError("it is too large to count")
        except ValueError as error:
            reason = first_line(error)
            left_out.append(
                Text(f"The schedule of {group.label} is left out: {reason}.")
            )
            continue
        if schedule in schedule_of_name.values():
            continue
        # Different schedules may share a name, such as those of one method with several options.
        # Then the label of the group names them, and last its task.
        name = schedule.name
        if name in schedule_of_name:
            name = group.label
        if name in schedule_of_name:
            name = f"{group.label}, {task}"
        schedule_of_name[name] = schedule
    return schedule_of_name, left_out


def memory_blocks(schedules: Schedules) -> Iterator[Block]:
    """Yield the schedules' grids and peaks."""
    from toolkit.figures import schedules as draw
    from toolkit.schedule import steady_state
    from toolkit.schedule.grid import rows

    if not schedules:
        yield Text("No run has a schedule.")
        return
    small = [
        name
        for name, schedule in schedules.items()
        if rows(schedule.layout)[1] <= _MOST_ROWS
    ]
    for start in range(0, len(small), _GRIDS):
        drawn = small[start : start + _GRIDS]
        names = ", ".join(drawn)
        yield Figure(
            draw([schedules[name] for name in drawn]),
            f"{names}: the stage that each rank runs in each slot of three training steps, above"
            " the activations that all ranks together keep.",
            f"Grids of {names}, over their activation memory.",
        )
    table = []
    for name, schedule in schedules.items():
        steady = steady_state(schedule)
        n_stages = schedule.n_stages
        fullest_peak = max(map(max, steady.activations))
        staleness = {
            "staleness_mean": schedule.mean_staleness,
            "staleness_max": schedule.max_staleness,
        }
        table.append(
            {
                "schedule": name,
                "stages": str(n_stages),
                "micro-batches": str(schedule.n_microbatches),
                "ranks": str(schedule.n_ranks),
                "peak, all ranks": f"{steady.peak_activations / n_stages:.4g}",
                "peak, fullest rank": f"{fullest_peak / n_stages:.4g}",
                **staleness_cells(staleness),
            }
        )
    yield Table(
        table,
        "Activations that a schedule keeps, at most and in micro-batches (1 is all that one"
        " micro-batch keeps over the whole model), and how many steps late its weights are.",
    )


def communication_blocks(tasks: Tasks, schedules: Schedules) -> Iterator[Block]:
    """Yield the traffic by slot, and the measurements of ranks."""
    if schedules:
        yield Table(
            [
                {"schedule": name} | _traffic(schedule)
                for name, schedule in schedules.items()
            ],
            "What all ranks together send in a slot of the steady state, in stages' parameters,"
            " and the messages of one training step.",
        )
    else:
        yield Text("No run has a schedule.")
    for task, group in each_group(tasks):
        # One run shows how all of them ran.
        measured_runs = [run for run in group.runs if run.ranks]
        if measured_runs:
            run = measured_runs[0]
            rows = []
            for row in run.ranks:
                rows.append(
                    {heading: str(cell) for heading, cell in rank_cells(row).items()}
                )
            caption = f"{group.label}, {task}: memory and messages as measured in {run.folder}."
            yield Table(rows, caption)
        # A run without measurements, or of another experiment, has no such file.
        timelines = [run.folder / "timeline.png" for run in group.runs]
        timelines = [path for path in timelines if path.exists()]
        if timelines:
            yield Figure(
                timelines[0],
                f"{group.label} as measured in {timelines[0].parent}: what each rank computes,"
                " updates, sends and receives, over time.",
                f"Timeline of {group.label}: a row per rank, over what all of them send.",
            )


def _traffic(schedule: "Schedule") -> dict[str, str]:
    """Return the cells of a schedule's traffic in the steady state."""
    from toolkit.schedule import steady_state

    steady = steady_state(schedule)
    units_by_slot = [*map(float, steady.units_by_slot)]
    n_messages = 0
    for slot in steady.traffic:
        n_messages += sum(rank.messages for rank in slot)
    return {
        "mean in a slot": f"{mean(units_by_slot):.4g}",
        "largest in a slot": f"{max(units_by_slot):.4g}",
        "messages a step": str(n_messages),
    }
