"""The runs of a comparison, as read from its folder: each rule with each seed."""

from collections.abc import Mapping
from dataclasses import replace
from math import isnan, nan
from typing import Any

from toolkit.metric import ACCURACY, LOSS
from toolkit.options import COMPARED, ENDED
from toolkit.results.csv_log import read_csv
from toolkit.results.record import DamagedError, Numbers, numbers_of, per_cent, read_yaml
from toolkit.results.run_record import Run, seed_of
from toolkit.results.schedule_from_config import schedule_name

_MOST_SEEDS = 10_000
_WAITING = "unfinished", "it has not begun"


def comparison_runs(comparison: Run, result: Mapping[str, Any]) -> list[Run]:
    """Return a comparison's runs, or its rules' means if runs.csv was not kept.

    Args:
        comparison: what all runs share.
        result: content of its result.json; empty before the file exists.

    Raises:
        DamagedError: the options or runs.csv are not those of a comparison.
    """
    config = comparison.config
    rules = config.get("rules") or {}
    # Rules that a resumed comparison has left out are only there.
    known = (read_yaml(comparison.folder / COMPARED).get("rules") or {}) | rules
    summaries = {row["rule"]: row for row in result.get("metrics", ()) if "schedule" in row}
    shared = {k: v for k, v in config.items() if k not in ("rules", "seeds")}

    def of_rule(rule: str) -> Run:
        options = known.get(rule)
        name = summaries[rule]["schedule"] if rule in summaries else schedule_name(options)
        delays = [row for row in result.get("delays", ()) if row.get("rule") == rule]
        return replace(
            comparison,
            rule=rule,
            schedule=name or rule,
            config=shared | ({"schedule": options} if isinstance(options, dict) else {}),
            delays=[numbers_of(row) for row in delays],
        )

    if comparison.state == "finished" and not (comparison.folder / ENDED).exists():
        if not summaries:
            raise DamagedError("there are no runs.csv and no rules in result.json")
        return [
            replace(
                of_rule(rule),
                seed=None,
                metrics=_means(numbers_of(row)),
                repeats=config.get("seeds") or 1,
                message="runs.csv was not kept: means over seeds",
            )
            for rule, row in summaries.items()
        ]
    epochs: dict[tuple[str, int], list[Numbers]] = {}
    for row in read_csv(comparison.folder / ENDED, words=("rule",)):
        rule, seed = row.pop("rule", None), seed_of({"seed": row.pop("seed", None)})
        if rule is None or seed is None:
            raise DamagedError("runs.csv has a row without rule or seed")
        epochs.setdefault((rule, seed), []).append(per_cent(row))
    first, n_seeds = seed_of(config) or 0, config.get("seeds") or 0
    if n_seeds > _MOST_SEEDS:
        raise DamagedError(f"seeds is {str(n_seeds)[:20]}; expected at most {_MOST_SEEDS}")
    planned = [(rule, seed) for seed in range(first, first + n_seeds) for rule in rules]
    next_state = comparison.state, comparison.message  # of the one run under way
    runs = []
    for rule, seed in dict.fromkeys([*planned, *epochs]):
        run = of_rule(rule)
        run = replace(
            run, seed=seed, config={**run.config, "seed": seed}, epochs=epochs.get((rule, seed), [])
        )
        ended = _ended(run)
        if ended is None:
            ended, next_state = next_state, _WAITING
        state, message = ended
        metrics = dict(run.epochs[-1]) if state == "finished" else {}
        runs.append(replace(run, state=state, message=message, metrics=metrics))
    return runs or [comparison]


def _ended(run: Run) -> tuple[str, str] | None:
    """State and message of a run that has ended, or None.

    Args:
        run: with the state and the message of its comparison.
    """
    lost = next((row["epoch"] for row in run.epochs if isnan(row.get("train_loss", 0.0))), None)
    if lost is not None:
        return "failed", f"its loss diverged in epoch {lost:.0f}"
    if run.state == "finished":
        return (run.state, run.message) if run.epochs else ("unfinished", "runs.csv lacks it")
    complete = run.epochs and len(run.epochs) == run.config.get("epochs")
    return ("finished", "") if complete else None


def _means(row: Numbers) -> Numbers:
    """A rule's means, spreads and differences, from a row of the result."""
    metrics: Numbers = {}
    for by in (ACCURACY, LOSS):
        names = by.key, *(f"{by.name}_{part}" for part in ("sd", "difference", "difference_95"))
        metrics |= {k: row.get(column, nan) for k, column in zip(names, by.columns, strict=True)}
    return metrics
