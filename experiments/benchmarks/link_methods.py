"""Methods that the benchmark of links compares: their schedules, trainings and predicted times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import slept
from benchmarks.step_times import mean_step
from benchmarks.training_steps import N_CLASSES, momentum_sgd, random_images
from toolkit.cost import Costs, Hardware, affordable_schedule, compressed_costs
from toolkit.cost.slow_link_rivals import ddp_costs
from toolkit.model import build, partition
from toolkit.runtime import Distributed, World
from toolkit.runtime.baselines import DDP, DelayedAllReduce
from toolkit.schedule import Schedule, catalog

Task = SimpleNamespace
"""What every method trains: the options of the benchmark, and ``workers`` and ``seed``."""
Train = Callable[[int], Iterator[object]]
"""Trains a number of steps, and yields at the end of each."""
Times = list[list[float]]
"""Of each rank when its steps ended, by time.monotonic(), which a machine's processes share."""


@dataclass(frozen=True)
class Method:
    """How the workers train."""

    runtime: Callable[..., Any]
    delay: Any = 0  # of the weights; without it workers start together
    options: dict[str, Any] = field(default_factory=dict)  # of the runtime
    together: int = 1  # workers of a group


_WITHIN = 0.1  # share of a step that fresher weights may cost
AFFORDABLE = "affordable delay"
_HALF = {"compression": "bf16"}
_PACED = {"pacing": True, "chunk_mb": 0.25}
_CODED = {
    "8-bit": {"compression": "int8"},
    "4-bit": {"compression": "int4"},
    "top-k": {"compression": "topk"},
}
_OF_PROGRAMS: dict[str, dict[str, Any]] = {
    "": {},
    " 16-bit": _HALF,
    " paced": _PACED,
    " 16-bit paced": _HALF | _PACED,
    " 8-bit": _CODED["8-bit"],
    " 4-bit": _CODED["4-bit"],
    " top-k": _CODED["top-k"],
    " rank 4": {"compression": "low_rank"},
}
"""Options of a runtime that follows a program, by what its name ends with."""
_LOW_RANK = {"rank 4": {"compression": "powersgd", "low_rank": 4}}
METHODS = {
    "DDP": Method(DDP),
    "DDP tuned": Method(DDP, options={"bucket_mb": 4.0, "bucket_view": True}),
    "DDP 16-bit": Method(DDP, options=_HALF),
    **{
        f"DDP {suffix}": Method(DDP, options=options)
        for suffix, options in (_CODED | _LOW_RANK).items()
    },
    "delayed all-reduce": Method(DelayedAllReduce, 1),
    "delayed all-reduce 16-bit": Method(DelayedAllReduce, 1, _HALF),
    **{
        f"{name}{suffix}": Method(Distributed, delay, options)
        for name, delay in (("CDP-v1", 1), ("CDP-v2", "freshest"))
        for suffix, options in _OF_PROGRAMS.items()
    },
    AFFORDABLE: Method(Distributed, AFFORDABLE),
    "groups of 2": Method(Distributed, AFFORDABLE, together=2),
}
COMPUTE = "compute"
"""The same computation without any message: a lower bound, not a method."""
ALL = (COMPUTE, *METHODS)
SLEPT = ("DDP", "delayed all-reduce", "CDP-v1", "CDP-v2", AFFORDABLE, "groups of 2")
"""Methods compared by default if stages sleep."""
AFFORDED = tuple(name for name, method in METHODS.items() if method.delay == AFFORDABLE)
"""Methods whose schedule depends on the link, and on stages that sleep."""
# Of DDP if stages sleep: ResNet-50 has 100 MB, and a bucket of torch 25 MB.
_BUCKETS = 4


@dataclass(frozen=True)
class Link:
    """One setting of the links."""

    workers: int
    ratio: float  # of M to C that was asked for; 0: no limit
    mbit: float | None  # a second, of the limit
    compute: float  # C: seconds of a step without messages
    one_way: float  # M: seconds in which all parameters go from one machine to another
    latency: float = 0.0  # seconds of a message of a byte
    # Seconds in which all parameters go from rank to rank within a machine.
    local: float = 0.0

    @property
    def name(self) -> str:
        return link_name(self.ratio)


def link_name(ratio: float) -> str:
    return "unshaped" if ratio == 0 else f"M = {'' if ratio == 1 else f'{ratio:g} '}C"


def images_of(task: Task) -> tuple[Tensor, Tensor]:
    """Return random images of all workers, and their classes."""
    torch.manual_seed(task.seed)
    n_images = task.workers * task.batch
    if task.sleep:
        return slept.random_samples(n_images)
    return random_images(n_images, task.image_size)


def fresh_model(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    if task.sleep:
        return slept.model(task.stages, task.megabytes, task.sleep)
    return build(task.model, N_CLASSES, task.image_size)


def methods_of(task: Task) -> tuple[str, ...]:
    usual = SLEPT if task.sleep else tuple(name for name in ALL if name not in AFFORDED)
    return tuple(task.methods) or usual


def schedule_of(task: Task, name: str, link: Link | None = None) -> Schedule:
    """Return the schedule of a method; the link decides which delay is affordable."""
    method, n, s = METHODS[name], task.workers, task.stages
    if method.delay == 0:
        return catalog.data_parallel(n, n_stages=s)
    groups = -(-n // method.together)
    if method.delay == AFFORDABLE:
        assert link
        return _affordable(
            n, s, groups, task.megabytes, hardware_of(task, link), link.compute
        )
    # With all weights a step late there is time for rotated chains, in which each rank sends only
    # to the next one. Otherwise messages of several ranks meet at a port.
    chains = (
        "rotated" if method.runtime is Distributed and method.delay == 1 else "in_order"
    )
    return catalog.cyclic(n, method.delay, n_stages=s, chains=chains, groups=groups)


@cache  # it takes seconds
def _affordable(
    n: int,
    n_stages: int,
    groups: int,
    megabytes: float,
    hardware: Hardware,
    seconds: float,
) -> Schedule:
    make = partial(catalog.cyclic, n, n_stages=n_stages, groups=groups)
    costs = slept.costs(n_stages, megabytes, seconds)
    return affordable_schedule(make, costs, hardware, within=_WITHIN)


def make(task: Task, name: str, link: Link | None, world: World) -> Train:
    """Make a method, ready to train from the first weights on. Every rank calls it."""
    images, classes = images_of(task)
    model = fresh_model(task)
    if name == COMPUTE:
        rank_images = images.chunk(task.workers)[world.rank]
        rank_classes = classes.chunk(task.workers)[world.rank]
        return _plain(model, rank_images, rank_classes)
    method = METHODS[name]
    options = method.options
    if task.sleep:
        stages = slept.cut(model, task.stages)
    else:
        stages = partition(model, task.stages, images[: task.batch], by=task.partition)
    if task.sleep and method.runtime is DDP:
        # Half a stage less than a bucket's stages: the last of them fills it.
        filled = (_in_bucket(task) - 0.5) * 1e6 * task.megabytes / task.stages
        options = options | {"bucket_mb": filled / 2**20}
    # Rank 0 alone searches for the affordable delay, which takes seconds.
    schedule = world.gather(None if world.rank else schedule_of(task, name, link))[0]
    runtime = method.runtime(
        stages, schedule, momentum_sgd, F.cross_entropy, world=world, **options
    )
    # One batch over and over: what is learned does not matter here.
    return lambda n_steps: runtime.run([(images, classes)] * n_steps)


def _plain(model: nn.Module, images: Tensor, classes: Tensor) -> Train:
    optimizer = momentum_sgd(model.parameters())

    def train(n_steps: int) -> Iterator[None]:
        for _ in range(n_steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            yield

    return train


def _in_bucket(task: Task) -> int:
    """Return the number of stages in a bucket of DDP, if they sleep."""
    return -(-task.stages // _BUCKETS)


def hardware_of(task: Task, link: Link) -> Hardware:
    """Return the machines that were measured."""
    n_bytes = 1e6 * task.megabytes
    # M has the latency of one message, and the rest is due to its bytes.
    bandwidth = n_bytes / max(link.one_way - link.latency, 1e-9)
    # The rates of computing are infinite: stages have seconds of their own, and the measured C has
    # those of the updates. Connections of TCP that meet at a port share it.
    hardware = Hardware(
        "measured", inf, inf, bandwidth, link.latency, shared_ports=True
    )
    if task.ranks_per_machine == 1:
        return hardware
    local_bandwidth = n_bytes / link.local
    return replace(
        hardware,
        ranks_per_machine=task.ranks_per_machine,
        local_bandwidth=local_bandwidth,
    )


def predicted(task: Task, link: Link, name: str) -> float:
    """Return the seconds of a step by the simulator, for stages that sleep.

    Of the same steps as those measured: messages may still pile up in them.
    """
    hardware = hardware_of(task, link)
    costs: Costs = slept.costs(task.stages, task.megabytes, link.compute)
    schedule = schedule_of(task, name, link)
    runtime, options = METHODS[name].runtime, METHODS[name].options
    compression = options.get("compression", "none")
    # Gloo has one ring of all ranks, and knows no machines.
    if runtime is not Distributed:
        hardware = replace(hardware, ranks_per_machine=1, local_bandwidth=inf)
    if runtime is DDP:
        # DDP waits for buckets, not for stages: a bucket is simulated as one stage.
        costs, hardware = ddp_costs(
            slept.merged(costs, _in_bucket(task)),
            hardware,
            task.workers,
            compression,
            low_rank=options.get("low_rank", 0),
        )
        schedule = catalog.data_parallel(task.workers, n_stages=len(costs))
    else:
        costs = compressed_costs(costs, compression)
    if runtime is DelayedAllReduce:
        schedule = catalog.data_parallel(task.workers, delay=1, n_stages=task.stages)
    return step_time(
        slept.predicted_times(schedule, costs, hardware, task.steps), task.skip
    )


def step_time(times: Times, skip: int) -> float:
    """Return the seconds of a step of the slowest rank, after step ``skip``, counted from 0."""
    return max(mean_step(moments, skip) for moments in times)
