"""Tables of own and kept runs.

``epochs`` are tables of one row an epoch, as :func:`train_rules` or
:func:`toolkit.results.collect.learning_curves` give them; ``measure`` is the test metric,
``LOSS`` for language models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd

from toolkit.errors import UserError
from toolkit.format import metric_cells, staleness_cells
from toolkit.metric import ACCURACY, Metric
from toolkit.results.statistics import in_a_sentence, interval, says
from toolkit.schedule import labels

Curves = dict[str, list[list[float]]]


class Markdown(str):
    """Text that notebooks render."""

    def _repr_markdown_(self) -> str:
        return str(self)


def train_rules(
    config: Any,
    seeds: Iterable[int] | None = None,
    on_epoch: Any = lambda activity, share: None,
) -> pd.DataFrame:
    """Train under each rule with each seed: a row an epoch, accuracies in per cent.

    Schedules with equal names are labelled by their rules. After a loss diverges, the remaining
    epochs of the run are NaN.

    Args:
        config: of ``compare``.
        seeds: of weights and batches, the same for every rule; by default those of ``config``.
        on_epoch: called with the name of the current run and the completed share of all runs.

    Raises:
        UserError: the options are those of another experiment, or ask for tuned rates, or there are
            no seeds.
    """
    from toolkit.cli import build_run, build_schedule, load_samples, settle_delays
    from toolkit.cli.runs import rule_config
    from toolkit.results.comparison import seeds_of
    from toolkit.results.record import per_cent

    if "rules" not in config:
        raise UserError('rules are those of compare: give settings("compare", ...)')
    if config.tune.rates is not None:
        raise UserError(
            f"tune.rates={config.tune.rates} is for cyclic-dp compare, which keeps its trials:"
            " leave it out, or give rules their rates, as by +own.cdp_v1.optimizer.lr=0.05"
        )
    if seeds is None:
        seeds = seeds_of(config)
    # A generator would be empty after the first rule.
    if isinstance(seeds, Iterable):
        seeds = [*seeds]
    if not isinstance(seeds, list) or not seeds:
        raise UserError(
            f"seeds are whole numbers, one or more, such as [0, 1]: got {seeds!r}"
        )
    # Loaded once for all runs.
    images = load_samples(config.data)
    # Before schedules are built, an affordable delay becomes a matrix in `config`.
    settle_delays(config, lambda: images.form)
    label_of_rule = labels(
        {name: build_schedule(rule).name for name, rule in config.rules.items()}
    )
    n_runs = len(seeds) * len(config.rules)
    n_done = 0
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        # Rules within a seed, so that a cell that is stopped has pairs.
        for rule, label in label_of_rule.items():
            on_epoch(f"{label}, seed {seed}", n_done / n_runs)
            run = build_run(rule_config(config, rule, seed), images)
            for epoch in run.run_to_end():
                numbers = per_cent(asdict(epoch)) | {"epoch": epoch.epoch}
                rows.append({"schedule": label, "seed": seed} | numbers)
            n_done += 1
    on_epoch(f"{n_runs} runs", 1.0)
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
    curves: Curves = {}
    for rule, runs in _values(epochs, measure).items():
        curves[rule] = []
        for run in runs.values():
            # Tables have per cent, figures take shares.
            curves[rule].append([value / measure.factor for value in run])
    return curves


def own_curves(
    kept_epochs: pd.DataFrame, own_epochs: pd.DataFrame, measure: Metric = ACCURACY
) -> Curves:
    """Return kept and own runs of the rules that both have, cut to the shortest run.

    Args:
        kept_epochs: a row for each epoch of each kept run, as :func:`by_epoch` takes them.
        own_epochs: likewise of the reader's own runs.
        measure: accuracy or loss.

    Raises:
        UserError: no rule is in both, or several runs of a rule have the same seed.
    """
    kept_curves = by_epoch(kept_epochs, measure)
    own_curves = by_epoch(own_epochs, measure)
    curves: Curves = {}
    for label, runs_of_rule in (("kept", kept_curves), ("own", own_curves)):
        for rule, runs in runs_of_rule.items():
            if rule in kept_curves and rule in own_curves:
                curves[f"{rule}, {label}"] = runs
    if not curves:
        raise UserError(
            f"kept and own runs share no rule: got {', '.join(kept_curves)} and"
            f" {', '.join(own_curves)}"
        )
    # Figures need curves of one length, and the reader's runs are often short.
    n_epochs = min(_lengths(curves))
    for label, runs in curves.items():
        curves[label] = [run[:n_epochs] for run in runs]
    return curves


def _lengths(curves: Mapping[str, Iterable[Sequence[float]]]) -> set[int]:
    """Return the different numbers of epochs of all runs."""
    lengths = set()
    for runs in curves.values():
        lengths |= {len(run) for run in runs}
    return lengths


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
    cells_of_rule = {}
    for rule, row in _summaries(epochs, baseline, measure, margin).items():
        cells = {"runs": row["runs"], **metric_cells(row, measure, baseline)}
        # The baseline has no difference from itself to say anything about.
        cells["says"] = ""
        if rule != baseline:
            low, high = interval(row, measure)
            cells["says"] = says(low, high)
        cells_of_rule[rule] = cells
    return pd.DataFrame.from_dict(cells_of_rule, orient="index")


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
            sentence = in_a_sentence(
                f"**{rule}**", baseline, row, row["runs"], measure, margin
            )
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
    lengths = sorted(
        _lengths({rule: runs.values() for rule, runs in values_of_rule.items()})
    )
    # The last epochs are compared, so they have to be the same ones.
    if len(lengths) > 1:
        raise UserError(
            f"runs have {', '.join(map(str, lengths))} epochs: keep those that all have, by"
            f' epochs[epochs["epoch"] < {lengths[0]}]'
        )
    last_baseline = {seed: run[-1] for seed, run in values_of_rule[baseline].items()}
    rows = {}
    # Pairs only: a kept comparison may have more seeds than the reader's own runs.
    for rule, runs in values_of_rule.items():
        last_values = {seed: run[-1] for seed, run in runs.items()}
        shared_seeds = last_values.keys() & last_baseline.keys()
        if shared_seeds:  # else over_seeds says what is wrong
            last_values = {
                seed: last_values[seed] for seed in runs if seed in shared_seeds
            }
        row = over_seeds(last_values, last_baseline, measure, margin)
        row["runs"] = sum(not isnan(value) for value in last_values.values())
        rows[rule] = row
    return rows


def _values(epochs: pd.DataFrame, measure: Metric) -> dict[str, dict[int, list[float]]]:
    """Return by rule and seed the metric after each epoch, of finished and diverged runs."""
    if measure.key not in epochs:
        raise UserError(
            f"these runs have no test {measure.name}: their table lacks {measure.key}"
        )
    # Rules of a folder whose schedules share a name get labels.
    labels_of_folder = {}
    if {"folder", "rule"} <= {*epochs}:
        for folder, rows in epochs.groupby("folder"):
            schedule_of_rule = dict(zip(rows["rule"], rows["schedule"], strict=True))
            labels_of_folder[folder] = labels(schedule_of_rule)
    values_of_rule: dict[str, dict[int, list[float]]] = {}
    # Tables of train_rules have no folder; those of kept runs do, and perhaps several.
    keys = [name for name in ("folder", "rule", "schedule", "seed") if name in epochs]
    for _, run in epochs.groupby(keys, sort=False, dropna=False):
        first_row = run.iloc[0]
        # A diverged run is unfinished as well, and is drawn until then.
        diverged = run.get("train_loss", run["epoch"]).isna().any()
        if first_row.get("state", "finished") != "finished" and not diverged:
            continue
        rule = first_row["schedule"]
        if labels_of_folder:
            rule = labels_of_folder[first_row["folder"]][first_row["rule"]]
        seed = int(first_row["seed"])
        runs = values_of_rule.setdefault(str(rule), {})
        if seed in runs or run["epoch"].duplicated().any():
            raise UserError(
                f"several runs of {rule} have seed {seed}, one in"
                f" {first_row.get('folder', 'epochs')}:"
                ' keep one of them, as by epochs[epochs["folder"] == FOLDER], or by an option'
            )
        runs[seed] = run.sort_values("epoch")[measure.key].tolist()
    return values_of_rule


def delay_study(folder: Path | str, measure: Metric = ACCURACY) -> pd.DataFrame:
    """Return the table of a comparison of delays from an output folder of cyclic-dp compare.

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
    rows = result["metrics"]
    needed_columns = {"rule", "schedule", *measure.columns}
    if not rows or not all(needed_columns <= {*row} for row in rows):
        raise UserError(
            f"{folder} has no result of a comparison with test {measure.name}: give a finished"
            " output folder of cyclic-dp compare, such as that of study=delays"
        )
    # Rules whose schedules share a name are labelled by their own names, too.
    label_of_rule = labels({row["rule"]: row["schedule"] for row in rows})
    baseline = next(iter(label_of_rule.values()))
    cells_of_rule = {}
    for row in rows:
        # One for each stage; the least is of the stage whose gradient turns most.
        cosines = []
        for delay in result["delays"]:
            # None where a fresh gradient was not computed at any step.
            if delay["rule"] == row["rule"] and delay["cosine"] is not None:
                cosines.append(delay["cosine"])
        cells_of_rule[label_of_rule[row["rule"]]] = {
            **staleness_cells(row),
            "least cosine": f"{min(cosines):.2f}" if cosines else "",
            **metric_cells(row, measure, baseline),
        }
    return pd.DataFrame.from_dict(cells_of_rule, orient="index")
