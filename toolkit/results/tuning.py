"""The learning rate of each rule of a comparison, chosen by short runs.

The trials are a comparison of their own, of each rule at each rate with one seed. It is kept in the
folder ``tuning`` of the comparison, and continues and grows as any other.
"""

from collections.abc import Sequence
from math import inf, isnan
from typing import Any

from toolkit.errors import UserError
from toolkit.metric import Metric
from toolkit.options import TuneOptions, with_own
from toolkit.results.comparison import RuleRun, RunOptions, seeds_of
from toolkit.results.record import PlainRow


def trials(options: RunOptions) -> dict[str, Any]:
    """Return the options of the comparison of each rule of ``options`` at each of its rates.

    Raises:
        UserError: the comparison itself uses the seed of the trials, or an option of ``tune`` is
            out of range.
    """
    tune = TuneOptions(**options["tune"])
    seeds = seeds_of(options)
    if tune.seed in seeds:
        raise UserError(
            f"tune.seed={tune.seed} is a seed of the comparison, {seeds[0]} to {seeds[-1]}: rates"
            " that are chosen by the runs that they are judged by look too good; take another"
        )
    rules = {}
    own_options = {}
    for rule, rule_options in options["rules"].items():
        for factor, rate in _rates(options, rule).items():
            rules[_name(rule, factor)] = rule_options
            own_options[_name(rule, factor)] = _own(options, rule, rate)
    return {
        **options,
        "rules": rules,
        "own": own_options,
        "seed": tune.seed,
        "seeds": 1,
        "epochs": tune.epochs,
        # Trials are cheap, and nobody reads more of them than their final metric.
        "diagnostics": 0,
        # Trials are judged by the newest weights, so the late ones need no test.
        "readout": "newest"
        if options["readout"] == "as_published"
        else options["readout"],
        "tracking": {**options["tracking"], "mode": "disabled"},
    }


def tried(options: RunOptions, runs: Sequence[RuleRun], by: Metric) -> list[PlainRow]:
    """Return a row for each trial: rule, ``lr``, its final test metric, and whether it is the best.

    The best has the best test metric after the last epoch and, of equal ones, the lowest test loss.
    A trial whose loss diverges is the worst; if all do, the lowest rate is the best.

    Args:
        options: those of the comparison.
        runs: the trials.
        by: metric that judges them.
    """
    last_epochs = {run.rule: run.epochs[-1] for run in runs}
    rows = []
    for rule in options["rules"]:
        epoch_of_rate = {}
        # From the lowest rate on: max() returns the first of equal ones.
        for factor, rate in sorted(_rates(options, rule).items()):
            epoch_of_rate[rate] = last_epochs[_name(rule, factor)]
        best_rate = max(epoch_of_rate, key=lambda rate: _merit(epoch_of_rate[rate], by))
        for rate, epoch in epoch_of_rate.items():
            value = by.factor * epoch[by.key]
            rows.append(
                {"rule": rule, "lr": rate, by.name: value, "best": rate == best_rate}
            )
    return rows


def _merit(last_epoch: PlainRow, by: Metric) -> list[float]:
    """Return the sort key of a trial: its metric, then its loss; larger is better."""
    metric = last_epoch[by.key]
    if by.lower_is_better:
        metric = -metric
    loss = last_epoch["test_loss"]
    # NaN compares as false with everything, so max() would depend on the order.
    if isnan(metric):
        metric = -inf
    if isnan(loss):
        loss = inf
    return [metric, -loss]


def with_best(options: RunOptions, rows: Sequence[PlainRow]) -> dict[str, Any]:
    """Return ``own`` of a comparison, with the best rate of each rule."""
    own_options = {**options["own"]}
    for row in rows:
        if row["best"]:
            own_options[row["rule"]] = _own(options, row["rule"], row["lr"])
    return own_options


def edges(rows: Sequence[PlainRow]) -> dict[str, str]:
    """Return the rules whose best rate is the lowest or the highest of several, and which it is."""
    edge_of_rule = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        # From the lowest rate on.
        is_best = [row["best"] for row in rows if row["rule"] == rule]
        if len(is_best) > 1 and is_best[0]:
            edge_of_rule[rule] = "lowest"
        elif len(is_best) > 1 and is_best[-1]:
            edge_of_rule[rule] = "highest"
    return edge_of_rule


def edge_notes(rows: Sequence[PlainRow]) -> list[str]:
    """Return a sentence on each rule whose best rate is the lowest or the highest of several."""
    best_rates = {row["rule"]: row["lr"] for row in rows if row["best"]}
    notes = []
    for rule, edge in edges(rows).items():
        direction = {"lowest": "lower", "highest": "higher"}[edge]
        notes.append(
            f"{rule}: the best of its rates, {best_rates[rule]:g}, is the {edge} that was tried; a"
            f" {direction} one may be better: add it to tune.rates"
        )
    return notes


def _name(rule: str, factor: float) -> str:
    return f"{rule}_x{factor:g}"


def _rates(options: RunOptions, rule: str) -> dict[float, float]:
    """Return the learning rates at which a rule is tried, by their factors."""
    rate = with_own(options, options["own"].get(rule) or {})["optimizer"]["lr"]
    # Without the last digits of 3 * 0.1.
    return {
        factor: float(f"{factor * rate:.12g}") for factor in options["tune"]["rates"]
    }


def _own(options: RunOptions, rule: str, rate: float) -> dict[str, Any]:
    """Return the options of a rule alone, at a learning rate."""
    rule_options = options["own"].get(rule) or {}
    return {
        **rule_options,
        "optimizer": {**rule_options.get("optimizer", {}), "lr": rate},
    }
