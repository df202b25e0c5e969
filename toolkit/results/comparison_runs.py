"""The runs of a comparison, as its folder tells: each rule with each seed."""

from collections.abc import Mapping
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

from toolkit.metric import ACCURACY, LOSS
from toolkit.options import COMPARED, ENDED
from toolkit.results.reader import (
    LARGEST,
    DamagedError,
    mappings,
    numbers_of,
    per_cent,
    read_csv,
    read_yaml,
    text_or_none,
    whole_number,
)
from toolkit.results.run_record import Run
from toolkit.results.schedule_from_config import schedule_name

_MOST_SEEDS = 10_000  # of a comparison; more are a damaged option
_WAITS = "unfinished", "it has not begun"


def runs_of_rules(comparison: Run, result: Mapping[str, Any]) -> list[Run]:
    """Each rule with each seed; where runs.csv has not been kept, each rule.

    Args:
        comparison: what its folder tells of all its runs.
        result: that it has written, if any.

    Raises:
        DamagedError: runs.csv cannot be read.
    """
    rules = _rules(comparison.config)
    known = _rules(read_yaml(comparison.folder / COMPARED)) | rules  # also of those left out since
    summed = [row for row in mappings(result.get("metrics")) if text_or_none(row.get("rule"))]
    names = {row["rule"]: text_or_none(row.get("schedule")) for row in summed}
    shared = {k: v for k, v in comparison.config.items() if k not in ("rules", "seeds")}
    delays = mappings(result.get("delays"))

    def of_rule(rule: str) -> Run:
        options = known.get(rule)
        return replace(
            comparison,
            rule=rule,
            schedule=names.get(rule) or schedule_name(options) or rule,
            config=shared | ({"schedule": options} if isinstance(options, dict) else {}),
            delays=[numbers_of(row) for row in delays if row.get("rule") == rule],
        )

    if comparison.state == "finished" and not (comparison.folder / ENDED).exists():
        means = [replace(of_rule(r["rule"]), **_mean(r, comparison.config)) for r in summed]
        none = "there are no runs.csv and no rules in result.json"
        return means or [replace(comparison, message=none)]
    epochs = _epochs_by_run(comparison.folder / ENDED)
    planned = [(rule, seed) for seed in _seeds(comparison.config) for rule in rules]
    under_way = comparison.state, comparison.message
    found = []
    for rule, seed in dict.fromkeys([*planned, *epochs]):
        run = of_rule(rule)
        config, seen = {**run.config, "seed": seed}, epochs.get((rule, seed), [])
        run = replace(run, seed=seed, config=config, epochs=seen)
        ended = _ended(run)
        if ended is None:  # one at a time is under way, and others wait for it
            ended, under_way = under_way, _WAITS
        state, message = ended
        metrics = dict(seen[-1]) if state == "finished" else {}
        found.append(replace(run, state=state, message=message, metrics=metrics))
    return found or [comparison]


def _ended(run: Run) -> tuple[str, str] | None:
    """The state and the message of a run that has ended, by its epochs; None: it has not.

    Args:
        run: with the state and the message of its comparison.
    """
    lost = next((row["epoch"] for row in run.epochs if isnan(row.get("train_loss", 0.0))), None)
    if lost is not None:
        return "failed", f"its loss diverged in epoch {lost:.0f}"
    if run.state == "finished":
        lacking = "unfinished", "runs.csv does not have it"
        return (run.state, run.message) if run.epochs else lacking
    whole = len(run.epochs) == whole_number(run.config.get("epochs"))
    return ("finished", "") if run.epochs and whole else None


def _seeds(config: Mapping[str, Any]) -> range:
    first, n_seeds = (whole_number(config.get(name)) or 0 for name in ("seed", "seeds"))
    return range(first, first + min(n_seeds, _MOST_SEEDS))


def _rules(options: Any) -> dict[str, Any]:
    rules = options.get("rules") if isinstance(options, dict) else None
    return rules if isinstance(rules, dict) else {}


def _mean(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison says of a rule, all seeds together."""
    numbers = numbers_of(row)
    metrics = {}
    for by in (ACCURACY, LOSS):
        names = by.key, *(f"{by.name}_{part}" for part in ("sd", "difference", "difference_95"))
        for name, column in zip(names, by.columns, strict=True):
            metrics[name] = numbers.get(column, nan)
    return {
        "metrics": metrics,
        "repeats": whole_number(config.get("seeds")) or 1,
        "message": "runs.csv has not been kept: means over seeds",
    }


def _epochs_by_run(path: Path) -> dict[tuple[str, int], list[dict[str, float]]]:
    """The epochs of each rule with each seed."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for row in read_csv(path, words=("rule",)):
        rule, seed = row.pop("rule", None), row.pop("seed", None)
        whole = isinstance(seed, float) and seed.is_integer() and abs(seed) < LARGEST
        if not isinstance(rule, str) or not whole:
            raise DamagedError("runs.csv: a row without rule and seed")
        found.setdefault((rule, int(seed)), []).append(per_cent(row))
    return found
