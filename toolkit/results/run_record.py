"""One run, as read from its folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

from toolkit.metric import ACCURACY, Metric
from toolkit.results.record import DamagedError, Numbers

STATES = ("finished", "running", "stopped", "failed", "unfinished", "damaged")
_DIVERGED = re.compile(r"(training|test) loss of epoch \d+")  # in the message of a failed run


@dataclass(frozen=True)
class Run:
    """One training, or another result, as read from its folder.

    Attributes:
        folder: where it is; several runs of a comparison share it.
        kind: the experiment, such as train or compare.
        state: one of :data:`STATES`.
        message: reason why it is unfinished, or a caution; empty otherwise.
        rule: name of its schedule in the configuration.
        schedule: the schedule's own name.
        seed: of weights and data.
        config: its options; of a run of a comparison, those of that training.
        judged_by: the metric of its model.
        metrics: of the last epoch; accuracies in per cent.
        epochs: the metrics of every epoch.
        delays: delay diagnostics, a row per stage.
        ranks: measurements, a row per rank.
        notes: sentences on what went wrong; of a comparison, in all of its runs.
        repeats: number of runs that ``metrics`` is the mean of, if no single run was kept.
        provenance: command, commit, versions, device, started, seconds.
    """

    folder: Path
    kind: str
    state: str
    message: str = ""
    rule: str | None = None
    schedule: str | None = None
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    judged_by: Metric = ACCURACY
    metrics: Numbers = field(default_factory=dict)
    epochs: Sequence[Numbers] = ()
    delays: Sequence[Numbers] = ()
    ranks: Sequence[Numbers] = ()
    notes: Sequence[str] = ()
    repeats: int = 1
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether the experiment trains a model."""
        return self.kind in ("train", "compare")

    @property
    def diverged(self) -> bool:
        """Whether its loss diverged, which ended it."""
        lost = any(isnan(epoch.get("train_loss", 0.0)) for epoch in self.epochs)
        return lost or _DIVERGED.search(self.message) is not None

    @property
    def counts(self) -> bool:
        """Whether it has a final accuracy and a known schedule."""
        known = isinstance(self.config.get("schedule"), dict)
        accurate = isfinite(self.metrics.get("top1", nan))
        return self.trains and self.state == "finished" and known and accurate


def seed_of(config: Mapping[str, Any]) -> int | None:
    """Return the seed of a run, if it has one.

    Raises:
        DamagedError: it is not a whole number below 2^63, which is the largest in a table.
    """
    seed = config.get("seed")
    if seed is not None and (not isinstance(seed, int) or abs(seed) >= 2**63):
        raise DamagedError(f"seed is not a whole number below 2^63: got {str(seed)[:20]}")
    return seed
