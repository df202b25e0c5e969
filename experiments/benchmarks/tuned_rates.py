"""The tuned learning rates of a comparison, compared with the certified ones of its rules.

The certificate is that of a quadratic loss whose largest curvature is the one of the first weights.
Training meets other curvatures, the same for all rules as far as they train alike: so what it can
predict is by how much one rule's rate is below another's. Both rates are therefore divided by
those of the comparison's first rule.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, log, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from toolkit.errors import UserError
from toolkit.plan.stability import coupling_of, largest_stable_rate
from toolkit.results.run_files import DELAYS_FILE
from toolkit.results.run_schedule import rebuild_schedule
from toolkit.results.runs import Run, read_runs
from toolkit.schedule import labels

Row = dict[str, Any]


def tuned_runs(folder: str | Path) -> list[Run]:
    """Return a finished run of each rule of a comparison that has tuned learning rates of SGD.

    Raises:
        UserError: there is no such comparison in ``folder``.
    """
    first_runs: dict[str, Run] = {}
    for run in read_runs([folder]):
        if run.kind == "compare" and run.state == "finished" and run.rule is not None:
            # Any seed: a rule has one learning rate.
            first_runs.setdefault(run.rule, run)
    for run in first_runs.values():
        if run.config["optimizer"].get("_target_") != "torch.optim.SGD":
            raise UserError(
                f"rule {run.rule} of {folder} trains with"
                f" {run.config['optimizer'].get('_target_')}: the certificate is that of SGD"
            )
    if len(first_runs) < 2:
        raise UserError(
            f"tuned={folder} has {len(first_runs)} rules with finished runs: give the folder of a"
            " comparison of two or more, such as one by cyclic-dp compare study=corrections"
        )
    return [*first_runs.values()]


def rate_rows(
    runs: Sequence[Run],
    curvature: float | None = None,
    stage_shares: Sequence[float] | None = None,
) -> list[Row]:
    """Return a row for each rule: its tuned learning rate and its largest stable one.

    Args:
        runs: a run of each rule, the first rule first.
        curvature: the largest of the loss at the first weights; None: only ratios are certified.
        stage_shares: of each stage in its direction, sum 1; None: equal ones.
    """
    names = {str(run.rule): str(run.schedule) for run in runs}
    label_of_rule = labels(names)
    coupling = None if stage_shares is None else coupling_of(stage_shares)
    rows: list[Row] = []
    for run in runs:
        optimizer = run.config["optimizer"]
        certificate = largest_stable_rate(
            rebuild_schedule(run.config["schedule"]),
            momentum=optimizer.get("momentum", 0.0),
            nesterov=optimizer.get("nesterov", False),
            coupling=coupling,
        )
        row: Row = {"rule": label_of_rule[str(run.rule)]}
        row["tuned"] = _highest_rate(run)
        row["limit"] = certificate.limit
        row["certified"] = None if curvature is None else certificate.rate(curvature)
        rows.append(row)
    for row in rows:
        # What both rates have in common, such as the curvature, cancels.
        row["tuned / first"] = row["tuned"] / rows[0]["tuned"]
        row["certified / first"] = row["limit"] / rows[0]["limit"]
    return rows


def _highest_rate(run: Run) -> float:
    """Return the learning rate at which SGD trains for longest: the highest of any epoch."""
    # With a warm-up the highest rate comes later than the first epoch.
    rates = [epoch.get("learning_rate", nan) for epoch in run.epochs]
    reached = [rate for rate in rates if not isnan(rate)]
    return max(reached, default=run.config["optimizer"]["lr"])


def correlations(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Return the correlations of tuned with certified rates: of their ranks and of their logs."""
    from scipy.stats import pearsonr, spearmanr

    tuned = [row["tuned"] for row in rows]
    certified = [row["limit"] for row in rows]
    ranks = spearmanr(tuned, certified)
    # Rates are tried by factors, so their logarithms are what is evenly spaced.
    logs = pearsonr([log(rate) for rate in tuned], [log(rate) for rate in certified])
    return {
        "rules": len(rows),
        "rank correlation": round(float(ranks[0]), 3),
        "p": round(float(ranks[1]), 3),
        "correlation of logarithms": round(float(logs[0]), 3),
    }


def cosines(
    folder: str | Path, runs: Sequence[Run]
) -> dict[str, list[tuple[int, float]]]:
    """Return by rule the steps and cosines of delayed and fresh gradients that runs measured.

    A cosine is the mean over stages and seeds. Empty if the comparison had no ``diagnostics``.

    Args:
        folder: of the comparison.
        runs: a run of each rule.
    """
    names = {str(run.rule): str(run.schedule) for run in runs}
    values: dict[str, dict[int, list[float]]] = {}
    for row in _delay_rows(Path(folder)):
        if row["rule"] in names and not isnan(cosine := float(row["cosine"] or nan)):
            values.setdefault(row["rule"], {}).setdefault(int(row["step"]), []).append(
                cosine
            )
    label_of_rule = labels(names)
    curves = {}
    for rule, values_of_step in values.items():
        curves[label_of_rule[rule]] = [
            (step, fmean(step_values))
            for step, step_values in sorted(values_of_step.items())
        ]
    return curves


def _delay_rows(folder: Path) -> Iterator[dict[str, str]]:
    path = folder / DELAYS_FILE
    if path.is_file():
        with path.open(newline="") as file:
            yield from csv.DictReader(file)
