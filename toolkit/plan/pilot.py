"""A pilot: measure a small run of the user's model, predict the user's machines, and advise."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from math import inf
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.cost import Hardware, StageCost, profile
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, check_choice, whole
from toolkit.format import TIMES, digits, size, table, unit_for
from toolkit.model import Stages, partition
from toolkit.plan import measure
from toolkit.plan.advice import Advice, advise
from toolkit.plan.findings import Findings, RuleFindings, TrainingFindings, check_placement, predict
from toolkit.plan.measure import Data, read
from toolkit.results import describe
from toolkit.runtime import SingleProcess
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule
from toolkit.schedule.paper_table import RULES, schedule_of
from toolkit.training.data import Batch
from toolkit.training.loop import cross_entropy


@dataclass(frozen=True)
class Pilot(Findings):
    """The findings, with the advice that follows from them."""

    @cached_property
    def advice(self) -> Advice:
        """What follows from the findings."""
        return advise(self)

    @property
    def recommendation(self) -> str:
        """The advice as text."""
        return self.advice.text()

    def elsewhere(self, hardware: Hardware | None = None, placement: str | None = None) -> "Pilot":
        """The same measurements, predicted for other machines or another placement."""
        hardware, placement = hardware or self.hardware, placement or self.placement
        check_placement(placement)
        schedules = [
            schedule_of(found.rule, self.n_workers, placement, n_stages=self.n_stages)
            for found in self.rules
        ]
        predictions = predict(schedules, self.costs, hardware, self.optimizer_bytes, self.slack)
        rules = tuple(
            replace(rule, predicted=prediction)
            for rule, prediction in zip(self.rules, predictions, strict=True)
        )
        return replace(self, hardware=hardware, placement=placement, rules=rules)

    def rows(self) -> list[dict[str, str]]:
        """A row a rule, as it is read."""
        rows = []
        for found in self.rules:
            row = {
                "rule": found.rule,
                "activations of all workers (measured)": _size(found.activations),
            }
            if found.cuda_peak is not None:
                row["CUDA peak (measured)"] = _size(found.cuda_peak)
            row |= {
                "step in one process (measured)": _time(found.seconds),
                "by that of DP": _range(found.ratio),
                "step on your machines (predicted)": _time(found.predicted.seconds),
                "by that of DP, predicted": _range(found.predicted.ratio),
                "of which messages": f"{found.waiting:.0%}",
                "fullest device (predicted)": _size(self.tightest(found)[0]),
            }
            if self.limited:
                row["fits"] = "yes" if self.fits(found) else "no"
            if self.training is not None and found.rule in self.training.accuracy:
                found_shares = self.training.accuracy[found.rule]
                row["accuracy (measured)"] = f"{sum(found_shares) / len(found_shares):.1%}"
            elif self.training is not None:
                row["accuracy (measured)"] = "-"
            rows.append(row)
        return rows

    def table(self) -> str:
        """The findings as aligned text."""
        if not self.rules:
            return "nothing was measured: the model cannot be cut into stages"
        return table(self._turned())

    def _turned(self) -> list[dict[str, str]]:
        """A row a quantity, a column a rule."""
        rows = self.rows()
        return [
            {"": name, **{row["rule"]: row[name] for row in rows}}
            for name in rows[0]
            if name != "rule"
        ]

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and how sure it is."""
        if not self.rules:
            return []
        compute = "was measured here" if self.compute == "measured" else "its roofline has"
        n_devices = len(self.rules[0].predicted.memories)
        memories = [self.hardware.memory_of(rank) for rank in range(n_devices)]
        room = " to ".join(_size(memory) for memory in sorted({min(memories), max(memories)}))
        room = f", {room} a device" if self.limited else ", memory not given"
        lines = [
            f"Measured on {self.device}: {self.n_workers} micro-batches of {self.batch}"
            f" {self.samples} of shape {list(self.shape)}, {self.n_stages} stages, in"
            f" {self.seconds:.0f} s.",
            f"Predicted for {self.hardware.name}: {self.hardware.link_bandwidth * 8e-9:g} Gbit/s"
            f" links{room}; computing takes the time that {compute}. Simulated, not run there:"
            " what disturbs a real machine is not in it.",
            "Ranges of measured ratios are quartiles over rounds; those of predicted ones come of"
            f" computing that takes {self.slack[0]:.2f} to {self.slack[1]:.2f} of the time"
            f" {'seen' if self.compute == 'measured' else 'of the roofline'}.",
        ]
        if self.training is not None:
            trained, n = self.training, len(self.training.seeds)
            lines.append(
                f"Accuracy: of {trained.n_tested} {trained.tested} after {trained.n_steps} training"
                f" steps, {n} seeds; an interval is that of the seeds, and no narrower than so few"
                f" {trained.tested} make it. So short a training shows large losses and no small"
                " ones, and nothing about the end of a long one."
            )
        else:
            lines.append(f"Accuracy was not measured: {self.untrained}.")
        return lines

    def __str__(self) -> str:
        return "\n\n".join([self.table(), *self.origin(), self.recommendation])

    def _repr_html_(self) -> str:
        advice = self.advice
        parts = [f"<h3>{escape(advice.verdict)}</h3>", _list(advice.reasons)]
        if self.rules:
            turned = self._turned()
            heads = "".join(f"<th>{escape(name)}</th>" for name in turned[0])
            body = "".join(
                "<tr>" + "".join(f"<td{_aligned(k)}>{escape(row[k])}</td>" for k in row) + "</tr>"
                for row in turned
            )
            parts.append(f"<table><thead><tr>{heads}</tr></thead>{body}</table>")
        parts.append(_list(self.origin()))
        for title, lines in (("Watch", advice.watch), ("Roll back", advice.roll_back)):
            if lines:
                parts.append(f"<b>{title}</b>{_list(lines)}")
        shown = escape(advice.command)
        parts.append(f'<b>Go on with</b><pre style="white-space:pre-wrap">{shown}</pre>')
        return "\n".join(parts)


def _list(lines: tuple[str, ...] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _aligned(column: str) -> str:
    return "" if column else ' style="text-align:left"'


def _range(ratio: tuple[float, float, float]) -> str:
    least, middle, most = ratio
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def _size(n_bytes: float) -> str:
    return "not limited" if n_bytes == inf else size(n_bytes)


def _time(seconds: float) -> str:
    unit, name = unit_for(seconds, TIMES[:2])
    return f"{seconds:.2f} s" if name == "s" else f"{digits(seconds / unit)} ms"


COMPUTE = ("measured", "roofline")
ETHERNET = Hardware(
    "devices as this one, 10 Gbit/s links",
    flops=1e12,
    memory_bandwidth=5e10,
    link_bandwidth=1.25e9,
    link_latency=5e-5,
)
"""What is assumed where no hardware is given; with measured times its flops do not count."""
_STEPS = 300  # at most, of a short training
_LEAST = 10  # training steps below which none is made
_ROUNDS = 7
_ROOFLINE = 0.8, 1.5  # of its time; a device reaches it seldom


def pilot(
    model: nn.Module | Callable[[], nn.Module],
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
    loss: measure.Loss = cross_entropy,
    on_progress: measure.Say = lambda what, share: None,
) -> Pilot:
    """Should this model be trained with cyclic data parallelism on these machines?

    Memory, time and accuracy are measured on copies of the model, on the device where it is; the
    machines are predicted. The model given is left as it is.

    Args:
        model: a classifier of images, or of the next token, that torch.fx can trace; or a
            function that makes one, with which every seed begins from weights of its own.
        images: a set of the toolkit, of text, too; ``(images, classes)`` as tensors, images alone,
            or a data set of such pairs.
        n_workers: micro-batches of a training step, and stages if the model can be cut into so
            many.
        batch: images, or sequences, of a micro-batch.
        hardware: the machines: links and memory, and with ``compute="roofline"`` also their
            speed. Unless given, devices like this one with links of 10 Gbit/s.
        placement: ``per_microbatch``: each worker has a device; ``per_stage``: a pipeline, a
            stage a device; ``one``: all workers share a device, and stages keep equally much in
            place of equal FLOPs.
        compute: whether the predictions take computing as ``measured`` here, or the ``roofline``
            of the hardware.
        budget: seconds that the pilot may take, about. It bounds the training steps.
        seeds: runs of each rule.
        steps: training steps of a run; as many as the budget allows, and 300 at most, unless
            given. 0: no training.
        optimizer: makes an optimizer from a list of parameters; SGD with momentum 0.9 and a rate
            of 0.05 unless given.
        loss: mean loss of a micro-batch.
        on_progress: called with what is under way, and the share of it that is done.

    Raises:
        ValueError: a model that cannot be traced or does not take the images, too few images, or
            an option without sense.
    """
    begun = time.perf_counter()
    n_workers, batch = whole(n_workers, "n_workers", 2), whole(batch, "batch", 1)
    seeds = whole(seeds, "seeds", 1)
    steps = None if steps is None else whole(steps, "steps", 0)
    _check(placement, compute, budget)
    if hardware is not None:
        check_hardware(hardware)
    make, target = _maker(model)
    first = make(0)
    parameter = _first_trained(first)
    device = parameter.device
    data = read(images, n_workers * batch, device, parameter.dtype)
    example = next(data.train(0))
    on_progress("cutting the model", 0.0)
    equal = "activations" if placement == "one" else "flops"
    stages, n_stages = _cut(first, n_workers, example[0][:batch], equal)
    _check_output(stages, data, example[1][:batch])
    found = Pilot(
        n_workers=n_workers,
        n_stages=n_stages,
        batch=batch,
        placement=placement,
        partition=equal,
        device=describe(device),
        hardware=hardware or _this_device(device),
        compute=compute,
        rules=(),
        model=target,
        shape=tuple(example[0].shape[1:]),
        samples=data.samples,
        n_classes=data.n_classes,
    )
    if n_stages < 2:
        return replace(found, untrained="the model cannot be cut into stages")
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    def again(seed: int) -> Stages:
        twins = copy.deepcopy(stages)  # to cut a model takes longer
        twins.model.load_state_dict(make(seed).state_dict())
        return twins

    def start(seed: int, schedule: Schedule, looks: int = 0) -> SingleProcess:
        return SingleProcess(again(seed), schedule, optimizer, loss, seed=seed, diagnostics=looks)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        trial = _Trial(found, data, example, again, start, on_progress)
        found = trial.rules(optimizer, loss, budget)
        left = budget - (time.perf_counter() - begun)
        n_steps = _affordable(found, left, seeds) if steps is None else steps
        untrained = _why_untrained(data, n_steps, steps, budget)
        training = None if untrained else trial.train(n_steps, seeds)
    return replace(
        found,
        training=training,
        untrained=untrained,
        seconds=time.perf_counter() - begun,
    )


class _Trial:
    """The measurements of a pilot, and what is predicted from them, on one model.

    Args:
        found: what is known before anything is measured.
        data: to train on, and to test on.
        example: a batch of it.
        again: from a seed to the stages, with weights of that seed where each has its own.
        start: a runtime from a seed, a schedule, and the steps between two looks at the delay.
        say: called with what is under way, and the share of it that is done.
    """

    def __init__(
        self,
        found: Pilot,
        data: Data,
        example: Batch,
        again: Callable[[int], Stages],
        start: Callable[..., SingleProcess],
        say: measure.Say,
    ) -> None:
        self.found, self.data, self.example = found, data, example
        self.again, self.start, self.say = again, start, say

    def rules(self, optimizer: MakeOptimizer, loss: measure.Loss, budget: float) -> Pilot:
        """Memory and time of every rule, measured and predicted."""
        here = _here(self.found)
        kept = {}
        for k, (rule, schedule) in enumerate(here.items()):
            self.say(f"measuring the memory of {rule}", k / len(here))
            kept[rule] = measure.held(self.again(0), schedule, self.example, optimizer, loss)
        runtimes = {rule: self.start(0, schedule) for rule, schedule in here.items()}
        seconds = measure.step_times(runtimes, self.example, _ROUNDS, budget / 5, self.say)
        state = _optimizer_bytes(runtimes["DP"])
        costs = self._costs(runtimes["DP"].stages)
        slack = _ROOFLINE
        if self.found.compute == "measured":
            low, middle, high = quantiles(seconds["DP"], n=4)
            slack = low / middle, high / middle
        self.say("predicting", 0.0)
        n, s, placement = self.found.n_workers, self.found.n_stages, self.found.placement
        schedules = [schedule_of(rule, n, placement, n_stages=s) for rule in RULES]
        predictions = predict(schedules, costs, self.found.hardware, state, slack)
        self.say("predicting", 1.0)
        rules = tuple(
            RuleFindings(
                rule=rule,
                activations=kept[rule][0],
                cuda_peak=kept[rule][1],
                seconds=median(seconds[rule]),
                ratio=measure.ratios(seconds[rule], seconds["DP"]),
                predicted=prediction,
            )
            for rule, prediction in zip(RULES, predictions, strict=True)
        )
        return replace(
            self.found, rules=rules, slack=slack, costs=costs, optimizer_bytes=tuple(state)
        )

    def train(self, n_steps: int, seeds: int) -> TrainingFindings:
        """A short training under DP and CDP-v2."""
        here = _here(self.found)
        pair = [here["DP"], here["CDP-v2"]]
        return measure.train(self.start, pair, self.data, n_steps, range(seeds), self.say)

    def _costs(self, stages: Stages) -> tuple[StageCost, ...]:
        micro = self.example[0][: self.found.batch]
        if self.found.compute == "measured":
            return profile(stages, micro)
        model = copy.deepcopy(stages.model).to("meta")
        micro = micro.to("meta")
        return profile(partition(model, len(stages), micro, self.found.partition), micro)


def _affordable(found: Pilot, left: float, seeds: int) -> int:
    """Training steps of a run in the seconds that are left for all; 0 if they are too few."""
    slowest = max(rule.seconds for rule in found.rules)
    n_steps = min(_STEPS, int(0.8 * left / (2 * seeds * slowest)) - measure.NORMS // 2)
    return n_steps if n_steps >= _LEAST else 0


def _here(found: Pilot) -> dict[str, Schedule]:
    """Every rule with all workers on one device: what is measured."""
    on_one = partial(schedule_of, placement="one", n_stages=found.n_stages)
    return {rule: on_one(rule, found.n_workers) for rule in RULES}


def _optimizer_bytes(runtime: SingleProcess) -> list[int]:
    """Bytes of the optimizer's state, by stage."""
    found = []
    for stage in runtime.part()["stages"].values():
        states = (stage["optimizer"] or {"state": {}})["state"].values()
        found.append(sum(x.nbytes for s in states for x in s.values() if isinstance(x, Tensor)))
    return found


def _maker(
    model: nn.Module | Callable[[], nn.Module],
) -> tuple[Callable[[int], nn.Module], str]:
    """A function of the seed that gives the model; and how a command line names it."""
    if isinstance(model, nn.Module):
        return lambda seed: model, ""  # again() copies it
    if not callable(model):
        raise UserError(
            f"model is a torch.nn.Module, or a function that makes one: got a"
            f" {type(model).__name__}"
        )

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = model()
        if not isinstance(made, nn.Module):
            raise UserError(f"model() gives a {type(made).__name__}: expected a torch.nn.Module")
        return made

    module, name = (getattr(model, key, "") for key in ("__module__", "__qualname__"))
    known = module and module != "__main__" and name and "<" not in name
    return make, f"{module}.{name}" if known else ""


def _first_trained(model: nn.Module) -> nn.Parameter:
    """Where the model is, and in which type it takes images."""
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise UserError(
            f"{type(model).__name__} has nothing to train: give a model with a parameter that"
            " requires a gradient"
        )
    return parameter


def _cut(model: nn.Module, n_workers: int, example: Tensor, by: str) -> tuple[Stages, int]:
    """As many stages as workers, or as many as the model can be cut into; 2 or more train."""
    uncut = partition(model, 1, example)  # what cannot be traced is refused here
    for n_stages in range(n_workers, 1, -1):
        try:
            stages = partition(model, n_stages, example, by)
        except ValueError:
            continue
        if sum(any(p.requires_grad for p in stage.parameters()) for stage in stages) > 1:
            return stages, n_stages
    return uncut, 1


def _this_device(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return ETHERNET
    total = torch.cuda.get_device_properties(device).total_memory
    return replace(ETHERNET, memory_bandwidth=1e12, memory=float(total))


def _why_untrained(data: Data, n_steps: int, asked: int | None, budget: float) -> str:
    if not data.labelled:
        return "the images came without classes"
    if not data.n_tested:
        return f"none of the {data.samples} is left to test on: give more"
    if n_steps < 1 and asked is None:
        return f"a budget of {budget:g} s leaves no time for {_LEAST} training steps"
    return "" if n_steps else "no training steps were asked for"


def _check_output(stages: Stages, data: Data, answers: Tensor) -> None:
    shape = stages.output.shape
    if shape[:-1] != answers.shape or shape[-1] < data.n_classes:
        raise UserError(
            f"the model's output for {len(answers)} {data.samples} has shape {list(shape)} and"
            f" these are of {data.n_classes} classes: expected"
            f" {[*answers.shape, data.n_classes]} or wider"
        )


def _check(placement: str, compute: str, budget: float) -> None:
    check_placement(placement)
    check_choice("compute", compute, COMPUTE)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UserError(f"budget is a number of seconds above 0: got {budget!r}")
