"""Predictions of all candidates of a plan, in several processes, and the choice among them."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from toolkit.cost import Costs, recomputing
from toolkit.errors import UserError, first_line
from toolkit.format import duration
from toolkit.plan.candidates import LARGEST, Candidate, candidates
from toolkit.plan.measure import OnProgress
from toolkit.plan.predictions import Machines, Prediction, front
from toolkit.plan.search import Found, search
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.choice import choice_of, options_of

NEAR = 0.03
"""Share of a step, or of memory, that makes no difference to the verdict."""
WITHIN = 0.1
"""Share of a step's time that a step of staleness is worth."""
_SETTLED = 2  # schedules whose affordable delay is searched for
_SEARCHED = 64  # their stages times micro-batches, at most: seconds
SLOW = 2.0
"""Times the fastest that a schedule may take for other cuts of it to be tried."""
_LONG = 24  # steady training steps that confirm a prediction: contended links beat


CostsOf = Callable[[Sequence[Candidate]], list[Costs | UserError]]
"""Returns the costs of each candidate's stages, or why it has none."""


class Sweep:
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

    def possible(self, ranks: Sequence[int], batch: int) -> list[Candidate]:
        """Return the candidates; workers have fewer stages if the model cannot have so many."""
        stages = LARGEST
        while True:
            tried = [candidate for n in ranks for candidate in candidates(n, batch, stages)]
            (costs,) = self.costs_of(tried[:1])
            if not isinstance(costs, UserError):
                self.costs[_key(tried[0])] = costs
                return tried
            if tried[0].choice.stages == 1:
                raise costs
            stages = tried[0].choice.stages // 2

    def simulate(self, what: str, tried: Sequence[Candidate], always: Candidate) -> None:
        """Predict candidates, but for those that a prediction dominates whatever they take."""
        new = {_key(c): c for c in tried if _key(c) not in self.costs}
        parts = [[*part] for _, part in groupby(sorted(new, key=_traced), key=_traced)]
        tasks = [([new[key] for key in part],) for part in parts]
        found = self._each("analysing stages", self.costs_of, tasks, len(tasks))
        for part, of_part in zip(parts, found, strict=True):
            for key, costs in zip(part, of_part, strict=True):
                if isinstance(costs, UserError):
                    self.left_out[key[0]] = first_line(costs)
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
                f"searching for rank orders ({' '.join(duration(took))})",
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
        done = [*self.done.values()]  # a pool asks from a thread of its own, while this one adds
        return not bound.fits or any(p.fits and p.dominates(bound) for p in done)

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


def _traced(key: tuple[int, int, str]) -> tuple[int, str]:
    """What is traced together: enough parts for several processes."""
    return key[1], key[2]


def _key(candidate: Candidate) -> tuple[int, int, str]:
    """What the costs of a candidate's stages depend on."""
    return candidate.schedule.n_stages, candidate.batch, candidate.partition
