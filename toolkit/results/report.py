"""A report on runs: summary, accuracy, memory, communication, commands; and its HTML page."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite, isnan, nan
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.errors import UserError, first_line, shortened
from toolkit.format import count, metric_cells, plus_minus, rank_cells, staleness_cells
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.collect import PRINCIPAL, Group, flat_options, group_runs
from toolkit.results.provenance import strip_folders
from toolkit.results.runs import MESSAGES, Run, rebuild_schedule
from toolkit.results.statistics import check_margin, delay_means, in_a_sentence, over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from toolkit.schedule import Schedule

Schedules = dict[str, "Schedule"]

_CURVES, _SIZE = 7, (8.2, 3.2)  # lines in one figure, and its inches
_GRIDS, _ROWS = 3, 12  # schedules in one figure, and rows of the largest one drawn
_MOST_OPS = 4096  # stages times micro-batches of a schedule to count
_MOST_VALUES = 4  # of an option
_PIXELS_PER_INCH, _WIDTH = 91, 640  # on the page: of a drawing, and of a PNG
_MOST_ROWS, _MOST_CHARACTERS = 1000, 500  # of a table, of a cell
_EQUIVALENCE = (
    " At a margin: whether the difference is shown to be smaller than that, by two one-sided paired"
    " t-tests at 5 %, whose larger p-value is p."
)
_NUMBER = re.compile(r"[-+\d][-+\d.,e±% ]*")


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells, with the same keys, which are the headings.

    Only the first of very many rows are kept, and long cells are cut: a page has to open.
    """

    rows: Sequence[Mapping[str, str]]
    caption: str

    def __post_init__(self) -> None:
        n_rows, first_rows = len(self.rows), self.rows[:_MOST_ROWS]
        cut_rows = [
            {heading: shortened(cell, _MOST_CHARACTERS) for heading, cell in row.items()}
            for row in first_rows
        ]
        object.__setattr__(self, "rows", cut_rows)
        if n_rows > _MOST_ROWS:
            caption = f"{self.caption} The first {_MOST_ROWS} of {n_rows} rows."
            object.__setattr__(self, "caption", caption)

    @property
    def numeric(self) -> set[str]:
        """Headings of the columns of numbers."""
        return {
            heading
            for heading in self.rows[0]
            if all(_NUMBER.fullmatch(row[heading]) for row in self.rows)
        }


@dataclass(frozen=True)
class Figure:
    """A picture: a drawing or a PNG file, its caption, and the same for those who cannot see it."""

    figure: "Drawing | Path"
    caption: str
    alt: str

    @property
    def width(self) -> int:
        """Pixels on the page."""
        if isinstance(self.figure, Path):
            return _WIDTH
        return round(_PIXELS_PER_INCH * self.figure.get_size_inches()[0])

    @property
    def source(self) -> str:
        """The picture as a data URL; an SVG's ids then do not clash with those of others."""
        if isinstance(self.figure, Path):
            return f"data:image/png;base64,{b64encode(self.figure.read_bytes()).decode()}"
        from toolkit.figures import style

        content = BytesIO()
        with style():
            self.figure.savefig(content, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(content.getvalue()).decode()}"


@dataclass(frozen=True)
class Command:
    """A command that repeats runs, and a line on where they ran."""

    command: str
    note: str


Block = Text | Table | Figure | Command


@dataclass(frozen=True)
class Report:
    """A title, and blocks by the titles of their sections, in reading order."""

    title: str
    sections: Mapping[str, Sequence[Block]]


def to_html(report: Report, footer: str = "") -> str:
    """Return the report as a page that needs no other file; all text is escaped."""
    from jinja2 import Environment, FileSystemLoader

    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(report=report, footer=footer)


def build_report(runs: Sequence[Run], title: str, margin: float | None = None) -> Report:
    """Return the report on ``runs``; what cannot be shown is named and left out.

    Args:
        runs: as :func:`toolkit.results.runs.read_runs` returns them.
        title: title of the report.
        margin: largest difference that does not matter, in points or nats; by default the margin
            of the comparisons, if they state one.

    Raises:
        UserError: the margin is not above 0.
    """
    check_margin(margin)
    tasks = group_runs(runs)
    schedules, left_out = _schedules(tasks)
    sections = {
        "Summary": [*_conclusions(tasks, margin), *_summary(runs, tasks)],
        "Accuracy": _accuracy(tasks, margin),
        "Memory": [*left_out, *_memory(schedules)],
        "Communication": _communication(tasks, schedules),
        "Reproduce": _commands(runs),
    }
    return Report(title, {name: [*blocks] for name, blocks in sections.items()})


def _conclusions(tasks: Mapping[str, list[Group]], margin: float | None) -> Iterator[Text]:
    """Yield a sentence on each rule, compared with the baseline of its task."""
    for task, groups in tasks.items():
        for group in groups:
            baseline, metric = group.baseline(groups), group.runs[0].judged_by
            row = over_seeds(*_ends(group, baseline, metric), metric, margin)
            if group is not baseline and not isnan(row[metric.columns[2]]):
                arguments = row, len(group.by_seed), metric, margin
                sentence = in_a_sentence(group.label, baseline.label, *arguments)
                yield Text(f"{task}, test {metric.name}: {sentence}")


def _summary(runs: Sequence[Run], tasks: Mapping[str, list[Group]]) -> Iterator[Block]:
    """Yield the tables of what was trained, of the runs left out, and of their notes."""
    yield Text(f"{count(len(runs), 'run')}: {_states(runs)}.")
    rows = []
    for task, groups in tasks.items():
        options = [flat_options(group.runs[0].config) for group in groups]
        runs_of_task = [run for group in groups for run in group.runs]
        seeds = sorted({run.seed for run in runs_of_task if run.seed is not None})
        row = {"training": task, "rules": ", ".join(group.label for group in groups)}
        row |= {
            option: _few([options_of_run.get(option) for options_of_run in options])
            for option in PRINCIPAL[2:]
        }
        rows.append(row | {"seeds": _few(seeds), "states": _states(runs_of_task)})
    if rows:
        yield Table(rows, "What was trained.")
    if left_out_rows := [_left_out(run) for run in runs if not run.counts]:
        yield Table(left_out_rows, "Left out of the tables and figures below, and why.")
    if notes := dict.fromkeys((str(run.folder), note) for run in runs for note in run.notes):
        yield Table(
            [{"folder": folder, "note": note} for folder, note in notes], "Notes of the runs."
        )


def _few(values: Sequence[object]) -> str:
    """Return the different values, or their number if there are many."""
    texts = dict.fromkeys("-" if value is None else str(value) for value in values)
    return ", ".join(texts) if len(texts) <= _MOST_VALUES else f"{len(texts)} values"


def _states(runs: Sequence[Run]) -> str:
    """Return the number of runs in each state."""
    states = Counter(run.state for run in runs)
    return ", ".join(f"{states[state]} {state}" for state in MESSAGES if states[state])


def _left_out(run: Run) -> dict[str, str]:
    """Return the row of a run without a final result, with the reason."""
    usual_reason = (
        "its result lacks the final accuracy or the schedule" if run.trains else "no training"
    )
    return {
        "folder": str(run.folder),
        "experiment": run.kind,
        "state": run.state,
        "reason": run.message or usual_reason,
        "rule": run.schedule or run.rule or "-",
        "seed": "-" if run.seed is None else str(run.seed),
    }


def _accuracy(tasks: Mapping[str, list[Group]], margin: float | None) -> Iterator[Block]:
    """Yield the curves and final metrics of each task, and the delay diagnostics."""
    if not any(group.by_seed for groups in tasks.values() for group in groups):
        yield Text("No run has finished with an accuracy.")
    rows = []
    for task, groups in tasks.items():
        shown_groups = [
            group for group in groups if group.by_seed or any(run.diverged for run in group.runs)
        ]
        if not any(group.by_seed for group in shown_groups):
            continue
        metric = shown_groups[0].runs[0].judged_by
        stated_margins = {
            run.config.get("margin") for group in shown_groups for run in group.runs
        } - {None}
        task_margin = (
            stated_margins.pop() if margin is None and len(stated_margins) == 1 else margin
        )
        yield from _curves(task, shown_groups, metric)
        baseline_labels = {group.baseline(shown_groups).label for group in shown_groups}
        baseline = (
            baseline_labels.pop()
            if len(baseline_labels) == 1
            else "the first rule with these options"
        )
        final_rows = [
            _final(group, group.baseline(shown_groups), metric, baseline, task_margin)
            for group in shown_groups
        ]
        filled_headings = [
            heading for heading in final_rows[0] if any(row[heading] != "-" for row in final_rows)
        ]
        yield Table(
            [{heading: row[heading] for heading in filled_headings} for row in final_rows],
            f"{task}: test {metric.name} after the last epoch, mean ± standard deviation over"
            f" seeds, and the difference from {baseline}, paired by seed, in"
            f" {metric.unit_of_differences}, ± its 95 % interval. A single seed has neither: a"
            " difference may be chance. A seed that"
            " ran twice counts as it ran last." + (_EQUIVALENCE if task_margin is not None else ""),
        )
        rows += [
            {"training": task, "rule": group.label} | row
            for group in groups
            # Runs of one comparison share a folder and its delays.
            for run in {run.folder: run for run in group.by_seed.values()}.values()
            for row in run.delays
            if "stage" in row
        ]
    if delay_rows := [
        {"training": row["training"], "rule": row["rule"], "stage": f"{row['stage']:.0f}"}
        | {"steps late": f"{row['delay']:.2f}", "cosine": f"{row['cosine']:.3f}"}
        | {"moved": f"{100 * row['moved'] / (row['weights'] or nan):.2f} %"}
        for row in delay_means(rows, ["training", "rule", "stage"])
    ]:
        yield Table(
            delay_rows,
            "What the delay does to the gradients, mean over the steps looked into: how many steps"
            " late the weights were, the cosine between the gradient used and the fresh one, and"
            " how far a step moves the weights by their own size.",
        )


def _curves(task: str, groups: Sequence[Group], by: Metric) -> Iterator[Figure]:
    """Yield the curves of a task's groups; runs of another length than most are left out."""
    from toolkit.figures.curves_figure import over_epochs

    curves = {}
    for group in groups:
        runs = [[epoch.get(by.key, nan) for epoch in run.epochs] for run in group.by_seed.values()]
        finite = [run for run in runs if run and all(map(isfinite, run))]
        if finite:
            length = Counter(map(len, finite)).most_common(1)[0][0]
            curves[group.label] = [run for run in finite if len(run) == length]
    labels = [*curves]
    for start in range(0, len(labels), _CURVES):
        drawn_curves = {rule: curves[rule] for rule in labels[start : start + _CURVES]}
        final_values = {rule: mean(run[-1] for run in runs) for rule, runs in drawn_curves.items()}
        final_text = ", ".join(
            f"{rule} {final_value:.{by.decimals - 1}f} {by.unit}"
            for rule, final_value in final_values.items()
        )
        (figure := over_epochs(drawn_curves, by)).set_size_inches(_SIZE)
        yield Figure(
            figure,
            f"{task}: test {by.name} after each epoch, mean over seeds and the band they span.",
            f"Line chart of test {by.name} over epochs, {task}; at the end {final_text}.",
        )


def _ends(group: Group, baseline: Group, by: Metric) -> tuple[dict[int, float], dict[int, float]]:
    """Return the last test metric by seed, of a group and of its baseline."""
    values, baseline_values = (
        {seed: run.metrics.get(by.key, nan) for seed, run in member.by_seed.items()} or {-1: nan}
        for member in (group, baseline)
    )
    return values, baseline_values if values.keys() & baseline_values.keys() else dict.fromkeys(
        values, nan
    )


def _final(
    group: Group, baseline: Group, by: Metric, first: str, margin: float | None
) -> dict[str, str]:
    other_metric = ACCURACY if by is LOSS else LOSS
    values, baseline_values = _ends(group, baseline, by)
    rows = [run.metrics for run in group.by_seed.values()] or [{}]
    means = {
        key: mean(row.get(key, nan) for row in rows)
        for key in (other_metric.key, "samples_per_second")
    }
    n_diverged = sum(run.diverged and not run.counts for run in group.runs)
    seeds = ", ".join(map(str, group.by_seed)) or "none"
    return {
        "rule": group.label,
        "seeds": f"{seeds} ({n_diverged} diverged)" if n_diverged else seeds,
        **metric_cells(over_seeds(values, baseline_values, by, margin), by, first),
        f"test {other_metric.name} ({other_metric.unit})": plus_minus(
            means[other_metric.key], None, "", other_metric.decimals
        ),
        "samples/s": plus_minus(means["samples_per_second"], None, decimals=0),
    }


def _schedules(tasks: Mapping[str, list[Group]]) -> tuple[Schedules, list[Text]]:
    """Return the groups' schedules by name, each once, and why others cannot be shown."""
    schedule_of_name: Schedules = {}
    left_out = []
    for task, groups in tasks.items():
        for group in groups:
            try:
                schedule = rebuild_schedule(group.runs[0].config["schedule"])
                if schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
                    raise UserError("it is too large to count")
            except ValueError as error:
                reason = first_line(error)
                left_out.append(Text(f"The schedule of {group.label} is left out: {reason}."))
                continue
            names = schedule.name, group.label, f"{group.label}, {task}"
            if schedule not in schedule_of_name.values():
                schedule_of_name[
                    next((name for name in names if name not in schedule_of_name), names[-1])
                ] = schedule
    return schedule_of_name, left_out


def _memory(schedules: Schedules) -> Iterator[Block]:
    """Yield the schedules' grids and peaks."""
    from toolkit.figures import schedules as draw
    from toolkit.schedule import steady_state
    from toolkit.schedule.grid import rows

    if not schedules:
        yield Text("No run has a schedule.")
        return
    small_names = [
        name for name, schedule in schedules.items() if rows(schedule.layout)[1] <= _ROWS
    ]
    for start in range(0, len(small_names), _GRIDS):
        drawn_names = small_names[start : start + _GRIDS]
        figure, names = draw([schedules[name] for name in drawn_names]), ", ".join(drawn_names)
        yield Figure(
            figure,
            f"{names}: the stage that each rank runs in each slot of three training steps, above"
            " the activations that all ranks together keep.",
            f"Grids of {names}, over their activation memory.",
        )
    table = []
    for name, schedule in schedules.items():
        steady, n_stages = steady_state(schedule), schedule.n_stages
        staleness_fields = {
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
                "peak, fullest rank": f"{max(map(max, steady.activations)) / n_stages:.4g}",
                **staleness_cells(staleness_fields),
            }
        )
    yield Table(
        table,
        "Activations that a schedule keeps, at most and in micro-batches (1 is all that one"
        " micro-batch keeps over the whole model), and how many steps late its weights are.",
    )


def _communication(tasks: Mapping[str, list[Group]], schedules: Schedules) -> Iterator[Block]:
    """Yield the traffic by slot, and the measurements of ranks."""
    from toolkit.schedule import steady_state

    rows = []
    for name, schedule in schedules.items():
        steady = steady_state(schedule)
        units_by_slot = [*map(float, steady.units_by_slot)]
        messages = sum(rank.messages for slot in steady.traffic for rank in slot)
        cells = {
            "mean in a slot": f"{mean(units_by_slot):.4g}",
            "largest in a slot": f"{max(units_by_slot):.4g}",
        }
        rows.append({"schedule": name} | cells | {"messages a step": str(messages)})
    caption = (
        "What all ranks together send in a slot of the steady state, in stages' parameters, and the"
        " messages of one training step."
    )
    yield Table(rows, caption) if rows else Text("No run has a schedule.")
    for task, group in ((task, group) for task, groups in tasks.items() for group in groups):
        # One run shows how all of them ran.
        if run := next((run for run in group.runs if run.ranks), None):
            yield Table(
                [
                    {heading: str(cell) for heading, cell in rank_cells(row).items()}
                    for row in run.ranks
                ],
                f"{group.label}, {task}: memory and messages as measured in {run.folder}.",
            )
        files = (run.folder / "timeline.png" for run in group.runs)
        if file := next((file for file in files if file.exists()), None):
            yield Figure(
                file,
                f"{group.label} as measured in {file.parent}: what each rank computes, updates,"
                " sends and receives, over time.",
                f"Timeline of {group.label}: a row a rank, over what all of them send.",
            )


def _commands(runs: Sequence[Run]) -> Iterator[Block]:
    """Yield each command once, with the runs that it made and where they ran."""
    folders_of_command: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        source = run.provenance
        if isinstance(command := source.get("command"), str):
            commit, change_mark, _ = str(source.get("commit")).partition("+")  # + if changed since
            versions = [
                f"{package} {version}"
                for package, version in (source.get("versions") or {}).items()
            ]
            origin_parts = [
                f"commit {commit[:10]}{change_mark}",
                *versions,
                str(source.get("device")),
            ]
            folders_of_command.setdefault(
                (strip_folders(command), ", ".join(origin_parts)), []
            ).append(str(run.folder))
    if not folders_of_command:
        yield Text("No run has a command.")
    for (command, origin), folders in folders_of_command.items():
        first_folder, *other_folders = dict.fromkeys(folders)
        others_text = f" and {len(other_folders)} more" if other_folders else ""
        yield Command(
            command, f"{count(len(folders), 'run')} in {first_folder}{others_text}; {origin}"
        )
