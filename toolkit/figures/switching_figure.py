"""Step times of a run that switches its schedule, over the training steps."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.figure import Figure

from toolkit.figures.style import BLACK, drawing, legend_right, series


def switching(
    seconds: Sequence[float],
    schedules: Sequence[str],
    fixed: Mapping[str, Sequence[float]] | None = None,
    changes: Sequence[int] = (),
) -> Figure:
    """Draw the time of each step, and below it the schedule in force.

    Args:
        seconds: of each training step.
        schedules: name of the schedule of each step.
        fixed: seconds of each step by fixed schedules, by name.
        changes: steps at which the machine changed.
    """
    fixed = fixed or {}
    names = dict.fromkeys([*fixed, *schedules])
    line_styles = {name: series(index) for index, name in enumerate(names)}
    with drawing((7.0, 3.4)) as figure:
        times_axes, schedule_axes = figure.subplots(
            2, 1, sharex=True, height_ratios=[5, 1]
        )
        for name, fixed_seconds in fixed.items():
            times_axes.plot(
                fixed_seconds, label=f"{name}, fixed", alpha=0.7, **line_styles[name]
            )
        times_axes.plot(seconds, color=BLACK, linewidth=1.6, label="switching")
        times_axes.set_yscale("log")
        times_axes.set_ylabel("seconds of a step")
        legend_right(times_axes)
        # A step is one unit wide and centred on its number, as the points above are.
        for step, name in enumerate(schedules):
            colour = line_styles[name]["color"]
            schedule_axes.axvspan(step - 0.5, step + 0.5, color=colour, linewidth=0)
        first_step = 0
        for name, steps in groupby(schedules):
            n_steps = len([*steps])
            centre = first_step + (n_steps - 1) / 2
            schedule_axes.text(
                centre, 0.5, name, ha="center", va="center", color="white"
            )
            first_step += n_steps
        for axes in (times_axes, schedule_axes):
            for step in changes:
                axes.axvline(step - 0.5, color=BLACK, linestyle=":", linewidth=0.8)
        schedule_axes.set_yticks([])
        schedule_axes.set_ylabel("in force", rotation=0, ha="right", va="center")
        schedule_axes.set_xlabel("training step")
    return figure
