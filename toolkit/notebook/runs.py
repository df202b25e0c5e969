"""Runs of the user's own beside kept ones: accuracy and paired differences."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    import pandas as pd

Curves = dict[str, list[list[float]]]


def train_rules(
    config: DictConfig, seeds: Iterable[int], on_epoch: Any = lambda what, share: None
) -> "pd.DataFrame":
    """Train under each rule with each seed: a row an epoch, accuracies in per cent.

    Args:
        config: of ``compare``.
        seeds: of weights and batches; the same for every rule.
        on_epoch: called with what is under way, and the share of it that is done.
    """
    import pandas as pd
    from hydra.utils import instantiate

    from toolkit.training import prepare

    images = instantiate(config.data)
    runs = [(seed, rule) for seed in seeds for rule in config.rules.values()]
    rows: list[dict[str, Any]] = []
    for k, (seed, rule) in enumerate(runs):
        job = prepare(OmegaConf.create({**config, "schedule": rule, "seed": seed}), images)
        on_epoch(f"{job.schedule.name}, seed {seed}", k / len(runs))
        for epoch in job.run():
            top = {"top1": 100 * epoch.top1, "top5": 100 * epoch.top5}
            rows.append({"schedule": job.schedule.name, "seed": seed} | asdict(epoch) | top)
    on_epoch(f"{len(runs)} runs", 1.0)
    return pd.DataFrame(rows)


def top1_by_epoch(epochs: "pd.DataFrame", last: bool = False) -> Curves:
    """Shares of test images that are right after each epoch: by rule, a list a run.

    Args:
        epochs: a row an epoch, as of :func:`train_rules` or ``learning_curves``.
        last: of each run the last epoch only.
    """
    by_rule: Curves = {}
    for (rule, _), run in epochs.groupby(["schedule", "seed"], sort=False):
        values = (run.sort_values("epoch")["top1"] / 100).tolist()
        by_rule.setdefault(str(rule), []).append(values[-1:] if last else values)
    return by_rule


def own_curves(kept: "pd.DataFrame", own: "pd.DataFrame") -> Curves:
    """Kept and own runs of the rules that both have, over as many epochs as both."""
    n_epochs = int(min(kept["epoch"].max(), own["epoch"].max())) + 1
    curves: Curves = {}
    for whose, epochs in (("kept", kept), ("own", own)):
        for rule, runs in top1_by_epoch(epochs).items():
            if rule in set(own["schedule"]) & set(kept["schedule"]):
                curves[f"{rule}, {whose}"] = [run[:n_epochs] for run in runs]
    return curves


def differences(epochs: "pd.DataFrame", baseline: str = "DP") -> "pd.DataFrame":
    """Accuracy after the last epoch, and its difference from ``baseline``, paired by seed.

    Differences are in points, with Student's 95 % interval.

    Raises:
        ValueError: there are no runs of the baseline.
    """
    import pandas as pd

    from toolkit.tracking import paired_difference, plus_minus, spread

    found = _last(epochs)
    if baseline not in found:
        raise ValueError(f"there are no runs of {baseline!r}: there are {', '.join(found)}")
    rows = {}
    for rule, by_seed in found.items():
        seeds = [seed for seed in by_seed if seed in found[baseline]]
        mine, base = ([of[seed] for seed in seeds] for of in (by_seed, found[baseline]))
        difference = paired_difference(mine, base)
        low, high = difference.interval
        rows[rule] = {
            "runs": len(seeds),
            "test accuracy (%)": plus_minus(sum(mine) / len(mine), spread(mine)),
            f"minus {baseline} (points)": plus_minus(difference.mean, difference.half_width, "+"),
            "says": _says(low, high) if rule != baseline else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def delay_study(folder: Path) -> "pd.DataFrame":
    """A comparison of delays, as its result tells.

    Differences are from its first rule, in points, paired by seed, with a 95 % interval; cosines
    are between delayed and fresh gradients, the smallest of all stages.
    """
    import pandas as pd

    from toolkit.schedule import labels
    from toolkit.tracking import plus_minus

    result = json.loads((folder / "result.json").read_text())
    called = labels({row["rule"]: row["schedule"] for row in result["metrics"]})
    rows = {}
    for row in result["metrics"]:
        looks = [look for look in result["delays"] if look["rule"] == row["rule"]]
        cosines = [look["cosine"] for look in looks if look["cosine"] is not None]
        rows[called[row["rule"]]] = {
            "mean staleness (largest)": f"{row['staleness_mean']:.2f} ({row['staleness_max']})",
            "least cosine": f"{min(cosines):.2f}" if cosines else "",
            "test accuracy (%)": plus_minus(row["accuracy"], row["accuracy_sd"]),
            "minus DP (points)": plus_minus(row["difference"], row["difference_95"], "+"),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _last(epochs: "pd.DataFrame") -> dict[str, dict[int, float]]:
    """By rule and seed, the accuracy after the last epoch."""
    found: dict[str, dict[int, float]] = {}
    for (rule, seed), run in epochs.groupby(["schedule", "seed"], sort=False):
        found.setdefault(str(rule), {})[int(seed)] = run.sort_values("epoch")["top1"].iloc[-1]
    return found


def _says(low: float, high: float) -> str:
    if low != low:
        return "one run: nothing"
    if high < 0:
        return "lower"
    return "higher" if low > 0 else "no difference shown"
