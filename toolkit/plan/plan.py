"""Which schedule for a model, on given machines, within limits: all of them are simulated."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.cost import Hardware
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, whole
from toolkit.format import count, duration, plan_cells, size, table
from toolkit.model import InputSpec
from toolkit.model.analysis import meta_copy
from toolkit.model.partition import MEASURES
from toolkit.plan.candidates import data_options
from toolkit.plan.findings import Pilot
from toolkit.plan.measure import OnProgress
from toolkit.plan.pilot import Model, pilot
from toolkit.plan.predictions import Limits, Machines, Prediction, front, stage_costs
from toolkit.plan.search import Found
from toolkit.plan.sweep import NEAR, SLOW, Sweep
from toolkit.schedule.catalog import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plan:
    """Predictions of all candidates, and the best of them.

    Attributes:
        predictions: of every candidate that was simulated.
        front: those within the limits that no other dominates, the fastest first.
        baseline: data parallelism with a worker for each of the most ranks.
        best: the verdict; None if nothing keeps the limits.
        limits: of each candidate.
        hardware: the machines.
        given: options of a command line that describe the model, its samples and the machines.
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
    given: str
    n_candidates: int
    left_out: Mapping[int, str] = field(default_factory=dict)
    searched: Found | None = None

    @property
    def verdict(self) -> str:
        """Two lines: the best candidate beside data parallelism, and a command that tries it."""
        base, best = self.baseline, self.best
        ddp = f"DDP on {count(base.ranks, 'rank')}"
        takes = f"{_time(base.seconds)} a step, {size(base.memory)}"
        if best is None:
            least = min(self.predictions, key=attrgetter("memory"))
            return (
                f"Nothing keeps the limits: {ddp} takes {takes}; the least memory is"
                f" {size(least.memory)}, of {least.candidate.label}.\n"
                "Raise the limits, or lower the batch."
            )
        tried = f"try it by: {self.command(best)}"
        if best == base:
            return (
                f"Stay with {ddp} ({takes}): nothing within the limits is more than {NEAR:.0%}"
                f" faster.\n{tried}"
            )
        lacking = "" if base.fits else f", which takes {takes} and does not keep the limits"
        share = best.memory / base.memory
        held = "the same memory" if abs(share - 1) < NEAR else f"{share:.2f} of its memory"
        late = f"weights {best.staleness:.2f} steps late on average"
        return (
            f"{best.candidate.label} on {count(best.ranks, 'rank')}:"
            f" {best.seconds / base.seconds:.2f} of the step time of {ddp}{lacking}; {held},"
            f" {late if best.staleness else 'no weight late'}.\n{tried}"
        )

    def command(self, found: Prediction) -> str:
        """Return a command line that trains by the schedule of a prediction."""
        return found.candidate.command(self.given)

    def pilot(self, model: Model, images: Any, **options: Any) -> Pilot:
        """Measure data parallelism and the best candidate on this machine.

        Where the best is data parallelism, or a pipeline whose ranks have several stages, CDP-v1
        and CDP-v2 are measured in its place.

        Args:
            model: as for :func:`toolkit.plan.pilot`.
            images: as for :func:`toolkit.plan.pilot`.
            options: of :func:`toolkit.plan.pilot`, besides.
        """
        best = self.best or self.baseline
        schedule, choice = best.schedule, best.candidate.choice
        most, own = self.limits.memory, self.hardware
        memories = [min(most, memory) for memory in own.memories]
        options |= {"hardware": replace(own, memory=min(most, own.memory), memories=memories)}
        options |= {"given": self.given}
        pipeline = choice.orders or METHODS[choice.schedule].kind == "pipeline"
        if best.staleness or (pipeline and schedule.n_stages == best.ranks and not choice.orders):
            return pilot(model, images, candidate=best.candidate, **options)
        n = best.ranks if pipeline else max(2, choice.microbatches)
        where = "per_stage" if pipeline else schedule.layout.name
        size = max(1, best.candidate.batch * schedule.n_microbatches // n)
        return pilot(model, images, n, batch=size, placement=where, **options)

    def rows(self) -> list[dict[str, Any]]:
        """Return the front, the best and data parallelism as plain values, the fastest first."""
        more = {p for p in (self.best, self.baseline) if p} - {*self.front}
        return [self.row(p) for p in sorted([*self.front, *more], key=attrgetter("seconds"))]

    def row(self, found: Prediction) -> dict[str, Any]:
        """Return a prediction as plain values."""
        return {
            "schedule": found.candidate.label,
            "ratio": found.seconds / self.baseline.seconds,
            **{name: value for name, value in vars(found).items() if name != "candidate"},
            "options": found.candidate.options(),
        }

    def figure(self) -> "Figure":
        """Draw step times and memory of all predictions, and the front."""
        from toolkit.figures import plan_figure

        others = [vars(p) for p in self.predictions if p not in self.front]
        limit = min(self.limits.memory, self.hardware.memory)
        return plan_figure(self.rows(), others, vars(self.baseline), limit)

    def __str__(self) -> str:
        rows = [{"": k} | plan_cells(row) for k, row in enumerate(self.rows())]
        return f"{self.verdict}\n\n{table(rows)}\n\n{self.origin}"

    @property
    def origin(self) -> str:
        """How many candidates were looked at and simulated, and what was left out."""
        more = "".join(f"\n{n} stages left out: {why}" for n, why in self.left_out.items())
        if found := self.searched:
            least = "which is the least" if found.proven else f"at least {_time(found.bound)}"
            more += f"\nSearched rank orders take {_time(found.seconds)}, {least} on its stages."
        return (
            f"{len(self.predictions)} of {self.n_candidates} candidates simulated. Not simulated:"
            " those that must break a limit, those that cannot beat another one, and other cuts of"
            f" schedules {SLOW:g} times as slow as the fastest.{more}"
        )

    def _repr_html_(self) -> str:
        from html import escape

        import pandas as pd

        lines = "".join(f"<p>{escape(line)}</p>" for line in self.verdict.splitlines())
        return lines + pd.DataFrame(map(plan_cells, self.rows())).to_html(index=False)


def plan(
    model: nn.Module,
    form: InputSpec,
    hardware: Hardware,
    ranks: int | Sequence[int] = 8,
    *,
    batch: int = 256,
    limits: Limits | None = None,
    precision: str = "fp32",
    optimizer_words: float = 1.0,
    given: str = "",
    search_seconds: float = 0.0,
    jobs: int | None = None,
    on_progress: OnProgress = lambda what, share: None,
) -> Plan:
    """Simulate all methods of the catalogue on a model and machines, and choose the best.

    Stages, groups, chains, micro-batches, cuts, and whether activations are computed again vary as
    well. Fast schedules with late weights are also tried with a delay in which no single weight
    could be fresher, in at most a share :data:`WITHIN` more time.

    Args:
        model: any module that :func:`toolkit.model.partition` cuts; on any device.
        form: its samples.
        hardware: seconds of messages, and of kernels by the roofline; limits of memory.
        ranks: numbers of devices to choose from.
        batch: samples of a training step.
        limits: what a candidate may take.
        precision: as for :func:`toolkit.cost.profile`.
        optimizer_words: numbers that an optimizer keeps of each parameter: 1, momentum; 2, Adam's.
        given: options of a command line that describe the model, its samples and the machines.
        search_seconds: for a search of rank orders that the catalogue lacks, on the stages of its
            fastest pipeline: see :func:`toolkit.plan.search`. 0: none.
        jobs: processes; as many as CPUs unless given.
        on_progress: called with the present activity, and the share of it that is done.

    Raises:
        UserError: the model cannot be cut, workers' shares of the batch differ, or an invalid
            number.
    """
    machines = Machines(check_hardware(hardware), limits or Limits(), optimizer_words)
    sizes = [whole(n, "ranks", 1) for n in (ranks if isinstance(ranks, Sequence) else [ranks])]
    if not sizes or any(whole(batch, "batch", 1) % n for n in sizes):
        raise UserError(f"batch={batch} must be a multiple of ranks: got {sizes}; change either")
    costs_of = partial(stage_costs, meta_copy(model), form, precision)
    sweep = Sweep(machines, costs_of, jobs or os.cpu_count() or 1, on_progress)
    tried = sweep.possible(sorted(set(sizes), reverse=True), batch)
    plainest = tried[0]
    sweep.simulate("simulating schedules", [c for c in tried if c.is_plain], plainest)
    slowest = SLOW * min(p.seconds for p in sweep.done.values())
    near = {c.choice for c, p in sweep.done.items() if p.seconds <= slowest}
    more = [c for c in tried if c.choice in near and c not in sweep.done]
    sweep.simulate("simulating cuts and recomputation", more, plainest)
    sweep.settle()
    searched = sweep.search(search_seconds) if search_seconds > 0 else None
    ddp = (replace(plainest, partition=by) for by in MEASURES)
    baseline = min((sweep.done[c] for c in ddp if c in sweep.done), key=attrgetter("seconds"))
    best = sweep.confirmed(baseline)
    given = given or f"model.target=MY_PACKAGE.MY_MODEL {data_options(form)}"
    done, order = (*sweep.done.values(),), (*front(sweep.done.values()),)
    return Plan(
        done, order, baseline, best, machines.limits, hardware, given, len(tried), sweep.left_out,
        searched,
    )  # fmt: skip


def _time(seconds: float) -> str:
    return " ".join(duration(seconds))
