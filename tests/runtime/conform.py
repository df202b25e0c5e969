"""What each rank of the conformance suite of the distributed runtime does."""

import copy
import io
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime import models
from toolkit.cost import profile, simulate
from toolkit.cost.hardware import UNIT
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join, rank_layouts
from toolkit.runtime.message_transfer import Messages
from toolkit.schedule import (
    Correction,
    RandomDelay,
    Schedule,
    ScheduleSpec,
    after,
    catalog,
)
from toolkit.schedule.method_sizes import pipeline_sizes

STEPS = 6

# Stage 1 is on both ranks; sums of its gradients go from the one to the other.
SPLIT = ("0F0 1F0 1B0 0B0 0F1 0B1", "1F1 1B1")
# Stages that change their ranks, and the ranks that update them.
CHANGING = after(
    [(catalog.cyclic(2), 2), (catalog.cyclic(2, 1), 2)], catalog.gpipe(2, 2)
)
GPIPE = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def pipelines(n_ranks, n_microbatches):
    """Every pipeline of the catalogue."""
    for method in catalog.METHODS.values():
        if method.kind == "pipeline":
            sizes = pipeline_sizes(method, n_ranks, n_microbatches)
            yield ScheduleSpec(method.name, **sizes).build()


def schedules(n_ranks):
    """Every method that takes ``n_ranks``: 1, 2, 3, 4 or 6.

    A new method other than a pipeline is added here, and is then tested by the whole suite.
    """
    if n_ranks == 1:
        yield catalog.gradient_accumulation(2, 3)
    if n_ranks in (3, 6):
        n = {3: 2, 6: 3}[n_ranks]
        yield catalog.cyclic(n, 1, "per_stage_and_microbatch")
        yield catalog.cyclic(n, "freshest", "per_stage_and_microbatch")
    if n_ranks == 3:
        yield catalog.data_parallel(3, n_stages=4)
        yield catalog.cyclic(3, n_stages=2)
    if n_ranks not in (2, 4):
        return
    n = n_ranks
    for state in ("replicated", "sharded"):
        yield catalog.data_parallel(n, state=state)
        yield catalog.cyclic(n, 1, state=state)
        yield catalog.cyclic(n, "freshest", state=state)
    for delay in (1, "freshest"):
        yield catalog.cyclic(n, delay, "per_stage")
    yield catalog.cyclic(n, 1, state="circulating")
    yield catalog.weipipe(n, accumulate=n // 2)
    yield catalog.cyclic(n, 1, chains="rotated")
    yield catalog.cyclic(n, 1, correction="extrapolate")
    yield catalog.cyclic(n, "freshest", "per_stage", correction="optimizer_step")
    yield catalog.cyclic(n, 1, correction=Correction("compensate", 0.5))
    yield after([(catalog.data_parallel(n), 2)], catalog.cyclic(n, 1))
    yield catalog.one_f_one_b(n, 2 * n)
    yield catalog.interleaved_1f1b(2 * n, n, n)
    yield catalog.zero_bubble(n, n)
    yield catalog.v_half(2 * n, n)
    yield catalog.pipedream_2bw(n, n + 1)
    if n == 4:
        yield catalog.cyclic(4, groups=2)
        yield catalog.cyclic(4, 1, groups=2, chains="rotated")
        yield catalog.cyclic(4, state="sharded", groups=2)
        yield catalog.data_parallel(2, "per_stage_and_microbatch")
        yield catalog.chimera(4, 4)
        yield catalog.dualpipe(4, 8)
        yield catalog.hanayo(8, 4, 4)
        gpipe = catalog.gpipe(4, 3)
        yield Schedule.from_csv(gpipe.to_csv(), name="CSV")
    if n == 2:
        yield catalog.cyclic(2, 2)
        yield catalog.data_parallel(2, delay=1)
        yield catalog.published(2)
        yield from pipelines(2, 4)
        yield Schedule.from_rank_orders(SPLIT, name="rank orders")
        yield Schedule.from_rank_orders(
            GPIPE, name="GPipe overlapping", period=4, delay="freshest"
        )
        yield catalog.cyclic(2, accumulate=2)
        yield catalog.data_parallel(2, delay=RandomDelay(most=2, seed=3), accumulate=2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@dataclass
class Trained:
    """The results of a run, of all ranks."""

    states: dict[int, dict]  # the model's, by the steps that were done: 4, 5 and 6
    updates: list[tuple[int, dict]]  # (step, weights by name) after each update
    steps: list[list[int]]  # of the results
    losses: dict  # by (step, micro-batch)
    peaks: tuple[int, ...]  # activation bytes of each rank
    sent: list[float]  # bytes of each rank
    weights: tuple[int, ...]  # most bytes of each rank
    most_weights: tuple[float, ...]  # those that it could hold

    def assert_follows(self, states: list[dict], losses: dict) -> None:
        """Compare it with ``states``, those after each step, and ``losses``."""
        for n_steps, state in self.states.items():
            models.assert_same(state, states[n_steps - 1])
        models.assert_updates(self.updates, states)
        models.assert_same(self.losses, losses)


def train(world, schedule: Schedule) -> Trained:
    """Run ``schedule`` on ``world``: four overlapping steps, one alone, and one alone."""
    batches = models.make_batches(schedule.n_microbatches, STEPS)
    stages = models.cut(models.residual(), schedule)
    kept: list[tuple[int, dict]] = []
    optimizer = models.keeping(kept, sgd)
    runtime = Distributed(
        stages, schedule, optimizer, F.cross_entropy, world=world, record=STEPS
    )
    results = list(runtime.run(batches[:4]))
    states = {4: copy.deepcopy(runtime.module().state_dict())}
    for n_steps, batch in enumerate(batches[4:], 5):
        results.append(runtime.step(*batch))
        states[n_steps] = copy.deepcopy(runtime.module().state_dict())
    found = runtime.measurements()
    mine = {
        (result.step, m): loss
        for result in results
        for m, loss in zip(result.microbatches, result.losses, strict=True)
    }
    losses = {key: loss for part in world.gather(mine) for key, loss in part.items()}
    updates = [update for part in world.gather(kept) for update in part]
    steps = world.gather([result.step for result in results])
    sent = [row["bytes_sent"] for row in found.by_rank()]
    weights = found.peak_weights(), found.most_weights()
    return Trained(
        states, updates, steps, losses, found.peak_activations(), sent, *weights
    )


def all_methods(sizes) -> tuple[dict[int, list[Trained]], dict[int, dict]]:
    """Every schedule of each of ``sizes``, on a part of the world; and :func:`in_tiers` of 4."""
    world = join(device="cpu")
    trained: dict[int, list[Trained]] = {}
    for size in sizes:
        if (part := world.part(size)) is not None:
            trained[size] = [train(part, schedule) for schedule in schedules(size)]
        world.barrier()
    tiers = in_tiers(world) if world.size == 4 else {}
    return (trained, tiers) if world.rank == 0 else ({}, {})


def predicted(schedule: Schedule) -> tuple[list[float], list[float]]:
    """Peak activation bytes and bytes sent of each rank, in the three runs of :func:`train`."""
    stages = models.cut(models.residual(), schedule)
    example = torch.empty(3, 1, 6, 6, dtype=torch.float64, device="meta")
    costs = profile(stages, example)
    sent = [0.0] * schedule.n_ranks
    peaks = [0.0] * schedule.n_ranks
    for first, n_steps in ((0, 4), (4, 1), (5, 1)):
        timeline = simulate(schedule.lower(n_steps, first), costs, UNIT)
        sent = [a + b for a, b in zip(sent, timeline.bytes_sent(), strict=True)]
        of_run = [
            timeline.peak_memory(rank, "activations")
            for rank in range(timeline.n_ranks)
        ]
        peaks = [max(pair) for pair in zip(peaks, of_run, strict=True)]
    return peaks, sent


def by_itself(schedule: Schedule) -> tuple[list[dict], dict]:
    """The state after each step, and losses, in a single process."""
    batches = models.make_batches(schedule.n_microbatches, STEPS)
    stages = models.cut(models.residual(), schedule)
    runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy)
    states, losses = [], {}
    for result in runtime.run(batches):
        states.append(copy.deepcopy(runtime.module().state_dict()))
        losses |= {(result.step, m): loss for m, loss in enumerate(result.losses)}
    return states, losses


def odd_jobs() -> dict[str, Any]:
    """What one schedule is enough to show, on 2 ranks."""
    world = join(device="cpu")
    found: dict[str, Any] = {}
    for schedule in (catalog.cyclic(2, 1), catalog.one_f_one_b(2, 3)):
        runtime = _awkward(world, schedule)
        found[f"awkward {schedule.name}"] = runtime.module().state_dict()
        found[f"rates {schedule.name}"] = models.learning_rates(runtime)
    batches = models.make_batches(2)
    first = _trained(world, catalog.cyclic(2, 1, state="sharded"), batches[:3])
    found["state"] = copy.deepcopy(first.state_dict())
    found["extrapolated"] = first.extrapolated()
    found["late"] = first.late_weights()
    # Of the same trajectory.
    resumed = _runtime(world, catalog.cyclic(2, 1, "per_stage"))
    resumed.load_state_dict(found["state"])
    list(resumed.run(batches[3:]))
    found["resumed"] = resumed.module().state_dict()
    changing = _trained(world, CHANGING, batches[:4])
    found["changing"] = copy.deepcopy(changing.state_dict())
    list(changing.run(batches[4:]))
    found["changed"] = changing.module().state_dict()
    model = models.residual()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += world.rank
    found["unalike"] = (
        _trained(world, catalog.cyclic(2), batches, model=model).module().state_dict()
    )
    for by_hand in (False, True):
        found[f"masked {by_hand}"] = _masked(world, by_hand)
    found["not saved"] = _not_saved(world)
    found["errors"] = _errors(world)
    found["options"] = _with_options(world)
    found["warmed up"] = _warmed_up(world)
    return found


def option_cases():
    """Options whose code differs between a rank and a single process: name, schedule, options."""
    all_at_once = StepOptions(clip=0.05, checkpoint="all", ema=0.9, channels_last=True)
    sharded = catalog.cyclic(2, state="sharded")
    for schedule in (
        catalog.data_parallel(2),
        catalog.cyclic(2, 1, "per_stage"),
        sharded,
    ):
        yield f"{schedule.name} {schedule.layout.name}", schedule, all_at_once
    yield "delayed", catalog.cyclic(2, 1), all_at_once


def _with_options(world) -> dict[str, Any]:
    """States with :func:`option_cases`, and with 16 bits, on 2 ranks."""
    from toolkit.runtime.baselines import DDP, DelayedAllReduce  # slow to import

    found: dict[str, Any] = {}
    for name, schedule, options in option_cases():
        make = DelayedAllReduce if name == "delayed" else Distributed
        runtime = _trained(
            world, schedule, models.make_batches(2), make=make, options=options
        )
        found[name] = copy.deepcopy(runtime.module().state_dict()), runtime.averages()
    batches = [(x.float(), y) for x, y in models.make_batches(2)]
    for precision in ("fp32", "bf16"):
        others = {
            "model": models.residual().float(),
            "options": StepOptions(precision=precision),
        }
        pipeline = _trained(world, catalog.gpipe(2, 2), batches, record=5, **others)
        found[precision] = copy.deepcopy(pipeline.module().state_dict())
        measured = pipeline.measurements()
        found[f"{precision} sent"] = sum(
            row["bytes_sent"] for row in measured.by_rank()
        )
        found[f"{precision} held"] = measured.peak_activations()
    ddp = _runtime(world, catalog.data_parallel(2), make=DDP, **others)
    found["DDP bf16"] = [float(result.loss) for result in ddp.run(batches)][-1]
    return found


def _error_of(attempt, kind=UserError) -> str | None:
    try:
        attempt()
    except kind as error:
        return str(error)
    return None


def _warmed_up(world) -> tuple[list[str], dict]:
    """The first calls of a rank whose messages are taken for NCCL's; and its last state."""
    begun: list[str] = []

    def noted(name, function):
        return lambda *args, **options: (
            begun.append(name),
            function(*args, **options),
        )[1]

    with (
        mock.patch.object(world, "backend", "nccl"),
        mock.patch.object(
            rank_layouts, "warm_up", noted("warm_up", rank_layouts.warm_up)
        ),
        mock.patch.object(Messages, "receive", noted("receive", Messages.receive)),
        mock.patch.object(Messages, "send", noted("send", Messages.send)),
    ):
        return begun, _awkward(
            world, catalog.cyclic(2, 1, "per_stage")
        ).module().state_dict()


def in_tiers(world) -> dict[int, dict]:
    """Data parallelism on 4 ranks, by the ranks that a machine is said to have."""
    found = {}
    for per_machine in (1, 2, 3, 4):
        batches = models.make_batches(4, STEPS)
        runtime = _trained(
            world, catalog.data_parallel(4), batches, per_machine=per_machine
        )
        found[per_machine] = copy.deepcopy(runtime.module().state_dict())
    return found


def on_gpus() -> dict[str, Any]:
    """A few schedules on the GPUs of this machine, which ranks may share; states on the CPU."""
    world = join(device="cuda")
    found = {}
    for schedule in (
        catalog.data_parallel(2),
        catalog.cyclic(2),
        catalog.cyclic(2, 1, "per_stage"),
    ):
        model = models.residual().to(world.device)
        runtime = _trained(
            world, schedule, models.make_batches(2), model=model, record=2
        )
        assert all(row["device_peak"] for row in runtime.measurements().by_rank())
        state = runtime.module().state_dict()
        found[schedule.name] = {name: tensor.cpu() for name, tensor in state.items()}
    return found


def _decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def _runtime(world, schedule, model=None, make=Distributed, **options):
    stages = models.cut(model or models.residual(), schedule)
    return make(stages, schedule, sgd, F.cross_entropy, world=world, **options)


def _trained(world, schedule, batches, **options):
    runtime = _runtime(world, schedule, **options)
    list(runtime.run(batches))
    return runtime


def _awkward(world, schedule):
    """A runtime that has trained an awkward model."""
    stages = models.cut_awkward(models.awkward(), schedule)
    given = stages, schedule, adamw, F.cross_entropy
    runtime = Distributed(*given, lr_scheduler=_decay, seed=3, world=world)
    list(runtime.run(models.id_batches(schedule.n_microbatches)))
    return runtime


def _masked(world, by_hand) -> dict[str, Any]:
    """The weights of a model that takes and returns dictionaries."""
    stages = models.masked_stages(models.masked(), by_hand)
    runtime = Distributed(
        stages, catalog.cyclic(2), adamw, models.scores_loss, world=world
    )
    list(runtime.run(models.masked_batches(2)))
    return runtime.module().state_dict()


class Doubles(nn.Linear):
    """Computes in float64."""

    def forward(self, x):
        return super().forward(x.double())


def _not_saved(world) -> str | None:
    """Why torch.save refuses a model, or its averages, with weights of two types in a stage."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Linear(5, 4), Doubles(4, 3, dtype=torch.float64)
    )
    stages = partition(model, 2, torch.zeros(2, 6), ["1"])
    given = stages, catalog.gpipe(2, 2), sgd, F.cross_entropy
    runtime = Distributed(*given, world=world, options=StepOptions(ema=0.9))
    runtime.step(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))
    found = runtime.module().state_dict(), runtime.averages()
    return _error_of(lambda: [torch.save(x, io.BytesIO()) for x in found], RuntimeError)


def _errors(world) -> list[str | None]:
    """The messages of what every rank refuses alike."""
    runtime = _runtime(world, catalog.cyclic(2))
    batches = models.make_batches(2)
    attempts = (
        lambda: _runtime(world, catalog.cyclic(3)),
        lambda: _runtime(world, catalog.gpipe(2, 2)).measurements(),
        lambda: list(runtime.run(iter(batches))),
        lambda: runtime.step(torch.zeros(7, 1, 6, 6), torch.zeros(7)),
        lambda: runtime.load_state_dict({}),
    )
    return [_error_of(attempt) for attempt in attempts]
