"""Runs of the user's own beside kept ones: how well they train, and paired differences."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from toolkit.errors import UserError
from toolkit.format import counted_cells, metric_cells, rank_cells, reduction_cells, staleness_cells
from toolkit.metric import ACCURACY, Metric

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.cost import MemoryCurve
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.runtime.meters.predicted_vs_measured import MeasuredRow
    from toolkit.schedule.paper_table import Row

Curves = dict[str, list[list[float]]]


def train_rules(
    config: DictConfig,
    seeds: Iterable[int] | None = None,
    on_epoch: Any = lambda what, share: None,
) -> "pd.DataFrame":
    """Train under each rule with each seed: a row an epoch, accuracies in per cent.

    Schedules that share a name are told apart by their rules. Where a loss has diverged, the rest
    of the run is epochs of NaN.

    Args:
        config: of ``compare``.
        seeds: of weights and batches, the same for every rule; those of ``config`` unless given.
        on_epoch: called with what is under way, and the share of it that is done.

    Raises:
        ValueError: the options are those of another experiment, or there are no seeds.
    """
    import pandas as pd

    from toolkit.cli import build_schedule
    from toolkit.results.comparison_folder import run_options, seeds_of
    from toolkit.results.reader import numbers_of, per_cent
    from toolkit.schedule import labels
    from toolkit.training import prepare
    from toolkit.training.data import load

    if "rules" not in config:
        raise UserError('rules are those of compare: give settings("compare", ...)')
    if seeds is None:
        seeds = seeds_of(config)
    if not isinstance(seeds, Iterable) or not (seeds := [*seeds]):
        raise UserError(f"seeds are whole numbers, one or more, such as [0, 1]: got {seeds!r}")
    images = load(config.data)
    called = labels({name: build_schedule(rule).name for name, rule in config.rules.items()})
    runs = [(seed, name) for seed in seeds for name in config.rules]
    rows: list[dict[str, Any]] = []
    for k, (seed, name) in enumerate(runs):
        on_epoch(f"{called[name]}, seed {seed}", k / len(runs))
        own = OmegaConf.create(run_options(config, name, seed))
        for epoch in prepare(own, images).run_to_end():
            numbers = per_cent(numbers_of(asdict(epoch))) | {"epoch": epoch.epoch}
            rows.append({"schedule": called[name], "seed": seed} | numbers)
    on_epoch(f"{len(runs)} runs", 1.0)
    return pd.DataFrame(rows)


def by_epoch(epochs: "pd.DataFrame", measure: Metric = ACCURACY, last: bool = False) -> Curves:
    """How good the models were after each epoch: by rule, a list a run, as figures take them.

    Accuracies are shares, losses in nats. Runs that are known not to have finished are left out,
    but for those whose loss diverged: theirs are NaN from there on.

    Args:
        epochs: a row an epoch, as of :func:`train_rules` or ``learning_curves``.
        measure: by which models are judged; language models by ``LOSS``.
        last: of each run the last epoch only.

    Raises:
        ValueError: several runs of a rule have one seed, or they tell nothing of the measure.
    """
    return {
        rule: [
            [value / measure.factor for value in (run[-1:] if last else run)]
            for run in by_seed.values()
        ]
        for rule, by_seed in _values(epochs, measure).items()
    }


def own_curves(kept: "pd.DataFrame", own: "pd.DataFrame", measure: Metric = ACCURACY) -> Curves:
    """Kept and own runs of the rules that both have, over as many epochs as all of them.

    Raises:
        ValueError: there is no such rule, or several runs of a rule have one seed.
    """
    theirs, mine = by_epoch(kept, measure), by_epoch(own, measure)
    shared = [rule for rule in theirs if rule in mine]
    if not shared:
        raise UserError(
            f"kept and own runs share no rule: {_listed(theirs)} were kept, and there are"
            f" {_listed(mine)}; train one of those that were kept"
        )
    curves = {
        f"{rule}, {whose}": found[rule]
        for whose, found in (("kept", theirs), ("own", mine))
        for rule in shared
    }
    n_epochs = min(len(run) for runs in curves.values() for run in runs)
    return {label: [run[:n_epochs] for run in runs] for label, runs in curves.items()}


def differences(
    epochs: "pd.DataFrame", baseline: str = "DP", measure: Metric = ACCURACY
) -> "pd.DataFrame":
    """The measure after the last epoch, and its difference from ``baseline``, paired by seed.

    Differences are in points or, of losses, in nats, with Student's 95 % interval. Runs that are
    known not to have finished, or whose loss has diverged, are left out.

    Raises:
        ValueError: there are no runs of the baseline, or a rule has none of its seeds; several
            runs of a rule have one seed; or some runs have fewer epochs than others.
    """
    import pandas as pd

    from toolkit.results import over_seeds

    found = _values(epochs, measure)
    if baseline not in found:
        raise UserError(
            f"there are no runs of {baseline!r} that have finished: there are {_listed(found)}"
        )
    _check_lengths(found)
    base = {seed: run[-1] for seed, run in found[baseline].items()}
    rows = {}
    for rule, by_seed in found.items():
        mine = {seed: run[-1] for seed, run in by_seed.items() if seed in base}
        if not mine:
            raise UserError(
                f"{rule} has no run with a seed of {baseline}: it has {_listed(by_seed)}, and"
                f" {baseline} {_listed(base)}; train both with the same seeds"
            )
        comes_to = over_seeds(mine, base, measure)
        *_, difference, width = comes_to.values()
        rows[rule] = {
            "runs": sum(not isnan(value) for value in mine.values()),
            **metric_cells(comes_to, measure, baseline),
            "says": _says(difference - width, difference + width) if rule != baseline else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def delay_study(folder: Path | str, measure: Metric = ACCURACY) -> "pd.DataFrame":
    """A comparison of delays, as its result tells.

    Differences are from its first rule, paired by seed, with a 95 % interval; cosines are between
    delayed and fresh gradients, the smallest of all stages.

    Raises:
        ValueError: there is no result of a comparison in ``folder``.
    """
    import pandas as pd

    from toolkit.schedule import labels

    result = _comparison(Path(folder), measure)
    called = labels({row["rule"]: row["schedule"] for row in result["metrics"]})
    baseline = called[result["metrics"][0]["rule"]]
    rows = {}
    for row in result["metrics"]:
        looks = [look for look in result.get("delays", ()) if look["rule"] == row["rule"]]
        cosines = [look["cosine"] for look in looks if look["cosine"] is not None]
        rows[called[row["rule"]]] = {
            **staleness_cells(row),
            "least cosine": f"{min(cosines):.2f}" if cosines else "",
            **metric_cells(row, measure, baseline),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _comparison(folder: Path, measure: Metric) -> dict[str, Any]:
    """The result that a comparison has written, judged by ``measure``."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        result = {}
    if not all(
        {"rule", "schedule", *measure.columns} <= {*row} for row in result.get("metrics", [{}])
    ):
        raise UserError(
            f"{folder} has no result of a comparison that tells its {measure.name}: give the output"
            " folder of one that has ended, as of experiments/compare.py study=delays"
        )
    return result


def _values(epochs: "pd.DataFrame", measure: Metric) -> dict[str, dict[int, list[float]]]:
    """By rule and seed, the measure after each epoch of the runs that have finished or diverged.

    Raises:
        ValueError: several runs of a rule have one seed, or they tell nothing of the measure.
    """
    if measure.key not in epochs:
        raise UserError(f"these runs have no test {measure.name}: their table lacks {measure.key}")
    if "state" in epochs:
        epochs = epochs[(epochs["state"] == "finished") | _diverged(epochs)]
    if {"folder", "rule"} <= {*epochs}:
        epochs = epochs.assign(schedule=_told_apart(epochs))
    found: dict[str, dict[int, list[float]]] = {}
    for (rule, seed), run in epochs.groupby(["schedule", "seed"], sort=False):
        if run["epoch"].duplicated().any():
            raise UserError(_ambiguous(str(rule), int(seed), run))
        values = run.sort_values("epoch")[measure.key].tolist()
        found.setdefault(str(rule), {})[int(seed)] = values
    return found


def _diverged(epochs: "pd.DataFrame") -> "pd.Series":
    """Of each row, whether the loss of its run diverged."""
    run = [column for column in ("folder", "rule", "schedule", "seed") if column in epochs]
    lost = epochs.get("train_loss", epochs["epoch"]).isna()
    return lost.groupby([epochs[column] for column in run], dropna=False).transform("any")


def _told_apart(epochs: "pd.DataFrame") -> list[str]:
    """What the schedule of each row is called beside the others of its folder."""
    from toolkit.schedule import labels

    rows = [*zip(*(epochs[name] for name in ("folder", "rule", "schedule")), strict=True)]
    by_folder: dict[str, dict[str, str]] = {}
    for folder, rule, name in rows:
        by_folder.setdefault(folder, {})[rule] = name
    called = {folder: labels(names) for folder, names in by_folder.items()}
    return [called[folder][rule] for folder, rule, _ in rows]


def _ambiguous(rule: str, seed: int, run: "pd.DataFrame") -> str:
    several = f"there are several runs of {rule} with seed {seed}"
    if "folder" not in run:
        return f"{several}: train each seed once"
    of_folders = run.groupby("folder").nunique()
    for name in of_folders.columns:
        tells = run[name].nunique() == len(of_folders) and (of_folders[name] == 1).all()
        if tells and name not in ("epoch", "message"):
            return f'{several}, by {name}: choose one, as by epochs[epochs["{name}"] == VALUE]'
    return (
        f"{several}, in {_listed(run['folder'].unique())}: leave one of them in the table, as by"
        ' epochs[epochs["folder"] != FOLDER]'
    )


def _check_lengths(found: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """Refuse runs of which some have fewer epochs than others."""
    lengths = {rule: sorted({len(run) for run in runs.values()}) for rule, runs in found.items()}
    least = min(map(min, lengths.values()))
    if least < max(map(max, lengths.values())):
        told = (f"{rule} has {' or '.join(map(str, n))}" for rule, n in lengths.items())
        raise UserError(
            f"runs differ in their epochs: {_listed(told)}; keep those that all have, by"
            f' epochs[epochs["epoch"] < {least}]'
        )


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"


def _says(low: float, high: float) -> str:
    """What an interval says of a difference."""
    if isnan(low):
        return "no spread: nothing"
    if high < 0:
        return "lower"
    return "higher" if low > 0 else "no difference shown"


def memory_saved(curves: "Mapping[str, MemoryCurve]", workers: Sequence[int]) -> "pd.DataFrame":
    """How far the peak of shifted workers is below that of workers together, by curve.

    The last column is the largest reduction, 1 - mean/peak, which no number of workers exceeds.
    """
    import pandas as pd

    rows = {
        name: reduction_cells({n: curve.reduction(n) for n in workers}, curve.largest_reduction)
        for name, curve in curves.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def counted_and_measured(
    rows: "Sequence[Row]", measured: "Sequence[MeasuredRow]" = ()
) -> "pd.DataFrame":
    """The paper's settings as counted from programs; and whether processes measured the same.

    A: activations of one micro-batch over the whole model. P: the model's parameters.

    Args:
        rows: of :func:`toolkit.schedule.paper_table.compare`.
        measured: of as many workers, in the same order.

    Raises:
        ValueError: what was measured is not what was counted.
    """
    import pandas as pd

    ran = [row.measurements.schedule for row in measured]
    if measured and ran != [row.schedule for row in rows]:
        raise UserError(
            "what was measured ran other schedules than were counted: count as many workers as"
            " were measured, compare(n)"
        )
    found = []
    for k, row in enumerate(rows):
        counted = asdict(row.counted)
        found.append(counted_cells({"setting": row.setting, "rule": row.rule} | counted))
        if measured:
            differences = measured[k].differences
            found[-1]["measured"] = ", ".join(differences) + " differ" if differences else "equal"
    return pd.DataFrame(found).set_index(["setting", "rule"])


def by_rank(found: "Measurements") -> "pd.DataFrame":
    """What each rank held at most, and sent and received in the steps that were recorded."""
    import pandas as pd

    return pd.DataFrame([rank_cells(row) for row in found.by_rank()]).set_index("rank")
