"""A pilot: measure a small run of the user's model, predict the user's machines, and advise."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.cost import Costs, Hardware, profile, recomputing
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, check_choice, whole
from toolkit.model import Stages, partition
from toolkit.plan import measure
from toolkit.plan.candidates import Candidate, data_options
from toolkit.plan.findings import PILOT_PLACEMENTS, Pilot, RuleFindings
from toolkit.plan.predictions import Limits, Machines, Prediction
from toolkit.plan.stability import largest_stable_rate
from toolkit.results import describe
from toolkit.runtime import SingleProcess
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule, ScheduleSpec
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.placement import IN_ORDER
from toolkit.training.loop import cross_entropy

Model = nn.Module | Callable[[], nn.Module]
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
_STEPS = 300  # most training steps of a short training
_LEAST = 10  # fewest
_ROUNDS = 7
_ROOFLINE = 0.8, 1.5  # times the roofline that computing may take


def pilot(
    model: Model,
    images: Any,
    n_workers: int = 4,
    *,
    batch: int = 8,
    hardware: Hardware | None = None,
    placement: str = "per_microbatch",
    compute: str = "measured",
    budget: float = 60.0,
    seeds: int = 3,
    steps: int | None = None,
    optimizer: MakeOptimizer | None = None,
    loss: Loss = cross_entropy,
    candidate: Candidate | None = None,
    given: str = "",
    on_progress: measure.OnProgress = lambda what, share: None,
) -> Pilot:
    """Find out whether to train this model with cyclic data parallelism on these machines.

    Memory, time and accuracy are measured on copies of the model, on its device; the machines are
    simulated. The given model does not change.

    Args:
        model: a classifier of images, or of the next token, that torch.fx can trace; or a
            function that makes one, so that each seed starts from its own weights.
        images: a set of :mod:`toolkit.training.data`, of images or text; ``(images, classes)`` as
            tensors; images alone; or a data set of such pairs.
        n_workers: micro-batches of a training step, and stages if the model can be cut into so
            many.
        batch: images, or sequences, of a micro-batch.
        hardware: the machines' links and memory, and with ``compute="roofline"`` also their
            speed; by default devices like this one with links of 10 Gbit/s.
        placement: ``per_microbatch``: each worker has a device; ``per_stage``: a pipeline with
            one stage a device; ``per_stage_and_microbatch``: model parallelism; ``one``: all
            workers share a device, and the stages have equal activations instead of equal FLOPs.
        compute: source of the predicted computing times: ``measured`` here, or the ``roofline``
            of the hardware.
        budget: approximate seconds that the pilot may take; it bounds the training steps.
        seeds: runs of each rule.
        steps: training steps of a run; by default what the budget allows, at most 300.
            0: no training.
        optimizer: makes an optimizer from a list of parameters. By default SGD with Nesterov
            momentum 0.9 and a learning rate of 0.05; late weights are then extrapolated where
            that allows a larger stable rate: see :func:`toolkit.plan.largest_stable_rate`.
        loss: mean loss of a micro-batch.
        candidate: a schedule of a plan, which is compared with DP instead of CDP-v1 and CDP-v2.
            Workers, batch and placement are its own.
        given: options of a command line that describe the model and its samples.
        on_progress: called with the name of the activity and its completed share.

    Raises:
        UserError: a model that cannot be traced or does not take the images, too few images, or
            an invalid option.
    """
    start = time.perf_counter()
    n_workers, batch = whole(n_workers, "n_workers", 2), whole(batch, "batch", 1)
    seeds = whole(seeds, "seeds", 1)
    steps = None if steps is None else whole(steps, "steps", 0)
    check_choice("placement", placement, PILOT_PLACEMENTS)
    check_choice("compute", compute, COMPUTE)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UserError(f"budget is a number of seconds above 0: got {budget!r}")
    if hardware is not None:
        check_hardware(hardware)
    if candidate is not None:
        n_workers = candidate.schedule.n_microbatches
        batch = candidate.batch
        placement = candidate.schedule.layout.name
    make, target = _maker(model)
    first_model = make(0)
    parameter = next(
        (weights for weights in first_model.parameters() if weights.requires_grad), None
    )
    if parameter is None:
        raise UserError(f"{type(first_model).__name__} has no parameter that requires a gradient")
    device = parameter.device
    data = measure.read_measurements(images, n_workers * batch, device, parameter.dtype)
    example = next(data.train(0))
    on_progress("cutting the model", 0.0)
    measure_name = "activations" if placement == "one" else "flops"
    measure_name = candidate.partition if candidate else measure_name
    n_stages = candidate.schedule.n_stages if candidate else n_workers
    stages, n_stages = _cut(first_model, n_stages, example[0][:batch], measure_name)
    output_shape, answer_shape = stages.output.shape, example[1][:batch].shape
    form = data.samples.form
    if output_shape[:-1] != answer_shape or output_shape[-1] < form.n_classes:
        raise UserError(
            f"the model's output for {batch} {form.samples} of {form.n_classes} classes has shape"
            f" {list(output_shape)}: expected {[*answer_shape, form.n_classes]} or wider"
        )
    if hardware is None:
        hardware = ETHERNET
        if device.type == "cuda":
            device_bytes = torch.cuda.get_device_properties(device).total_memory
            hardware = replace(hardware, memory_bandwidth=1e12, memory=float(device_bytes))
    model_option = f"model.target={target or 'MY_PACKAGE.MY_MODEL'}"
    command_options = given or f"{model_option} {data_options(form, own=True)}"
    findings = Pilot(
        n_workers, n_stages, batch, placement, describe(device), hardware, compute,
        rules=(), given=command_options, form=form,
    )  # fmt: skip
    if n_stages < 2:
        return replace(findings, untrained="the model cannot be cut into stages")
    plain_candidate = Candidate(ScheduleSpec("dp", n_stages, n_workers), batch, measure_name)
    candidates = _tried(plain_candidate, placement, candidate)
    if optimizer is None:
        optimizer = partial(torch.optim.SGD, lr=_RATE, momentum=_MOMENTUM, nesterov=True)
        candidates = {
            rule: _corrected(rule_candidate) for rule, rule_candidate in candidates.items()
        }
        command_options += f" optimizer=nesterov optimizer.lr={_RATE}"
        findings = replace(findings, given=command_options, certified=True)

    def runtime(seed: int, schedule: Schedule, diagnostics: int = 0) -> SingleProcess:
        stages_copy = copy.deepcopy(stages)  # faster than another cut
        stages_copy.model.load_state_dict(make(seed).state_dict())
        return SingleProcess(
            stages_copy, schedule, optimizer, loss, seed=seed, diagnostics=diagnostics
        )

    # Every rule is measured with all workers on one device.
    one_device: Any = {"placement": "one", "state": "replicated", "chains": IN_ORDER}
    one_device_schedules = {
        rule: replace(rule_candidate.schedule, **one_device)
        for rule, rule_candidate in candidates.items()
    }
    checkpoint = candidates["DP"].checkpoint
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        measured_bytes = {}
        for index, (rule, schedule) in enumerate(one_device_schedules.items()):
            on_progress(f"measuring the memory of {rule}", index / len(one_device_schedules))
            stages_copy = copy.deepcopy(stages)
            measured_bytes[rule] = measure.held(
                stages_copy, schedule, example, optimizer, loss, checkpoint
            )
        runtimes = {rule: runtime(0, schedule) for rule, schedule in one_device_schedules.items()}
        seconds = measure.step_times(runtimes, example, _ROUNDS, budget / 5, on_progress)
        on_progress("predicting", 0.0)
        # Predict the user's machines from the measured seconds, or from the roofline. A roofline
        # needs shapes alone, so the stages move to the meta device.
        slack, costed_stages, microbatch = _ROOFLINE, runtimes["DP"].stages, example[0][:batch]
        if compute == "measured":
            low_seconds, middle_seconds, high_seconds = quantiles(seconds["DP"], n=4)
            slack = low_seconds / middle_seconds, high_seconds / middle_seconds
        else:
            microbatch = microbatch.to("meta")
            costed_stages = partition(
                copy.deepcopy(costed_stages.model).to("meta"), n_stages, microbatch, measure_name
            )
        costs = recomputing(profile(costed_stages, microbatch), checkpoint)
        parameter_bytes = sum(cost.parameter_bytes for cost in costs)
        machines = Machines(hardware, Limits(), _optimizer_bytes(runtimes["DP"]) / parameter_bytes)
        predicted = {
            rule: _predicted(rule_candidate, costs, machines, slack)
            for rule, rule_candidate in candidates.items()
        }
        on_progress("predicting", 1.0)
        rules = tuple(
            RuleFindings(
                rule=rule,
                activations=measured_bytes[rule][0],
                cuda_peak=measured_bytes[rule][1],
                seconds=median(seconds[rule]),
                ratio=measure.ratios(seconds[rule], seconds["DP"]),
                predicted=rule_predictions[0],
                speed=_speed(rule_predictions, predicted["DP"]),
                without_links=rule_predictions[-1].seconds,
            )
            for rule, rule_predictions in predicted.items()
        )
        findings = replace(findings, rules=rules, slack=slack)
        # By default, training takes about 80 % of the seconds that the budget has left.
        n_steps = steps
        if n_steps is None:
            seconds_left = budget - (time.perf_counter() - start)
            pair_seconds = findings.of("DP").seconds + findings.late.seconds
            n_steps = int(0.8 * seconds_left / (seeds * pair_seconds)) - measure.NORM_BATCHES // 2
            n_steps = min(_STEPS, n_steps) if n_steps >= _LEAST else 0
        training = None
        untrained = ""
        if not findings.late.predicted.staleness:
            untrained = f"{findings.late.rule} reads no weight late, and so trains as DP does"
        elif not data.labelled:
            untrained = "the images came without classes"
        elif next(iter(data.test()), None) is None:
            untrained = f"no {form.samples} are left to test on: give more"
        elif not n_steps:
            untrained = "steps=0" if steps == 0 else f"budget={budget:g} s is too short"
        else:
            trained_schedules = {
                rule: one_device_schedules[rule] for rule in ("DP", findings.late.rule)
            }
            training = measure.train_by(
                runtime, trained_schedules, data, n_steps, range(seeds), on_progress
            )
    return replace(
        findings,
        training=training,
        untrained=untrained,
        seconds=time.perf_counter() - start,
    )


def _tried(
    plain_candidate: Candidate, placement: str, late_candidate: Candidate | None
) -> dict[str, Candidate]:
    """Return the rules to compare: DP and the late candidate.

    Without one: CDP-v1 and CDP-v2 of the sizes of ``plain_candidate``.
    """
    dp_spec = replace(plain_candidate.spec, placement=placement)
    cdp_specs = {
        METHODS[name].label: replace(dp_spec, method=name) for name in ("cdp_v1", "cdp_v2")
    }
    if late_candidate:
        dp_spec = replace(
            dp_spec,
            microbatches=late_candidate.spec.microbatches,
            accumulate=late_candidate.spec.accumulate,
        )
    if placement == "per_stage":
        dp_spec = replace(plain_candidate.spec, method="gpipe")
    if late_candidate:
        return {
            "DP": replace(late_candidate, spec=dp_spec, within=None),
            late_candidate.label.partition(",")[0]: late_candidate,
        }
    return {
        rule: replace(plain_candidate, spec=spec)
        for rule, spec in {"DP": dp_spec, **cdp_specs}.items()
    }


def _corrected(candidate: Candidate) -> Candidate:
    """Extrapolate the late weights of ``candidate`` if that allows a larger stable rate."""
    best_candidate = candidate
    largest_rate = 0.0
    for correction in ("none", "extrapolate") if candidate.schedule.max_staleness else ():
        with suppress(UserError):  # sharded weights cannot be extrapolated
            corrected_candidate = replace(
                candidate, spec=replace(candidate.spec, correction=correction)
            )
            rate = largest_stable_rate(
                corrected_candidate.schedule, momentum=_MOMENTUM, nesterov=True
            ).limit
            best_candidate, largest_rate = (
                (corrected_candidate, rate)
                if rate > largest_rate
                else (best_candidate, largest_rate)
            )
    return best_candidate


def _predicted(
    candidate: Candidate, costs: Costs, machines: Machines, slack: tuple[float, float]
) -> list[Prediction]:
    """Predict a candidate with the measured costs, their least and most, and without messages."""
    seconds = [cost.seconds(machines.hardware) for cost in costs]
    cost_variants = [costs] + [
        tuple(
            replace(cost, forward_seconds=factor * forward, backward_seconds=factor * backward)
            for cost, (forward, backward) in zip(costs, seconds, strict=True)
        )
        for factor in slack
    ]
    free_links = replace(machines.hardware, link_bandwidth=inf, link_latency=0.0)
    predictions = machines.predict([candidate] * len(cost_variants), cost_variants)
    return predictions + replace(machines, hardware=free_links).predict([candidate], [costs])


def _speed(
    rule_predictions: Sequence[Prediction], base_predictions: Sequence[Prediction]
) -> tuple[float, float, float]:
    """Return the least, middle and largest ratio of step times."""
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
        parameter_states = (stage["optimizer"] or {"state": {}})["state"].values()
        n_bytes += sum(
            tensor.nbytes
            for parameter_state in parameter_states
            for tensor in parameter_state.values()
            if isinstance(tensor, Tensor)
        )
    return n_bytes


def _maker(model: Model) -> tuple[Callable[[int], nn.Module], str]:
    """Return a function from a seed to the model, and its name on a command line."""
    if isinstance(model, nn.Module):
        return lambda seed: model, ""
    if not callable(model):
        raise UserError(f"model is a torch.nn.Module, or a function that makes one: got {model!r}")

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            new_model = model()
        if not isinstance(new_model, nn.Module):
            raise UserError(f"model() returns a torch.nn.Module: got {new_model!r}")
        return new_model

    module, name = (getattr(model, key, "") for key in ("__module__", "__qualname__"))
    is_importable = module and module != "__main__" and name and "<" not in name
    return make, f"{module}.{name}" if is_importable else ""


def _cut(
    model: nn.Module, max_stages: int, example: Tensor, measure_name: str
) -> tuple[Stages, int]:
    """Cut into ``most`` stages, or the most possible; at least two stages must train."""
    # Raises if the model cannot be traced, or mixes samples.
    uncut_stages = partition(model, 1, example)
    for n_stages in range(max_stages, 1, -1):
        try:
            stages = partition(model, n_stages, example, measure_name, check=False)
        except ValueError:
            continue
        if (
            sum(any(weights.requires_grad for weights in stage.parameters()) for stage in stages)
            > 1
        ):
            return stages, n_stages
    return uncut_stages, 1
