"""A run, as its folder tells."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

from toolkit.metric import ACCURACY, Metric
from toolkit.results.reader import Numbers

STATES = ("finished", "running", "stopped", "failed", "unfinished", "damaged")
_DIVERGED = re.compile(r"(training|test) loss of epoch \d+")  # in what a run has ended with


@dataclass(frozen=True)
class Run:
    """One training, or another result, as its folder tells.

    Attributes:
        folder: where it is; several runs of a comparison share it.
        kind: the experiment, such as train or compare.
        state: one of :data:`STATES`.
        message: why it has not finished, or what is missing; empty if nothing is.
        left_out: whether what is missing keeps it out of figures.
        rule: what the configuration calls its schedule.
        schedule: the schedule's name.
        seed: of weights and data.
        config: its own options, those of a single training also where it is one of a comparison.
        judged_by: what tells how good its model is.
        metrics: of the last epoch; accuracies in per cent.
        epochs: the metrics of every epoch.
        delays: what the delay did to the gradients, a row a stage.
        ranks: what was measured, a row a rank.
        notes: on what did not go as it should; of a comparison, on all of its runs.
        repeats: runs that ``metrics`` is the mean of, where no run has been kept by itself.
        provenance: command, commit, versions, device, started, seconds.
    """

    folder: Path
    kind: str
    state: str
    message: str = ""
    left_out: bool = False
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
        """Whether it is one of the experiments that train a model."""
        return self.kind in ("train", "compare")

    @property
    def diverged(self) -> bool:
        """Whether its loss did, which ended it."""
        lost = any(isnan(epoch.get("train_loss", 0.0)) for epoch in self.epochs)
        return lost or _DIVERGED.search(self.message) is not None

    @property
    def counts(self) -> bool:
        """Whether it has a final accuracy, and tells what of."""
        told = isfinite(self.metrics.get("top1", nan)) and isinstance(
            self.config.get("schedule"), dict
        )
        return self.trains and self.state == "finished" and told and not self.left_out
