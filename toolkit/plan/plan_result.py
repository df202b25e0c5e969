"""The result of a plan: predictions of all candidates, the verdict, and how they are shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from toolkit.cost import Hardware
from toolkit.cost.worker_forms import NEGLIGIBLE
from toolkit.errors import UserError
from toolkit.format import count, duration, size
from toolkit.plan.candidate_sweep import NEAR_FACTOR
from toolkit.plan.candidates import placeholder_note
from toolkit.plan.choice import reason_to_stay
from toolkit.plan.findings import Pilot
from toolkit.plan.measure import OnProgress
from toolkit.plan.model_cut import Model
from toolkit.plan.pilot import DEFAULT_OPTIONS, PilotOptions, pilot
from toolkit.plan.plan_table import (
    accuracy_notes,
    legend,
    plan_cells,
    terminal_table,
)
from toolkit.plan.predictions import Limits, Prediction
from toolkit.plan.search_space import SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plan:
    """Predictions of all candidates, and the best of them.

    Attributes:
        predictions: of every candidate that was simulated.
        front: those within the limits that no other dominates, the fastest first.
        baseline: torch's DistributedDataParallel with a worker for each of the most ranks.
        ddp_alike: DistributedDataParallel on the ranks of the best, with as many micro-batches and
            the same recomputation, to compare memory with; None if it has no such form.
        best: the verdict; None if nothing keeps the limits.
        coarser: what is faster with coarser messages: the best of each class of accuracy.
        limits: of each candidate.
        hardware: the machines.
        command_options: options of a command line that describe the model, its samples and the
            machines.
        n_candidates: how many were looked at.
        searched: the result of a search for rank orders.
        left_out: why a model could not be cut, by the number of stages.
    """

    predictions: tuple[Prediction, ...] = field(repr=False)
    front: tuple[Prediction, ...] = field(repr=False)
    baseline: Prediction
    best: Prediction | None
    limits: Limits
    hardware: Hardware
    command_options: str
    n_candidates: int
    left_out: Mapping[int, str] = field(default_factory=dict)
    searched: SearchResult | None = None
    ddp_alike: Prediction | None = None
    coarser: tuple[Prediction, ...] = ()

    @property
    def verdict(self) -> str:
        """The best candidate compared with data parallelism, and a command to try it, as lines."""
        baseline = self.baseline
        best_prediction = self.best
        baseline_name = f"DDP on {count(baseline.ranks, 'rank')}"
        baseline_cost = f"{_time(baseline.seconds)} a step, {size(baseline.memory)}"
        if best_prediction is None:
            least_memory = min(self.predictions, key=attrgetter("memory"))
            return (
                f"Nothing keeps the limits: {baseline_name} takes {baseline_cost}; the least memory"
                f" is {size(least_memory.memory)}, of {least_memory.candidate.label}.\n"
                "Raise the limits, or lower the batch."
            )
        try_command = f"try it by: {self.command(best_prediction)}"
        note = placeholder_note(try_command)
        if note:
            try_command += f"\n{note}"
        if best_prediction == baseline:
            return (
                f"Stay with {baseline_name} ({baseline_cost}):"
                f" {reason_to_stay(self.predictions, baseline)}.\n{try_command}"
            )

        baseline_failure = ""
        if not baseline.fits:
            baseline_failure = (
                f", which takes {baseline_cost} and does not keep the limits"
            )
        # Memory is compared with DDP of the same micro-batches and recomputation: these alone
        # change it, and are no merit of the schedule.
        memory_words = f"{size(best_prediction.memory)} on the fullest rank"
        if self.ddp_alike is not None:
            memory_share = best_prediction.memory / self.ddp_alike.memory
            memory_words = f"{memory_share:.2f} of its memory"
            if abs(memory_share - 1) < NEGLIGIBLE:
                memory_words = "the same memory"
            if self.ddp_alike != baseline:
                memory_words += " with the same accumulation and recomputation"
        staleness_words = "no weight late"
        if best_prediction.staleness:
            staleness_words = (
                f"weights {best_prediction.staleness:.2f} steps late on average"
            )
        return (
            f"{best_prediction.candidate.label} on {count(best_prediction.ranks, 'rank')}:"
            f" {best_prediction.seconds / baseline.seconds:.2f} of the step time of"
            f" {baseline_name}{baseline_failure}; {memory_words}, {staleness_words}.\n{try_command}"
        )

    def command(self, prediction: Prediction) -> str:
        """Return a command line that trains by the schedule of a prediction."""
        return prediction.candidate.command(self.command_options)

    def pilot(
        self,
        model: Model,
        samples: Any,
        *,
        options: PilotOptions = DEFAULT_OPTIONS,
        on_progress: OnProgress = lambda activity, share: None,
    ) -> Pilot:
        """Measure data parallelism and the best candidate on this machine.

        Where the best is data parallelism, or a pipeline whose ranks have several stages, CDP-v1
        and CDP-v2 are measured in its place.

        Args:
            model: as for :func:`toolkit.plan.pilot`.
            samples: as for :func:`toolkit.plan.pilot`.
            options: as for :func:`toolkit.plan.pilot`. Batch, placement and hardware are replaced
                by those of the plan.
            on_progress: called with the name of the activity and its completed share.

        Raises:
            UserError: ranks of the best have several devices.
        """
        best_prediction = self.best or self.baseline
        candidate = best_prediction.candidate
        if candidate.width > 1:
            raise UserError(
                f"a pilot measures ranks of one device: got a plan whose best has {candidate.width}"
                " a rank. Plan with widths=[1]"
            )
        schedule = candidate.schedule
        spec = candidate.spec
        is_pipeline = spec.family == "pipeline"
        has_stage_per_rank = schedule.n_stages == best_prediction.ranks
        # A pilot says what fits in the memory of the hardware, so the plan's limit goes there.
        options = replace(options, hardware=self._hardware_within_limits())
        measure = partial(
            pilot,
            model,
            samples,
            command_options=self.command_options,
            on_progress=on_progress,
        )
        # The best is measured itself if it has late weights, or if it is a pipeline of the
        # catalogue with a stage for each rank.
        if best_prediction.staleness or (
            is_pipeline and has_stage_per_rank and not spec.orders
        ):
            return measure(options=options, candidate=candidate)

        # Otherwise the cyclic methods of its sizes are measured. One micro-batch leaves them
        # nothing to stagger.
        n_workers = max(2, spec.microbatches)
        placement = schedule.layout.name
        if is_pipeline:
            n_workers = best_prediction.ranks
            placement = "per_stage"
        batch = max(1, candidate.batch * schedule.n_microbatches // n_workers)
        return measure(
            n_workers, options=replace(options, batch=batch, placement=placement)
        )

    def _hardware_within_limits(self) -> Hardware:
        """Return the machines with no more memory than the limit."""
        limit = self.limits.memory
        return replace(
            self.hardware,
            memory=min(limit, self.hardware.memory),
            memories=[min(limit, memory) for memory in self.hardware.memories],
        )

    def _listed(self) -> list[Prediction]:
        """Return the front, the best and data parallelism, the fastest first."""
        named = {*self.coarser, self.baseline, *([self.best] if self.best else [])}
        return sorted(
            [*self.front, *(named - {*self.front})], key=attrgetter("seconds")
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the front, the best and data parallelism as plain values, the fastest first."""
        return [self.row(prediction) for prediction in self._listed()]

    def row(self, prediction: Prediction) -> dict[str, Any]:
        """Return a prediction as plain values."""
        fields = {
            name: value
            for name, value in vars(prediction).items()
            if name != "candidate"
        }
        return {
            "schedule": prediction.candidate.label,
            "ratio": prediction.seconds / self.baseline.seconds,
            **fields,
            "width": prediction.candidate.width,
            "devices": prediction.devices,
            "compression": prediction.candidate.compression,
            "accuracy": prediction.accuracy,
            "options": prediction.candidate.options(),
        }

    def figure(self) -> "Figure":
        """Draw step times and memory of all predictions, and the front."""
        from toolkit.figures import plan_figure

        other_predictions = [
            vars(prediction)
            for prediction in self.predictions
            if prediction not in self.front
        ]
        memory_limit = min(self.limits.memory, self.hardware.memory)
        return plan_figure(
            self.rows(), other_predictions, vars(self.baseline), memory_limit
        )

    def __str__(self) -> str:
        listed = self._listed()
        lines = terminal_table(listed, self.baseline)
        notes = accuracy_notes(listed, self.baseline)
        columns = legend(listed)
        return f"{self.verdict}\n\n{lines}\n\n{columns}\n\n{self.origin}{notes}"

    @property
    def origin(self) -> str:
        """How many candidates were looked at and simulated, and what was left out."""
        notes = "".join(
            f"\n{n_stages} stages left out: {reason}"
            for n_stages, reason in self.left_out.items()
        )
        if self.searched is not None:
            optimality = f"at least {_time(self.searched.bound)}"
            if self.searched.proven:
                optimality = "which is the least"
            seconds = _time(self.searched.seconds)
            notes += (
                f"\nSearched rank orders take {seconds}, {optimality} on its stages."
            )
        return (
            f"{len(self.predictions)} of {self.n_candidates} candidates simulated. Not simulated:"
            " those that must break a limit, those that cannot beat another one, and other cuts of"
            f" schedules {NEAR_FACTOR:g} times as slow as the fastest.{notes}"
        )

    def _repr_html_(self) -> str:
        from html import escape

        import pandas as pd

        lines = "".join(f"<p>{escape(line)}</p>" for line in self.verdict.splitlines())
        return lines + pd.DataFrame(map(plan_cells, self.rows())).to_html(index=False)


def _time(seconds: float) -> str:
    return " ".join(duration(seconds))
