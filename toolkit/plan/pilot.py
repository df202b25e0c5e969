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
from toolkit.plan.findings import PLACEMENTS, Pilot, RuleFindings
from toolkit.plan.predictions import Limits, Machines, Prediction
from toolkit.plan.stability import largest_stable_rate
from toolkit.results import describe
from toolkit.runtime import SingleProcess
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.choice import Choice
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
    check_choice("placement", placement, PLACEMENTS)
    check_choice("compute", compute, COMPUTE)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UserError(f"budget is a number of seconds above 0: got {budget!r}")
    if hardware is not None:
        check_hardware(hardware)
    if candidate is not None:
        n_workers, batch = candidate.schedule.n_microbatches, candidate.batch
        placement = candidate.schedule.layout.name
    make, target = _maker(model)
    first = make(0)
    parameter = next((p for p in first.parameters() if p.requires_grad), None)
    if parameter is None:
        raise UserError(f"{type(first).__name__} has no parameter that requires a gradient")
    device = parameter.device
    data = measure.read(images, n_workers * batch, device, parameter.dtype)
    example = next(data.train(0))
    on_progress("cutting the model", 0.0)
    equal = "activations" if placement == "one" else "flops"
    equal = candidate.partition if candidate else equal
    n_stages = candidate.schedule.n_stages if candidate else n_workers
    stages, n_stages = _cut(first, n_stages, example[0][:batch], equal)
    output, answers = stages.output.shape, example[1][:batch].shape
    form = data.samples.form
    if output[:-1] != answers or output[-1] < form.n_classes:
        raise UserError(
            f"the model's output for {batch} {form.samples} of {form.n_classes} classes has shape"
            f" {list(output)}: expected {[*answers, form.n_classes]} or wider"
        )
    if hardware is None:
        hardware = ETHERNET
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            hardware = replace(hardware, memory_bandwidth=1e12, memory=float(total))
    named = f"model.target={target or 'MY_PACKAGE.MY_MODEL'}"
    given = given or f"{named} {data_options(form, own=True)}"
    found = Pilot(
        n_workers, n_stages, batch, placement, describe(device), hardware, compute,
        rules=(), given=given, form=form,
    )  # fmt: skip
    if n_stages < 2:
        return replace(found, untrained="the model cannot be cut into stages")
    plain = Candidate(Choice("dp", n_stages, n_workers), batch, equal)
    tried = _tried(plain, placement, candidate)
    if optimizer is None:
        optimizer = partial(torch.optim.SGD, lr=_RATE, momentum=_MOMENTUM, nesterov=True)
        tried = {rule: _corrected(one) for rule, one in tried.items()}
        given += f" optimizer=nesterov optimizer.lr={_RATE}"
        found = replace(found, given=given, certified=True)

    def runtime(seed: int, schedule: Schedule, diagnostics: int = 0) -> SingleProcess:
        twins = copy.deepcopy(stages)  # faster than another cut
        twins.model.load_state_dict(make(seed).state_dict())
        return SingleProcess(twins, schedule, optimizer, loss, seed=seed, diagnostics=diagnostics)

    # What is measured: every rule with all workers on one device.
    alone: Any = {"placement": "one", "state": "replicated", "chains": IN_ORDER}
    here = {rule: replace(one.schedule, **alone) for rule, one in tried.items()}
    again = tried["DP"].checkpoint
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        held = {}
        for k, (rule, schedule) in enumerate(here.items()):
            on_progress(f"measuring the memory of {rule}", k / len(here))
            twins = copy.deepcopy(stages)
            held[rule] = measure.held(twins, schedule, example, optimizer, loss, again)
        runtimes = {rule: runtime(0, schedule) for rule, schedule in here.items()}
        seconds = measure.step_times(runtimes, example, _ROUNDS, budget / 5, on_progress)
        on_progress("predicting", 0.0)
        slack, costed, micro = _ROOFLINE, runtimes["DP"].stages, example[0][:batch]
        if compute == "measured":
            low, middle, high = quantiles(seconds["DP"], n=4)
            slack = low / middle, high / middle
        else:
            micro = micro.to("meta")
            costed = partition(copy.deepcopy(costed.model).to("meta"), n_stages, micro, equal)
        costs = recomputing(profile(costed, micro), again)
        held_by = sum(cost.parameter_bytes for cost in costs)
        machines = Machines(hardware, Limits(), _optimizer_bytes(runtimes["DP"]) / held_by)
        predicted = {rule: _predicted(one, costs, machines, slack) for rule, one in tried.items()}
        on_progress("predicting", 1.0)
        rules = tuple(
            RuleFindings(
                rule=rule,
                activations=held[rule][0],
                cuda_peak=held[rule][1],
                seconds=median(seconds[rule]),
                ratio=measure.ratios(seconds[rule], seconds["DP"]),
                predicted=mine[0],
                speed=_speed(mine, predicted["DP"]),
                without_links=mine[-1].seconds,
            )
            for rule, mine in predicted.items()
        )
        found = replace(found, rules=rules, slack=slack)
        n_steps = steps
        if n_steps is None:
            left = budget - (time.perf_counter() - start)
            both = found.of("DP").seconds + found.late.seconds
            n_steps = int(0.8 * left / (seeds * both)) - measure.NORM_BATCHES // 2
            n_steps = min(_STEPS, n_steps) if n_steps >= _LEAST else 0
        training, untrained = None, ""
        if not found.late.predicted.staleness:
            untrained = f"{found.late.rule} reads no weight late, and so trains as DP does"
        elif not data.labelled:
            untrained = "the images came without classes"
        elif next(iter(data.test()), None) is None:
            untrained = f"no {form.samples} are left to test on: give more"
        elif not n_steps:
            untrained = "steps=0" if steps == 0 else f"budget={budget:g} s is too short"
        else:
            pair = {rule: here[rule] for rule in ("DP", found.late.rule)}
            training = measure.train(runtime, pair, data, n_steps, range(seeds), on_progress)
    return replace(
        found,
        training=training,
        untrained=untrained,
        seconds=time.perf_counter() - start,
    )


def _tried(plain: Candidate, placement: str, late: Candidate | None) -> dict[str, Candidate]:
    """DP; and ``late``, or CDP-v1 and CDP-v2 of the sizes of ``plain``."""
    dp = replace(plain.choice, placement=placement)
    found = {METHODS[name].label: replace(dp, schedule=name) for name in ("cdp_v1", "cdp_v2")}
    if late:
        dp = replace(dp, microbatches=late.choice.microbatches, accumulate=late.choice.accumulate)
    if placement == "per_stage":
        dp = replace(plain.choice, schedule="gpipe")
    if late:
        return {"DP": replace(late, choice=dp, within=None), late.label.partition(",")[0]: late}
    return {rule: replace(plain, choice=choice) for rule, choice in {"DP": dp, **found}.items()}


def _corrected(candidate: Candidate) -> Candidate:
    """``candidate`` with or without extrapolation of its late weights: the larger stable rate."""
    best, most = candidate, 0.0
    for correction in ("none", "extrapolate") if candidate.schedule.max_staleness else ():
        with suppress(UserError):  # sharded weights cannot be extrapolated
            other = replace(candidate, choice=replace(candidate.choice, correction=correction))
            rate = largest_stable_rate(other.schedule, momentum=_MOMENTUM, nesterov=True).limit
            best, most = (other, rate) if rate > most else (best, most)
    return best


def _predicted(
    candidate: Candidate, costs: Costs, machines: Machines, slack: tuple[float, float]
) -> list[Prediction]:
    """Predictions: as computing takes, with the least and the most of it, and without links."""
    seconds = [cost.seconds(machines.hardware) for cost in costs]
    versions = [costs] + [
        tuple(
            replace(cost, forward_seconds=factor * forward, backward_seconds=factor * backward)
            for cost, (forward, backward) in zip(costs, seconds, strict=True)
        )
        for factor in slack
    ]
    free = replace(machines.hardware, link_bandwidth=inf, link_latency=0.0)
    found = machines.predict([candidate] * len(versions), versions)
    return found + replace(machines, hardware=free).predict([candidate], [costs])


def _speed(mine: Sequence[Prediction], base: Sequence[Prediction]) -> tuple[float, float, float]:
    """Least, middle and largest ratio of step times."""
    ratios = [m.seconds / b.seconds for m, b in zip(mine[:-1], base[:-1], strict=True)]
    return min(ratios), ratios[0], max(ratios)


def _optimizer_bytes(runtime: SingleProcess) -> int:
    """Bytes of the optimizers' state."""
    found = 0
    for stage in runtime.part()["stages"].values():
        states = (stage["optimizer"] or {"state": {}})["state"].values()
        found += sum(x.nbytes for s in states for x in s.values() if isinstance(x, Tensor))
    return found


def _maker(model: Model) -> tuple[Callable[[int], nn.Module], str]:
    """Function from a seed to the model; and the name by which a command line finds it."""
    if isinstance(model, nn.Module):
        return lambda seed: model, ""
    if not callable(model):
        raise UserError(f"model is a torch.nn.Module, or a function that makes one: got {model!r}")

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = model()
        if not isinstance(made, nn.Module):
            raise UserError(f"model() returns a torch.nn.Module: got {made!r}")
        return made

    module, name = (getattr(model, key, "") for key in ("__module__", "__qualname__"))
    known = module and module != "__main__" and name and "<" not in name
    return make, f"{module}.{name}" if known else ""


def _cut(model: nn.Module, most: int, example: Tensor, by: str) -> tuple[Stages, int]:
    """Cut into ``most`` stages, or the most possible; at least two stages must train."""
    uncut = partition(model, 1, example)  # raises if the model cannot be traced, or mixes samples
    for n_stages in range(most, 1, -1):
        try:
            stages = partition(model, n_stages, example, by, check=False)
        except ValueError:
            continue
        if sum(any(p.requires_grad for p in stage.parameters()) for stage in stages) > 1:
            return stages, n_stages
    return uncut, 1
