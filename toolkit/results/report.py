"""From runs to a report: summary, accuracy, memory, communication, commands."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from statistics import mean
from typing import TYPE_CHECKING

from toolkit.errors import UserError, first_line
from toolkit.format import count, metric_cells, plus_minus, rank_cells, staleness_cells
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.collect import PRINCIPAL, Group, flat_options, group_runs
from toolkit.results.provenance import strip_folders
from toolkit.results.report_page import Block, Command, Figure, Report, Table, Text
from toolkit.results.runs import MESSAGES, Run, rebuild_schedule
from toolkit.results.statistics import delay_means, over_seeds

if TYPE_CHECKING:
    from toolkit.schedule import Schedule

_CURVES = 7  # in one figure
_SIZE = (4.5, 2.7)  # inches; legible on a phone
_GRIDS, _ROWS = 3, 12  # schedules in one figure, and rows of the largest one drawn
_MOST_OPS = 4096  # stages times micro-batches of a schedule to count
_MOST_VALUES = 4  # of an option


def build_report(runs: Sequence[Run], title: str) -> Report:
    """Return the report on ``runs``. What cannot be shown is named and left out.

    Args:
        runs: as :func:`toolkit.results.runs.read_runs` returns them.
        title: heading of the page.
    """
    groups = group_runs(runs)
    schedules, left_out = _schedules(groups)
    sections = {
        "Summary": _summary(runs, groups),
        "Accuracy": _accuracy(groups),
        "Memory": [*left_out, *_memory(schedules)],
        "Communication": _communication(groups, schedules),
        "Reproduce": _commands(runs),
    }
    return Report(title, {name: [*blocks] for name, blocks in sections.items()})


def _summary(runs: Sequence[Run], groups: Sequence[Group]) -> Iterator[Block]:
    yield Text(f"{count(len(runs), 'run')}: {_states(runs)}.")
    rows = []
    for name, same in _comparisons(groups).items():
        options = [flat_options(group.runs[0].config) for group in same]
        found = [run for group in same for run in group.runs]
        seeds = sorted({run.seed for run in found if run.seed is not None})
        row = {"training": name, "rules": ", ".join(group.label for group in same)}
        row |= {option: _few([own.get(option) for own in options]) for option in PRINCIPAL[2:]}
        rows.append(row | {"seeds": _few(seeds), "states": _states(found)})
    if rows:
        yield Table(rows, "What was trained.")
    if left := [_left_out(run) for run in runs if not run.counts]:
        yield Table(left, "Left out of the tables and figures below, and why.")
    if notes := dict.fromkeys((str(run.folder), note) for run in runs for note in run.notes):
        yield Table([{"folder": f, "note": note} for f, note in notes], "Notes of the runs.")


def _comparisons(groups: Sequence[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.comparison, []).append(group)
    return found


def _few(values: Sequence[object]) -> str:
    found = dict.fromkeys("-" if value is None else str(value) for value in values)
    return ", ".join(found) if len(found) <= _MOST_VALUES else f"{len(found)} values"


def _states(runs: Sequence[Run]) -> str:
    states = Counter(run.state for run in runs)
    return ", ".join(f"{states[state]} {state}" for state in MESSAGES if states[state])


def _left_out(run: Run) -> dict[str, str]:
    lacks = "its result lacks the final accuracy or the schedule" if run.trains else "no training"
    return {
        "folder": str(run.folder),
        "experiment": run.kind,
        "state": run.state,
        "reason": run.message or lacks,
        "rule": run.schedule or run.rule or "-",
        "seed": "-" if run.seed is None else str(run.seed),
    }


def _accuracy(groups: Sequence[Group]) -> Iterator[Block]:
    """Curves and final metrics of each comparison, and delay diagnostics."""
    if not any(group.counting for group in groups):
        yield Text("No run has finished with an accuracy.")
    for name, same in _comparisons(groups).items():
        shown = [g for g in same if g.counting or any(run.diverged for run in g.runs)]
        if not any(group.counting for group in shown):
            continue
        by = shown[0].runs[0].judged_by
        yield from _curves(name, shown, by)
        yield Table(
            [_final(group, shown[0], by) for group in shown],
            f"{name}: test {by.name} after the last epoch, mean ± standard deviation over seeds,"
            f" and the difference from {shown[0].label}, paired by seed, in"
            f" {by.unit_of_differences}, ± its 95 % interval. A single seed has neither: a"
            " difference may be chance. A seed that ran twice counts as it ran last.",
        )
    rows = [
        {"training": group.comparison, "rule": group.label} | {"stage": int(row["stage"])} | row
        for group in groups
        # Runs of one comparison share a folder and its delays.
        for run in {run.folder: run for run in group.counting}.values()
        for row in run.delays
        if "stage" in row
    ]
    cells = [
        {"training": row["training"], "rule": row["rule"], "stage": f"{row['stage']:.0f}"}
        | {"steps late": f"{row['delay']:.2f}", "cosine": f"{row['cosine']:.3f}"}
        | {"moved": f"{100 * row['moved'] / (row['weights'] or nan):.2f} %"}
        for row in delay_means(rows, ["training", "rule", "stage"])
    ]
    if cells:
        yield Table(
            cells,
            "What the delay does to the gradients, mean over the steps looked into: how many steps"
            " late the weights were, the cosine between the gradient used and the fresh one, and"
            " how far a step moves the weights by their own size.",
        )


def _curves(name: str, groups: Sequence[Group], by: Metric) -> Iterator[Figure]:
    from toolkit.figures.curves_figure import over_epochs

    curves = {}
    for group in groups:
        runs = [[e.get(by.key, nan) for e in run.epochs] for run in group.by_seed.values()]
        finite = [run for run in runs if run and all(map(isfinite, run))]
        if finite:
            length = Counter(map(len, finite)).most_common(1)[0][0]
            curves[group.label] = [run for run in finite if len(run) == length]
    labels = [*curves]
    for k in range(0, len(labels), _CURVES):
        shown = {rule: curves[rule] for rule in labels[k : k + _CURVES]}
        last = {rule: mean(run[-1] for run in runs) for rule, runs in shown.items()}
        ends = ", ".join(f"{r} {x:.{by.decimals - 1}f} {by.unit}" for r, x in last.items())
        figure = over_epochs(shown, by)
        figure.set_size_inches(_SIZE)
        yield Figure(
            figure,
            f"{name}: test {by.name} after each epoch, mean over seeds and the band they span.",
            f"Line chart of test {by.name} over epochs, {name}; at the end {ends}.",
        )


def _final(group: Group, first: Group, by: Metric) -> dict[str, str]:
    other = ACCURACY if by is LOSS else LOSS
    own, base = (
        {seed: run.metrics.get(by.key, nan) for seed, run in of.by_seed.items()} or {-1: nan}
        for of in (group, first)
    )
    if not own.keys() & base.keys():
        base = dict.fromkeys(own, nan)
    rows = [run.metrics for run in group.by_seed.values()] or [{}]
    means = {k: mean(row.get(k, nan) for row in rows) for k in (other.key, "samples_per_second")}
    lost = sum(run.diverged and not run.counts for run in group.runs)
    seeds = ", ".join(map(str, group.by_seed)) or "none"
    return {
        "rule": group.label,
        "seeds": f"{seeds} ({lost} diverged)" if lost else seeds,
        **metric_cells(over_seeds(own, base, by), by, first.label),
        f"test {other.name} ({other.unit})": plus_minus(means[other.key], None, "", other.decimals),
        "samples/s": plus_minus(means["samples_per_second"], None, decimals=0),
    }


def _schedules(groups: Sequence[Group]) -> tuple[dict[str, "Schedule"], list[Text]]:
    """The groups' schedules by name, each once, and why others cannot be shown."""
    found: dict[str, Schedule] = {}
    left_out = []
    for group in groups:
        try:
            schedule = rebuild_schedule(group.runs[0].config["schedule"])
            if schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
                raise UserError("it is too large to count")
        except ValueError as error:
            why = first_line(error)
            left_out.append(Text(f"The schedule of {group.label} is left out: {why}."))
            continue
        names = schedule.name, group.label, f"{group.label}, {group.comparison}"
        if schedule not in found.values():
            found[next((name for name in names if name not in found), names[-1])] = schedule
    return found, left_out


def _memory(schedules: Mapping[str, "Schedule"]) -> Iterator[Block]:
    """The schedules' grids and peaks."""
    from toolkit.figures import schedules as draw
    from toolkit.schedule import steady_state
    from toolkit.schedule.grid import rows

    if not schedules:
        yield Text("No run has a schedule.")
        return
    small = [name for name, of in schedules.items() if rows(of.layout)[1] <= _ROWS]
    for k in range(0, len(small), _GRIDS):
        drawn = small[k : k + _GRIDS]
        names = ", ".join(drawn)
        yield Figure(
            draw([schedules[name] for name in drawn]),
            f"{names}: the stage that each rank runs in each slot of three training steps, above"
            " the activations that all ranks together keep.",
            f"Grids of {names}, over their activation memory.",
        )
    table = []
    for name, schedule in schedules.items():
        steady, n = steady_state(schedule), schedule.n_stages
        mean_late, most_late = schedule.mean_staleness, schedule.max_staleness
        table.append(
            {
                "schedule": name,
                "stages": str(n),
                "micro-batches": str(schedule.n_microbatches),
                "ranks": str(schedule.n_ranks),
                "peak, all ranks": f"{steady.peak_activations / n:.4g}",
                "peak, fullest rank": f"{max(map(max, steady.activations)) / n:.4g}",
                **staleness_cells({"staleness_mean": mean_late, "staleness_max": most_late}),
            }
        )
    yield Table(
        table,
        "Activations that a schedule keeps, at most and in micro-batches (1 is all that one"
        " micro-batch keeps over the whole model), and how many steps late its weights are.",
    )


def _communication(groups: Sequence[Group], schedules: Mapping[str, "Schedule"]) -> Iterator[Block]:
    """Traffic by slot, and what was measured on ranks."""
    from toolkit.schedule import steady_state

    rows = []
    for name, schedule in schedules.items():
        steady = steady_state(schedule)
        sent = [float(units) for units in steady.units_by_slot]
        messages = sum(rank.messages for slot in steady.traffic for rank in slot)
        cells = {"mean in a slot": f"{mean(sent):.4g}", "largest in a slot": f"{max(sent):.4g}"}
        rows.append({"schedule": name} | cells | {"messages a step": str(messages)})
    about = (
        "What all ranks together send in a slot of the steady state, in stages' parameters, and the"
        " messages of one training step."
    )
    yield Table(rows, about) if rows else Text("No run has a schedule.")
    for group in groups:
        # One run shows how all of them ran.
        if run := next((run for run in group.runs if run.ranks), None):
            yield Table(
                [{k: str(cell) for k, cell in rank_cells(row).items()} for row in run.ranks],
                f"{group.label}, {group.comparison}: memory and messages as measured in"
                f" {run.folder}.",
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
    """Each command once, with the runs that it made and where they ran."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        source = run.provenance
        if isinstance(command := source.get("command"), str):
            commit, mark, _ = str(source.get("commit")).partition("+")  # + if changed since
            versions = [f"{k} {v}" for k, v in (source.get("versions") or {}).items()]
            parts = [f"commit {commit[:10]}{mark}", *versions, str(source.get("device"))]
            found.setdefault((strip_folders(command), ", ".join(parts)), []).append(str(run.folder))
    if not found:
        yield Text("No run has a command.")
    for (command, origin), same in found.items():
        first, *others = dict.fromkeys(same)
        more = f" and {len(others)} more" if others else ""
        yield Command(command, f"{count(len(same), 'run')} in {first}{more}; {origin}")
