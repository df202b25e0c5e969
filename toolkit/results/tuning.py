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
from toolkit.results.comparison import Options, RuleRun, seeds_of
from toolkit.results.record import Row


def trials(options: Options) -> dict[str, Any]:
    """Return the options of the comparison of each rule of ``options`` at each of its rates.

    Raises:
        UserError: the comparison itself uses the seed of the trials, or an option of ``tune`` is
            out of range.
    """
    tune = TuneOptions(**options["tune"])
    if tune.seed in (seeds := seeds_of(options)):
        raise UserError(
            f"tune.seed={tune.seed} is a seed of the comparison, {seeds[0]} to {seeds[-1]}: rates"
            " that are chosen by the runs that they are judged by look too good; take another"
        )
    trial_of_name = {
        _name(rule, factor): (rule, rate)
        for rule in options["rules"]
        for factor, rate in _rates(options, rule).items()
    }
    return {
        **options,
        "rules": {name: options["rules"][rule] for name, (rule, _) in trial_of_name.items()},
        "own": {name: _own(options, rule, rate) for name, (rule, rate) in trial_of_name.items()},
        "seed": tune.seed,
        "seeds": 1,
        "epochs": tune.epochs,
        "diagnostics": 0,
        "tracking": {**options["tracking"], "mode": "disabled"},
    }


def tried(options: Options, runs: Sequence[RuleRun], by: Metric) -> list[Row]:
    """Return a row for each trial: rule, ``lr``, its final test metric, and whether it is the best.

    The best has the best test metric after the last epoch and, of equal ones, the lowest test loss.
    A trial whose loss diverges is the worst; if all do, the lowest rate is the best.

    Args:
        options: those of the comparison.
        runs: the trials.
        by: metric that judges them.
    """
    ends = {run.rule: run.epochs[-1] for run in runs}
    rows = []
    for rule in options["rules"]:
        rates = sorted(_rates(options, rule).items())
        trials_of_rule = [(rate, ends[_name(rule, factor)]) for factor, rate in rates]
        best, _ = max(trials_of_rule, key=lambda trial: _merit(trial[1], by))
        rows += [
            {"rule": rule, "lr": rate, by.name: by.factor * end[by.key], "best": rate == best}
            for rate, end in trials_of_rule
        ]
    return rows


def _merit(last_epoch: Row, by: Metric) -> list[float]:
    """Return the sort key of a trial: its metric, then its loss; larger is better."""
    sign = -1 if by.lower_is_better else 1
    return [
        -inf if isnan(value) else value
        for value in (sign * last_epoch[by.key], -last_epoch["test_loss"])
    ]


def with_best(options: Options, rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``own`` of a comparison, with the best rate of each rule."""
    best_options = {
        row["rule"]: _own(options, row["rule"], row["lr"]) for row in rows if row["best"]
    }
    return {**options["own"], **best_options}


def edges(rows: Sequence[Row]) -> dict[str, str]:
    """Return the rules whose best rate is the lowest or the highest of several, and which it is."""
    edge_of_rule = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        best_flags = [row["best"] for row in rows if row["rule"] == rule]
        if len(best_flags) > 1 and (best_flags[0] or best_flags[-1]):
            edge_of_rule[rule] = "lowest" if best_flags[0] else "highest"
    return edge_of_rule


def edge_notes(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on each rule whose best rate is the lowest or the highest of several."""
    best_rate_of_rule = {row["rule"]: row["lr"] for row in rows if row["best"]}
    return [
        f"{rule}: the best of its rates, {best_rate_of_rule[rule]:g}, is the {edge} that was tried;"
        f" a {'lower' if edge == 'lowest' else 'higher'} one may be better: add it to tune.rates"
        for rule, edge in edges(rows).items()
    ]


def _name(rule: str, factor: float) -> str:
    return f"{rule}_x{factor:g}"


def _rates(options: Options, rule: str) -> dict[float, float]:
    """Return the learning rates at which a rule is tried, by their factors."""
    rate = with_own(options, options["own"].get(rule) or {})["optimizer"]["lr"]
    # Without the last digits of 3 * 0.1.
    return {factor: float(f"{factor * rate:.12g}") for factor in options["tune"]["rates"]}


def _own(options: Options, rule: str, rate: float) -> dict[str, Any]:
    """Return the options of a rule alone, at a learning rate."""
    rule_options = options["own"].get(rule) or {}
    return {**rule_options, "optimizer": {**rule_options.get("optimizer", {}), "lr": rate}}
