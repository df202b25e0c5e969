"""A pilot: measure a small run of the user's model, predict the user's machines, and advise."""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from toolkit.cost import Hardware
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, check_choice, whole
from toolkit.plan.candidates import Candidate, data_options, late_methods
from toolkit.plan.findings import PILOT_PLACEMENTS, Pilot
from toolkit.plan.measure import OnProgress
from toolkit.plan.model_cut import Model, ModelCut, cut_model
from toolkit.plan.pilot_bench import PilotBench
from toolkit.plan.pilot_training import NORM_BATCHES
from toolkit.plan.runtime_overhead import runtime_overhead
from toolkit.plan.stability import largest_stable_rate
from toolkit.results import describe
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.step_options import Loss
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS
from toolkit.training.evaluation import cross_entropy

COMPUTE = ("measured", "roofline")
ETHERNET = Hardware(
    "devices as this one, 10 Gbit/s links",
    flops=1e12,  # not used with measured times
    memory_bandwidth=5e10,
    link_bandwidth=1.25e9,
    link_latency=5e-5,
)
_MOMENTUM = 0.9
_RATE = 0.05
_DEFAULT_OPTIMIZER = partial(
    torch.optim.SGD, lr=_RATE, momentum=_MOMENTUM, nesterov=True
)
_STEPS = range(10, 301)  # training steps of a short training


@dataclass(frozen=True)
class PilotOptions:
    """How a pilot trains, which machines it predicts, and how long it may take.

    Args:
        batch: samples of a micro-batch.
        placement: ``per_microbatch``: each worker has a device; ``per_stage``: a pipeline with
            one stage per device; ``per_stage_and_microbatch``: model parallelism; ``one``: all
            workers share a device, and the stages have equal activations instead of equal FLOPs.
        optimizer: makes an optimizer from a list of parameters. By default SGD with Nesterov
            momentum 0.9 and a learning rate of 0.05; late weights are then extrapolated where
            that allows a larger stable rate: see :func:`toolkit.plan.largest_stable_rate`.
        loss: mean loss of a micro-batch.
        hardware: the machines' links and memory, and with ``compute="roofline"`` also their
            speed; by default devices like this one with links of 10 Gbit/s.
        compute: source of the predicted computing times: ``measured`` here, or the ``roofline``
            of the hardware.
        overhead: whether two processes also measure the runtime's own time, of an op, a message
            and an update, which predicted steps then include. It takes half a minute beyond the
            budget, and counts where computing is measured on a CPU: a GPU computes while the
            runtime prepares.
        budget: approximate seconds that the pilot may take; it bounds the training steps.
        seeds: runs of each rule.
        steps: training steps of a run; by default what the budget allows, at most 300.
            0: no training.

    Raises:
        UserError: an option is invalid; the message names it.
    """

    batch: int = 8
    placement: str = "per_microbatch"
    optimizer: MakeOptimizer | None = None
    loss: Loss = cross_entropy
    hardware: Hardware | None = None
    compute: str = "measured"
    overhead: bool = False
    budget: float = 60.0
    seeds: int = 3
    steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", whole(self.batch, "batch", 1))
        object.__setattr__(self, "seeds", whole(self.seeds, "seeds", 1))
        if self.steps is not None:
            object.__setattr__(self, "steps", whole(self.steps, "steps", 0))
        check_choice("placement", self.placement, PILOT_PLACEMENTS)
        check_choice("compute", self.compute, COMPUTE)
        if not (isinstance(self.budget, int | float) and self.budget > 0):
            raise UserError(
                f"budget is a number of seconds above 0: got {self.budget!r}"
            )
        if self.hardware is not None:
            check_hardware(self.hardware)


DEFAULT_OPTIONS = PilotOptions()


def pilot(
    model: Model,
    samples: Any,
    n_workers: int = 4,
    *,
    options: PilotOptions = DEFAULT_OPTIONS,
    candidate: Candidate | None = None,
    command_options: str = "",
    on_progress: OnProgress = lambda activity, share: None,
) -> Pilot:
    """Find out whether to train this model with cyclic data parallelism on these machines.

    Memory, time and accuracy are measured on copies of the model, on its device; the machines are
    simulated. The given model does not change.

    Args:
        model: a classifier of images, or of the next token, that torch.fx can trace; or a
            function that makes one, so that each seed starts from its own weights.
        samples: a set of :mod:`toolkit.training.data`, of images or text; ``Datasets`` makes one of
            torch's Datasets.
        n_workers: micro-batches of a training step, and stages if the model can be cut into so
            many.
        options: the training, the machines, and the limits of time.
        candidate: a schedule of a plan, which is compared with DP instead of CDP-v1 and CDP-v2.
            Workers, batch and placement are its own.
        command_options: options of a command line that describe the model and its samples.
        on_progress: called with the name of the activity and its completed share.

    Raises:
        UserError: a model that cannot be traced or does not take the samples, or too few samples.
    """
    start = time.perf_counter()
    n_workers = whole(n_workers, "n_workers", 2)
    plain_candidate = _plain_candidate(n_workers, options, candidate)

    # 1. Cut the model into stages.
    model_cut = cut_model(model, samples, plain_candidate, on_progress)
    findings = _without_rules(model_cut, plain_candidate, options, command_options)
    if candidate is not None:
        findings = replace(findings, placement=candidate.schedule.layout.name)
    if model_cut.n_stages < 2:
        return replace(findings, untrained="the model cannot be cut into stages")

    # 2. Choose the rules, and the corrections of their late weights.
    rules = _rules_to_compare(
        plain_candidate, model_cut.n_stages, findings.placement, candidate
    )
    optimizer = options.optimizer or _DEFAULT_OPTIMIZER
    if options.optimizer is None:
        # Without an optimizer of the user's, late weights get the corrections that keep SGD stable.
        rules = {rule: _corrected(candidate) for rule, candidate in rules.items()}
        findings = _with_default_optimizer(findings)

    # 3. Measure them here, predict the machines, and train two of them.
    bench = PilotBench(
        model_cut.make_model, model_cut.stages, rules, optimizer, options.loss
    )
    findings = _measure_and_train(
        bench, findings, model_cut, options, start, on_progress
    )
    return replace(findings, seconds=time.perf_counter() - start)


def _without_rules(
    model_cut: ModelCut,
    plain_candidate: Candidate,
    options: PilotOptions,
    command_options: str,
) -> Pilot:
    """Return the findings of a pilot before any rule is measured."""
    form = model_cut.data.samples.form
    if not command_options:
        target = model_cut.target or "MY_PACKAGE.MY_MODEL"
        command_options = f"model.target={target} {data_options(form, own=True)}"
    return Pilot(
        n_workers=plain_candidate.spec.microbatches,
        n_stages=model_cut.n_stages,
        batch=plain_candidate.batch,
        placement=options.placement,
        device=describe(model_cut.device),
        hardware=options.hardware or _machines_like(model_cut.device),
        compute=options.compute,
        rules=(),
        command_options=command_options,
        form=form,
    )


def _with_default_optimizer(findings: Pilot) -> Pilot:
    """Return ``findings`` whose commands train with the pilot's own optimizer."""
    command_options = (
        f"{findings.command_options} optimizer=nesterov optimizer.lr={_RATE}"
    )
    return replace(findings, command_options=command_options, certified=True)


def _plain_candidate(
    n_workers: int, options: PilotOptions, candidate: Candidate | None
) -> Candidate:
    """Return data parallelism with the sizes to measure: those of ``candidate`` if there is one."""
    if candidate is not None:
        schedule = candidate.schedule
        spec = ScheduleSpec("dp", schedule.n_stages, schedule.n_microbatches)
        return Candidate(spec, candidate.batch, candidate.partition)
    partition_by = "activations" if options.placement == "one" else "flops"
    return Candidate(
        ScheduleSpec("dp", n_workers, n_workers), options.batch, partition_by
    )


def _measure_and_train(
    bench: PilotBench,
    findings: Pilot,
    model_cut: ModelCut,
    options: PilotOptions,
    start: float,
    on_progress: OnProgress,
) -> Pilot:
    """Return ``findings`` with what each rule takes, and with a training if there is time.

    Args:
        bench: the rules on this device.
        findings: without rules.
        model_cut: the model and its samples.
        options: limits of time.
        start: of the pilot, by :func:`time.perf_counter`.
        on_progress: as of :func:`pilot`.
    """
    device = model_cut.device
    if options.overhead and options.compute == "measured" and device.type == "cpu":
        on_progress("measuring the runtime's own time", 0.0)
        overhead_start = time.perf_counter()
        findings = replace(findings, overhead=runtime_overhead())
        # What this takes does not count in the budget.
        start += time.perf_counter() - overhead_start
    # The caller's random numbers stay as they were, on the CPU and on the model's device.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # A fifth of the budget: most of the time is for the training, which decides on accuracy.
        findings = bench.measure(
            findings, model_cut.example, options.budget / 5, on_progress
        )
        n_steps = options.steps
        if n_steps is None:
            seconds_left = options.budget - (time.perf_counter() - start)
            n_steps = _affordable_steps(findings, seconds_left, options.seeds)

        late = findings.late
        if not late.predicted.staleness:
            reason = f"{late.rule} reads no weight late, and so trains as DP does"
            return replace(findings, untrained=reason)
        if options.steps == 0:
            return replace(findings, untrained="steps=0")
        if n_steps == 0:
            return replace(
                findings, untrained=f"budget={options.budget:g} s is too short"
            )
        seeds = range(options.seeds)
        training = bench.train(late.rule, model_cut.data, n_steps, seeds, on_progress)
        return replace(findings, training=training)


def _machines_like(device: torch.device) -> Hardware:
    """Return machines of devices like this one, with links of 10 Gbit/s."""
    if device.type != "cuda":
        return ETHERNET
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    return replace(ETHERNET, memory_bandwidth=1e12, memory=float(device_bytes))


def _affordable_steps(findings: Pilot, seconds_left: float, n_seeds: int) -> int:
    """Return the training steps that take about 80 % of the seconds left; 0 if they are few."""
    # A seed trains DP and the late rule. At the end of each run norms settle by NORM_BATCHES
    # forwards, which take at most as long as half as many steps.
    pair_seconds = findings.of("DP").seconds + findings.late.seconds
    # A fifth is left for evaluations, and for steps that take longer than measured.
    n_steps = int(0.8 * seconds_left / (n_seeds * pair_seconds)) - NORM_BATCHES // 2
    if n_steps < _STEPS[0]:
        return 0
    return min(_STEPS[-1], n_steps)


def _rules_to_compare(
    plain_candidate: Candidate,
    n_stages: int,
    placement: str,
    late_candidate: Candidate | None,
) -> dict[str, Candidate]:
    """Return the rules to compare, DP first: with the late candidate, or with CDP of its sizes.

    In a pipeline DP runs as the first pipeline of the catalogue, GPipe.
    """
    # The model may have been cut into fewer stages than were asked for.
    plain_spec = replace(plain_candidate.spec, stages=n_stages)
    dp_spec = replace(plain_spec, placement=placement)
    baseline_spec = dp_spec
    if late_candidate is not None:
        late_spec = late_candidate.spec
        baseline_spec = replace(
            dp_spec,
            microbatches=late_spec.microbatches,
            accumulate=late_spec.accumulate,
        )
    if placement == "per_stage":
        pipelines = [
            name for name, method in METHODS.items() if method.kind == "pipeline"
        ]
        baseline_spec = replace(plain_spec, method=pipelines[0])

    if late_candidate is not None:
        late_rule = late_candidate.label.partition(",")[0]
        baseline = replace(late_candidate, spec=baseline_spec, within=None)
        return {"DP": baseline, late_rule: late_candidate}
    rules = {"DP": replace(plain_candidate, spec=baseline_spec)}
    for name in late_methods():
        rules[METHODS[name].label] = replace(
            plain_candidate, spec=replace(dp_spec, method=name)
        )
    return rules


def _corrected(candidate: Candidate) -> Candidate:
    """Extrapolate the late weights of ``candidate`` if that allows a larger stable rate."""
    if not candidate.schedule.max_staleness:
        return candidate
    best_candidate = candidate
    largest_rate = 0.0
    # Without a correction first, so that of equal rates the plain rule stays.
    for correction in ("none", "extrapolate"):
        with suppress(UserError):  # sharded weights cannot be extrapolated
            spec = replace(candidate.spec, correction=correction)
            corrected_candidate = replace(candidate, spec=spec)
            schedule = corrected_candidate.schedule
            certificate = largest_stable_rate(
                schedule, momentum=_MOMENTUM, nesterov=True
            )
            if certificate.limit > largest_rate:
                best_candidate = corrected_candidate
                largest_rate = certificate.limit
    return best_candidate
