"""Tables of own and kept runs, and of what was counted and measured.

``epochs`` are tables of one row an epoch, as :func:`train_rules` or
:func:`toolkit.results.collect.learning_curves` give them; ``measure`` is the test metric,
``LOSS`` for language models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from toolkit.cost.situations import situation_cells
from toolkit.errors import UserError
from toolkit.format import (
    counted_cells,
    metric_cells,
    rank_cells,
    reduction_cells,
    staleness_cells,
)
from toolkit.metric import ACCURACY, Metric
from toolkit.results.statistics import in_a_sentence, interval, says
from toolkit.schedule import labels

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.runtime.meters.predicted_vs_measured import MeasuredRow
    from toolkit.schedule.paper_table import Row

Curves = dict[str, list[list[float]]]


class Markdown(str):
    """Text that notebooks render."""

    def _repr_markdown_(self) -> str:
        return str(self)


def train_rules(
    config: Any,
    seeds: Iterable[int] | None = None,
    on_epoch: Any = lambda what, share: None,
) -> pd.DataFrame:
    """Train under each rule with each seed: a row an epoch, accuracies in per cent.

    Schedules with equal names are labelled by their rules. After a loss diverges, the remaining
    epochs of the run are NaN.

    Args:
        config: of ``compare``.
        seeds: of weights and batches, the same for every rule; those of ``config`` unless given.
        on_epoch: called with the name of the current run and the completed share of all runs.

    Raises:
        UserError: the options are those of another experiment, or ask for tuned rates, or there are
            no seeds.
    """
    from toolkit.cli import build
    from toolkit.results.comparison import seeds_of
    from toolkit.results.record import per_cent

    if "rules" not in config:
        raise UserError('rules are those of compare: give settings("compare", ...)')
    if config.tune.rates is not None:
        raise UserError(
            f"tune.rates={config.tune.rates} is for experiments/compare.py, which keeps its trials:"
            " leave it out, or give rules their rates, as by +own.cdp_v1.optimizer.lr=0.05"
        )
    if seeds is None:
        seeds = seeds_of(config)
    if not isinstance(seeds, Iterable) or not (seeds := [*seeds]):
        raise UserError(f"seeds are whole numbers, one or more, such as [0, 1]: got {seeds!r}")
    images = build.load_samples(config.data)
    build.settle_delays(config, lambda: images.form)
    label_of_rule = labels(
        {name: build.build_schedule(rule).name for name, rule in config.rules.items()}
    )
    runs = [(seed, name) for seed in seeds for name in config.rules]
    rows: list[dict[str, Any]] = []
    for index, (seed, name) in enumerate(runs):
        on_epoch(f"{label_of_rule[name]}, seed {seed}", index / len(runs))
        for epoch in build.build_run(build.rule_config(config, name, seed), images).run_to_end():
            numbers = per_cent(asdict(epoch)) | {"epoch": epoch.epoch}
            rows.append({"schedule": label_of_rule[name], "seed": seed} | numbers)
    on_epoch(f"{len(runs)} runs", 1.0)
    return pd.DataFrame(rows)


def by_epoch(epochs: pd.DataFrame, measure: Metric = ACCURACY) -> Curves:
    """Return the test metric after each epoch: by rule, one list a run, as figures take them.

    Accuracies are shares, losses are in nats. Unfinished runs are left out; a run whose loss
    diverged is NaN from there on.

    Args:
        epochs: a row for each epoch of each run: rule, seed, epoch and the metric.
        measure: accuracy or loss.

    Raises:
        UserError: several runs of a rule have the same seed, or the table lacks the metric.
    """
    return {
        rule: [[value / measure.factor for value in run] for run in by_seed.values()]
        for rule, by_seed in _values(epochs, measure).items()
    }


def own_curves(kept: pd.DataFrame, own: pd.DataFrame, measure: Metric = ACCURACY) -> Curves:
    """Return kept and own runs of the rules that both have, cut to the shortest run.

    Args:
        kept: a row for each epoch of each kept run, as :func:`by_epoch` takes them.
        own: the same of one's own runs.
        measure: accuracy or loss.

    Raises:
        UserError: no rule is in both, or several runs of a rule have the same seed.
    """
    kept_by_rule, own_by_rule = by_epoch(kept, measure), by_epoch(own, measure)
    curves = {f"{rule}, kept": runs for rule, runs in kept_by_rule.items() if rule in own_by_rule}
    curves |= {f"{rule}, own": runs for rule, runs in own_by_rule.items() if rule in kept_by_rule}
    if not curves:
        raise UserError(
            f"kept and own runs share no rule: got {', '.join(kept_by_rule)} and"
            f" {', '.join(own_by_rule)}"
        )
    n_epochs = min(len(run) for runs in curves.values() for run in runs)
    return {label: [run[:n_epochs] for run in runs] for label, runs in curves.items()}


def differences(
    epochs: pd.DataFrame,
    baseline: str = "DP",
    measure: Metric = ACCURACY,
    margin: float | None = None,
) -> pd.DataFrame:
    """Return the last epoch's metric, and its difference from rule ``baseline``, paired by seed.

    Differences are in points or, of losses, in nats, with Student's 95 % interval. Unfinished and
    diverged runs are left out.

    Args:
        epochs: a row for each epoch of each run, as :func:`by_epoch` takes them.
        baseline: the rule from which the others differ.
        measure: accuracy or loss.
        margin: largest difference that does not matter, against which equivalence is tested.

    Raises:
        UserError: there are no runs of the baseline, a rule shares no seed with it, several runs
            of a rule have the same seed, runs differ in their number of epochs, or the margin is
            not above 0.
    """
    rows = {
        rule: {
            "runs": row["runs"],
            **metric_cells(row, measure, baseline),
            "says": "" if rule == baseline else says(*interval(row, measure)),
        }
        for rule, row in _summaries(epochs, baseline, measure, margin).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def in_words(
    epochs: pd.DataFrame,
    baseline: str = "DP",
    measure: Metric = ACCURACY,
    margin: float | None = None,
) -> Markdown:
    """Return the table of :func:`differences` in sentences, a list item for each rule.

    Args:
        epochs: a row for each epoch of each run, as :func:`by_epoch` takes them.
        baseline: the rule from which the others differ.
        measure: accuracy or loss.
        margin: largest difference that does not matter, against which equivalence is tested.
    """
    lines = []
    for rule, row in _summaries(epochs, baseline, measure, margin).items():
        if rule != baseline and not isnan(row[measure.columns[2]]):
            sentence = in_a_sentence(f"**{rule}**", baseline, row, row["runs"], measure, margin)
            lines.append(f"- {sentence}")
    return Markdown("\n".join(lines))


def _summaries(
    epochs: pd.DataFrame, baseline: str, measure: Metric, margin: float | None
) -> dict[str, dict[str, Any]]:
    """Return by rule the columns of :func:`toolkit.results.over_seeds` and the number of runs."""
    from toolkit.results import over_seeds

    values_of_rule = _values(epochs, measure)
    if baseline not in values_of_rule:
        raise UserError(
            f"no run of {baseline!r} has finished: got runs of"
            f" {', '.join(values_of_rule) or 'none'}"
        )
    lengths = sorted({len(run) for runs in values_of_rule.values() for run in runs.values()})
    if len(lengths) > 1:
        raise UserError(
            f"runs have {', '.join(map(str, lengths))} epochs: keep those that all have, by"
            f' epochs[epochs["epoch"] < {lengths[0]}]'
        )
    final_values = {
        rule: {seed: run[-1] for seed, run in runs.items()} for rule, runs in values_of_rule.items()
    }
    rows = {}
    for rule, rule_values in final_values.items():
        paired_values = {
            seed: value for seed, value in rule_values.items() if seed in final_values[baseline]
        } or rule_values
        n_runs = sum(not isnan(value) for value in paired_values.values())
        rows[rule] = over_seeds(paired_values, final_values[baseline], measure, margin) | {
            "runs": n_runs
        }
    return rows


def _values(epochs: pd.DataFrame, measure: Metric) -> dict[str, dict[int, list[float]]]:
    """Return by rule and seed the metric after each epoch, of finished and diverged runs."""
    if measure.key not in epochs:
        raise UserError(f"these runs have no test {measure.name}: their table lacks {measure.key}")
    # Rules of a folder whose schedules share a name get labels.
    labels_of_folder = {}
    if {"folder", "rule"} <= {*epochs}:
        for folder, rows in epochs.groupby("folder"):
            labels_of_folder[folder] = labels(
                dict(zip(rows["rule"], rows["schedule"], strict=True))
            )
    values_of_rule: dict[str, dict[int, list[float]]] = {}
    keys = [name for name in ("folder", "rule", "schedule", "seed") if name in epochs]
    for _, run in epochs.groupby(keys, sort=False, dropna=False):
        first_row = run.iloc[0]
        diverged = run.get("train_loss", run["epoch"]).isna().any()
        if first_row.get("state", "finished") != "finished" and not diverged:
            continue
        rule = (
            labels_of_folder[first_row["folder"]][first_row["rule"]]
            if labels_of_folder
            else first_row["schedule"]
        )
        by_seed, seed = values_of_rule.setdefault(str(rule), {}), int(first_row["seed"])
        if seed in by_seed or run["epoch"].duplicated().any():
            raise UserError(
                f"several runs of {rule} have seed {seed}, one in"
                f" {first_row.get('folder', 'epochs')}:"
                ' keep one of them, as by epochs[epochs["folder"] == FOLDER], or by an option'
            )
        by_seed[seed] = run.sort_values("epoch")[measure.key].tolist()
    return values_of_rule


def delay_study(folder: Path | str, measure: Metric = ACCURACY) -> pd.DataFrame:
    """Return the table of a comparison of delays from an output folder of experiments/compare.py.

    Differences are from its first rule, paired by seed, with a 95 % interval; cosines are between
    delayed and fresh gradients, the smallest of all stages.

    Args:
        folder: output folder of a comparison that has ended.
        measure: accuracy or loss.

    Raises:
        UserError: ``folder`` has no result of a comparison with this metric.
    """
    from toolkit.results.record import read_result

    result = read_result(Path(folder))
    rows, needed_columns = result["metrics"], {"rule", "schedule", *measure.columns}
    if not rows or not all(needed_columns <= {*row} for row in rows):
        raise UserError(
            f"{folder} has no result of a comparison with test {measure.name}: give a finished"
            " output folder of experiments/compare.py, such as that of study=delays"
        )
    label_of_rule = labels({row["rule"]: row["schedule"] for row in rows})
    baseline = next(iter(label_of_rule.values()))
    cells_of_rule = {}
    for row in rows:
        stage_cosines = [
            delay["cosine"] for delay in result["delays"] if delay["rule"] == row["rule"]
        ]
        cosines = [cosine for cosine in stage_cosines if cosine is not None]
        cells_of_rule[label_of_rule[row["rule"]]] = {
            **staleness_cells(row),
            "least cosine": f"{min(cosines):.2f}" if cosines else "",
            **metric_cells(row, measure, baseline),
        }
    return pd.DataFrame.from_dict(cells_of_rule, orient="index")


def memory_saved(curves: "Mapping[str, MemoryCurve]", workers: Sequence[int]) -> pd.DataFrame:
    """Return how far the peak of staggered workers is below that of simultaneous ones, by curve.

    A curve is the memory of one micro-batch. The last column is the largest reduction,
    1 - mean/peak, which no number of workers exceeds.

    Args:
        curves: memory of one micro-batch, by name.
        workers: numbers of workers.
    """
    rows = [
        reduction_cells(
            {n_workers: curve.reduction(n_workers) for n_workers in workers},
            curve.largest_reduction,
        )
        for curve in curves.values()
    ]
    return pd.DataFrame(rows, index=[*curves])


def counted_and_measured(
    rows: "Sequence[Row]", measured: "Sequence[MeasuredRow]" = ()
) -> pd.DataFrame:
    """Return the paper's settings counted from programs, and whether processes measured the same.

    A: activations of one micro-batch over the whole model. P: the model's parameters.

    Args:
        rows: of :func:`toolkit.schedule.paper_table.compare`.
        measured: of the same number of workers; others raise UserError.
    """
    measured_schedules = [row.measurements.schedule for row in measured]
    if measured and measured_schedules != [row.schedule for row in rows]:
        raise UserError("measured and counted schedules differ: take the same n in compare(n)")
    cells = [
        counted_cells({"setting": row.setting, "rule": row.rule} | asdict(row.counted))
        for row in rows
    ]
    table = pd.DataFrame(cells).set_index(["setting", "rule"])
    if measured:
        difference_texts = [", ".join(row.differences) for row in measured]
        table["measured"] = [
            f"{difference_text} differ" if difference_text else "equal"
            for difference_text in difference_texts
        ]
    return table


def when_cdp_helps(rows: "Iterable[Mapping[str, Any]]") -> pd.DataFrame:
    """Return a table of memory, devices and step times of CDP and DP.

    Args:
        rows: situations, as :mod:`toolkit.cost.situations` finds them.
    """
    index = ["situation", "workers", "M/C"]
    return pd.DataFrame([situation_cells(row) for row in rows]).set_index(index)


def by_rank(found: "Measurements") -> pd.DataFrame:
    """Return each rank's peak memory, and what it sent and received.

    Args:
        found: what ``runtime.measurements()`` returned.
    """
    return pd.DataFrame([rank_cells(row) for row in found.by_rank()]).set_index("rank")
