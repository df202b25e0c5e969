"""Step times of a run that switches its schedule, over the training steps."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from toolkit.figures.style import BLACK, drawing, legend_right, series


def switching(
    seconds: Sequence[float],
    schedules: Sequence[str],
    others: Mapping[str, Sequence[float]] | None = None,
    changes: Sequence[int] = (),
) -> Figure:
    """Draw the time of each step, and below it the schedule in force.

    Args:
        seconds: of each training step.
        schedules: name of the schedule of each step.
        others: seconds of each step by fixed schedules, by name.
        changes: steps at which the machine changed.
    """
    names = list(dict.fromkeys([*(others or {}), *schedules]))
    looks = {name: series(k) for k, name in enumerate(names)}
    with drawing((7.0, 3.4)) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
        for name, taken in (others or {}).items():
            above.plot(taken, label=f"{name}, fixed", alpha=0.7, **looks[name])
        above.plot(seconds, color=BLACK, linewidth=1.6, label="switching")
        above.set_yscale("log")
        above.set_ylabel("seconds of a step")
        legend_right(above)
        for step, name in enumerate(schedules):
            below.axvspan(step - 0.5, step + 0.5, color=looks[name]["color"], linewidth=0)
        begins = [k for k, name in enumerate(schedules) if k == 0 or name != schedules[k - 1]]
        for begin, end in zip(begins, [*begins[1:], len(schedules)], strict=True):
            middle = (begin + end - 1) / 2
            below.text(middle, 0.5, schedules[begin], ha="center", va="center", color="white")
        for axes in (above, below):
            for step in changes:
                axes.axvline(step - 0.5, color=BLACK, linestyle=":", linewidth=0.8)
        below.set_yticks([])
        below.set_ylabel("in force", rotation=0, ha="right", va="center")
        below.set_xlabel("training step")
    return figure
