"""Which schedule for a model, on given machines, within limits: all of them are simulated."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.cost import Costs, Hardware, recomputing
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, first_line, whole
from toolkit.format import count, duration, plan_cells, size, table
from toolkit.model import InputSpec
from toolkit.model.analysis import meta_copy
from toolkit.model.partition import MEASURES
from toolkit.plan.candidates import LARGEST, Candidate, candidates, data_options
from toolkit.plan.findings import Pilot
from toolkit.plan.pilot import Model, pilot
from toolkit.plan.predictions import Limits, Machines, Prediction, front, stage_costs
from toolkit.plan.search import Found, search
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.choice import choice_of, options_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OnProgress = Callable[[str, float], object]
"""Called with the present activity, and the share of it that is done."""
NEAR = 0.03
"""Share of a step, or of memory, that makes no difference to the verdict."""
WITHIN = 0.1
"""Share of a step's time that a step of staleness is worth."""
_SETTLED = 2  # schedules whose affordable delay is searched for
_SEARCHED = 64  # their stages times micro-batches, at most: seconds
_SLOW = 3.0  # times the fastest that a schedule may take for other cuts of it to be tried
_LONG = 24  # steady training steps that confirm a prediction: contended links beat


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
            f" schedules {_SLOW:g} times as slow as the fastest.{more}"
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
    well. Schedules with late weights that are fast also get the freshest delay that takes at most a
    share :data:`WITHIN` more time.

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
    tried = _possible(costs_of, sorted(set(sizes), reverse=True), batch)
    plainest = tried[0]
    sweep = _Sweep(machines, costs_of, jobs or os.cpu_count() or 1, on_progress)
    sweep.simulate("simulating schedules", [c for c in tried if c.is_plain], plainest)
    slowest = _SLOW * min(p.seconds for p in sweep.done.values())
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


CostsOf = Callable[[Candidate], Costs | UserError]


def _possible(costs_of: CostsOf, ranks: Sequence[int], batch: int) -> list[Candidate]:
    """Return the candidates; workers have fewer stages if the model cannot be cut into so many."""
    stages = LARGEST
    while True:
        tried = [candidate for n in ranks for candidate in candidates(n, batch, stages)]
        costs = costs_of(tried[0])
        if not isinstance(costs, UserError):
            return tried
        if tried[0].choice.stages == 1:
            raise costs
        stages = tried[0].choice.stages // 2


class _Sweep:
    """Predictions so far, and processes that make more."""

    def __init__(
        self,
        machines: Machines,
        costs_of: CostsOf,
        jobs: int,
        on_progress: OnProgress,
    ) -> None:
        from joblib import Parallel

        self.machines, self.costs_of, self.on_progress = machines, costs_of, on_progress
        self.pool = Parallel(jobs, return_as="generator")
        self.costs: dict[tuple[int, int, str], Costs] = {}
        self.left_out: dict[int, str] = {}  # by number of stages
        self.done: dict[Candidate, Prediction] = {}

    def simulate(self, what: str, tried: Sequence[Candidate], always: Candidate) -> None:
        """Predict candidates, but for those that a prediction dominates whatever they take."""
        new = {_key(c): c for c in tried if _key(c) not in self.costs}
        tasks = [(c,) for c in new.values()]
        found = self._each("analysing stages", self.costs_of, tasks, len(tasks))
        for (key, candidate), costs in zip(new.items(), found, strict=True):
            if isinstance(costs, UserError):
                self.left_out[candidate.choice.stages] = first_line(costs)
            else:
                self.costs[key] = costs
        possible = [c for c in tried if _key(c) in self.costs]
        groups = [[*group] for _, group in groupby(possible, key=attrgetter("choice"))]

        def unbeaten() -> Iterator[tuple[list[Candidate], list[Costs]]]:
            for group in groups:
                chosen = [c for c in group if c == always or not self._beaten(c)]
                if chosen:
                    yield chosen, [*map(self._costs, chosen)]

        for predictions in self._each(what, self.machines.predict, unbeaten(), len(groups)):
            self._add(predictions)

    def settle(self) -> None:
        """Search for the affordable delay of fast schedules with late weights."""
        late = worth_settling([*self.done.values()])
        tasks = [(c, self._costs(c), WITHIN) for c in late]
        what = "searching for affordable delays"
        self._add(self._each(what, self.machines.settle, tasks, len(tasks)))

    def search(self, seconds: float) -> Found | None:
        """Search for rank orders on the stages of the fastest pipeline; None without pipelines."""
        fresh = [p for c, p in self.done.items() if METHODS[c.choice.schedule].kind == "pipeline"]
        if not (fresh := [p for p in fresh if not p.staleness]):
            return None
        plain = min(fresh, key=lambda p: (not p.fits, p.seconds)).candidate
        machines, costs = self.machines, self._costs(plain)
        limits = [machines.memory_of(rank) for rank in range(plain.schedule.n_ranks)]
        begin = time.monotonic()
        found = search(
            costs, plain.schedule.n_microbatches, ranks=plain.schedule.n_ranks,
            hardware=machines.hardware, memory=limits, seconds=seconds,
            optimizer_bytes=machines.optimizer_bytes(costs),
            progress=lambda what, took, bound: self.on_progress(
                f"searching for rank orders ({_time(took)})",
                min(1.0, (time.monotonic() - begin) / seconds),
            ),
        )  # fmt: skip
        orders = choice_of(replace(found.schedule, name="rank orders"))
        mine = replace(plain, choice=orders)
        self._add(machines.predict([mine], [costs]))
        return found

    def confirmed(self, baseline: Prediction) -> Prediction | None:
        """Simulate the best schedules with late weights for longer; return the choice of them."""
        known: set[Candidate] = set()
        while True:
            best = choose([*self.done.values()], baseline)
            shown = [*front(self.done.values()), *[best] * bool(best)]
            new = {p.candidate for p in shown if p and p.staleness} - known
            if not new:
                return best
            known |= new
            tasks = [([c], [self._costs(c)], _LONG) for c in new]
            for predictions in self._each(
                "confirming the best", self.machines.predict, tasks, len(tasks)
            ):
                self._add(predictions)

    def _beaten(self, candidate: Candidate) -> bool:
        bound = self.machines.bound(candidate, self._costs(candidate))
        return not bound.fits or any(p.fits and p.dominates(bound) for p in self.done.values())

    def _costs(self, candidate: Candidate) -> Costs:
        return recomputing(self.costs[_key(candidate)], candidate.checkpoint)

    def _add(self, predictions: Iterable[Prediction]) -> None:
        self.done |= {prediction.candidate: prediction for prediction in predictions}

    def _each(
        self, what: str, call: Callable[..., Any], tasks: Iterable[tuple], n: int
    ) -> Iterator[Any]:
        """Yield the results of ``call`` on each of at most ``n`` tuples of arguments, in order."""
        from joblib import delayed

        self.on_progress(what, 0.0)
        for k, result in enumerate(self.pool(delayed(call)(*task) for task in tasks)):
            yield result
            self.on_progress(what, (k + 1) / n)


def choose(found: Sequence[Prediction], baseline: Prediction) -> Prediction | None:
    """Return the best of some predictions; data parallelism if it is nearly as good.

    A step of staleness counts as much as a share :data:`WITHIN` of the step time. Of those that are
    nearly equal by that, the one with the least memory, without recomputation if possible.

    Args:
        found: predictions; those within the limits count.
        baseline: data parallelism.
    """
    found = [p for p in found if p.fits]

    def cost(p: Prediction) -> float:
        return p.seconds * (1 + WITHIN * p.staleness)

    if not found:
        return None
    limit = (1 + NEAR) * min(map(cost, found))
    if baseline.fits and cost(baseline) <= limit:
        return baseline
    near = [p for p in found if cost(p) <= limit]
    return min(near, key=lambda p: (p.candidate.checkpoint != "none", p.memory, p.staleness))


def worth_settling(done: Sequence[Prediction]) -> list[Candidate]:
    """Return the fastest candidates with late weights that nothing fresher comes near."""
    late = [
        p
        for p in done
        if p.fits
        and p.schedule.n_stages * p.schedule.n_microbatches <= _SEARCHED
        and options_of(p.candidate.choice.schedule).get("delay") == 1
        and not any(
            q.fits and q.staleness < p.staleness and q.seconds <= (1 + WITHIN) * p.seconds
            for q in done
        )
    ]
    return [p.candidate for p in sorted(late, key=attrgetter("seconds"))[:_SETTLED]]


def _key(candidate: Candidate) -> tuple[int, int, str]:
    """What the costs of a candidate's stages depend on."""
    return candidate.schedule.n_stages, candidate.batch, candidate.partition


def _time(seconds: float) -> str:
    return " ".join(duration(seconds))
