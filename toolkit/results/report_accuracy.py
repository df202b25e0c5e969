"""Learning curves and final accuracies of a report, and what delays did to gradients."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from statistics import mean
from typing import Any

from toolkit.format import DASH, count, number
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.report_groups import Group
from toolkit.results.report_page import Block, Figure, Table, Text
from toolkit.results.statistics import delay_means, paired_by_seed, spread

_CURVES = 7  # in one figure
_SIZE = (4.5, 2.7)  # inches; legible on a phone
_MEASURED = ("stage", "delay", "cosine", "gradient", "fresh_gradient", "moved", "weights")


def accuracy_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Curves and final accuracies of each comparison, and delay diagnostics."""
    counted = [group for group in groups if group.counting]
    if not counted:
        yield Text("No run has finished with an accuracy.")
    shown = [group for group in groups if group.counting or group.n_diverged]
    for name in dict.fromkeys(group.comparison for group in counted):
        yield from _comparison(name, [group for group in shown if group.comparison == name])
    yield from _delays(counted)


def _comparison(name: str, groups: Sequence[Group]) -> Iterator[Block]:
    from toolkit.figures.curves_figure import over_epochs

    by = groups[0].runs[0].judged_by
    curves = {group.label: found for group in groups if (found := _curves(group, by))}
    labels = [*curves]
    for k in range(0, len(labels), _CURVES):
        shown = labels[k : k + _CURVES]
        ends = ", ".join(
            f"{rule} {mean(c[-1] for c in curves[rule]):.{by.decimals - 1}f} {by.unit}"
            for rule in shown
        )
        figure = over_epochs({rule: curves[rule] for rule in shown}, by)
        figure.set_size_inches(_SIZE)
        yield Figure(
            figure,
            f"{name}: test {by.name} after each epoch, the mean over seeds and the band that they"
            " span.",
            f"Line chart of test {by.name} over epochs, {name}; at the end {ends}.",
        )
    caption = f"{name}: {by.name} after the last epoch, mean and standard deviation over seeds"
    if len(groups) > 1:
        caption += (
            f"; the difference from {groups[0].label}, paired by seed and in"
            f" {by.unit_of_differences}, with a 95 % interval"
        )
    yield Table([_final(group, groups[0], by) for group in groups], f"{caption}.")
    yield from map(Text, _cautions(groups))


def _curves(group: Group, by: Metric) -> list[list[float]]:
    """The metric after each epoch, of the runs with the most common number of epochs."""
    found = [[epoch.get(by.key, nan) for epoch in run.epochs] for run in group.by_seed.values()]
    finite = [curve for curve in found if curve and all(map(isfinite, curve))]
    if not finite:
        return []
    length = Counter(map(len, finite)).most_common(1)[0][0]
    return [curve for curve in finite if len(curve) == length]


def _final(group: Group, first: Group, by: Metric) -> dict[str, str]:
    runs = group.by_seed
    metrics = [run.metrics for run in runs.values()]
    n_seeds, average = len(runs), _mean(metrics, by.key)
    deviation = spread([row.get(by.key, nan) for row in metrics]) if runs else nan
    difference, width = _difference(group, first, by)
    if group.means and not runs:
        metrics, n_seeds = [group.means.metrics], group.means.repeats
        average, deviation = metrics[0][by.key], metrics[0][f"{by.name}_sd"]
    other = ACCURACY if by is LOSS else LOSS
    lost = group.n_diverged

    def decimal(value: float, of: Metric = by, sign: str = "") -> str:
        return number(value, f"{{:{sign}.{of.decimals}f}}")

    return {
        "rule": group.label,
        "seeds": f"{n_seeds} ({lost} diverged)" if lost else str(n_seeds),
        f"{by.name} ({by.unit})": decimal(average),
        "sd": decimal(deviation),
        "difference": decimal(difference, sign="+z"),
        "95 % interval": f"± {decimal(width)}" if isfinite(width) else DASH,
        f"{other.name} ({other.unit})": decimal(_mean(metrics, other.key), other),
        "samples/s": number(_mean(metrics, "samples_per_second"), "{:.0f}"),
    }


def _mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    """The mean of a column; NaN if a row lacks it."""
    values = [row.get(name, nan) for row in rows]
    return mean(values) if values else nan


def _difference(group: Group, first: Group, by: Metric) -> tuple[float, float]:
    """The mean difference from ``first`` and half its interval, NaN if unknown."""
    if group is first:
        return nan, nan
    mine, base = (
        {seed: run.metrics.get(by.key, nan) for seed, run in of.by_seed.items()}
        for of in (group, first)
    )
    if group.means and not mine:  # as the comparison itself found
        kept = group.means.metrics if group.means.folder == first.runs[0].folder else {}
        return kept.get(f"{by.name}_difference", nan), kept.get(f"{by.name}_difference_95", nan)
    if not mine.keys() & base.keys():
        return nan, nan
    found = paired_by_seed(mine, base)
    return found.mean, found.half_width


def _cautions(groups: Sequence[Group]) -> Iterator[str]:
    single = [g.label for g in groups if len(g.by_seed) == 1 and not g.n_diverged]
    if single:
        who = "Each rule" if len(single) == len(groups) > 1 else ", ".join(single)
        yield f"{who} ran with one seed: there is no spread, and a difference may be chance."
    left = [g.label for g in groups if len(g.by_seed) == 1 and g.n_diverged]
    if left:
        yield f"Of {', '.join(left)} only one seed did not diverge: there is no spread."
    base = groups[0].by_seed.keys()
    fewer = [g.label for g in groups if g.by_seed and base and g.by_seed.keys() != base]
    if fewer:
        yield (
            f"{', '.join(fewer)}: not the seeds of {groups[0].label}; the difference is over the"
            " seeds that both have."
        )
    means = [g.label for g in groups if g.means and not g.by_seed]
    if means:
        yield (
            f"Of {', '.join(means)} only means over seeds were kept: there are no curves, and the"
            " differences are those of the comparison itself."
        )
    if repeated := sum(group.n_repeated for group in groups):
        yield (
            f"{count(repeated, 'run')} with the seed of another of the same configuration: the one"
            " that started last counts."
        )


def _delays(groups: Sequence[Group]) -> Iterator[Block]:
    """Delay diagnostics, a row per rule and a cosine per stage."""
    have = [group for group in groups if any(run.delays for run in group.counting)]
    found = [
        {"rule": group.full_label(have)} | {name: row.get(name, nan) for name in _MEASURED}
        for group in have
        # Runs of one comparison share a folder and its delays.
        for run in {run.folder: run for run in group.counting}.values()
        for row in run.delays
        if "stage" in row
    ]
    by_rule: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in delay_means(found, ["rule", "stage"]):
        by_rule.setdefault(row["rule"], {})[int(row["stage"])] = row
    stages = sorted({stage for by_stage in by_rule.values() for stage in by_stage})
    if by_rule:
        yield Table(
            [_delay_row(rule, by_stage, stages) for rule, by_stage in by_rule.items()],
            "What the delay does to the gradients, mean over the steps looked into: how many steps"
            " late the weights were, how far a step moves them by their own size, and for each"
            " stage the cosine between the gradient used and the fresh one.",
        )


def _delay_row(
    rule: str, by_stage: Mapping[int, Mapping[str, Any]], stages: Sequence[int]
) -> dict[str, str]:
    rows = by_stage.values()
    moved = mean(row["moved"] / row["weights"] if row["weights"] else nan for row in rows)
    cosines = {
        f"stage {stage}": number(by_stage[stage]["cosine"], "{:.3f}") if stage in by_stage else DASH
        for stage in stages
    }
    return {
        "rule": rule,
        "steps late": number(mean(row["delay"] for row in rows), "{:.2f}"),
        "moved": number(100 * moved, "{:.2f} %"),
        **cosines,
    }
