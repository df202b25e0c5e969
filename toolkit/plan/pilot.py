"""A pilot: measure a small run of the user's model, predict the user's machines, and advise."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.cost import Hardware
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, check_choice, whole
from toolkit.model import InputSpec, Stages, partition
from toolkit.plan.candidates import Candidate, data_options, late_methods
from toolkit.plan.findings import PILOT_PLACEMENTS, Pilot
from toolkit.plan.measure import Data, OnProgress
from toolkit.plan.pilot_bench import PilotBench
from toolkit.plan.pilot_training import NORM_BATCHES
from toolkit.plan.stability import largest_stable_rate
from toolkit.results import describe
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS
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
_STEPS = range(10, 301)  # training steps of a short training


def pilot(  # noqa: PLR0913 - options, by keyword
    model: Model,
    samples: Any,
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
        UserError: a model that cannot be traced or does not take the samples, too few samples, or
            an invalid option.
    """
    start = time.perf_counter()
    n_workers = whole(n_workers, "n_workers", 2)
    batch = whole(batch, "batch", 1)
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

    # 1. Cut the model into stages.
    make_model, target = _model_maker(model)
    first_model = make_model(0)
    trained_weights = [weights for weights in first_model.parameters() if weights.requires_grad]
    if not trained_weights:
        raise UserError(f"{type(first_model).__name__} has no parameter that requires a gradient")
    device = trained_weights[0].device
    data = Data(samples, n_workers * batch, device, trained_weights[0].dtype)
    example = next(data.train(0))
    on_progress("cutting the model", 0.0)
    partition_by = "activations" if placement == "one" else "flops"
    n_stages = n_workers
    if candidate is not None:
        partition_by = candidate.partition
        n_stages = candidate.schedule.n_stages
    stages, n_stages = _cut(first_model, n_stages, example[0][:batch], partition_by)
    form = samples.form
    _check_output(stages.output.shape, example[1][:batch].shape, form)
    if hardware is None:
        hardware = _machines_like(device)
    command_options = given or f"model.target={target or 'MY_PACKAGE.MY_MODEL'}"
    if not given:
        command_options += f" {data_options(form, own=True)}"
    findings = Pilot(
        n_workers=n_workers,
        n_stages=n_stages,
        batch=batch,
        placement=placement,
        device=describe(device),
        hardware=hardware,
        compute=compute,
        rules=(),
        given=command_options,
        form=form,
    )
    if n_stages < 2:
        return replace(findings, untrained="the model cannot be cut into stages")

    # 2. Choose the rules, and the corrections of their late weights.
    plain_candidate = Candidate(ScheduleSpec("dp", n_stages, n_workers), batch, partition_by)
    candidates = _rules_to_compare(plain_candidate, placement, candidate)
    if optimizer is None:
        optimizer = partial(torch.optim.SGD, lr=_RATE, momentum=_MOMENTUM, nesterov=True)
        for rule, rule_candidate in candidates.items():
            candidates[rule] = _corrected(rule_candidate)
        command_options += f" optimizer=nesterov optimizer.lr={_RATE}"
        findings = replace(findings, given=command_options, certified=True)

    # 3. Measure them here, predict the machines, and train two of them.
    bench = PilotBench(make_model, stages, candidates, optimizer, loss)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        findings = bench.measure(findings, example, budget / 5, on_progress)
        n_steps = steps
        if n_steps is None:
            seconds_left = budget - (time.perf_counter() - start)
            n_steps = _affordable_steps(findings, seconds_left, seeds)
        training = None
        untrained = ""
        if not findings.late.predicted.staleness:
            untrained = f"{findings.late.rule} reads no weight late, and so trains as DP does"
        elif not n_steps:
            untrained = "steps=0" if steps == 0 else f"budget={budget:g} s is too short"
        else:
            training = bench.train(findings.late.rule, data, n_steps, range(seeds), on_progress)
    return replace(
        findings,
        training=training,
        untrained=untrained,
        seconds=time.perf_counter() - start,
    )


def _check_output(
    output_shape: Sequence[int], answer_shape: Sequence[int], form: InputSpec
) -> None:
    """Raise UserError unless the model gives a number for each class of each answer."""
    if [*output_shape[:-1]] != [*answer_shape] or output_shape[-1] < form.n_classes:
        raise UserError(
            f"the model's output for {answer_shape[0]} {form.samples} of {form.n_classes} classes"
            f" has shape {list(output_shape)}: expected {[*answer_shape, form.n_classes]} or wider"
        )


def _machines_like(device: torch.device) -> Hardware:
    """Return machines of devices like this one, with links of 10 Gbit/s."""
    if device.type != "cuda":
        return ETHERNET
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    return replace(ETHERNET, memory_bandwidth=1e12, memory=float(device_bytes))


def _affordable_steps(findings: Pilot, seconds_left: float, n_seeds: int) -> int:
    """Return the training steps that take about 80 % of the seconds left; 0 if they are few."""
    pair_seconds = findings.of("DP").seconds + findings.late.seconds
    n_steps = int(0.8 * seconds_left / (n_seeds * pair_seconds)) - NORM_BATCHES // 2
    return min(_STEPS[-1], n_steps) if n_steps >= _STEPS[0] else 0


def _rules_to_compare(
    plain_candidate: Candidate, placement: str, late_candidate: Candidate | None
) -> dict[str, Candidate]:
    """Return the rules to compare, DP first: with the late candidate, or with CDP of its sizes.

    In a pipeline DP runs as the first pipeline of the catalogue, GPipe.
    """
    dp_spec = replace(plain_candidate.spec, placement=placement)
    baseline_spec = dp_spec
    if late_candidate is not None:
        baseline_spec = replace(
            dp_spec,
            microbatches=late_candidate.spec.microbatches,
            accumulate=late_candidate.spec.accumulate,
        )
    if placement == "per_stage":
        pipelines = [name for name, method in METHODS.items() if method.kind == "pipeline"]
        baseline_spec = replace(plain_candidate.spec, method=pipelines[0])
    if late_candidate is not None:
        return {
            "DP": replace(late_candidate, spec=baseline_spec, within=None),
            late_candidate.label.partition(",")[0]: late_candidate,
        }
    rules = {"DP": replace(plain_candidate, spec=baseline_spec)}
    for name in late_methods():
        rules[METHODS[name].label] = replace(plain_candidate, spec=replace(dp_spec, method=name))
    return rules


def _corrected(candidate: Candidate) -> Candidate:
    """Extrapolate the late weights of ``candidate`` if that allows a larger stable rate."""
    if not candidate.schedule.max_staleness:
        return candidate
    best_candidate = candidate
    largest_rate = 0.0
    for correction in ("none", "extrapolate"):
        with suppress(UserError):  # sharded weights cannot be extrapolated
            corrected_candidate = replace(
                candidate, spec=replace(candidate.spec, correction=correction)
            )
            rate = largest_stable_rate(
                corrected_candidate.schedule, momentum=_MOMENTUM, nesterov=True
            ).limit
            if rate > largest_rate:
                best_candidate = corrected_candidate
                largest_rate = rate
    return best_candidate


def _model_maker(model: Model) -> tuple[Callable[[int], nn.Module], str]:
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
    model: nn.Module, max_stages: int, example: Tensor, partition_by: str
) -> tuple[Stages, int]:
    """Cut into ``max_stages``, or the most possible; at least two stages must train."""
    # Raises if the model cannot be traced, or mixes samples.
    uncut_stages = partition(model, 1, example)
    for n_stages in range(max_stages, 1, -1):
        try:
            stages = partition(model, n_stages, example, partition_by, check=False)
        except ValueError:
            continue
        n_trained = sum(
            any(weights.requires_grad for weights in stage.parameters()) for stage in stages
        )
        if n_trained > 1:
            return stages, n_stages
    return uncut_stages, 1
