"""Predictions of all candidates of a plan, made in several processes.

::

    candidates of the catalogue
        |  analyse their stages; leave out what the model cannot be cut into
        |  leave out those whose lower bound a prediction already dominates
        v
    simulate the others  ->  affordable delays, searched rank orders  ->  confirm the best
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.cost import Costs, recomputing
from toolkit.cost.worker_forms import BUCKETS, STALENESS_PRICE, TIMED_STEPS
from toolkit.errors import UserError, first_line
from toolkit.format import duration
from toolkit.plan.candidates import MAX_OPS, Candidate, of_microbatch
from toolkit.plan.candidates import candidates as candidates_on
from toolkit.plan.choice import best_of_classes, worth_a_fresher_delay
from toolkit.plan.compressed_candidates import costs_of_messages
from toolkit.plan.measure import OnProgress
from toolkit.plan.predictions import Prediction, Predictor, front
from toolkit.plan.search import search
from toolkit.plan.search_space import SearchResult, SearchSpace
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS

NEAR_FACTOR = 2.0
"""Other cuts are tried of schedules that take at most this many times the fastest one's time."""


CostsOf = Callable[[Sequence[Candidate]], list[Costs | UserError]]
"""Returns the costs of each candidate's stages, or the reason why the model cannot be cut so."""


class StagesKey(NamedTuple):
    """What determines the costs of a candidate's stages, before recomputation is added."""

    n_stages: int
    batch: int
    partition: str
    width: int = 1

    @classmethod
    def of(cls, candidate: Candidate) -> "StagesKey":
        """Return the key of a candidate's stages."""
        return cls(
            n_stages=candidate.schedule.n_stages,
            batch=candidate.batch,
            partition=candidate.partition,
            width=candidate.width,
        )

    @property
    def trace_key(self) -> tuple[int, int]:
        """Key of the trace that stages are cut from."""
        return self.batch, self.width

    @property
    def cuts_key(self) -> tuple[int, str, int]:
        """Key of the stages that are cut from one trace with one ``partition``."""
        return self.batch, self.partition, self.width


class CandidateSweep:
    """Predictions so far, and processes that make more.

    Attributes:
        costs: of the stages of candidates, without recomputation.
        left_out: by number of stages, why the model cannot be cut into so many; the plan prints it.
        done: the latest prediction of each candidate.
    """

    def __init__(
        self,
        predictor: Predictor,
        costs_of: CostsOf,
        jobs: int,
        on_progress: OnProgress,
    ) -> None:
        from joblib import Parallel

        self.predictor = predictor
        self.costs_of = costs_of
        self.jobs = jobs
        self.on_progress = on_progress
        # Results come one by one, in the order of the tasks, whatever task ends first.
        self.pool = Parallel(jobs, return_as="generator")
        # Recomputation is added when it is needed, so one analysis serves with and without it.
        self.costs: dict[StagesKey, Costs] = {}
        self.left_out: dict[int, str] = {}
        self.done: dict[Candidate, Prediction] = {}

    def find_candidates(
        self,
        devices: Sequence[int],
        batch: int,
        buckets: int,
        *,
        widths: Sequence[int] = (1,),
        microbatch: int | None = None,
    ) -> list[Candidate]:
        """Return the candidates that the model can have, and keep the costs found on the way.

        Args:
            devices: numbers of devices, the largest first.
            batch: samples of a training step.
            buckets: number of the buckets of DistributedDataParallel, the baseline. It has ranks of
                one device, also where ``widths`` has no 1.
            widths: devices of a rank, the least first.
            microbatch: samples of a micro-batch, if costs are known of that one alone; else None.

        Raises:
            UserError: the model cannot be analysed even as one stage, or some number of ranks has
                no such micro-batches.
        """
        # A model may have too few modules for as many stages as ranks. Its first candidate shows
        # that. Workers then take half as many stages, until the model can be cut.
        max_stages = MAX_OPS
        while True:
            all_candidates: list[Candidate] = []
            for n_devices in devices:
                on_ranks = candidates_on(n_devices, batch, max_stages, buckets)
                if 1 not in widths:
                    on_ranks = [each for each in on_ranks if each.partition == BUCKETS]
                if microbatch is not None:
                    on_ranks = of_microbatch(on_ranks, microbatch, n_devices, batch)
                all_candidates += on_ranks
            for width, n_devices in product(widths, devices):
                if 1 < width <= n_devices:
                    n_ranks = n_devices // width
                    all_candidates += candidates_on(
                        n_ranks, batch, max_stages, width=width
                    )
            first_cut = next(
                each for each in all_candidates if each.partition != BUCKETS
            )
            (costs,) = self.costs_of([first_cut])
            if not isinstance(costs, UserError):
                self.costs[StagesKey.of(first_cut)] = costs
                return all_candidates
            if first_cut.spec.stages == 1:
                raise costs
            max_stages = first_cut.spec.stages // 2

    def simulate(
        self, activity: str, candidates: Sequence[Candidate], always: Candidate
    ) -> None:
        """Predict candidates, except those whose lower bound a prediction already dominates.

        Args:
            activity: for the progress.
            candidates: those to predict.
            always: the candidate that is predicted in any case: the baseline of every comparison.
        """
        self._analyse_stages(candidates)
        costed_candidates = [
            candidate
            for candidate in candidates
            if StagesKey.of(candidate) in self.costs
        ]
        # Candidates of one schedule differ in batch, cut or recomputation, and stand side by side.
        # One task has them all, since they share the program.
        groups = [
            [*group] for _, group in groupby(costed_candidates, key=attrgetter("spec"))
        ]

        # The pool takes tasks as workers become free, so each bound is compared with the
        # predictions made so far.
        def unbeaten() -> Iterator[tuple[list[Candidate], list[Costs]]]:
            for group in groups:
                chosen = [
                    candidate
                    for candidate in group
                    if candidate == always or not self._beaten(candidate)
                ]
                if chosen:
                    yield chosen, [*map(self._costs, chosen)]

        for predictions in self._each(
            activity, self.predictor.predict, unbeaten(), len(groups)
        ):
            self._add(predictions)

    def _analyse_stages(self, candidates: Sequence[Candidate]) -> None:
        """Compute missing costs of stages, of several in one task."""
        uncosted = {}
        for candidate in candidates:
            key = StagesKey.of(candidate)
            if key not in self.costs:
                # Any candidate with this key stands for all of them.
                uncosted[key] = candidate
        keys_in_order = sorted(uncosted, key=attrgetter("cuts_key"))
        # A trace takes far longer than a cut. It is made once for all measures, unless processes
        # would be idle.
        same_task = attrgetter("trace_key")
        if len({key.trace_key for key in uncosted}) < self.jobs:
            same_task = attrgetter("cuts_key")
        keys_by_task = sorted(keys_in_order, key=same_task)
        key_groups = [[*keys] for _, keys in groupby(keys_by_task, key=same_task)]
        tasks = []
        for keys in key_groups:
            tasks.append(([uncosted[key] for key in keys],))
        group_costs = self._each("analysing stages", self.costs_of, tasks, len(tasks))
        costs_of_key: dict[StagesKey, Costs | UserError] = {}
        for keys, costs_of_group in zip(key_groups, group_costs, strict=True):
            costs_of_key |= zip(keys, costs_of_group, strict=True)
        # In an order that does not depend on the tasks: of several reasons the last one is kept.
        for key in keys_in_order:
            costs = costs_of_key[key]
            if isinstance(costs, UserError):
                self.left_out[key.n_stages] = first_line(costs)
            else:
                self.costs[key] = costs

    def near_methods(self) -> set[tuple[ScheduleSpec, str]]:
        """Return specs and compressions not much slower than the fastest with the same messages."""
        # Within each compression: coarser messages are faster, but no rivals of exact ones.
        fastest: dict[str, float] = {}
        for candidate, prediction in self.done.items():
            seconds = fastest.get(candidate.compression, prediction.seconds)
            fastest[candidate.compression] = min(seconds, prediction.seconds)
        return {
            (candidate.spec, candidate.compression)
            for candidate, prediction in self.done.items()
            if prediction.seconds <= NEAR_FACTOR * fastest[candidate.compression]
        }

    def find_affordable_delays(self) -> None:
        """Search for the affordable delay of fast schedules with late weights."""
        late_candidates = worth_a_fresher_delay([*self.done.values()])
        tasks = [
            (candidate, self._costs(candidate), STALENESS_PRICE)
            for candidate in late_candidates
        ]
        activity = "searching for affordable delays"
        self._add(
            self._each(
                activity, self.predictor.find_affordable_delay, tasks, len(tasks)
            )
        )

    def search_rank_orders(self, seconds: float) -> SearchResult | None:
        """Search for rank orders on the stages of the fastest pipeline; None without pipelines."""
        pipelines = [
            prediction
            for candidate, prediction in self.done.items()
            if METHODS[candidate.spec.method].kind == "pipeline"
            and not prediction.staleness
        ]
        if not pipelines:
            return None
        # One that fits comes before one that does not.
        best_pipeline = min(
            pipelines, key=lambda prediction: (not prediction.fits, prediction.seconds)
        ).candidate
        predictor = self.predictor
        costs = self._costs(best_pipeline)
        limits = [
            predictor.memory_of(rank) for rank in range(best_pipeline.schedule.n_ranks)
        ]
        begin = time.monotonic()
        space = SearchSpace(
            costs,
            best_pipeline.schedule.n_microbatches,
            ranks=best_pipeline.schedule.n_ranks,
            hardware=predictor.hardware_of(best_pipeline),
            memory=limits,
            optimizer_bytes=predictor.optimizer_bytes(costs),
        )
        search_result = search(
            space,
            seconds=seconds,
            progress=lambda activity, step_seconds, bound: self.on_progress(
                f"searching for rank orders ({' '.join(duration(step_seconds))})",
                min(1.0, (time.monotonic() - begin) / seconds),
            ),
        )
        orders_spec = ScheduleSpec.of(search_result.schedule)
        # Its prediction competes with all others, and is made by the same simulator.
        searched_candidate = replace(best_pipeline, spec=orders_spec)
        self._add(predictor.predict([searched_candidate], [costs]))
        return search_result

    def confirm_choice(self, baseline: Prediction) -> list[Prediction]:
        """Simulate the best schedules with late weights for longer; return the choices of them.

        Args:
            baseline: data parallelism.

        Returns:
            those of :func:`best_of_classes`.
        """
        # A longer simulation may change which schedules are the best. So this is repeated until all
        # of the best have been simulated for longer.
        confirmed_candidates: set[Candidate] = set()
        while True:
            best_predictions = best_of_classes([*self.done.values()], baseline)
            shown_predictions = [*front(self.done.values()), *best_predictions]
            late_candidates = {
                prediction.candidate
                for prediction in shown_predictions
                if prediction.staleness
            }
            new_candidates = late_candidates - confirmed_candidates
            if not new_candidates:
                return best_predictions
            confirmed_candidates |= new_candidates
            tasks = [
                ([candidate], [self._costs(candidate)], TIMED_STEPS)
                for candidate in new_candidates
            ]
            for predictions in self._each(
                "confirming the best", self.predictor.predict, tasks, len(tasks)
            ):
                self._add(predictions)

    def _beaten(self, candidate: Candidate) -> bool:
        bound = self.predictor.bound(candidate, self._costs(candidate))
        # The pool calls this from its own thread while this thread adds predictions. A list copied
        # at once cannot change size during the iteration.
        predictions = [*self.done.values()]
        return not bound.fits or any(
            prediction.fits and prediction.dominates(bound)
            for prediction in predictions
        )

    def _costs(self, candidate: Candidate) -> Costs:
        costs = recomputing(self.costs[StagesKey.of(candidate)], candidate.checkpoint)
        return costs_of_messages(
            candidate, costs, self.predictor.hardware_of(candidate)
        )

    def _add(self, predictions: Iterable[Prediction]) -> None:
        self.done |= {prediction.candidate: prediction for prediction in predictions}

    def _each(
        self,
        activity: str,
        call: Callable[..., Any],
        tasks: Iterable[tuple],
        n_tasks: int,
    ) -> Iterator[Any]:
        """Yield the results of ``call`` on each of at most ``n_tasks`` tuples of arguments."""
        from joblib import delayed

        self.on_progress(activity, 0.0)
        for index, result in enumerate(
            self.pool(delayed(call)(*task) for task in tasks)
        ):
            yield result
            self.on_progress(activity, (index + 1) / n_tasks)
