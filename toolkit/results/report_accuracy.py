"""How well the runs have trained."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from statistics import mean
from typing import Any

from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.report_blocks import Block, Figure, Table, Text
from toolkit.results.report_format import NONE, count, mean_of, number
from toolkit.results.report_groups import Group
from toolkit.results.statistics import delay_means, paired_by_seed, spread

_CURVES = 7  # in one figure
_SIZE = (4.5, 2.7)  # inches; legible on a phone
_MEASURED = ("stage", "delay", "cosine", "gradient", "fresh_gradient", "moved", "weights")


def _written(value: float, by: Metric, sign: str = "") -> str:
    return number(value, f"{{:{sign}.{by.decimals}f}}")


def accuracy_blocks(groups: Sequence[Group]) -> Iterator[Block]:
    """Curves and final accuracies of each comparison, and what delays did to gradients."""
    counted = [group for group in groups if group.counting]
    if not counted:
        yield Text("No run has finished with an accuracy.")
    told = [group for group in groups if group.counting or group.n_diverged]
    for name in dict.fromkeys(group.comparison for group in counted):
        yield from _comparison(name, [group for group in told if group.comparison == name])
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
    yield from _cautions(groups)


def _curves(group: Group, by: Metric) -> list[list[float]]:
    """The measure after each epoch, of the runs that have as many as most of them."""
    found = [[epoch.get(by.key, nan) for epoch in run.epochs] for run in group.by_seed.values()]
    whole = [curve for curve in found if curve and all(map(isfinite, curve))]
    if not whole:
        return []
    length = Counter(map(len, whole)).most_common(1)[0][0]
    return [curve for curve in whole if len(curve) == length]


def _final(group: Group, first: Group, by: Metric) -> dict[str, str]:
    runs = group.by_seed
    metrics = [run.metrics for run in runs.values()]
    n_seeds, average = len(runs), mean_of(metrics, by.key)
    deviation = spread([row.get(by.key, nan) for row in metrics]) if runs else nan
    difference, width = _difference(group, first, by)
    if group.summed and not runs:
        metrics, n_seeds = [group.summed.metrics], group.summed.repeats
        average, deviation = metrics[0][by.key], metrics[0][f"{by.name}_sd"]
    other = ACCURACY if by is LOSS else LOSS
    return {
        "rule": group.label,
        "seeds": f"{n_seeds} ({lost} diverged)" if (lost := group.n_diverged) else str(n_seeds),
        f"{by.name} ({by.unit})": _written(average, by),
        "sd": _written(deviation, by),
        "difference": _written(difference, by, "+z"),
        "95 % interval": "± " + _written(width, by) if isfinite(width) else NONE,
        f"{other.name} ({other.unit})": _written(mean_of(metrics, other.key), other),
        "samples/s": number(mean_of(metrics, "samples_per_second"), "{:.0f}"),
    }


def _difference(group: Group, first: Group, by: Metric) -> tuple[float, float]:
    """The mean difference and half its interval, as far as there are any."""
    mine, firsts = (
        {seed: run.metrics.get(by.key, nan) for seed, run in of.by_seed.items()}
        for of in (group, first)
    )
    if group is first:
        return nan, nan
    if group.summed and not mine:  # what the comparison itself has found
        kept = group.summed.metrics if group.summed.folder == first.runs[0].folder else {}
        return kept.get(f"{by.name}_difference", nan), kept.get(f"{by.name}_difference_95", nan)
    if not mine.keys() & firsts.keys():
        return nan, nan
    found = paired_by_seed(mine, firsts)
    return found.mean, found.half_width


def _cautions(groups: Sequence[Group]) -> Iterator[Block]:
    single = [g.label for g in groups if len(g.by_seed) == 1 and not g.n_diverged]
    if single:
        who = "Each rule" if len(single) == len(groups) > 1 else ", ".join(single)
        yield Text(
            f"{who} ran with one seed: no spread and no interval can be given, and a difference may"
            " be chance."
        )
    left = [g.label for g in groups if len(g.by_seed) == 1 and g.n_diverged]
    if left:
        yield Text(f"Of {', '.join(left)} only one seed did not diverge: there is no spread.")
    fewer = [
        g.label
        for g in groups
        if g.by_seed and groups[0].by_seed and g.by_seed.keys() != groups[0].by_seed.keys()
    ]
    if fewer:
        yield Text(
            f"{', '.join(fewer)}: not the seeds of {groups[0].label}; the difference is over those"
            " that they share."
        )
    summed = [g.label for g in groups if g.summed and not g.by_seed]
    if summed:
        yield Text(
            f"Of {', '.join(summed)} only means over seeds were kept: there are no curves, and the"
            " differences are those of the comparison itself."
        )
    repeated = sum(group.n_repeated for group in groups)
    if repeated:
        yield Text(
            f"{count(repeated, 'run')} with the seed of another of the same configuration: the one"
            " that started last counts."
        )


def _delays(groups: Sequence[Group]) -> Iterator[Block]:
    """A row a rule: its cosines stage by stage."""
    have = [group for group in groups if any(run.delays for run in group.counting)]
    found = [
        {"rule": group.full_label(have)} | {name: row.get(name, nan) for name in _MEASURED}
        for group in have
        for row in _told(group)
        if "stage" in row
    ]
    means = delay_means(found, ["rule", "stage"])
    stages = sorted({int(row["stage"]) for row in means})
    rows = [
        _delay_row(rule, {int(row["stage"]): row for row in means if row["rule"] == rule}, stages)
        for rule in dict.fromkeys(row["rule"] for row in means)
    ]
    if rows:
        yield Table(
            rows,
            "What the delay does to the gradients, mean over the steps looked into: how many steps"
            " late the weights were, how far a step moves them by their own size, and for each"
            " stage the cosine between the gradient used and the fresh one.",
        )


def _told(group: Group) -> Iterator[Mapping[str, float]]:
    """A comparison tells of a rule's delays once, for all its seeds."""
    folders = set()
    for run in group.counting:
        if run.folder not in folders:
            yield from run.delays
        folders.add(run.folder)


def _delay_row(
    rule: str, by_stage: Mapping[int, Mapping[str, Any]], stages: Sequence[int]
) -> dict[str, str]:
    late = mean(row["delay"] for row in by_stage.values())
    moved = mean(
        row["moved"] / row["weights"] if row["weights"] else nan for row in by_stage.values()
    )
    cosines = {
        f"stage {stage}": number(by_stage[stage]["cosine"], "{:.3f}") if stage in by_stage else NONE
        for stage in stages
    }
    about = {"steps late": number(late, "{:.2f}"), "moved": number(100 * moved, "{:.2f} %")}
    return {"rule": rule} | about | cosines
