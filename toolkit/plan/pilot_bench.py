"""Measure the rules of a pilot on one device, predict the user's machines, and train."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, quantiles

from torch import Tensor, nn

from toolkit.cost import Costs, profile, recomputing
from toolkit.model import Stages, partition
from toolkit.plan.candidates import Candidate
from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings
from toolkit.plan.measure import Data, OnProgress, ratios, step_memory, step_times
from toolkit.plan.pilot_training import train_by
from toolkit.plan.predictions import Limits, Prediction, Predictor
from toolkit.plan.runtime_overhead import RuntimeOverhead
from toolkit.runtime import SingleProcess
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.step_options import Loss
from toolkit.schedule import Schedule
from toolkit.schedule.reduction_order import IN_ORDER
from toolkit.schedule.steady_state import steps_to_time
from toolkit.training.data import Batch

_ROUNDS = 7
_ROOFLINE = 0.8, 1.5  # times the roofline that computing may take


@dataclass(frozen=True)
class PilotBench:
    """The rules on one device, which runs all workers.

    Attributes:
        make_model: makes the model of a seed.
        stages: the first model, cut.
        candidates: by rule; DP first.
        optimizer: makes an optimizer from a list of parameters.
        loss: mean loss of a micro-batch.
    """

    make_model: Callable[[int], nn.Module]
    stages: Stages
    candidates: Mapping[str, Candidate]
    optimizer: MakeOptimizer
    loss: Loss

    def schedule(self, rule: str) -> Schedule:
        """Return the schedule of a rule with all workers on one device."""
        return replace(
            self.candidates[rule].schedule,
            placement="one",
            state="replicated",
            chains=IN_ORDER,
        )

    def runtime(
        self, seed: int, schedule: Schedule, diagnostics: int = 0
    ) -> SingleProcess:
        """Return a runtime on weights of their own; ``diagnostics`` as in its options."""
        stages = copy.deepcopy(self.stages)  # faster than another cut
        stages.model.load_state_dict(self.make_model(seed).state_dict())
        return SingleProcess(
            stages,
            schedule,
            self.optimizer,
            self.loss,
            seed=seed,
            diagnostics=diagnostics,
        )

    def measure(
        self, findings: Pilot, example: Batch, seconds: float, on_progress: OnProgress
    ) -> Pilot:
        """Return ``findings`` with what each rule takes here and on the user's machines.

        Args:
            findings: without rules.
            example: inputs and targets of a training step.
            seconds: for the timing of steps.
            on_progress: as of :func:`toolkit.plan.pilot`.
        """
        # 1. Measure memory and time here, all workers in one process.
        memory = self._peaks_of_rules(example, on_progress)
        runtimes = {
            rule: self.runtime(0, self.schedule(rule)) for rule in self.candidates
        }
        times = step_times(runtimes, example, _ROUNDS, seconds, on_progress)

        # 2. Predict the user's machines from the measured seconds, or from the roofline.
        on_progress("predicting", 0.0)
        stages = runtimes["DP"].stages
        microbatch = example[0][: findings.batch]
        if findings.compute == "measured":
            # The spread of measured steps is the slack of the prediction; the roofline has a usual
            # one.
            low_seconds, middle_seconds, high_seconds = quantiles(times["DP"], n=4)
            slack = (low_seconds / middle_seconds, high_seconds / middle_seconds)
        else:
            # A roofline needs shapes alone, so the stages move to the meta device.
            slack = _ROOFLINE
            model = copy.deepcopy(stages.model).to("meta")
            microbatch = microbatch.to("meta")
            partition_by = self.candidates["DP"].partition
            stages = partition(model, findings.n_stages, microbatch, partition_by)
        # The stages run in turn, as in a training step.
        costs = profile(stages, microbatch, in_turn=True)
        parameter_bytes = sum(cost.parameter_bytes for cost in costs)
        optimizer_words = _optimizer_bytes(runtimes["DP"]) / parameter_bytes
        predictor = Predictor(findings.hardware, Limits(), optimizer_words)
        predicted = {}
        for rule, candidate in self.candidates.items():
            costs_of_rule = _costs_of_rule(candidate, costs, stages, findings.overhead)
            predicted[rule] = _predicted(candidate, costs_of_rule, predictor, slack)
        on_progress("predicting", 1.0)

        # 3. What each rule takes.
        rules = tuple(
            RuleFindings(
                rule=rule,
                activations=memory[rule][0],
                cuda_peak=memory[rule][1],
                seconds=median(times[rule]),
                ratio=ratios(times[rule], times["DP"]),
                predicted=predictions[0],
                speed=_speed(predictions, predicted["DP"]),
                without_links=predictions[-1].seconds,
            )
            for rule, predictions in predicted.items()
        )
        return replace(findings, rules=rules, slack=slack)

    def _peaks_of_rules(
        self, example: Batch, on_progress: OnProgress
    ) -> dict[str, tuple[int, int | None]]:
        """Return by rule the peak bytes of autograd, and those of CUDA; None on the CPU."""
        checkpoint = self.candidates["DP"].checkpoint
        peaks = {}
        for index, rule in enumerate(self.candidates):
            on_progress(f"measuring the memory of {rule}", index / len(self.candidates))
            # A copy, since the steps that are measured train it.
            stages = copy.deepcopy(self.stages)
            peaks[rule] = step_memory(
                stages,
                self.schedule(rule),
                example,
                self.optimizer,
                self.loss,
                checkpoint,
            )
        return peaks

    def train(
        self,
        rule: str,
        data: Data,
        n_steps: int,
        seeds: Sequence[int],
        on_progress: OnProgress,
    ) -> TrainingFindings:
        """Train under DP and ``rule``; see :func:`toolkit.plan.pilot_training.train_by`."""
        schedules = {name: self.schedule(name) for name in ("DP", rule)}
        return train_by(self.runtime, schedules, data, n_steps, seeds, on_progress)


def _costs_of_rule(
    candidate: Candidate,
    costs: Costs,
    stages: Stages,
    overhead: RuntimeOverhead | None,
) -> Costs:
    """Return ``costs`` with the runtime's own time, if it is known, and recomputed forwards."""
    if overhead is not None:
        program = candidate.schedule.lower(steps_to_time(candidate.schedule))
        costs = overhead.added_to(costs, program, stages)
    return recomputing(costs, candidate.checkpoint)


def _predicted(
    candidate: Candidate, costs: Costs, predictor: Predictor, slack: tuple[float, float]
) -> list[Prediction]:
    """Predict a candidate with the measured costs, their least and most, and without messages."""
    seconds = [cost.seconds(predictor.hardware) for cost in costs]
    # As measured, the fastest and the slowest; the prediction without messages comes last. `_speed`
    # and the findings rely on this order.
    cost_variants = [costs]
    for factor in slack:
        scaled_costs = []
        for cost, (forward, backward) in zip(costs, seconds, strict=True):
            scaled_costs.append(
                replace(
                    cost,
                    forward_seconds=factor * forward,
                    backward_seconds=factor * backward,
                )
            )
        cost_variants.append(tuple(scaled_costs))
    free_links = replace(predictor.hardware, link_bandwidth=inf, link_latency=0.0)
    predictions = predictor.predict([candidate] * len(cost_variants), cost_variants)
    return predictions + replace(predictor, hardware=free_links).predict(
        [candidate], [costs]
    )


def _speed(
    rule_predictions: Sequence[Prediction], base_predictions: Sequence[Prediction]
) -> tuple[float, float, float]:
    """Return the least, middle and largest ratio of step times."""
    # Costs scale alike for both rules, since they compute on the same devices.
    ratios = [
        rule_prediction.seconds / base_prediction.seconds
        for rule_prediction, base_prediction in zip(
            rule_predictions[:-1], base_predictions[:-1], strict=True
        )
    ]
    return min(ratios), ratios[0], max(ratios)


def _optimizer_bytes(runtime: SingleProcess) -> int:
    """Return the bytes of the optimizers' state."""
    n_bytes = 0
    for stage in runtime.local_state()["stages"].values():
        optimizer_state = stage["optimizer"] or {"state": {}}
        for parameter_state in optimizer_state["state"].values():
            tensors = [
                value for value in parameter_state.values() if isinstance(value, Tensor)
            ]
            n_bytes += sum(tensor.nbytes for tensor in tensors)
    return n_bytes
